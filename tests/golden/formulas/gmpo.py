"""arXiv:2507.20673: -(1/N) sum_i A_i exp(mean_t dt), dt = sgn(A) min(sgn(A) d, sgn(A) clip(d, -.4, .4))."""

from golden_case import Case, Tensor, clip, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        sign = 1.0 if advantage >= 0 else -1.0
        logs = zero()
        for token in response.tokens:
            plain = log_ratio(token, token.mu)
            clipped = clip(plain, -0.4, 0.4)
            logs = logs + (plain if (sign * plain).item() <= (sign * clipped).item() else clipped)
        total = total - advantage * (logs / len(response.tokens)).exp() / case.num_responses
    return total
