"""A recipe as a choice of parts: what cannot be told apart is refused."""

from dataclasses import replace

import pytest

from swarm.errors import ConfigError
from swarm.objectives.methods import load_recipe
from swarm.objectives.parts.kl import EntropyBonus, KlPenalty


def test_two_parts_of_one_class_are_refused_because_they_would_share_address_and_memory() -> None:
    grpo = load_recipe("grpo")
    twice = (EntropyBonus(strength=0.1), EntropyBonus(strength=0.2))
    with pytest.raises(ConfigError, match=r"grpo has two parts called EntropyBonus"):
        replace(grpo, terms=twice)
    both = replace(grpo, terms=(EntropyBonus(strength=0.1), KlPenalty(strength=0.2)))
    assert both.constants["terms.entropy_bonus.strength"] == 0.1
    assert both.with_params({"terms.entropy_bonus.strength": 0.3}).terms[1] == both.terms[1]
