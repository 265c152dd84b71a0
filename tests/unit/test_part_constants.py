"""Constants of parts: what their types say is checked, in alternatives and tuples too."""

from typing import Any, Literal

import pytest

from swarm.errors import ConfigError
from swarm.objectives.part import Count, Part, Positive, Share


class Ranged(Part):
    """A part of nothing but constants."""

    equation = "x"
    width: Positive | None = None
    span: tuple[Share, Share] = (0.0, 1.0)
    lengths: tuple[Count, ...] = ()
    mode: Literal["off", "on"] | Positive = "off"


@pytest.mark.parametrize(
    "values",
    [{}, {"width": 2.0}, {"span": (0.5, 0.5)}, {"lengths": (1, 2, 3)}, {"mode": "on"}, {"mode": 0.5}],
    ids=str,
)
def test_values_that_the_types_allow_are_taken(values: dict[str, Any]) -> None:
    part = Ranged(**values)
    assert all(getattr(part, name) == value for name, value in values.items())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"width": 0.0}, "width: 0.0 must be above 0"),
        ({"width": float("nan")}, "width: nan must be above 0"),
        ({"span": (0.0, 1.5)}, "span: 1.5 must be at least 0 and at most 1"),
        ({"lengths": (3, 0)}, "lengths: 0 must be at least 1"),
        ({"mode": -1.0}, "mode: -1.0 is neither 'off' nor 'on'"),
    ],
    ids=str,
)
def test_values_that_the_types_forbid_are_refused_by_name(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Ranged(**values)
