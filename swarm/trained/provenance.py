"""Origin of an exported model: a statement signed by its node, and a model card for people.

Invariant: the signature covers the digest of every exported file; paths of the machine are not in the statement.
"""

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from swarm import __version__
from swarm.config import NodeConfig
from swarm.errors import ConfigError, SwarmError
from swarm.events import Event, GroupsDrawn, PolicyEvaluated, StepMade, events_of, groups_learned_from
from swarm.identity import DOMAIN_EXPORT, Identity, node_id_of, verify
from swarm.process import write_json
from swarm.read_files import read_json
from swarm.telemetry import read_events
from swarm.trained.learning_evidence import LearningEvidence, learning_evidence, warm_up_words
from swarm.trained.model import TrainedModel
from swarm.types import Digest, JsonDict, NodeId, PolicyVersion, short
from swarm.wire.held_manifest import load_held

PROVENANCE: Final = "provenance.json"
CARD: Final = "README.md"
_MAX_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Signed statement of a folder whose files are exactly those that a node signed."""

    node_id: NodeId  # of the key that signed; it may claim anything below
    step: int
    run_id: str
    base_model: str
    recipe: str
    version_digest: str
    manifest_digest: str  # empty: no run was joined by a link
    digests: Mapping[str, str]  # path of each file -> SHA-256
    statement: JsonDict


def write_provenance(model: TrainedModel, folder: Path, kind: str, now_s: float) -> JsonDict:
    """Writes the model card and the signed statement over all files of an export; returns the statement.

    Args:
        model: version of a node.
        folder: folder of the exported files.
        kind: format of the export.
        now_s: wall clock.

    Raises:
        ConfigError: the node's key cannot be read or is not the one that trained the model, or its held manifest is
            damaged.
    """
    assert model.config is not None and model.directory is not None and model.version is not None
    identity = Identity.load(model.directory / "identity.key")
    if identity.node_id != model.version.policy_id:
        raise ConfigError(
            f"{model.directory}: identity.key is that of node {short(identity.node_id)}, the checkpoint is of node "
            f"{short(model.version.policy_id)}: put the key back with which it was trained"
        )
    events = read_events(model.directory / "events.jsonl")
    statement = _statement(model, model.config, kind, events, now_s)
    (folder / CARD).write_text(_card(statement), encoding="utf-8")
    statement["files"] = _file_digests(folder)
    write_json(
        folder / PROVENANCE,
        {
            "statement": statement,
            "public_key": identity.public_key.hex(),
            "signature": identity.sign(DOMAIN_EXPORT, _canonical(statement)).hex(),
        },
    )
    return statement


def verify_export(folder: Path) -> Verified:
    """Checks that a folder holds the files that a node signed, all of them and nothing else; returns the statement.

    Raises:
        ConfigError: names the file that differs, or the fault of the statement.
    """
    path = folder / PROVENANCE
    if not path.is_file():
        raise ConfigError(f"{folder}: no {PROVENANCE}: `swarm export` of a node writes one")
    try:
        node_id, statement, is_signed = _read_statement(path)
        found = _verified(node_id, statement)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error!r}; ask for another copy") from None
    if not is_signed:
        raise ConfigError(f"{path}: the signature does not fit: the statement was changed after it was signed")
    if found.statement["node_id"] != found.node_id:
        raise ConfigError(
            f"{path}: it says that node {found.statement['node_id']} made this model, but {found.node_id} signed it"
        )
    try:
        digests = _file_digests(folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    for name in sorted(found.digests.keys() | digests.keys()):
        if found.digests.get(name) != digests.get(name):
            what = "was changed" if name in digests else "is missing"
            what = what if name in found.digests else "is not signed"
            raise ConfigError(f"{folder / name}: {what}: not what node {short(found.node_id)} exported")
    return found


def exported_version(folder: Path, digest: Digest) -> PolicyVersion | None:
    """Version in the signed statement of a folder; None without a statement whose signature fits.

    Unlike `verify_export`, this checks no file.

    Args:
        folder: folder of an export.
        digest: digest of the weights as they were loaded, which the version gets.
    """
    try:
        node_id, statement, is_signed = _read_statement(folder / PROVENANCE)
        step = int(statement["step"])
    except (SwarmError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return PolicyVersion(policy_id=node_id, step=step, digest=digest) if is_signed else None


def _read_statement(path: Path) -> tuple[NodeId, JsonDict, bool]:
    """Reads the id of the key beside a statement, the statement, and True if that key signed it.

    Raises what hostile content makes `read_json`, parsing and indexing raise.
    """
    kept: dict[str, Any] = read_json(path, _MAX_BYTES)
    public_key, statement = bytes.fromhex(kept["public_key"]), kept["statement"]
    is_signed = verify(public_key, DOMAIN_EXPORT, _canonical(statement), bytes.fromhex(kept["signature"]))
    return node_id_of(public_key), statement, is_signed


def _verified(node_id: NodeId, statement: JsonDict) -> Verified:
    """Converts the fields of a statement. Raises KeyError, TypeError, ValueError."""
    return Verified(
        node_id=node_id,
        step=int(statement["step"]),
        run_id=str(statement["run_id"]),
        base_model=str(statement["base_model"]["source"]),
        recipe=str(statement["recipe"]["name"]),
        version_digest=str(statement["version_digest"]),
        manifest_digest=str(statement["manifest_sha256"]),
        digests=dict(statement["files"]),
        statement=statement,
    )


def _statement(
    model: TrainedModel, config: NodeConfig, kind: str, events: Iterable[Event], now_s: float
) -> dict[str, Any]:
    assert model.directory is not None and model.version is not None
    events, version = list(events), model.version
    held = load_held(model.directory, config.run_id)
    teachers, num_draws = _teachers(events, version.step)
    evidence = learning_evidence(events_of(PolicyEvaluated, events), version.step)
    return {
        "format": kind,
        "made_with": f"swarm-trainer {__version__}",
        "made_at": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds"),
        "run_id": config.run_id,
        "manifest_sha256": hashlib.sha256(held.data).hexdigest() if held is not None else "",
        "node_id": version.policy_id,
        "step": version.step,
        "version_digest": version.digest.hex(),
        "base_model": {"source": model.source_name, "digest": model.base_digest.hex(), "dtype": config.model.dtype},
        "lora_rank": config.model.lora_rank,
        "recipe": {"name": Path(config.learner.recipe).name, "params": dict(config.learner.recipe_params)},
        "learning_rate": config.learner.learning_rate,
        "environments": [
            {"name": each.name, "kind": each.kind, "dataset": Path(each.dataset).name} for each in config.environments
        ],
        "learning": evidence.words,
        "warm_up": warm_up_words(events),
        "answers_begin_with": sorted({each.prefill for each in config.environments if each.prefill}),
        "evaluations": _evaluations(evidence),
        "groups_learned_from": [{"producer": who, "groups": count} for who, count in teachers.most_common()],
        "draws_counted": num_draws,
    }


def _teachers(events: Iterable[Event], step: int) -> tuple[Counter[NodeId], int]:
    """Groups that a version learned from, by producer, and the number of draws that were counted."""
    draws: dict[int, GroupsDrawn] = {}  # of a draw that was made again after a restart, the last one
    steps: dict[int, StepMade] = {}
    for event in events:
        if isinstance(event, GroupsDrawn):
            draws[event.draw_step] = event
        elif isinstance(event, StepMade) and event.step <= step:
            steps[event.draw_step] = event
    made = draws.keys() & steps.keys()
    uses = [use for number in made for use in groups_learned_from(draws[number], steps[number])]
    return Counter(use.producer for use in uses), len(made)


def _evaluations(evidence: LearningEvidence) -> list[dict[str, Any]]:
    """Held-out success of each environment at the first and the newest evaluation."""
    return [
        {
            "environment": each.env,
            "split": "held_out",
            "problems": each.num_problems,
            "first": {"step": each.first_step, "success": each.before},
            "newest": {"step": each.newest_step, "success": each.after},
            "gain_interval_95": list(each.interval),
            "commonest_answer": each.baseline,
            "verdict": str(each.verdict),
        }
        for each in evidence.changes
    ]


def _card(statement: Mapping[str, Any]) -> str:
    """Model card in Markdown, for README.md."""
    base = statement["base_model"]["source"]
    header = ["---", "tags:", "- reinforcement-learning", "- swarm-trainer"]
    header += [f"base_model: {base}"] if "/" in base else []
    header += ["---", ""]
    learned = statement["groups_learned_from"]
    total = sum(each["groups"] for each in learned)
    own = sum(each["groups"] for each in learned if each["producer"] == statement["node_id"])
    lines = [
        f"# {base}, step {statement['step']} of run {statement['run_id']}",
        "",
        f"**{statement['learning']}**",
        "",
        *([f"{statement['warm_up']}.", ""] if statement["warm_up"] else []),
        *(
            f"Trained with answers that begin with `{each}`, which other tools do not write by themselves: put it "
            "behind the rendered prompt, or these figures do not hold.\n"
            for each in statement["answers_begin_with"]
        ),
        f"Post-trained by reinforcement learning with Swarm Trainer: recipe `{statement['recipe']['name']}`, learning "
        f"rate {statement['learning_rate']:g}, {statement['step']} steps; {own} groups of its own and {total - own} "
        f"of other nodes. Made {statement['made_at']} with {statement['made_with']}.",
        "",
        f"Held-out problems, at the first evaluation and the newest one up to step {statement['step']}:",
        "",
        "| environment | problems | before | after | gain, 95 % interval | commonest answer | |",
        "|---|---|---|---|---|---|---|",
        *map(_evaluation_row, statement["evaluations"]),
        "",
        "| taught by | groups | share |",
        "|---|---|---|",
        *(
            f"| {'its own node' if each['producer'] == statement['node_id'] else 'node'} `{short(each['producer'])}` | "
            f"{each['groups']} | {each['groups'] / total:.0%} |"
            for each in learned[:32]
        ),
        "",
        f"Counted over {statement['draws_counted']} draws that are in the node's log. `{PROVENANCE}` is signed by node "
        f"`{statement['node_id']}`; `swarm verify FOLDER` checks it against every file here.",
        "",
    ]
    return "\n".join(header + lines)


def _evaluation_row(row: Mapping[str, Any]) -> str:
    (first, newest), (low, high) = (row["first"], row["newest"]), row["gain_interval_95"]
    once = first["step"] == newest["step"]
    cells = (
        f"{first['success']:.2f} (step {first['step']})",
        "-" if once else f"{newest['success']:.2f} (step {newest['step']})",
        "-" if once else f"{newest['success'] - first['success']:+.2f} ({low:+.2f} to {high:+.2f})",
        f"{row['commonest_answer']:.2f}",
    )
    return f"| {row['environment']} | {row['problems']} | {' | '.join(cells)} | {row['verdict']} |"


def _file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the provenance, by path in the folder.

    Raises ConfigError for a link or a device, whose content is elsewhere, and OSError.
    """

    def refuse(error: OSError) -> None:
        raise error

    digests: dict[str, str] = {}
    for parent, folders, files in os.walk(folder, onerror=refuse):
        for path in (Path(parent) / name for name in folders + files):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(f"{path}: a link or a device, no file or folder: put a copy in its place")
            if stat.S_ISREG(mode) and path != folder / PROVENANCE:
                with path.open("rb") as file:
                    digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _canonical(statement: Mapping[str, Any]) -> bytes:
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
