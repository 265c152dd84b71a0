"""The replay buffer as a state machine: its promises hold after any sequence of events."""

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarm.clock import ManualClock
from swarm.config import ReplayConfig
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.testing.builders import make_group, make_scored
from swarm.types import PolicyVersion

OWN = "own"
PEERS = ("p", "q")
FOLLOWERS = ("f", "g")  # make groups of our own lineage

MAX_BYTES = 50_000


class ReplayMachine(RuleBasedStateMachine):
    """Two buffers of one seed get the same events; one model checks what they hand out."""

    @initialize(
        max_age_steps=st.integers(0, 3),
        max_reuse=st.integers(1, 3),
        max_groups=st.integers(3, 12),
        local_groups=st.integers(0, 3),
        sampler=st.sampled_from(["uniform", "fresh", "effective"]),
    )
    def start(self, max_age_steps: int, max_reuse: int, max_groups: int, local_groups: int, sampler: str) -> None:
        self.clock = ManualClock()
        self.config = ReplayConfig.model_validate(
            {
                "local_groups": local_groups,
                "external_groups": 2,
                "max_age_steps": max_age_steps,
                "max_age_s": 50.0,
                "max_reuse": max_reuse,
                "max_groups": max_groups,
                "max_bytes": MAX_BYTES,
                "sampler": sampler,
            }
        )
        self.buffers = [ReplayBuffer(self.config, OWN, 3, self.clock, max_stored_bytes=8000) for _ in range(2)]
        self.heads = {name: PolicyVersion(policy_id=name, step=0) for name in (OWN, *PEERS)}
        self.uses: Counter[bytes] = Counter()
        self.zero_variance_seen: set[bytes] = set()
        self.step = 0
        self.num_made = 0

    @rule(
        producer=st.sampled_from([OWN, OWN, *FOLLOWERS, *PEERS]),
        age=st.integers(-1, 4),
        is_zero_variance=st.booleans(),
        size_bytes=st.integers(1, 9000),
        num_chars=st.integers(1, 60_000),
    )
    def add(self, producer: str, age: int, is_zero_variance: bool, size_bytes: int, num_chars: int) -> None:
        self.num_made += 1
        lineage = OWN if producer in FOLLOWERS else producer
        group = make_group(lineage, task_id=self.num_made, step=max(0, self.heads[lineage].step - age))
        first, *others = group.rollouts
        long = replace(first, actions=("x" * num_chars,))
        group = replace(group, producer=producer, rollouts=(long, *others))
        rewards = [1.0] * 8 if is_zero_variance else [1.0] * 7 + [0.0]
        scored = make_scored(
            group,
            rewards=rewards,
            is_made_here=producer == OWN,
            first_seen_s=self.clock.now_s(),
            size_bytes=size_bytes,
        )
        for buffer in self.buffers:
            buffer.add(scored)
            buffer.add(scored)  # again: no effect

    @rule(producer=st.sampled_from([OWN, *PEERS]), by=st.integers(1, 2))
    def advance_head(self, producer: str, by: int) -> None:
        self.heads[producer] = PolicyVersion(policy_id=producer, step=self.heads[producer].step + by)

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def draw(self) -> None:
        self.step += 1
        draws = [b.draw(self.step, self.heads[OWN], self.heads.get, {"p": 0.5}) for b in self.buffers]
        assert draws[0] == draws[1]
        draw = draws[0]
        if draw is None:
            return
        assert draw.groups and draw.num_zero_variance == len(draw.zero_variance_digests)
        digests = [drawn.scored.digest for drawn in draw.groups]
        assert len(set(digests)) == len(digests)
        num_local = sum(drawn.scored.is_own_policy(OWN) for drawn in draw.groups)
        assert num_local <= self.config.local_groups and len(digests) - num_local <= 2
        assert not self.zero_variance_seen & set(draw.zero_variance_digests)
        self.zero_variance_seen |= set(draw.zero_variance_digests)
        for drawn in draw.groups:
            self.uses[drawn.scored.digest] += 1
            assert drawn.use == self.uses[drawn.scored.digest] <= self.config.max_reuse
            group = drawn.scored.group
            assert drawn.scored.has_signal
            assert max(0, self.heads[group.policy_id].step - group.oldest_step) == drawn.age_steps
            assert drawn.age_steps <= self.config.max_age_steps
            assert self.clock.now_s() - drawn.scored.first_seen_s <= self.config.max_age_s

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "buffers"):
            return
        buffer = self.buffers[0]
        assert buffer.num_groups <= self.config.max_groups and buffer.num_bytes <= self.config.max_bytes
        assert buffer.fill <= 1.0
        capacity = self.buffers[0].capacity(self.heads[OWN].step, running=0)
        assert 0 <= capacity <= (self.config.max_age_steps + 1) * self.config.local_groups


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
