"""arXiv:2510.14545: token mean of PPO (.8, 1.2 r/sg[r]) with dual clip 3; A <- A (1 + .2 (H - mean H) / std H)."""

from golden_case import Case, Tensor, log_ratio, mean, std, z_score, zero


def loss(case: Case) -> Tensor:
    entropies = [token.entropy.item() for _, _, response in case for token in response.tokens]
    centre, spread = mean(entropies), std(entropies)
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            advantage = z_score(group, place, 1e-6) * (1 + 0.2 * (token.entropy.item() - centre) / spread)
            ratio = log_ratio(token, token.mu).exp()
            size = ratio.item()
            if advantage > 0 and size > 1.2:
                term = -1.2 * ratio / size * advantage
            elif advantage < 0 and size < 0.8:
                term = zero() - 0.8 * advantage
            elif advantage < 0 and size > 3.0:
                term = zero() - 3.0 * advantage
            else:
                term = -ratio * advantage
            total = total + term / case.num_tokens
    return total
