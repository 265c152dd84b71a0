"""The run manifest and the join link: what a stranger needs to take part, and nothing that could hurt him.

Invariant: a manifest is used only after its signature matched the link's fingerprint and `check_manifest`
passed: it names built-in tasks and recipes and digests, never code and never a path of the joining machine.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from swarm.config import (
    CoordinatorLink,
    DirectoryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GeneratorConfig,
    LearnerConfig,
    Model,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
)
from swarm.errors import ConfigError
from swarm.identity import DOMAIN_MANIFEST, Identity, node_id_of, verify
from swarm.types import NodeId
from swarm.wire.convert import is_endpoint, is_node_id

MAX_MANIFEST_BYTES = 64 * 2**10
_LINK = re.compile(r"^swarm://([^/#]{3,400})/([A-Za-z0-9._-]{1,40})#([0-9a-f]{64})$")
_BUILT_IN_MODELS = ("smollm2", "tiny")
_RECIPE_NAME = re.compile(r"^[a-z0-9_]{1,60}$")


class RunManifest(Model):
    """What every node of a run agrees on, signed by the coordinator."""

    run_id: str
    """Name of the run."""
    tokenizer_digest: str = ""
    """SHA-256 of the tokenizer, hex; nodes with another one exchange text only."""
    environments: tuple[EnvironmentConfig, ...]
    """Every environment of the run."""
    model: ModelConfig
    """Model and digest of its initial tensors."""
    generator: GeneratorConfig = GeneratorConfig()
    """Group size and sampling that the door of every node expects."""
    replay: ReplayConfig = ReplayConfig()
    """Recommended mix and limits."""
    learner: LearnerConfig = LearnerConfig()
    """Recommended recipe and optimizer."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Recommended evaluation."""

    @classmethod
    def of(cls, run_id: str, node: NodeConfig, tokenizer_digest: str = "") -> "RunManifest":
        """The manifest of a run whose nodes start from `node`; everyone asks everything."""
        return cls(
            run_id=run_id,
            tokenizer_digest=tokenizer_digest,
            environments=node.environments,
            model=node.model,
            generator=node.generator.model_copy(update={"asks": {}}),
            replay=node.replay,
            learner=node.learner,
            evaluation=node.evaluation,
        )

    def to_bytes(self) -> bytes:
        """UTF-8 JSON, the bytes that are signed."""
        return self.model_dump_json().encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinLink:
    """Where a run's coordinators are and whose key they must prove.

    Example:
        JoinLink.parse("swarm://10.0.0.1:7000/arithmetic#3fa1...")
    """

    addresses: tuple[str, ...]  # host:port
    run_id: str
    fingerprint: NodeId

    @classmethod
    def parse(cls, text: str) -> "JoinLink":
        """Raises ConfigError saying which part is wrong."""
        found = _LINK.match(text.strip())
        if found is None:
            raise ConfigError(f"link {text!a}: expected swarm://host:port[,host:port]/RUN#FINGERPRINT (64 hex characters)")
        addresses = tuple(found[1].split(","))
        for address in addresses:
            if not is_endpoint(address):
                raise ConfigError(f"link: {address!a} is not host:port")
        return cls(addresses=addresses, run_id=found[2], fingerprint=found[3])

    def __str__(self) -> str:
        return f"swarm://{','.join(self.addresses)}/{self.run_id}#{self.fingerprint}"


def sign_manifest(manifest: RunManifest, identity: Identity) -> tuple[bytes, bytes]:
    """The manifest's bytes and the signature over them."""
    data = manifest.to_bytes()
    return data, identity.sign(DOMAIN_MANIFEST, data)


def open_manifest(data: bytes, signature: bytes, public_key: bytes, link: JoinLink) -> RunManifest:
    """A manifest that the holder of the link's fingerprint signed.

    Raises:
        ConfigError: too large, not signed by that key, another run, or not a manifest.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"manifest of {len(data)} bytes, bound {MAX_MANIFEST_BYTES}")
    if not is_node_id(link.fingerprint) or node_id_of(public_key) != link.fingerprint:
        raise ConfigError("manifest: signed by another key than the link's fingerprint; is the link complete?")
    if not verify(public_key, DOMAIN_MANIFEST, data, signature):
        raise ConfigError("manifest: wrong signature")
    try:
        manifest = RunManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"manifest: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if manifest.run_id != link.run_id:
        raise ConfigError(f"manifest: of run {manifest.run_id!a}, the link is of {link.run_id!a}")
    return manifest


def check_manifest(manifest: RunManifest) -> None:
    """Refuses whatever could run code of others or read files of this machine.

    Raises:
        ConfigError: names the field.
    """
    for index, env in enumerate(manifest.environments):
        where = f"manifest.environments.{index} ({env.name})"
        if env.kind == "function":
            raise ConfigError(f"{where}: unknown_environment: kind function names local code; configure it in node.toml")
        if env.kind == "jsonl" and not re.fullmatch(r"[0-9a-f]{64}", env.digest):
            raise ConfigError(f"{where}: jsonl needs digest, the SHA-256 of the file")
    if not _RECIPE_NAME.match(manifest.learner.recipe):
        raise ConfigError(f"manifest.learner.recipe: {manifest.learner.recipe!a} is not a built-in recipe's name")
    if manifest.model.source not in _BUILT_IN_MODELS and not re.fullmatch(r"[0-9a-f]{64}", manifest.model.digest):
        raise ConfigError("manifest.model.digest: required for a model that is not built in")


def node_config_of(manifest: RunManifest, link: JoinLink, bootstrap: tuple[str, ...], directory: Path) -> NodeConfig:
    """What a joining node starts from: the manifest's run, this machine's directory, the link's coordinator."""
    return NodeConfig(
        dir=directory,
        run_id=manifest.run_id,
        environments=manifest.environments,
        model=manifest.model,
        generator=manifest.generator,
        replay=manifest.replay,
        learner=manifest.learner,
        evaluation=manifest.evaluation,
        worker="inline" if manifest.model.source == "tiny" else "process",
        directory=DirectoryConfig(bootstrap=bootstrap),
        coordinator=CoordinatorLink(address=",".join(link.addresses), fingerprint=link.fingerprint),
    )
