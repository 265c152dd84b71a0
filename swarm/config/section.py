"""A section of a configuration, and the numbers that its fields are.

Invariant: a section is frozen and has no unknown keys.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swarm.addresses import listening_address

Positive = Annotated[int, Field(gt=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Listening = Annotated[str, BeforeValidator(listening_address)]
ListeningOrOff = Annotated[str, BeforeValidator(lambda given: given if given == "" else listening_address(given))]


class Model(BaseModel):
    """Base of every section: frozen, no unknown keys, docstrings under fields are their help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
