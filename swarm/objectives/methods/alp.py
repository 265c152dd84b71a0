"""ALP: the ratio's numerator is the policy with noise in every layer, its denominator the unperturbed generator.

    r_t = pi_{theta,delta}(o) / mu(o),    h_l <- h_l + sigma_l eps, eps ~ N(0, I), at the input of layer l

One ratio corrects staleness and numerical mismatch alike: noise flattens the policy, so the ratio's tail stays short.
The sigma_l are learned with the policy, on a logarithmic scale; gradient flows through the perturbed pass. As in the
authors' single-turn script: product over the response, bounds .5 and 4, dual clip 10, sigma .02 at first; the learning
rate of the sigmas is that of the multi-turn script, whose sigma begins at 1e-6. Left out, as in `grpo`: the KL term of
.001. Ours: noise follows the packing of rows, so responses that share a prompt share the prompt's noise.
"""

from torch import Tensor

from swarm.objectives.part import Noise, NotNegative, Positive, RatioPart, Requirement, Scope, Scored
from swarm.objectives.parts import LOG_RATIO_BOUND, Clip, GroupZScore, TokenMean, log_ratio, on_tokens, rollout_sum
from swarm.objectives.recipe import Recipe


class PerturbedRatio(RatioPart):
    """The ratio of a whole response: the policy with noise in its layers over the generator."""

    equation = "r_t = sg[W_i] pi_t / sg[pi_t], W_i = exp(clamp(sum d_t, -20, 20)), d = log pi_{theta,delta} - log mu"
    scope = Scope.ROLLOUT
    always_needs = frozenset({Requirement.BEHAVIOR_LOGPROBS, Requirement.PERTURBED_LOGPROBS})
    std: Positive = 0.02  # of each layer's noise before the first update
    rate: NotNegative = 5e-4  # of Adam on log(std)

    @property
    def noise(self) -> Noise:
        return Noise(std=self.std, rate=self.rate)

    def __call__(self, scored: Scored) -> Tensor:
        ratios = log_ratio(scored.logprobs, scored.behavior, scored.mask)
        whole = rollout_sum(ratios, scored.mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return on_tokens(whole, scored.logprobs, scored.mask)


RECIPE = Recipe(
    name="alp",
    title="Adaptive Layerwise Perturbation: Unifying Off-Policy Corrections for LLM RL",
    acronym="ALP",
    arxiv="2603.19470",
    verification="code",  # amazon-science/adaptive-layerwise-perturbation `compute_policy_loss_perturbed`
    advantage=GroupZScore(),
    ratio=PerturbedRatio(),
    weight=Clip(low=0.5, high=3.0, dual=10.0),
    aggregate=TokenMean(),
)
