"""DHPO: a token's surrogate and its response's, each clipped in its own interval, then mixed.

Invariant: the mix is a convex combination with constant shares; share 1 is the token method, share 0 the
sequence method. Wants a token ratio, of which the sequence ratio is formed.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts.ratio.sequence import on_tokens, rollout_mean
from swarm.objectives.parts.weight.clip import clip_surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class _Branches(WeightPart):
    scope: ClassVar[Scope] = Scope.ROLLOUT
    token_low: float = 0.2  # half-widths
    token_high: float = 0.2
    sequence_low: float = 3e-4
    sequence_high: float = 4e-4

    def mixed(self, scored: Scored, share: Tensor | float) -> TokenLosses:
        """The mix; `share` of the token branch, a number or [N, L].

        A token counts as bounded where neither branch has a gradient.
        """
        mean = rollout_mean(scored.log_ratio.detach(), scored.mask)
        whole = on_tokens(mean, scored.logprobs, scored.mask)
        token = clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.token_low, 1 + self.token_high)
        sequence = clip_surrogate(whole, scored.advantages, 1 - self.sequence_low, 1 + self.sequence_high)
        losses = share * token.losses + (1 - share) * sequence.losses
        return TokenLosses(losses=losses, bounded=token.bounded & sequence.bounded)


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchClip(_Branches):
    """Averaged mixing.

    Source: DHPO, arXiv:2601.05607; the share and both intervals are ours.
    """

    equation: ClassVar[str] = "L_t = share L(r_t, token clip) + (1 - share) L(s_i, sequence clip), L = PPO's minimum"
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share: {self.share} must lie in [0, 1]")

    def __call__(self, scored: Scored) -> TokenLosses:
        return self.mixed(scored, self.share)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBranchClip(_Branches):
    """Entropy-guided mixing: the more uncertain the policy is at a token, the more its own ratio counts.

    Source: DHPO, arXiv:2601.05607; the form of the share, its scale and both intervals are ours.
    """

    equation: ClassVar[str] = (
        "L_t = a_t L(r_t, token clip) + (1 - a_t) L(s_i, sequence clip), a_t = sg[H_t/(H_t + half)]"
    )
    half: float = 1.0  # nats at which both branches count the same

    def __post_init__(self) -> None:
        if self.half <= 0:
            raise ConfigError(f"half: {self.half} must be positive")

    def __call__(self, scored: Scored) -> TokenLosses:
        entropy = scored.entropy.detach().clamp(min=0)
        return self.mixed(scored, entropy / (entropy + self.half))
