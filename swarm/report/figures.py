"""Figures of a report, derived from a result: curves, averages and the table of nodes.

Invariant: pure functions; an average over environments exists only where every one of them was
measured, so that no curve changes its meaning along the way.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from swarm.config import GuardLimits
from swarm.report.result import NodeResult, RunResult, SwarmResult, TurnsRow
from swarm.telemetry.recorder import overlap_share
from swarm.trained.learning_evidence import HeldOutChange, learning_difference
from swarm.types import SPLITS

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Accuracy at the first and last evaluation."""

    before: float
    after: float
    num_problems: int  # of one environment
    majority_baseline: float

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One line of the table of nodes."""

    name: str
    curriculum: tuple[str, ...]
    num_steps: int
    own: dict[str, Change | None]  # split -> change on the tasks in its curriculum
    other: dict[str, Change | None]  # split -> change on the tasks not in it
    num_local: int
    num_external: int
    num_set_aside: int
    age_mean_steps: float | None
    age_in_flight_mean_steps: float | None  # the part of it that passed during generation
    ess_share: float | None  # mean over steps
    tokens_per_s: float
    cut_off_share: float | None  # of its own responses, by the limit of tokens
    overlap_share: float | None


@dataclass(frozen=True, kw_only=True)
class LearnedRow:
    """Held-out change of one node on one environment, or against the run that it is compared with."""

    node: str
    color: int
    change: HeldOutChange
    is_own: bool  # the environment is in its curriculum
    remark: str = ""  # of which run
    is_difference: bool = False  # to the rival, and not to its own beginning


def learned_rows(result: RunResult) -> list[LearnedRow]:
    """Rows on whether each node that trains learned, environment by environment, those of a rival after the run's."""
    return [
        LearnedRow(node=node.name, color=color, change=change, is_own=change.env in node.curriculum, remark=remark)
        for swarm, remark in ((result.swarm, ""), *([(result.rival, result.rival_kind)] if result.rival else []))
        for color, node in enumerate(swarm.nodes)
        if node.trains
        for change in node.learning.changes
    ]


def rows_against_rival(result: RunResult) -> list[LearnedRow]:
    """Success of each node minus that of its rival on the same problems, at the newest step that both reached."""
    rivals = {node.name: node for node in result.rival.trainers} if result.rival else {}
    alone = next(iter(rivals.values())) if len(rivals) == 1 else None
    rows: list[LearnedRow] = []
    for color, node in enumerate(result.swarm.nodes):
        if (other := rivals.get(node.name, alone)) is not None and node.trains:
            rows += [
                LearnedRow(
                    node=node.name, color=color, change=each, is_own=each.env in node.curriculum, is_difference=True
                )
                for each in learning_difference(other.evaluations, node.evaluations).changes
            ]
    return rows


@dataclass(frozen=True, kw_only=True)
class FollowRow:
    """Versions of a trainer that one node took, and how fast."""

    name: str
    num_versions: int
    num_not_taken: int
    first_bytes: int  # of the first version taken
    bytes_per_version: float | None  # mean of those after it
    lag_s: float | None  # median, from the end of the optimizer step until the engine serves its version
    lag_p95_s: float | None
    stage_s: float | None  # mean: decoding and checking, beside generation
    pause_s: float | None  # mean: generation stood still
    mismatch_nats: float | None  # mean over versions, of the canaries


def follow_rows(swarm: SwarmResult) -> list[FollowRow]:
    """A row for each node that took, or refused, versions of another node's policy."""
    made = {step: at_s for node in swarm.trainers for step, at_s in node.stepped_at_s.items()}
    return [_follow_row(node, made) for node in swarm.nodes if node.versions or node.num_not_taken]


def _follow_row(node: NodeResult, made: dict[int, float]) -> FollowRow:
    later = node.versions[1:]
    lags = sorted(row.at_s - made[row.step] for row in later if row.step in made)
    return FollowRow(
        name=node.name,
        num_versions=len(node.versions),
        num_not_taken=node.num_not_taken,
        first_bytes=node.versions[0].num_bytes if node.versions else 0,
        bytes_per_version=fmean(row.num_bytes for row in later) if later else None,
        lag_s=median(lags) if lags else None,
        lag_p95_s=lags[min(len(lags) - 1, int(0.95 * len(lags)))] if lags else None,
        stage_s=fmean(row.seconds.get("stage", 0.0) for row in later) if later else None,
        pause_s=fmean(row.seconds.get("pause", 0.0) for row in later) if later else None,
        mismatch_nats=fmean(row.mismatch_nats for row in later) if later else None,
    )


def turns_rows(swarm: SwarmResult) -> list[tuple[str, TurnsRow]]:
    """(learner, row) for each number of turns; empty if no episode has several turns."""
    rows = [(node.name, row) for node in swarm.trainers for row in node.by_turns]
    return rows if any(row.num_turns > 1 for _, row in rows) else []


def accuracy_curve(node: NodeResult, environments: Collection[str], split: str) -> Points:
    """(step, mean accuracy) over `environments`, at every step where all of them were evaluated."""
    by_step: dict[int, dict[str, float]] = {}
    for row in node.evaluations:
        if row.split == split and row.env in environments:
            by_step.setdefault(row.step, {})[row.env] = row.accuracy
    wanted = len(set(environments))
    return [(step, fmean(found.values())) for step, found in sorted(by_step.items()) if wanted and len(found) == wanted]


def change(node: NodeResult, environments: Collection[str], split: str) -> Change | None:
    """First and last point of `accuracy_curve`, with problems and majority baseline; None without two points."""
    curve = accuracy_curve(node, environments, split)
    if len(curve) < 2:
        return None
    last = {row.env: row for row in node.evaluations if row.split == split and row.env in environments}
    return Change(
        before=curve[0][1],
        after=curve[-1][1],
        num_problems=min(row.num_problems for row in last.values()),
        majority_baseline=fmean(row.majority_baseline for row in last.values()),
    )


def environments_of(swarm: SwarmResult, node: NodeResult, own: bool) -> tuple[str, ...]:
    """Environments in the node's curriculum (`own`), or those of the swarm that are not in it."""
    return node.curriculum if own else tuple(env for env in swarm.environments if env not in node.curriculum)


def node_rows(swarm: SwarmResult) -> list[NodeRow]:
    """One row of the table for each node."""
    return [_node_row(swarm, node) for node in swarm.nodes]


def _node_row(swarm: SwarmResult, node: NodeResult) -> NodeRow:
    shares = [row.ess_share for row in node.steps if row.ess_share is not None]
    return NodeRow(
        name=node.name,
        curriculum=node.curriculum,
        num_steps=node.steps[-1].step if node.steps else 0,
        own={split: change(node, environments_of(swarm, node, True), split) for split in SPLITS},
        other={split: change(node, environments_of(swarm, node, False), split) for split in SPLITS},
        num_local=node.num_local,
        num_external=node.num_external,
        num_set_aside=node.num_set_aside,
        age_mean_steps=_mean_of(node.ages),
        age_in_flight_mean_steps=_mean_of(node.ages_in_flight),
        ess_share=fmean(shares) if shares else None,
        tokens_per_s=node.tokens_generated / node.generating_s if node.generating_s else 0.0,
        cut_off_share=node.num_cut_off / node.num_responses if node.num_responses else None,
        overlap_share=overlap_share(node.seconds),
    )


def _mean_of(histogram: Mapping[int, int]) -> float | None:
    count = sum(histogram.values())
    return sum(value * n for value, n in histogram.items()) / count if count else None


def mean_change(swarm: SwarmResult, split: str, own: bool) -> Change | None:
    """Mean change of the nodes that train, on tasks in their curriculum (`own`) or not in it.

    None if one of them has no change, or no node trains.
    """
    changes = [change(node, environments_of(swarm, node, own), split) for node in swarm.trainers]
    known = [found for found in changes if found is not None]
    if not known or len(known) < len(changes):
        return None
    return Change(
        before=fmean(found.before for found in known),
        after=fmean(found.after for found in known),
        num_problems=min(found.num_problems for found in known),
        majority_baseline=fmean(found.majority_baseline for found in known),
    )


def shared_step(result: RunResult) -> int | None:
    """Last step at which every node that trains, of the run and its rival, was evaluated; None if there is none."""
    if result.rival is None:
        return None
    nodes = (*result.swarm.trainers, *result.rival.trainers)
    common = set.intersection(*({row.step for row in node.evaluations} for node in nodes)) if nodes else set[int]()
    return max(common, default=None)


def advantage_over_rival(result: RunResult, split: str, own: bool) -> float | None:
    """Mean accuracy of the swarm minus that of its rival at `shared_step`.

    Args:
        result: a run with its rival.
        split: problems that count.
        own: True for the tasks in a node's curriculum, False for all others.

    Returns:
        None if there is no rival or no shared step, or a node has no accuracy at that step.
    """
    step = shared_step(result)
    if step is None or result.rival is None:
        return None
    means: list[float] = []
    for swarm in (result.swarm, result.rival):
        values: list[float] = []
        for node in swarm.trainers:
            accuracy = dict(accuracy_curve(node, environments_of(swarm, node, own), split)).get(step)
            if accuracy is None:
                return None
            values.append(accuracy)
        means.append(fmean(values))
    return means[0] - means[1]


def step_curve(node: NodeResult, figure: str) -> Points:
    """(step, value) of every step that has this figure."""
    return [(float(row.step), float(value)) for row in node.steps if (value := getattr(row, figure)) is not None]


def step_at(node: NodeResult, at_s: float) -> int:
    """Newest step that the node had made at a time; 0 before the first step."""
    return max((row.step for row in node.steps if row.at_s <= at_s), default=0)


def happenings(node: NodeResult) -> list[tuple[int, str]]:
    """(step, words) of events that explain a curve, by step: restarts, set-asides, skipped steps, KL spikes."""
    found = [(step_at(node, at_s), kind.replace("_", " ")) for at_s, kind in node.marks if node.steps]
    found += [(row.step, "step skipped") for row in node.steps if row.was_skipped]
    spikes = [row for row in node.steps if (row.mismatch_kl or 0.0) > GuardLimits().tight_kl]
    found += [(row.step, f"KL {row.mismatch_kl:.2g} nats a token, ESS {row.ess_share or 0:.2g}") for row in spikes]
    found += [(step, f"{count} groups set aside") for step, count in node.aside_at]
    return sorted(found)


def largest_gap_s(node: NodeResult) -> float | None:
    """Longest time between two successive steps; None with fewer than two steps."""
    times = [row.at_s for row in node.steps]
    return max((later - earlier for earlier, later in pairwise(times)), default=None)
