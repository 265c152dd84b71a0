"""Claims about any plan: it is minimal, more generators never add lag, and the number given as enough is enough."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarm.extras.plan.capacity_plan import GeneratorFigures, LearnerFigures, covers, groups_per_s, lag_steps, plan

SECONDS = st.floats(0.01, 100.0)
BYTES = st.floats(0.0, 1e9)

LEARNERS = st.builds(
    LearnerFigures,
    step_s=SECONDS,
    groups_per_step=st.floats(0.5, 500.0),
    tokens_per_group=st.floats(1.0, 1e5),
    max_age_steps=st.integers(0, 16),
    bytes_per_group=BYTES,
    patch_bytes=BYTES,
    encode_s=SECONDS,
)
GENERATORS = st.builds(
    GeneratorFigures,
    name=st.just("any"),
    tokens_per_s=st.floats(0.1, 1e6),
    groups_per_batch=st.integers(1, 32),
    apply_s=SECONDS,
    pause_s=st.floats(0.0, 1.0),
    down_bytes_per_s=st.floats(1.0, 1e12),
    up_bytes_per_s=st.floats(1.0, 1e12),
)


@given(learner=LEARNERS, generator=GENERATORS)
def test_the_number_of_generators_is_the_smallest_that_supplies_the_learner(
    learner: LearnerFigures, generator: GeneratorFigures
) -> None:
    number, rate = plan(learner, generator).num_generators, groups_per_s(learner, generator)
    if number is None:
        assert rate == 0
        return
    assert covers(number * rate, learner.demand)
    assert number == 1 or not covers((number - 1) * rate, learner.demand)


@given(learner=LEARNERS, generator=GENERATORS, number=st.integers(1, 200), more=st.integers(1, 200))
def test_more_generators_never_increase_the_lag(
    learner: LearnerFigures, generator: GeneratorFigures, number: int, more: int
) -> None:
    few, many = lag_steps(learner, generator, number), lag_steps(learner, generator, number + more)
    if few is None:
        assert many is None, "one that delivers nothing delivers nothing in numbers"
    else:
        assert many is not None and many <= few


@given(learner=LEARNERS, generator=GENERATORS)
def test_the_least_speed_is_enough_and_less_is_not(learner: LearnerFigures, generator: GeneratorFigures) -> None:
    least = plan(learner, generator).least_tokens_per_s
    if least is None or groups_per_s(learner, generator) == 0:
        return
    assert keeps_the_lag(learner, replace(generator, tokens_per_s=least))
    assert not keeps_the_lag(learner, replace(generator, tokens_per_s=0.99 * least))


@given(learner=LEARNERS, generator=GENERATORS)
def test_the_least_line_is_enough_and_less_is_not(learner: LearnerFigures, generator: GeneratorFigures) -> None:
    least = plan(learner, generator).least_down_bytes_per_s
    if not least or groups_per_s(learner, generator) == 0:
        return
    assert versions_arrive(learner, replace(generator, down_bytes_per_s=least))
    assert not versions_arrive(learner, replace(generator, down_bytes_per_s=0.99 * least))


def keeps_the_lag(learner: LearnerFigures, generator: GeneratorFigures) -> bool:
    return plan(learner, generator).inequalities[1].holds


def versions_arrive(learner: LearnerFigures, generator: GeneratorFigures) -> bool:
    return keeps_the_lag(learner, generator) and plan(learner, generator).inequalities[2].holds
