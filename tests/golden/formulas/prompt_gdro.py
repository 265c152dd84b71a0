"""arXiv:2601.19280, around 3.3 and 5.1: A <- A min(exp(clip(S_bin, -1, 1)), 2); GRPO with .001 k3 to the reference."""

import math

from golden_case import Case, Tensor, clip, log_ratio, ppo_min, z_score, zero

SCORES = [0.1, 0.6, 1.7, 0.0, -1.4, 0.9, 0.0, 0.0, 0.0, 0.0]
PLACES = {"sums/1": 4, "sums/3": 2, "products/1": 1}  # sums/2 was never seen
MEMORY = {
    "RobustWeights": {
        "prompts": {key: {"bin": place, "groups": [[0.5, 4]]} for key, place in PLACES.items()},
        "scores": SCORES,
    }
}
_BETWEEN = "acts between steps: test_parts_robust"
INERT = {f"shapers.robust_weights.{name}": _BETWEEN for name in ("pace", "num_bins", "k", "window", "margin")}
INERT["shapers.robust_weights.remembers"] = _BETWEEN


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        if group.key in PLACES:
            score = SCORES[PLACES[group.key]]
            advantage *= min(math.exp(max(-1.0, min(score, 1.0))), 2.0)
        for token in response.tokens:
            gap = clip(token.logp - token.ref, -20.0, 20.0)
            penalty = clip((-gap).exp() + gap - 1, -10.0, 10.0)
            term = 0.001 * penalty - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total + term / len(response.tokens) / case.num_responses
    return total
