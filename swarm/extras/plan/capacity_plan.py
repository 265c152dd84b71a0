"""Capacity planning: the generators, their speed and the bandwidth that a learner needs for a chosen lag bound.

Invariant: pure arithmetic over measured figures; every answer comes with the inequality that it follows from and the
numbers that were put into it.

Symbols of the inequalities:
T      seconds of one optimizer step that waits for no data, publishing its version included
b      groups that a step uses up, zero-variance groups included
N, r   generators, and groups that one of them makes in a second
g      groups that a generator makes together

A generator begins a group with its newest version. That version is T_encode + T_fetch + T_apply old when it begins to
serve, and up to one T older when its successor comes. The group takes T_generate and T_transfer, then waits for the
rest of its step's groups and for the step before: `queue` steps, one as long as supply covers demand. In the worst case
this is ceil(sum / T) + queue steps between its oldest token and its use, on average sum / T + queue.

That is the lag of a swarm in balance, and the smallest bound that it can keep. If supply exceeds demand, groups
wait: credit to begin one is granted as long as it can still be used, and the oldest are used first, so that ages settle
at the bound and never beyond it. For younger data lower the bound, not the number of generators.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_ROUNDING: Final = 1e-9  # relative: what floating point adds to a ratio that is a whole number


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerFigures:
    """Groups that a learner uses up, and versions that it publishes.

    Example:
        LearnerFigures(step_s=2.0, groups_per_step=8, tokens_per_group=64, max_age_steps=4)
    """

    step_s: float  # T
    groups_per_step: float  # b
    tokens_per_group: float
    max_age_steps: int  # the lag bound
    bytes_per_group: float = 0.0  # as it travels
    patch_bytes: float = 0.0  # of one version, manifest included
    encode_s: float = 0.0  # from the end of a step until its version is served to others

    @property
    def demand(self) -> float:
        """Groups per second: b / T."""
        return self.groups_per_step / self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorFigures:
    """Speed, batches and bandwidth of one kind of generator.

    Example:
        GeneratorFigures(name="laptop", tokens_per_s=120.0, groups_per_batch=2)
    """

    name: str
    tokens_per_s: float  # of all sequences that it decodes together
    groups_per_batch: int = 1  # g
    apply_s: float = 0.0  # from the last byte of a version until it serves
    pause_s: float = 0.0  # the part of it in which generation stands still
    down_bytes_per_s: float = math.inf
    up_bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Inequality:
    """A condition with its numbers."""

    name: str
    formula: str
    numbers: str
    holds: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The least number of generators of one kind that supplies a learner, and the lag that follows."""

    generator: GeneratorFigures
    num_generators: int | None  # the fewest that supply the learner; None: no number does
    groups_per_s: float  # of one
    lag_steps: int | None  # worst case; None where nothing arrives
    lag_mean_steps: float | None
    inequalities: tuple[Inequality, ...]
    least_tokens_per_s: float | None  # at which one is fast enough for the lag bound; None: no speed is
    least_down_bytes_per_s: float | None  # at which versions arrive fast enough; None: no line is

    @property
    def holds(self) -> bool:
        """True if that number of generators meets every condition."""
        return all(inequality.holds for inequality in self.inequalities)


def groups_per_s(learner: LearnerFigures, generator: GeneratorFigures) -> float:
    """r: groups per second of one generator, without the time in each step for which it pauses to take a version."""
    return generator.tokens_per_s * max(0.0, 1 - generator.pause_s / learner.step_s) / learner.tokens_per_group


def fewest(demand: float, rate: float) -> int | None:
    """The smallest N >= 1 with N * rate >= demand, up to rounding; None if the rate is not positive."""
    if rate <= 0:
        return None
    number = max(1, math.ceil(demand / rate * (1 - _ROUNDING)))
    return number if covers(number * rate, demand) else number + 1


def covers(supply: float, demand: float) -> bool:
    """True if supply >= demand, up to rounding."""
    return supply >= demand * (1 - _ROUNDING)


def stage_seconds(learner: LearnerFigures, generator: GeneratorFigures) -> dict[str, float]:
    """Seconds of each stage of a batch of groups and of its version, by name; 0 for an infinite bandwidth."""
    tokens = generator.groups_per_batch * learner.tokens_per_group
    return {
        "T_generate": tokens / generator.tokens_per_s if generator.tokens_per_s > 0 else math.inf,
        "T_transfer": generator.groups_per_batch * learner.bytes_per_group / generator.up_bytes_per_s,
        "T_encode": learner.encode_s,
        "T_fetch": learner.patch_bytes / generator.down_bytes_per_s,
        "T_apply": generator.apply_s,
    }


def lag_steps(learner: LearnerFigures, generator: GeneratorFigures, num_generators: int) -> int | None:
    """Steps between a group's oldest token and its use, in the worst case; None if no group arrives."""
    total_s = sum(stage_seconds(learner, generator).values())
    queue = queue_steps(learner, num_generators * groups_per_s(learner, generator))
    if queue is None or math.isinf(total_s):
        return None
    return _ceil(total_s / learner.step_s) + queue


def queue_steps(learner: LearnerFigures, supply: float) -> int | None:
    """Steps that a group waits for the others of its step: 1 if supply covers demand, None without supply."""
    return None if supply <= 0 else max(1, _ceil(learner.demand / supply))


def plan(learner: LearnerFigures, generator: GeneratorFigures) -> Plan:
    """Plans the fewest generators of a kind that supply the learner, with the conditions that they meet or miss.

    If no number of generators suffices, the conditions are those of one generator.
    """
    rate = groups_per_s(learner, generator)
    number = fewest(learner.demand, rate)
    counted = number or 1
    lag, queue = lag_steps(learner, generator, counted), queue_steps(learner, counted * rate)
    stages = stage_seconds(learner, generator)
    terms = " + ".join(figure(value) for value in stages.values())
    bytes_per_s = learner.patch_bytes / learner.step_s
    # credit covers what the steps of one group's life use up; a batch of each generator has to fit in
    room, begun = (learner.max_age_steps + 1) * learner.groups_per_step, counted * generator.groups_per_batch
    supply = Inequality(
        name="supply",
        formula="N r >= b / T",
        numbers=f"{counted} x {figure(rate)} = {figure(counted * rate)} >= {_demand(learner)} groups/s",
        holds=covers(counted * rate, learner.demand),
    )
    staleness = Inequality(
        name="lag",
        formula=f"ceil(({' + '.join(stages)}) / T) + queue <= max_age",
        numbers=f"ceil(({terms}) / {figure(learner.step_s)}) + {'never' if queue is None else queue}"
        f" = {'never' if lag is None else lag} <= {learner.max_age_steps} steps",
        holds=lag is not None and lag <= learner.max_age_steps,
    )
    bandwidth = Inequality(
        name="bandwidth",
        formula="patch_bytes / T <= b_down",
        numbers=f"{figure(learner.patch_bytes)} / {figure(learner.step_s)} = {figure(bytes_per_s)}"
        f" <= {figure(generator.down_bytes_per_s)} bytes/s",
        holds=covers(generator.down_bytes_per_s, bytes_per_s),
    )
    credit = Inequality(
        name="credit",
        formula="N g <= (max_age + 1) b",
        numbers=f"{counted} x {generator.groups_per_batch} = {begun} <= {learner.max_age_steps + 1} x"
        f" {figure(learner.groups_per_step)} = {figure(room)} groups",
        holds=covers(room, begun),
    )
    return Plan(
        generator=generator,
        num_generators=number,
        groups_per_s=rate,
        lag_steps=lag,
        lag_mean_steps=None if lag is None or queue is None else sum(stages.values()) / learner.step_s + queue,
        inequalities=(supply, staleness, bandwidth, credit),
        least_tokens_per_s=_least_tokens_per_s(learner, generator),
        least_down_bytes_per_s=_least_down(learner, generator),
    )


def fleet(learner: LearnerFigures, generators: Sequence[GeneratorFigures]) -> Inequality:
    """The condition that these generators together supply the learner."""
    rates = [groups_per_s(learner, generator) for generator in generators]
    terms = " + ".join(figure(rate) for rate in rates) or "0"
    return Inequality(
        name="supply of these together",
        formula="sum of r >= b / T",
        numbers=f"{terms} = {figure(sum(rates))} >= {_demand(learner)}",
        holds=covers(sum(rates), learner.demand),
    )


def _demand(learner: LearnerFigures) -> str:
    return f"{figure(learner.groups_per_step)} / {figure(learner.step_s)} = {figure(learner.demand)}"


def _slack_s(learner: LearnerFigures, generator: GeneratorFigures, without: str) -> float:
    """Seconds left for one stage within the lag bound, after the other stages and one step in the queue."""
    stages = stage_seconds(learner, generator)
    return (learner.max_age_steps - 1) * learner.step_s - sum(s for name, s in stages.items() if name != without)


def _least_tokens_per_s(learner: LearnerFigures, generator: GeneratorFigures) -> float | None:
    slack_s = _slack_s(learner, generator, "T_generate")
    return generator.groups_per_batch * learner.tokens_per_group / slack_s if slack_s > 0 else None


def _least_down(learner: LearnerFigures, generator: GeneratorFigures) -> float | None:
    """Bytes per second that fetch each version within a step and within the lag bound; None if no speed does."""
    if learner.patch_bytes == 0:
        return 0.0
    slack_s = min(learner.step_s, _slack_s(learner, generator, "T_fetch"))
    return learner.patch_bytes / slack_s if slack_s > 0 else None


def _ceil(ratio: float) -> int:
    return math.ceil(ratio * (1 - _ROUNDING))


def figure(value: float) -> str:
    """A number as text for people, with three significant digits.

    From 10,000 on it has k, M or G; a whole number below is written in full, and infinity as `unlimited`.
    """
    if math.isinf(value):
        return "unlimited"
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.3g} {unit}"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"
