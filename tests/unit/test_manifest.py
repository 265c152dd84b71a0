"""Join links and run manifests: signed data that can name nothing but built-ins and digests."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swarm.config import (
    EntryConfig,
    EnvironmentConfig,
    ExchangeConfig,
    FollowConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
)
from swarm.errors import ConfigError, Unauthenticated
from swarm.identity import DOMAIN_GROUP, DOMAIN_MANIFEST, Identity
from swarm.wire.join_link import JoinLink, node_config_from_manifest
from swarm.wire.run_manifest import (
    MAX_MANIFEST_BYTES,
    RunManifest,
    check_manifest,
    kept_back,
    manifest_of,
    open_manifest,
    write_toml,
)

FINGERPRINT = "ab" * 32
CHAR = EnvironmentConfig(name="echo", kind="char", dataset="copy", params={"length": 3, "letters": ["a", "b"]})


def manifest(**changes: Any) -> RunManifest:
    values: dict[str, Any] = {"run_id": "demo", "created_at_s": 1.0, "model": ModelConfig(), "environments": (CHAR,)}
    return RunManifest(**{**values, **changes})


def environment(**changes: Any) -> tuple[EnvironmentConfig, ...]:
    return (EnvironmentConfig.model_validate({"name": "mine", "kind": "jsonl", "dataset": "data.jsonl", **changes}),)


@pytest.mark.parametrize(
    "text", [f"swarm://10.0.0.1:4400/demo#{FINGERPRINT}", f"swarm://a.b:1,[::1]:2/d-1#{FINGERPRINT}"]
)
def test_a_link_is_the_same_after_parse_and_format(text: str) -> None:
    assert str(JoinLink.parse(f" {text}\n")) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (f"http://h:1/demo#{FINGERPRINT}", "swarm://"),
        (f"swarm://h/demo#{FINGERPRINT}", "host:port"),
        ("swarm://h:1/demo", "quote the link: a shell may end it at the #"),
        (f"swarm://h:0/demo#{FINGERPRINT}", "host:port"),
        (f"swarm://h:70000/demo#{FINGERPRINT}", "host:port"),
        (f"swarm://h:1,/demo#{FINGERPRINT}", "host:port"),
        (f"swarm://u@h:1/demo#{FINGERPRINT}", "host:port"),
        (f"swarm://h:1/#{FINGERPRINT}", "run ''"),
        (f"swarm://h:1/a/b#{FINGERPRINT}", "run"),
        (f"swarm://h:1/{'r' * 41}#{FINGERPRINT}", "run"),
        ("swarm://h:1/demo", "fingerprint"),
        ("swarm://h:1/demo#abcd", "'abcd' of 4 characters is not 64 hex"),
        (f"swarm://h:65536/demo#{FINGERPRINT}", "port 1 to 65535"),
        (f"swarm://{','.join(['h:1'] * 9)}/demo#{FINGERPRINT}", "9 addresses"),
        ("", "it is empty: does the coordinator run"),
        ("swarm-coordinator", "swarm://"),
    ],
)
def test_a_wrong_link_names_the_part_that_is_wrong(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match="join link") as caught:
        JoinLink.parse(text)
    assert part in str(caught.value)


@pytest.mark.parametrize("around", ["''", '""', "<>", "\u201c\u201d", "``", " \n", "\t>", "'\n"])
def test_a_link_is_the_same_with_what_mail_and_chat_put_around_it(around: str) -> None:
    link = f"swarm://h:1/demo#{FINGERPRINT}"
    assert str(JoinLink.parse(f"{around[0]}{link}{around[1]}")) == link


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environments": environment(kind="function", dataset="os:system")}, "unknown_environment"),
        ({"environments": environment()}, r"mine\).digest: unknown_environment"),
        ({"environments": environment(digest="AB" * 32)}, "digest"),
        (
            {
                "environments": environment(
                    kind="retry", dataset="", params={"inner": {"kind": "plugin", "dataset": "os:x"}}
                )
            },
            r"params\.inner\.kind: unknown_environment",
        ),
        (
            {
                "environments": environment(
                    kind="retry", dataset="", params={"inner": {"kind": "jsonl", "dataset": "/a.jsonl"}}
                )
            },
            r"params\.inner\.digest: unknown_environment",
        ),
        ({"environments": environment(kind="calculator", dataset="os:system")}, "dataset: unknown_environment"),
        ({"environments": environment(kind="char", dataset="os:getcwd")}, "dataset: unknown_environment"),
        ({"environments": environment(kind="reasoning_gym", dataset="../x")}, "dataset: unknown_environment"),
        ({"environments": environment(kind="reasoning_gym", dataset="gcd", params={"exact": False})}, "params.exact"),
        ({"learner": LearnerConfig(recipe="my_pkg.my_file:RECIPE")}, "learner.recipe"),
        ({"learner": LearnerConfig(recipe="./mine.py:RECIPE")}, "learner.recipe"),
        ({"learner": LearnerConfig(recipe_text_only="./mine.py:RECIPE")}, "learner.recipe_text_only"),
        ({"learner": LearnerConfig(recipe_without_logprobs="a.b:C")}, "learner.recipe_without_logprobs"),
        ({"model": ModelConfig(source="someone/some-model")}, "model.digest"),
        ({"model": ModelConfig(source="../../private")}, "model.source"),
        ({"model": ModelConfig(source="tiny", digest="xyz")}, "model.digest"),
        ({"tokenizer_digest": "short"}, "tokenizer_digest"),
        ({"trainer": "ada"}, "manifest: trainer"),
        ({"replay": ReplayConfig(max_bytes=2**60)}, "replay.max_bytes"),
    ],
)
def test_a_manifest_that_names_code_or_unproven_data_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        check_manifest(manifest(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"environments": environment(digest="ab" * 32)},
        {"environments": environment(kind="reasoning_gym", dataset="chain_sum")},
        {"model": ModelConfig(source="someone/some-model", digest="ab" * 32)},
        {"model": ModelConfig(source="tiny")},
        {"tokenizer_digest": "ab" * 32},
    ],
)
def test_built_ins_and_data_with_digests_are_accepted(changes: dict[str, Any]) -> None:
    check_manifest(manifest(**changes))


def test_a_signed_manifest_reads_back_equal() -> None:
    identity, original = Identity.create(), manifest()
    data = original.to_bytes()
    signature = identity.sign(DOMAIN_MANIFEST, data)
    assert open_manifest(data, identity.public_key, signature, identity.node_id, "demo").manifest == original


def test_a_manifest_of_another_signer_domain_content_or_run_is_refused() -> None:
    identity, other, data = Identity.create(), Identity.create(), manifest().to_bytes()
    signature = identity.sign(DOMAIN_MANIFEST, data)
    for key, sealed, content in (
        (other.public_key, other.sign(DOMAIN_MANIFEST, data), data),
        (identity.public_key, identity.sign(DOMAIN_GROUP, data), data),
        (identity.public_key, signature, data + b" "),
    ):
        with pytest.raises(Unauthenticated):
            open_manifest(content, key, sealed, identity.node_id, "demo")
    with pytest.raises(ConfigError, match="run_id"):
        open_manifest(data, identity.public_key, signature, identity.node_id, "other")


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"not json", "manifest"),
        (b"{}", "run_id"),
        (b"[" * 100_000, "manifest"),
        (b" " * (MAX_MANIFEST_BYTES + 1), "exceed"),
        (manifest().to_bytes().replace(b'"run_id"', b'"trust_remote_code": true, "run_id"'), "trust_remote_code"),
        (manifest(learner=LearnerConfig(recipe="a.b:C")).to_bytes(), "learner.recipe"),
    ],
)
def test_a_signature_does_not_make_a_wrong_manifest_right(data: bytes, field: str) -> None:
    identity = Identity.create()
    with pytest.raises(ConfigError, match=field):
        open_manifest(data, identity.public_key, identity.sign(DOMAIN_MANIFEST, data), identity.node_id, "demo")


def test_a_manifest_becomes_a_node_configuration_on_disk(tmp_path: Path) -> None:
    node = NodeConfig(environments=(CHAR,), replay=ReplayConfig(max_age_steps=7), learner=LearnerConfig(recipe="grpo"))
    made = manifest_of(node, "demo", "ab" * 32, created_at_s=5.0)
    link = JoinLink.parse(f"swarm://a:1,b:2/demo#{FINGERPRINT}")
    data = node_config_from_manifest(made, link, ("/ip4/127.0.0.1/tcp/1/p2p/x",), tmp_path / "node")
    write_toml(data, tmp_path / "new" / "node.toml")
    config = NodeConfig.model_validate(tomllib.loads((tmp_path / "new" / "node.toml").read_text()))
    assert config.environments == (CHAR,) and config.replay.max_age_steps == 7 and config.learner.recipe == "grpo"
    assert config.coordinator.address == "a:1,b:2" and config.coordinator.fingerprint == FINGERPRINT
    assert config.directory.kind == "dht" and config.directory.bootstrap == ("/ip4/127.0.0.1/tcp/1/p2p/x",)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["node.toml"]


def test_keys_that_no_manifest_passes_on_are_named() -> None:
    data: dict[str, Any] = {
        **{"name": "ada", "environments": [CHAR], "learner": {"recipe": "grpo"}, "warm_up": {"answers": "references"}},
        **{"exchange": {"max_group_bytes": 2**20, "store_bytes": 10**9}, "directory": {"shards": 2}},
    }
    assert kept_back(NodeConfig.model_validate(data)) == ["exchange.store_bytes", "name", "warm_up.answers"]
    assert kept_back(NodeConfig()) == []
    assert kept_back(NodeConfig(environments=(CHAR,), entry=EntryConfig(kind="work"))) == []


def test_the_trainer_that_the_coordinator_names_is_whom_joining_nodes_follow(tmp_path: Path) -> None:
    link = JoinLink.parse(f"swarm://a:1/demo#{FINGERPRINT}")
    for trainer in ("", "cd" * 32):
        node = NodeConfig(environments=(CHAR,), follow=FollowConfig(policy=trainer))
        identity, data = Identity.create(), manifest_of(node, "demo", "", created_at_s=5.0).to_bytes()
        signature = identity.sign(DOMAIN_MANIFEST, data)
        signed = open_manifest(data, identity.public_key, signature, identity.node_id, "demo").manifest
        joined = NodeConfig.model_validate(node_config_from_manifest(signed, link, (), tmp_path))
        assert joined.follow == FollowConfig(policy=trainer)


def test_a_manifest_may_name_the_environments_that_ship() -> None:
    kinds = ("calculator", "look_up", "grid_world", "apps", "dialogue", "code")
    configs = [EnvironmentConfig(name=kind, kind=kind, params={"max_turns": 6}) for kind in kinds]
    inner = {"kind": "reasoning_gym", "dataset": "chain_sum", "params": {"max_terms": 2}}
    configs.append(EnvironmentConfig(name="again", kind="retry", params={"inner": inner, "hint": "order"}))
    manifest = manifest_of(NodeConfig(environments=tuple(configs)), "demo", "", created_at_s=5.0)
    assert manifest.environments[-1].inner == EnvironmentConfig.model_validate({**inner, "name": "again"})


def test_an_installed_package_is_named_with_its_digest_alone() -> None:
    named = {"name": "mine", "kind": "plugin", "dataset": "sums"}
    for changes in ({}, {"digest": "ab" * 31}, {"dataset": "sums:Sums", "digest": "ab" * 32}):
        config = EnvironmentConfig.model_validate({**named, **changes})
        with pytest.raises(ConfigError, match=r"unknown_environment.*`swarm check` shows it"):
            manifest_of(NodeConfig(environments=(config,)), "demo", "", created_at_s=5.0)
    config = EnvironmentConfig.model_validate({**named, "digest": "ab" * 32})
    assert manifest_of(NodeConfig(environments=(config,)), "demo", "", created_at_s=5.0).environments == (config,)


def test_a_run_of_local_code_makes_no_manifest() -> None:
    node = NodeConfig(environments=environment(kind="function", dataset="os:system"))
    with pytest.raises(ConfigError, match="unknown_environment"):
        manifest_of(node, "demo", "", created_at_s=5.0)


def test_the_anchors_of_the_run_reach_whoever_joins() -> None:
    anchor = f"{'ab' * 32}@example.org:7700"
    node = NodeConfig(environments=(), exchange=ExchangeConfig(anchors=(anchor,)))
    made = manifest_of(node, "demo", "", created_at_s=5.0)
    link = JoinLink.parse(f"swarm://127.0.0.1:7700/demo#{'cd' * 32}")
    data = node_config_from_manifest(made, link, (), Path("node"))
    assert NodeConfig.model_validate(data).exchange.anchors == (anchor,)
    for wrong in ("example.org:7700", f"{'ab' * 32}@", f"{'AB' * 32}@example.org:7700", f"{'ab' * 32}@0.0.0.0:1"):
        with pytest.raises(ValidationError):
            ExchangeConfig(anchors=(wrong,))
