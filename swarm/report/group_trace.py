"""History of one group at every node that saw it: made, admitted or refused, drawn, learned from.

Invariant: each line comes from an event or the store of the named node; questions that neither of them can answer have
their own list.
"""

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.errors import ConfigError
from swarm.events import (
    Event,
    GroupAdmitted,
    GroupGivenUp,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupStored,
    GroupUse,
    NodeRestored,
    StepMade,
    groups_learned_from,
)
from swarm.report.node_directory import NodeDirectory
from swarm.trained.newest_groups import group_of, reading
from swarm.trained.samples import STORE
from swarm.types import FinishReason, NodeId, ScoredGroup, short

MIN_PREFIX: Final = 4  # hexadecimal digits
MAX_FOUND: Final = 1000  # digests that begin alike
MAX_NAMELESS: Final = 100_000  # producers and reasons of refusals without a digest; the rest counts as nobody's
_DIGEST = re.compile(r"[0-9a-f]{4,64}")
_WHOLE = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    """One thing that happened to the group at one node."""

    at_s: float  # wall clock of the node; 0: it is not known when
    node: str
    text: str


@dataclass(frozen=True, kw_only=True)
class GroupTrace:
    """Everything that the logs and stores of some nodes show about a group."""

    digest: str
    env: str
    producer: str  # name or id
    policy: str  # the lineage that generated it
    lines: tuple[TraceLine, ...]  # in order of time
    unknown: tuple[str, ...]  # questions that nobody here can answer


@dataclass
class _Seen:
    """Events of one node about digests with a prefix, and the node's store."""

    directory: NodeDirectory
    store: sqlite3.Connection | None
    events: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))  # by digest, draws left out
    draws: dict[str, dict[int, GroupsDrawn]] = field(default_factory=lambda: defaultdict(dict))  # digest -> draw
    steps: dict[int, StepMade] = field(default_factory=dict[int, StepMade])  # by draw, of `draws`
    nameless: Counter[tuple[NodeId, str]] = field(default_factory=Counter)  # refused without a digest: producer, reason

    def read_log(self, prefix: str) -> None:
        """Reads the whole event log, and keeps the events about digests with this prefix."""
        begins, num_drawn = prefix.encode(), set[int]()

        def is_wanted(line: bytes) -> bool:
            is_step = bool(num_drawn) and line.startswith(b'{"kind":"step"')
            return is_step or b'"' + begins in line or line.startswith(b'{"kind":"refused"')

        for event in self.directory.events.stream(is_wanted):
            if isinstance(event, StepMade):
                if event.draw_step in num_drawn:
                    self.steps[event.draw_step] = event
                continue
            if isinstance(event, GroupRefused) and not event.digest:
                who = event.producer if len(self.nameless) < MAX_NAMELESS else ""
                self.nameless[who, event.reason] += event.count
            for digest in {each for each in _digests_of(event) if each.startswith(prefix)}:
                if len(self.digests) >= MAX_FOUND and digest not in self.digests:
                    continue
                if isinstance(event, GroupsDrawn):
                    self.draws[digest][event.draw_step] = event
                    num_drawn.add(event.draw_step)
                else:
                    self.events[digest].append(event)

    @property
    def digests(self) -> set[str]:
        """Digests with the prefix that the log names."""
        return {*self.events, *self.draws}

    def stored_digests(self, prefix: str) -> list[str]:
        """Digests with this prefix in the store, including those of deleted and of used groups."""
        if self.store is None:
            return []
        like = "SELECT lower(hex(digest)) FROM {} WHERE hex(digest) LIKE ? LIMIT ?"
        query = " UNION ".join(f"SELECT * FROM ({like.format(table)})" for table in ("groups", "tombstones", "drawn"))
        return [row[0] for row in self.store.execute(query, (f"{prefix.upper()}%", MAX_FOUND) * 3)]

    def stored_group(self, key: bytes) -> ScoredGroup | None:
        """The group, if the store still has it; else None."""
        return None if self.store is None else group_of(self.store, key)

    def deleted_at_s(self, key: bytes) -> float | None:
        """Wall clock at which the store deleted the group; None if it did not."""
        query = "SELECT deleted_s FROM tombstones WHERE digest = ?"
        row = None if self.store is None else self.store.execute(query, (key,)).fetchone()
        return None if row is None else row[0]

    def source_weight(self, draw_step: int, producer: NodeId) -> float | None:
        """The weight that the coordinator's advice gave a source in a draw; None if it gave none."""
        query = "SELECT source_weights FROM draws WHERE step = ?"
        row = None if self.store is None else self.store.execute(query, (draw_step,)).fetchone()
        with suppress(ValueError, TypeError, KeyError):
            weights: Any = json.loads(row[0]) if row else {}
            return float(weights[producer])
        return None


def trace_group(directories: Sequence[NodeDirectory], prefix: str) -> GroupTrace:
    """Follows the group whose digest begins with `prefix` through the logs and stores of some nodes (blocking).

    Raises:
        ConfigError: `prefix` is not the beginning of a digest, no group has it, several groups have it, or a store
            cannot be read.
    """
    prefix = prefix.lower()
    if not _DIGEST.fullmatch(prefix):
        raise ConfigError(
            f"{prefix!r:.80}: no digest of a group; give {MIN_PREFIX} to 64 hexadecimal digits of one that "
            "`swarm samples` shows"
        )
    with ExitStack() as stack:
        nodes: list[_Seen] = []
        for each in directories:
            path = each.path / STORE
            store = stack.enter_context(reading(path)) if path.is_file() else None
            nodes.append(_Seen(directory=each, store=store))
            nodes[-1].read_log(prefix)
        digests = {digest for each in nodes for digest in (*each.digests, *each.stored_digests(prefix))}
        if not digests:
            raise ConfigError(
                f"{prefix}: no group whose digest begins so, in the logs and stores of "
                f"{', '.join(each.name for each in directories)}; name more directories with --dir (logs keep the "
                "newest 256 MB, refusals mostly without a digest)"
            )
        if len(digests) > 1:
            some = ", ".join(digest[:16] for digest in sorted(digests)[:4])
            raise ConfigError(f"{prefix}: {len(digests)} groups begin so ({some}, ...); give more digits")
        return _trace(digests.pop(), nodes)


def _trace(digest: str, nodes: Sequence[_Seen]) -> GroupTrace:
    names = {each.directory.node_id: each.directory.name for each in nodes if each.directory.node_id}
    key = bytes.fromhex(digest) if _WHOLE.fullmatch(digest) else b""  # a log that the disk changed may have anything
    groups = [each.stored_group(key) for each in nodes]
    known = next((event for each in nodes for event in each.events[digest] if isinstance(event, GroupStored)), None)
    of = known or next((each.group for each in groups if each is not None), None)
    lines = [line for each, scored in zip(nodes, groups, strict=True) for line in _lines(each, digest, scored, names)]
    for each in nodes:
        if (at_s := each.deleted_at_s(key)) is not None:
            text = "deleted from its store; the digest is kept, so that it is not taken again"
            lines.append(TraceLine(at_s=at_s, node=each.directory.name, text=text))
    return GroupTrace(
        digest=digest,
        env=of.env if of else "unknown",
        producer=_name(of.producer, names) if of else "unknown",
        policy=_name(of.policy_id, names) if of else "unknown",
        lines=tuple(sorted(lines, key=lambda line: line.at_s)),
        unknown=tuple(_unknown(digest, of.producer if of else "", nodes, names)),
    )


def _digests_of(event: Event) -> Iterable[str]:
    match event:
        case GroupStored() | GroupGivenUp() | GroupRefused():
            return (event.digest,)
        case GroupsDrawn():
            return (*(use.digest for use in event.groups), *event.zero_variance, *event.too_old)
        case NodeRestored():
            return (digest for digest, _ in event.held)
        case _:
            return ()


# --- in words ----------------------------------------------------------------------------------------------


def _lines(node: _Seen, digest: str, scored: ScoredGroup | None, names: Mapping[NodeId, str]) -> Iterable[TraceLine]:
    def line(at_s: float, text: str) -> TraceLine:
        return TraceLine(at_s=at_s, node=node.directory.name, text=text)

    for event in node.events[digest]:
        if text := _words(event, digest, names):
            yield line(event.at_s, text)
    for step, draw in node.draws[digest].items():
        use, made = _use_of(draw, digest), node.steps.get(step)
        weight = None if use is None else node.source_weight(step, use.producer)
        chance = "" if weight is None else f"; its source was drawn with weight {weight:.3g}"
        yield line(draw.at_s, _words_of_draw(draw, digest) + chance)
        if use is not None and made is not None:
            yield line(made.at_s, _words_of_step(draw, made, use))
    if scored is not None:
        began_s = min((event.at_s for event in node.events[digest]), default=0.0)  # a store writes before the log does
        rewards = " ".join(f"{value:g}" for value in scored.rewards.tolist()[:16])
        yield line(
            max(scored.first_seen_s, began_s),
            f"in its store, {scored.size_bytes:,} bytes, {_words_of_group(scored)}; rewards by its own verifier: "
            f"{rewards}",
        )


def _words(event: Event, digest: str, names: Mapping[NodeId, str]) -> str:
    match event:
        case GroupPut():
            parts = "".join(f", {name} {value:.3g}" for name, value in event.reward_parts.items())
            count = sum(event.finishes.values())
            cut = f" in {count} responses, {event.finishes.get(FinishReason.LENGTH, 0)} cut off" if count else ""
            return (
                f"made and stored: {event.num_tokens} tokens{cut}, mean reward {event.reward_mean:.3g}{parts}, "
                f"with {_versions(event)}"
            )
        case GroupAdmitted():
            return (
                f"admitted, sent by {_name(event.via, names)} {event.age_s:.1f} s after it was made; mean reward "
                f"{event.reward_mean:.3g}, {event.size_bytes:,} bytes, {_versions(event)}"
            )
        case GroupRefused():
            return f"refused, sent by {_name(event.via, names)}: {event.reason}"
        case GroupGivenUp():
            return f"given up: it ended the learner's process alone; draw {event.draw_step} is used without it"
        case NodeRestored():
            is_made_here = dict(event.held).get(digest)
            return f"held after a restart, {'made here' if is_made_here else 'of another node'}"
        case _:
            return ""


def _versions(event: GroupStored) -> str:
    if not event.versions:
        return f"version {event.oldest_step}"
    steps = [step for step, _ in event.versions]
    named = f"version {steps[0]}" if len(steps) == 1 else f"versions {steps[0]} to {steps[-1]}"
    return f"{named} ({event.versions[-1][1]})"


def _words_of_group(scored: ScoredGroup) -> str:
    group = scored.group
    steps = f"step {group.oldest_step}" if group.oldest_step == group.newest_step else (
        f"steps {group.oldest_step} to {group.newest_step}"
    )  # fmt: skip
    return f"task {group.task_id}, {len(group.rollouts)} responses of {group.num_tokens} tokens by {steps}"


def _words_of_draw(draw: GroupsDrawn, digest: str) -> str:
    use = _use_of(draw, digest)
    if use is None:
        why = "without signal, all its rewards are equal" if digest in draw.zero_variance else "too old, never drawn"
        return f"used up by draw {draw.draw_step}: {why}"
    flight = f", {use.in_flight_steps} of them in flight" if use.in_flight_steps else ""
    newcomer = "" if use.is_established else ", in the places of newcomers"
    return (
        f"drawn for draw {draw.draw_step}, one of {len(draw.groups)} groups: age {use.age_steps} of at most "
        f"{draw.max_age_steps} steps{flight}, use {use.use} of {draw.max_reuse}, {use.origin}{newcomer}"
    )


def _words_of_step(draw: GroupsDrawn, made: StepMade, use: GroupUse) -> str:
    if made.was_skipped:
        return f"not learned from: the step was skipped, and version {made.step} stayed"
    if all(each.digest != use.digest for each in groups_learned_from(draw, made)):
        return f"not learned from: the guard left it out of step {made.step}"
    edge = next((each for each in made.edges if each.source == use.producer), None)
    source = f"; its source: ESS {edge.ess_share:.2f}, KL {edge.mismatch_kl:.3g} nats a token" if edge else ""
    return f"learned from: version {made.step}, {made.digest[:16]}{source}"


def _use_of(draw: GroupsDrawn, digest: str) -> GroupUse | None:
    return next((use for use in draw.groups if use.digest == digest), None)


def _name(node: NodeId, names: Mapping[NodeId, str]) -> str:
    return names.get(node) or short(node) or "unknown"


# --- what nobody can know --------------------------------------------------------------------------------


def _unknown(digest: str, producer: NodeId, nodes: Sequence[_Seen], names: Mapping[NodeId, str]) -> Iterable[str]:
    if producer not in names:
        yield f"when and how it was made, as {_name(producer, names)} saw it: its directory is not among these"
    for node in nodes:
        if not node.events[digest] and not node.draws[digest]:
            yield _why_not_seen(node, producer)
        elif not node.directory.is_whole:
            yield f"what {node.directory.name} did with it before its event log begins: older files are gone"
    yield "to whom it was advertised or sent: nodes log what they take, not what they give"
    if any(_use_of(draw, digest) for node in nodes for draw in node.draws[digest].values()):
        yield "how much this group alone weighed in a gradient: steps log figures of each source, not of each group"


def _why_not_seen(node: _Seen, producer: NodeId) -> str:
    """Remark on a node whose log does not name the group.

    A log has the digest of a refused group only if it is the first of its reason and producer in a while; the remark
    sums up the refusals without a digest.
    """
    nameless = Counter[str]()
    for (who, reason), count in node.nameless.items():
        if who in (producer, ""):
            nameless[reason] += count
    refused = ", ".join(f"{count} {reason}" for reason, count in nameless.most_common(4))
    summed = "it refused none without a digest"
    if refused:
        summed = f"it refused {nameless.total()} groups that may be of this producer ({refused}), summed up"
    return f"whether {node.directory.name} was offered it: no event there names it; {summed}"
