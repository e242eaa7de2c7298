"""Type hints of config values, such as bounded numbers. fa_train.settings checks the config against them."""

from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

INFINITY = float("inf")

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(2**32)]  # NumPy accepts seeds from 0 to 2**32 - 1
PositiveFloat = Annotated[float, Gt(0), Lt(INFINITY)]
AtLeastOne = Annotated[float, Ge(1), Lt(INFINITY)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(INFINITY)]
Fraction = Annotated[float, Ge(0), Le(1)]
FractionBelowOne = Annotated[float, Ge(0), Lt(1)]
Betas = Annotated[Sequence[FractionBelowOne], Len(2, 2)]
NonEmptyText = Annotated[str, Len(1)]
Precision = Literal["32-true", "bf16-mixed", "bf16-true"]  # fp16 is not supported, because it would need loss scaling
Dtype = Literal["float32", "bfloat16", "float16"]  # of stored weights
