"""First steps are owed by nodes that had the time and something to learn from, and by no others."""

import pytest

from swarm.events import Event, GroupPut, GroupsDrawn, NodeKilled, NodeRestarted
from swarm.simulate.virtual.first_steps import FirstSteps

NODE = "ab" * 32


def put(reward_mean: float) -> GroupPut:
    return GroupPut(
        digest="d1",
        producer=NODE,
        policy_id=NODE,
        env="copy",
        oldest_step=0,
        size_bytes=100,
        reward_mean=reward_mean,
        num_tokens=4,
    )


DRAWN = GroupsDrawn(draw_step=1, groups=(), max_reuse=1, max_age_steps=4)


@pytest.mark.parametrize(
    ("events", "is_owing"),
    [
        ([], True),
        ([(4.0, put(0.5))], True),
        ([(9.0, put(0.5))], False),
        ([(4.0, put(0.0)), (8.0, put(1.0)), (12.0, put(0.5))], False),
        ([(4.0, put(0.0)), (8.0, DRAWN)], True),
        ([(4.0, put(0.5)), (12.0, NodeKilled()), (16.0, NodeRestarted())], False),
        ([(4.0, put(0.5)), (12.0, NodeKilled()), (16.0, NodeRestarted()), (20.0, DRAWN)], False),
        ([(2.0, NodeKilled()), (5.0, NodeRestarted()), (8.0, put(0.5))], True),
        ([(2.0, NodeKilled()), (5.0, NodeRestarted())], True),
        ([(1.0, put(0.5)), (18.0, NodeKilled()), (20.0, NodeRestarted())], True),
        ([(2.0, NodeKilled()), (2.0, put(0.5))], False),
    ],
    ids=[
        "never-put",
        "learnable-early",
        "learnable-late",
        "all-wrong-or-all-right",
        "drawn",
        "restarted-late",
        "drawn-late",
        "restarted-early",
        "restarted-and-never-put",
        "first-life-was-long-enough",
        "down",
    ],
)
def test_a_first_step_is_owed_where_there_was_time_and_signal(
    events: list[tuple[float, Event]], is_owing: bool
) -> None:
    first = FirstSteps(within_s=16.0)
    for at_s, event in events:
        first.note(at_s, NODE, event)
    assert (NODE not in first.excused(24.0, [NODE])) is is_owing
