"""arXiv:2511.14846, as public code quotes it: a failure's outcome is .5 times its mean likeness (cosine of counts of
three characters) to the group's successes; .1 off for a malformed turn and a first one without a call; returns
discounted by .9, z-score over all turns of the group; clip .2 / .28, token mean.
"""

import math

from golden_case import Case, Group, Response, Tensor, log_ratio, mean, ppo_min, std, zero


def like(one: Response, other: Response) -> float:
    texts = ["\n" + "\n".join(each.actions) + "\n" for each in (one, other)]
    parts = [[text[i : i + 3] for i in range(len(text) - 2)] for text in texts]
    names = sorted(set(parts[0]) | set(parts[1]))
    a, b = ([part.count(name) for name in names] for part in parts)
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def outcome(group: Group, response: Response) -> float:
    won = [member for member in group.members if member.reward > 0.5]
    if not won or response.reward > 0.5:
        return response.reward
    return 0.5 * mean([like(response, member) for member in won])


def returns(group: Group, response: Response) -> list[float]:
    later, found = 0.0, []
    for turn in reversed(range(response.num_turns)):
        is_slip = response.statuses[turn] == "malformed" or (turn == 0 and response.calls[0] == 0)
        own = outcome(group, response) if turn == response.num_turns - 1 else 0.0
        later = own - (0.1 if is_slip else 0.0) + 0.9 * later
        found.append(later)
    return found[::-1]


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        every = [value for member in group.members for value in returns(group, member)]
        for token in response.tokens:
            value = returns(group, response)[token.turn]
            score = 0.0 if max(every) == min(every) else (value - mean(every)) / (std(every) + 1e-6)
            total = total - ppo_min(log_ratio(token, token.mu).exp(), score, 0.8, 1.28) / case.num_tokens
    return total
