"""Number types with bounds, for type hints. fa_train.settings checks the values in conf/ against these hints."""

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, Gt, Le, Len, Lt

INFINITY = float("inf")

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(2**32)]  # the range of NumPy's seeds
PositiveFloat = Annotated[float, Gt(0), Lt(INFINITY)]
AtLeastOne = Annotated[float, Ge(1), Lt(INFINITY)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(INFINITY)]
Fraction = Annotated[float, Ge(0), Le(1)]
FractionBelowOne = Annotated[float, Ge(0), Lt(1)]
Betas = Annotated[Sequence[FractionBelowOne], Len(2, 2)]
