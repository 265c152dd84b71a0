"""arXiv:2306.03236, counts of states: .1 / sqrt(n (1 + N)) added to turn rewards, n visits in the episode so far, N
earlier episodes; reward-to-go .95 minus the mean of the group's turns of that number; clip .2, token mean.
"""

import math

from golden_case import Case, Group, Response, Tensor, log_ratio, mean, ppo_min, zero


def cell(environment: str, state: str) -> str:
    """CRC-32, bit by bit."""
    rest = 0xFFFFFFFF
    for byte in f"{environment} {state}".encode():
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0xEDB88320 if rest & 1 else 0)
    return str((rest ^ 0xFFFFFFFF) % 4096)


MEMORY = {"NoveltyReturn": {"cells": {cell("sums", "lake"): 3, cell("sums", "hill"): 8, cell("products", "hill"): 1}}}


def returns(case: Case, group: Group, member: Response) -> list[float]:
    cells, rewards = case.memory["NoveltyReturn"]["cells"], list(member.turn_rewards)
    rewards[-1] += member.reward
    for turn, state in enumerate(member.states):
        if state:
            visits = member.states[: turn + 1].count(state)
            rewards[turn] += 0.1 / math.sqrt(visits * (1 + cells.get(cell(group.key.split("/")[0], state), 0)))
    return [sum(0.95**later * each for later, each in enumerate(rewards[turn:])) for turn in range(len(rewards))]


def advantage(case: Case, group: Group, response: Response, turn: int) -> float:
    every = [returns(case, group, member)[turn] for member in group.members if member.num_turns > turn]
    return 0.0 if max(every) == min(every) else returns(case, group, response)[turn] - mean(every)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage(case, group, response, token.turn), 0.8, 1.2)
            total = total - term / case.num_tokens
    return total
