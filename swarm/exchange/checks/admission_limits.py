"""Bounds of admission, and the common result type of all its checks.

Invariant: a check is a function that returns a finding, or None where nothing is wrong. No check trusts a length, a
number or a name of a group beyond the guarantees of `open_group`, and no detail reveals prompt or answer text.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.config import NodeConfig
from swarm.episode import MAX_TURNS
from swarm.types import EpisodeLimits, RefusalReason
from swarm.wire.group_counts import CountLimits

Finding = tuple[RefusalReason, str] | None


def first(findings: Iterable[Finding]) -> Finding:
    """Returns the first finding of an iterable, or None; items after that finding are not computed."""
    return next((finding for finding in findings if finding is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """Bounds on a group for its admission."""

    max_group_bytes: int = 4 * 2**20  # as sent, and also when decompressed
    group_size: int = 8  # rollouts, exactly
    largest_group: int = 0  # 0, or groups have any size from 2 to this
    max_age_steps: int = 4
    max_age_s: float = 600.0  # since the producer's created_at, clock skew allowed on top
    max_new_tokens: int = 8  # tokens of one answer, and what its generator was allowed
    temperature: float = 1.0  # of the run
    reward_tolerance: float = 1e-3
    has_followers: bool = False  # other nodes have our weights, and make groups with them
    episode_environments: frozenset[str] = frozenset()  # names of environments of several turns
    max_episode_tokens: int = 2048  # of an episode there
    believed_from: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """environment whose observations are believed -> the nodes that are believed"""
    own_environments: frozenset[str] = frozenset()  # names of environments whose episodes stay where they were made

    @classmethod
    def from_config(cls, config: NodeConfig) -> "AdmissionLimits":
        """Limits that follow from a node's configuration."""
        return cls(
            max_group_bytes=config.exchange.max_group_bytes,
            group_size=config.generator.group_size,
            largest_group=config.generator.largest_group,
            max_age_steps=config.replay.max_age_steps,
            max_age_s=config.replay.max_age_s,
            max_new_tokens=config.generator.max_new_tokens,
            temperature=config.generator.temperature,
            has_followers=config.weights.publish,
            episode_environments=frozenset(each.name for each in config.environments if each.may_have_turns),
            max_episode_tokens=config.generator.max_episode_tokens,
            believed_from={e.name: frozenset(e.scored_from) for e in config.environments if e.exchange == "scored"},
            own_environments=config.own_environments,
        )

    @property
    def episodes(self) -> EpisodeLimits:
        """Bounds at which episodes of several turns end."""
        return EpisodeLimits(max_new_tokens=self.max_new_tokens, max_episode_tokens=self.max_episode_tokens)

    @property
    def counts(self) -> CountLimits:
        """Bounds of the number of elements of a group; a group beyond them is not parsed."""
        return CountLimits.of_run(
            group_size=max(self.group_size, self.largest_group),
            max_new_tokens=self.max_episode_tokens if self.episode_environments else self.max_new_tokens,
            max_turns=MAX_TURNS if self.episode_environments else 1,
            max_age_steps=self.max_age_steps,
        )
