"""Reading of a node's directory into a snapshot (blocking): no file is written, and every read is bounded.

Invariant: reading works on a running, stopped or crashed node; a part that cannot be read is left out, without error.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from swarm.config import NodeConfig, load_config
from swarm.diagnosis.snapshot import AnsweredGroup, Snapshot
from swarm.diagnosis.status_file import read_status_file
from swarm.environments.record_facts import RecordFacts, file_of, last_word, loose, plain, record_facts
from swarm.episode import TurnStatus
from swarm.errors import ConfigError
from swarm.process import is_running, lock_holder
from swarm.read_files import read_end
from swarm.telemetry import read_events, read_warnings
from swarm.trained.newest_groups import newest_groups
from swarm.types import EpisodeLimits, FinishReason, JsonDict, RolloutGroup, TokenTrace

CONFIGS: Final = ("node.toml", "worker.toml")  # the second is what the agent wrote for its worker
MAX_LOG_BYTES: Final = 64 * 2**10
# the start writes addresses, budgets and what the manifest says into the second
FILLED_IN: Final = ("entry.", "exchange.advertise", "exchange.store_bytes", "weights.store_bytes")
NUM_GROUPS: Final = 32  # own groups whose answers are looked at


def read_snapshot(directory: Path, now_s: float, max_idle_s: float = 300.0) -> Snapshot:
    """Reads the files of a node (blocking). Raises ConfigError if `directory` has neither configuration nor records."""
    status = _read_status(directory / "status.json")
    config, config_error, changed_keys = _read_config(directory, (status or {}).get("started_at_s", math.inf))
    events = tuple(read_events(directory / "events.jsonl"))
    if config is None and not config_error and status is None and not events:
        raise ConfigError(
            f"{directory}: neither node.toml nor events.jsonl is there, so no node's directory; `swarm join` makes one "
            "in swarm-node, `swarm train` in swarm-train, a simulation in <run>/swarm/<name>"
        )
    runs, pid = is_running(directory), lock_holder(directory)
    files = {} if config is None else {each.name: record_facts(each) for each in config.environments}
    records = {name: facts for name, facts in files.items() if facts is not None}
    return Snapshot(
        now_s=now_s,
        directory=directory,
        status=status,
        events=events,
        config=config,
        config_error=config_error,
        runs=runs,
        changed_keys=changed_keys,
        max_idle_s=max_idle_s,
        answers=_read_answers(directory, config, records),
        log=read_end(directory / "log.txt", MAX_LOG_BYTES),
        warnings=tuple(read_warnings(directory)),
        records=records,
        missing_files=_missing_files(config),
        pid=pid,
        stopped_pids=() if pid is None else _stopped_pids(pid),
    )


def _missing_files(config: NodeConfig | None) -> tuple[str, ...]:
    files = () if config is None else filter(None, map(file_of, config.environments))
    return tuple(str(path) for path in files if not path.exists())


def _read_config(directory: Path, started_at_s: float) -> tuple[NodeConfig | None, str, tuple[str, ...]]:
    """Returns (configuration or None, its error or "", keys changed since the worker's configuration was written)."""
    paths = [directory / name for name in CONFIGS if (directory / name).is_file()]
    if not paths:
        return None, "", ()
    try:
        own = load_config(NodeConfig, paths[0])
    except ConfigError as error:
        return None, str(error), ()
    try:
        of_worker = load_config(NodeConfig, paths[-1])  # with what `--set` changed
    except ConfigError:  # of another release
        return own, "", ()
    written_at_s = paths[-1].stat().st_mtime
    if written_at_s >= paths[0].stat().st_mtime:
        return of_worker, "", ()
    is_of_now = written_at_s >= started_at_s  # one process writes none: a worker inside the agent
    return own, "", _changed_keys(own, of_worker) if is_of_now else ()


def _changed_keys(one: NodeConfig, other: NodeConfig) -> tuple[str, ...]:
    """Returns the keys whose values differ between two configurations, except `dir` and keys that a start fills in."""
    before, now = (flat(each.model_dump(mode="json")) for each in (one, other))
    changed = sorted(key for key in {*before, *now} - {"dir"} if before.get(key) != now.get(key))
    return tuple(key for key in changed if not key.startswith(FILLED_IN))


def flat(data: JsonDict, before: str = "") -> JsonDict:
    """Flattens nested tables into one table with dotted keys."""
    found: JsonDict = {}
    for key, value in data.items():
        found.update(flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value})
    return found


def _read_status(path: Path) -> JsonDict | None:
    try:
        return read_status_file(path)
    except (OSError, ValueError):
        return None


def _stopped_pids(pid: int) -> tuple[int, ...]:
    """Process ids of stopped processes (SIGSTOP): the node's own and those that it started."""
    try:
        whole = psutil.Process(pid)
        return tuple(each.pid for each in (whole, *whole.children(recursive=True)) if each.status() == "stopped")
    except (psutil.Error, ValueError):
        return ()


def _read_answers(
    directory: Path, config: NodeConfig | None, records: Mapping[str, RecordFacts]
) -> tuple[AnsweredGroup, ...]:
    if config is None:
        return ()
    try:
        groups = newest_groups(directory / "groups.sqlite", NUM_GROUPS, "own", [e.name for e in config.environments])
    except ConfigError:
        return ()
    limits = config.generator.episode_limits
    of_turns = {each.name for each in config.environments if each.may_have_turns}
    return tuple(
        AnsweredGroup(
            env=scored.group.env,
            rewards=tuple(map(float, scored.rewards)),
            is_cut=tuple(rollout.finish is FinishReason.LENGTH for rollout in scored.group.rollouts),
            num_tokens=tuple(
                0 if rollout.trace is None else int(rollout.trace.action_mask.sum())
                for rollout in scored.group.rollouts
            ),
            has_room=tuple(
                _has_room(rollout.trace, limits)
                for rollout in scored.group.rollouts
                if rollout.trace is not None and scored.group.env in of_turns
            ),
            task_id=scored.group.task_id,
            prompt=hash(scored.group.prompt_ids.tobytes()),
            texts=tuple(hash(rollout.actions) for rollout in scored.group.rollouts),
            nats=_mean_nats(scored.group),
            is_malformed=tuple(
                turn.status is TurnStatus.MALFORMED for outcome in scored.outcomes for turn in outcome.transitions
            ),
            **_beside_references(scored.group, records.get(scored.group.env)),
        )
        for scored in groups
    )


def _mean_nats(group: RolloutGroup) -> float:
    """Mean of -log p over the tokens of a group's answers; NaN if no log-probs are known."""
    traces = [rollout.trace for rollout in group.rollouts if rollout.trace is not None]
    drawn = [each.logprobs[each.action_mask] for each in traces if each.logprobs is not None]
    num_tokens = sum(map(len, drawn))
    return -sum(float(each.sum()) for each in drawn) / num_tokens if num_tokens else math.nan


def _beside_references(group: RolloutGroup, records: RecordFacts | None) -> dict[str, tuple[bool, ...]]:
    """Compares a group's answers with the right answers of the file: fields of `AnsweredGroup`; {} if unknown."""
    number, references = group.task_id, () if records is None else records.references
    if number >= len(references) or not references[number]:
        return {}
    reference, answers = references[number], [rollout.text.strip() for rollout in group.rollouts]
    within = re.compile(rf"(?<!\w){re.escape(reference.strip())}(?!\w)", re.IGNORECASE)
    beside = {plain(references[each]) for each in (number - 1, number + 1) if 0 <= each < len(references)}
    is_right = tuple(plain(answer) == plain(reference) for answer in answers)
    end = loose(last_word(reference))
    return {
        "is_right": is_right,
        "is_nearly_right": tuple(
            not right and bool(loose(reference)) and (loose(answer) == loose(reference) or bool(within.search(answer)))
            for right, answer in zip(is_right, answers, strict=True)
        ),
        "is_end_of_right": tuple(
            not right and bool(end) and loose(answer) == end for right, answer in zip(is_right, answers, strict=True)
        ),
        "is_of_neighbour": tuple(
            not right and plain(answer) in beside for right, answer in zip(is_right, answers, strict=True)
        ),
    }


def _has_room(trace: TokenTrace, limits: EpisodeLimits) -> bool:
    """True if another turn would have fitted after an observation of the mean length of the earlier ones."""
    num_observed = int((~trace.action_mask).sum()) // max(1, int(trace.turn_ids.max(initial=0)))
    return limits.has_room(trace.token_ids.size, num_observed)
