"""Run manifest: the description of a run as signed JSON.

Invariant: a manifest is data. It can name built-in environments and recipes, and data files and installed plug-ins by
their digests, but carries no code; nothing in it is used before its signature and all bounds were checked.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import Field, ValidationError

from swarm.config import (
    MAX_ANCHORS,
    Anchor,
    EntryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GeneratorConfig,
    LearnerConfig,
    Model,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
)
from swarm.errors import ConfigError, Unauthenticated
from swarm.identity import DOMAIN_MANIFEST, Identity, is_hex_digest, node_id_of, verify
from swarm.printable import as_argument
from swarm.types import RUN_ID_PATTERN, JsonDict, NodeId

MAX_MANIFEST_BYTES: Final = 128 * 1024
MAX_ENVIRONMENTS: Final = 64
BUILT_IN_MODELS: Final = ("smollm2", "tiny", "tiny-agents")

_PLAIN_NAME: Final = re.compile(r"[a-z0-9_]{1,60}")
_WITHOUT_DATASET: Final = ("calculator", "retry", "look_up", "grid_world", "apps", "dialogue", "code", "nim", "notes")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_JSONL_PATH: Final = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}/){0,8}[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\.jsonl")

# Most that another's manifest may demand of a machine; a node's own configuration may exceed it.
_CEILINGS: Final = (
    ("generator.max_new_tokens", 131_072),
    ("generator.groups_per_batch", 4_096),
    ("replay.local_groups", 4_096),
    ("replay.external_groups", 4_096),
    ("replay.max_groups", 1_000_000),
    ("replay.max_bytes", 16 * 2**30),
    ("learner.token_budget", 4 * 2**20),
    ("evaluation.num_problems", 100_000),
    ("model.lora_rank", 4_096),
)
_PASSED_ON: Final = frozenset(
    {
        *("model", "environments", "generator", "replay", "learner", "evaluation", "entry", "follow.policy"),
        *("exchange.anchors", "exchange.max_group_bytes", "directory.shards", "dir", "run_id"),
    }
)  # sections and keys of the nodes' configuration that a manifest holds, or that every node sets for itself
MAX_TEXT_CHARS: Final = 4_000  # prompt template and prefill
MAX_PARAMS: Final = 64  # keys, or items of a list
MAX_PARAM_CHARS: Final = 200
MAX_PARAM_DEPTH: Final = 4
MAX_PARAM_NUMBER: Final = 1e6  # numbers decide on the size of problems, lists and grids
_MAX_INTEGER: Final = 2**53
MAX_SERIAL: Final = _MAX_INTEGER
WARN_BEFORE_S: Final = 7 * 86_400.0


class ManifestLimits(Model):
    """Bounds that every node of the run shares."""

    max_group_bytes: int = Field(default=4 * 2**20, ge=1024, le=64 * 2**20)
    """Largest group accepted or sent."""
    directory_shards: int = Field(default=1, ge=1, le=1024)
    """Keys over which adverts are spread; it must be equal everywhere."""


class RunManifest(Model):
    """A run as its coordinator describes it: values that must be equal everywhere, and recommended settings."""

    format: Literal[1] = 1
    """Version of this schema."""
    run_id: str = Field(pattern=RUN_ID_PATTERN)
    """Name of the run."""
    created_at_s: float = Field(ge=0, allow_inf_nan=False)
    """Wall clock of the coordinator when the run was made."""
    model: ModelConfig
    """Base model; its digest is that of the published tensors."""
    tokenizer_digest: str = ""
    """Hex SHA-256 of the tokenizer; "" if the coordinator does not have the tokenizer."""
    environments: tuple[EnvironmentConfig, ...] = Field(max_length=MAX_ENVIRONMENTS)
    """Every environment of the run."""
    generator: GeneratorConfig = GeneratorConfig()
    """Recommended settings of generation."""
    replay: ReplayConfig = ReplayConfig()
    """Recommended settings of the replay."""
    learner: LearnerConfig = LearnerConfig()
    """Recommended settings of the learner."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Recommended settings of the evaluation."""
    trainer: str = ""
    """Node id of the trainer that generators follow (`follow.policy`); "": the only trainer that they find."""
    limits: ManifestLimits = ManifestLimits()
    """Shared bounds."""
    anchors: tuple[Anchor, ...] = Field(default=(), max_length=MAX_ANCHORS)
    """Long-lived nodes (`exchange.anchors`): each joining node reaches one of them, whatever false adverts exist."""
    entry: EntryConfig = EntryConfig()
    """Rules of entry."""
    serial: int = Field(default=0, ge=0, le=MAX_SERIAL)
    """Number that rises with every change signed by the same key; 0 in manifests of releases without serials."""
    expires_at_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Wall clock from which on the manifest is refused; 0: never."""
    next_key: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Fingerprint of the key that takes over when the signing key is lost or stolen; a key names its successor once."""

    def to_bytes(self) -> bytes:
        """The manifest as UTF-8 JSON with sorted keys: the bytes that are signed."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=True).encode()


def manifest_of(node: NodeConfig, run_id: str, tokenizer_digest: str, created_at_s: float) -> RunManifest:
    """The manifest of a run whose nodes start from `node`. Raises ConfigError, which names the field."""
    manifest = RunManifest(
        run_id=run_id,
        created_at_s=created_at_s,
        model=node.model,
        tokenizer_digest=tokenizer_digest,
        environments=node.environments,
        generator=node.generator,
        replay=node.replay,
        learner=node.learner,
        evaluation=node.evaluation,
        trainer=node.follow.policy,
        anchors=node.exchange.anchors,
        limits=ManifestLimits(max_group_bytes=node.exchange.max_group_bytes, directory_shards=node.directory.shards),
        entry=node.entry,
    )
    check_manifest(manifest)
    return manifest


def kept_back(node: NodeConfig) -> list[str]:
    """Keys of the nodes' configuration with another value than the default that a manifest does not include, sorted."""
    whole, default = node.model_dump(mode="json"), NodeConfig().model_dump(mode="json")
    found: list[str] = []
    for key in whole.keys() - _PASSED_ON:
        if not isinstance(own := whole[key], dict):
            found += [key] if own != default[key] else []
            continue
        section = cast("JsonDict", own)
        found += [f"{key}.{name}" for name in section if section[name] != default[key][name]]
    found += ["generator.env_weights"] if node.generator.env_weights else []
    return sorted(set(found) - _PASSED_ON)


def check_manifest(manifest: RunManifest) -> None:
    """Refuses a manifest that names local code, data without a digest, or resources above a ceiling.

    Raises:
        ConfigError: the message names the field and the reason.
    """
    for index, env in enumerate(manifest.environments):
        _check_environment(f"manifest: environments.{index} ({env.name})", env)
    for key in ("recipe", "recipe_without_logprobs", "recipe_text_only"):
        name: str = getattr(manifest.learner, key)
        if not _PLAIN_NAME.fullmatch(name) and (name or key == "recipe"):
            raise ConfigError(f"manifest: learner.{key}: {name!a} is no built-in recipe's plain name")
    _check_params("manifest: learner.recipe_params", manifest.learner.recipe_params)
    _check_digest("tokenizer_digest", manifest.tokenizer_digest)
    _check_digest("model.digest", manifest.model.digest)
    _check_digest("trainer", manifest.trainer)
    source = manifest.model.source
    if source not in BUILT_IN_MODELS and not _HUB_ID.fullmatch(source):
        raise ConfigError(f"manifest: model.source: {source[:200]!a} is neither built in nor a hub id like owner/name")
    if source not in BUILT_IN_MODELS and not manifest.model.digest:
        raise ConfigError(f"manifest: model.digest: needed for model.source {source!a}")
    for path, most in _CEILINGS:
        section, _, key = path.partition(".")
        value = getattr(getattr(manifest, section), key)
        if value > most:
            raise ConfigError(f"manifest: {path}: {value} exceeds {most}, the most that a manifest may set")


def _check_environment(where: str, env: EnvironmentConfig) -> None:
    if env.kind in ("function", "python"):
        what = "names local code" if env.kind == "function" else "carries out programs"
        raise ConfigError(
            f"{where}.kind: unknown_environment: `{env.kind}` {what}, which no manifest may; each node adds "
            "it: swarm join LINK --set 'environments=[...]' (docs/training.md)"
        )
    if env.kind == "plugin" and not (_PLAIN_NAME.fullmatch(env.dataset) and is_hex_digest(env.digest)):
        raise ConfigError(
            f"{where}.kind: unknown_environment: a manifest names no local code but the entry point of an installed "
            "package, with its digest (`swarm check` shows it); else configure it locally"
        )
    if env.kind == "jsonl":
        if not is_hex_digest(env.digest):
            raise ConfigError(f"{where}.digest: unknown_environment: jsonl needs the SHA-256 of the file (64 hex)")
        if not _JSONL_PATH.fullmatch(env.dataset) or "path" in env.params:
            raise ConfigError(f"{where}.dataset: unknown_environment: expected a relative path to a .jsonl file, no ..")
    elif not _PLAIN_NAME.fullmatch(env.dataset) and (env.dataset or env.kind not in _WITHOUT_DATASET):
        raise ConfigError(f"{where}.dataset: unknown_environment: {env.dataset[:200]!a} is no built-in name")
    if env.kind == "reasoning_gym" and env.params.get("exact", True) is not True:
        raise ConfigError(f"{where}.params.exact: partial credit pays wrong and extended answers; leave it out")
    for name in ("prompt", "prefill"):
        if len(getattr(env, name)) > MAX_TEXT_CHARS:
            raise ConfigError(f"{where}.{name}: {len(getattr(env, name))} characters exceed {MAX_TEXT_CHARS}")
    for name in ("seed", "num_tasks"):
        if getattr(env, name) > _MAX_INTEGER:
            raise ConfigError(f"{where}.{name}: exceeds {_MAX_INTEGER}")
    if env.inner is not None:
        _check_environment(f"{where}.params.inner", env.inner)
    _check_params(f"{where}.params", {key: value for key, value in env.params.items() if key != "inner"})


def _check_params(where: str, value: Any, depth: int = 0) -> None:
    """Requires plain data of bounded depth, number and size: params decide the size of problems. Raises ConfigError."""
    if isinstance(value, str):
        is_bounded = len(value) <= MAX_PARAM_CHARS
    elif isinstance(value, (int, float)):
        is_bounded = abs(value) <= MAX_PARAM_NUMBER  # false for NaN
    elif isinstance(value, (dict, list, tuple)):
        items: list[Any] = list(cast("dict[str, Any]", value).items() if isinstance(value, dict) else value)
        is_bounded = len(items) <= MAX_PARAMS and depth < MAX_PARAM_DEPTH
        for item in items if is_bounded else ():
            _check_params(where, item, depth + 1)
    else:
        is_bounded = value is None
    if not is_bounded:
        raise ConfigError(
            f"{where}: a value is too large for a manifest: at most {MAX_PARAMS} items, {MAX_PARAM_CHARS} characters, "
            f"numbers up to {MAX_PARAM_NUMBER:g}, depth {MAX_PARAM_DEPTH}"
        )


def _check_digest(name: str, digest: str) -> None:
    if digest and not is_hex_digest(digest):
        raise ConfigError(f"manifest: {name}: expected 64 lower-case hex characters, got {digest[:80]!a}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedManifest:
    """A verified manifest with its signature, from `open_manifest` or `sign_manifest`."""

    manifest: RunManifest
    data: bytes  # the signed bytes
    public_key: bytes
    signature: bytes

    @property
    def key(self) -> NodeId:
        """Fingerprint of the signing key."""
        return node_id_of(self.public_key)


def sign_manifest(manifest: RunManifest, identity: Identity) -> SignedManifest:
    """Signs a manifest as the run's coordinator."""
    data = manifest.to_bytes()
    signature = identity.sign(DOMAIN_MANIFEST, data)
    return SignedManifest(manifest=manifest, data=data, public_key=identity.public_key, signature=signature)


def open_manifest(data: bytes, public_key: bytes, signature: bytes, fingerprint: NodeId, run_id: str) -> SignedManifest:
    """Opens a signed manifest from anywhere.

    Raises:
        Unauthenticated: the manifest was not signed by `fingerprint`.
        ConfigError: the manifest is too large, breaks a bound, or is of another run.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"manifest: {len(data)} bytes exceed {MAX_MANIFEST_BYTES}")
    if node_id_of(public_key) != fingerprint or not verify(public_key, DOMAIN_MANIFEST, data, signature):
        raise Unauthenticated(f"the manifest is not signed by {fingerprint[:8]}")
    try:
        manifest = RunManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "(whole)"
        raise ConfigError(f"manifest: {where}: {first['msg']}") from None
    if manifest.run_id != run_id:
        raise ConfigError(f"manifest: run_id: the link names {run_id!a}, the manifest {manifest.run_id!a}")
    check_manifest(manifest)
    return SignedManifest(manifest=manifest, data=data, public_key=public_key, signature=signature)


def check_expiry(manifest: RunManifest, now_s: float) -> None:
    """Refuses an expired manifest. Raises ConfigError."""
    if 0 < manifest.expires_at_s <= now_s:
        raise ConfigError(
            f"manifest: expires_at_s: it expired {(now_s - manifest.expires_at_s) / 86_400:.1f} days ago; the run's "
            "coordinator must sign another one, or this machine's clock is wrong"
        )


def check_succession(held: SignedManifest, new: SignedManifest) -> None:
    """Refuses a manifest that may not replace the newest one seen, because of its serial or of a key.

    The key that a manifest named as its next one takes over with any serial: a thief of the first key can sign any
    serial, but cannot name another successor.

    Raises:
        Unauthenticated: the manifest is refused; the message names the serials or the keys.
    """
    before, after = held.manifest, new.manifest
    if new.key == before.next_key and new.key != held.key:
        return
    if new.key != held.key:
        raise Unauthenticated(
            f"the manifest is signed by {new.key[:8]}; this node holds one of {held.key[:8]}, "
            f"which named {before.next_key[:8] or 'nobody'} as its successor"
        )
    if after.serial < before.serial:
        raise Unauthenticated(f"the manifest has serial {after.serial}; {before.serial} was seen before")
    if 0 < after.serial == before.serial and new.data != held.data:
        raise Unauthenticated(f"two manifests of serial {after.serial}: the coordinator's key signs for two")
    if before.next_key and after.next_key != before.next_key:
        raise Unauthenticated(f"the manifest names another next key than {before.next_key[:8]}, which was named before")


def write_toml(data: JsonDict, path: Path, head: str = "") -> None:
    """Writes plain data as TOML, atomically, after the line `head`; null values are left out. Raises OSError."""
    import tomlkit

    draft = path.with_name(f".{path.name}.draft")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(head + tomlkit.dumps(_without_null(data)), encoding="utf-8")
    draft.replace(path)


def write_node_toml(config: NodeConfig, path: Path) -> None:
    """Writes a node.toml for a person to edit: the learning rate, and keys that are not the default. Raises OSError."""
    data = config.model_dump(mode="json", exclude_defaults=True)
    data.setdefault("learner", {})["learning_rate"] = config.learner.learning_rate  # decided by the kind of model
    ordered = {key: data[key] for key in NodeConfig.model_fields if key in data}
    where = as_argument(path.parent)
    write_toml(ordered, path, f"# keys that are not here have their defaults: swarm check {where} --print shows all\n")


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_without_null(inner) for inner in value if inner is not None]
    return value
