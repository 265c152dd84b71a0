"""Base class of configuration sections, types of their fields, and the usual values of a field.

Invariant: a section is frozen and has no unknown keys; usual values do not affect validation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator

from swarm.addresses import listening_address

Positive = Annotated[int, Field(gt=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Listening = Annotated[str, BeforeValidator(listening_address)]
ListeningOrOff = Annotated[str, BeforeValidator(lambda given: given if given == "" else listening_address(given))]

_NOTHING = 1e-9  # stands for 0 where values are compared by factors
_OTHER = 0.5  # distance of a value that is no number, in factors of ten
_FAR = 3.0  # most factors of ten that count: 0 is not farther from 1 than a rate wrong by a thousand


@dataclass(frozen=True, slots=True)
class Usual:
    """Usual values of a field: if a node does not learn, `swarm why` looks at values outside of them first.

    A default value counts as usual even outside the span.

    Example:
        temperature: Annotated[PositiveFloat, Usual("0.5..1.4", "signal steps")] = 1.0
    """

    span: str  # "1e-6..1e-4", "..64", "4..", or a plain value: "false"
    # Some of: signal (rewards that differ), steps (their size), pace (their number), peers (finding them), exchange
    # (using their groups and weights), machine (its memory).
    bears_on: str

    def distance(self, value: object) -> float:
        """Distance of a value from the span in factors of ten, at most 3; 0 inside.

        If the value is no number or the span is a plain value: 0 for an equal value, else 0.5.
        """
        if ".." not in self.span or isinstance(value, bool) or not isinstance(value, int | float):
            shown = str(value).lower() if value or isinstance(value, bool) else "empty"
            return 0.0 if shown == self.span else _OTHER
        low, _, high = self.span.partition("..")
        below = math.log10(max(float(low or 0), _NOTHING) / max(value, _NOTHING)) if low else 0.0
        above = math.log10(max(value, _NOTHING) / max(float(high), _NOTHING)) if high else 0.0
        return min(max(below, above, 0.0), _FAR)

    def __get_pydantic_json_schema__(self, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the span to the JSON schema, for the page of the configuration."""
        return {**handler(core), "usual": self.span}


class Model(BaseModel):
    """Base class of every section: frozen, without unknown keys; the docstring under a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    removed: ClassVar[Mapping[str, object]] = {}  # keys of earlier releases -> the constant that each became

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, data: Any) -> Any:
        """Drops each removed key that holds its constant, so that files of earlier releases still load."""
        if not cls.removed or not isinstance(data, dict):
            return data
        given = cast("dict[str, Any]", data).items()
        return {key: value for key, value in given if key not in cls.removed or value != cls.removed[key]}
