"""ALP: token mean of -min(r A, clip(r, .5, 4) A), at most 10 |A| where A < 0; r the product of the response's ratios.

The value is the product's, the gradient the token's own. That log pi is the perturbed policy's is the learner's work.
"""

from golden_case import Case, Tensor, clip, log_ratio, ppo_min, z_score, zero

NUM_SEEDS = 8  # so that some negative is held at the dual clip
INERT = {
    "ratio.std": "of the noise under which log pi was scored: tests/unit/test_layer_noise.py",
    "ratio.rate": "of the noise under which log pi was scored: tests/unit/test_layer_noise.py",
}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        summed = sum(log_ratio(token, token.mu).item() for token in response.tokens)
        whole = clip(zero() + summed, -20.0, 20.0).item()
        for token in response.tokens:
            ratio = (whole + token.logp - token.logp.item()).exp()
            gained = ppo_min(ratio, advantage, 0.5, 4.0)
            if advantage < 0 and gained.item() < 10 * advantage:
                gained = zero() + 10 * advantage
            total = total - gained / case.num_tokens
    return total
