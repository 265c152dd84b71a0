"""The pull towards a tempered policy, against its definition."""

from dataclasses import replace

import pytest
import torch

from swarm.errors import ConfigError
from swarm.objectives.methods.dcpo_distribution import TemperedPull, tempered_log_ratio
from swarm.objectives.part import Prediction, Scored
from swarm.testing.batches import toy_batch, toy_scored


def make_scored(entropy: float, rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)) -> Scored:
    """Four rollouts of one token; both probes are known."""
    ones = torch.ones(4, 1)
    batch = toy_batch(torch.tensor(rewards), memory={"TemperedPull": {"entropy": entropy}})
    probes = {"log_ratio_at_temperature_1.2": 0.3 * ones, "log_ratio_at_temperature_0.8": -0.4 * ones}
    return toy_scored(batch, entropy=0.7 * ones, advantages=2 * ones, probes=probes)


def test_the_entropy_of_the_step_is_what_the_next_one_compares() -> None:
    part = TemperedPull()
    scored = make_scored(0.1)
    assert part.initial() == {"entropy": 0.0}
    assert part.observe(part.initial(), scored)["entropy"] == pytest.approx(0.7)
    half = replace(scored.batch, mask=torch.tensor([[True], [True], [False], [False]]))
    assert part.observe({}, replace(scored, batch=half))["entropy"] == pytest.approx(0.7)


def test_a_probe_is_the_ratio_to_the_softmax_at_that_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 7, (50,), generator=generator)
    temperature = torch.linspace(0.5, 2.0, 50, dtype=torch.float64)
    seen = Prediction(hidden=logits, logits=logits, targets=targets, temperature=temperature)
    found = tempered_log_ratio(seen, 1.3)

    def probability(factor: float) -> torch.Tensor:
        return torch.softmax(logits / (factor * temperature[:, None]), dim=1)[torch.arange(50), targets]

    torch.testing.assert_close(found.exp(), probability(1.3) / probability(1.0))


def test_an_extreme_ratio_is_bounded() -> None:
    scored = make_scored(0.2)
    far = replace(scored, probes={"log_ratio_at_temperature_1.2": torch.full((4, 1), 1e4)})
    assert bool(TemperedPull()(far).isfinite().all())


def test_temperatures_on_one_side_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sharp: 1\.1 must be above 0 and at most 1"):
        TemperedPull(sharp=1.1)
