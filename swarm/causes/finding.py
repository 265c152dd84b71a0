"""A finding of a diagnosis: what is wrong, how sure that is, by which figures, and what to do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

MOST_UNUSUAL: Final = 5  # things that are named of a node of which nothing is wrong


class Gravity(IntEnum):
    """What follows for the node."""

    NOTE = 0  # nothing is wrong: good to know
    WASTES = 1  # the node learns, and something is lost
    HARMS = 2  # it learns badly, or less than it could
    STOPS = 3  # it learns nothing


class Certainty(IntEnum):
    """How sure a finding is."""

    POSSIBLE = 1  # other causes look the same
    LIKELY = 2
    SURE = 3  # the node itself says so


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """One thing that a rule found."""

    name: str  # of the rule
    claim: str  # in plain words
    evidence: tuple[str, ...] = ()  # figures, and in brackets where they stand
    fix: str = ""
    gravity: Gravity = Gravity.HARMS
    certainty: Certainty = Certainty.SURE
    follows_from: frozenset[str] = frozenset()  # rules whose findings explain this one
    key: str = ""  # of node.toml, where a value there is the cause

    @property
    def weight(self) -> tuple[int, int]:
        """Graver and surer findings weigh more."""
        return self.gravity * self.certainty, self.gravity


def is_healthy(findings: Iterable[Diagnosed]) -> bool:
    """Whether notes are all that was found."""
    return all(each.gravity is Gravity.NOTE for each in findings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """What is odd and may do no harm: a finding only where something else was found that it explains."""

    finding: Diagnosed  # without gravity of its own
    explains: frozenset[str]  # names of findings, notes among them


def with_guilty(findings: Sequence[Diagnosed], suspects: Iterable[Suspect]) -> list[Diagnosed]:
    """Findings, and those suspects that explain one, as grave as that; what a likely one explains follows from it.

    One that is no more than possible needs something that is wrong: a note is seen of healthy nodes, too. Of several
    the one that explains more of what was found comes first, and of those the one that could explain less else.
    """
    found, present = list(findings), {each.name for each in findings}
    for suspect in sorted(suspects, key=lambda each: (-len(each.explains & present), len(each.explains))):
        is_likely = suspect.finding.certainty > Certainty.POSSIBLE
        effects = [
            each
            for each in findings
            if each.name in suspect.explains and (is_likely or each.gravity is not Gravity.NOTE)
        ]
        if not effects or any(each.name == suspect.finding.name for each in found):
            continue
        worst = max(effects, key=lambda each: each.weight)
        if is_likely:
            cause = {suspect.finding.name}
            found = [
                replace(each, follows_from=each.follows_from | cause) if each.name in suspect.explains else each
                for each in found
            ]
        found.append(
            replace(
                suspect.finding,
                evidence=(*suspect.finding.evidence, f"seen of it: {worst.claim}", *worst.evidence),
                gravity=max(worst.gravity, Gravity.WASTES),
            )
        )
    return found


def unusual(notes: Sequence[Diagnosed], suspects: Iterable[Suspect]) -> list[Diagnosed]:
    """The notes of a node of which nothing is wrong, behind what is odd about it: where to look if it disappoints."""
    surest = sorted((each.finding for each in suspects), key=lambda each: -each.certainty)
    return [*(replace(each, gravity=Gravity.NOTE) for each in surest[:MOST_UNUSUAL]), *notes]


def by_cause(findings: Iterable[Diagnosed]) -> list[Diagnosed]:
    """Causes before what follows from them, each by weight; notes last."""
    found = list(findings)
    names = {each.name for each in found if each.gravity is not Gravity.NOTE}

    def order(each: Diagnosed) -> tuple[bool, bool, int, int]:
        weight, gravity = each.weight
        return each.gravity is Gravity.NOTE, bool(each.follows_from & names), -weight, -gravity

    return sorted(found, key=order)
