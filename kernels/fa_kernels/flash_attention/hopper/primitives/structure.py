"""Structures: groups of named values in a kernel."""

from typing import TypeVar, dataclass_transform

from triton.experimental import gluon
from triton.language.core import _aggregate, base_value, constexpr

_Class = TypeVar("_Class")


@dataclass_transform()
def structure(cls: type[_Class]) -> type[_Class]:
    """Decorates a class with annotated fields.

    Objects of the class can be arguments, results and loop variables in kernels. A field may be any value of a kernel:
    a tensor, a buffer, a descriptor, a tuple, None or another structure. Fields cannot be reassigned. Methods must be
    `gluon.jit` functions.
    """
    fields = constexpr(tuple(cls.__annotations__))  # a constexpr, so that kernels are compiled again if names change

    def __init__(self, *values):
        for field, value in zip(fields.value, values, strict=True):
            setattr(self, field, value if isinstance(value, base_value) else constexpr(value))

    cls.__init__ = gluon.constexpr_function(__init__)
    cls.__annotations__ = dict.fromkeys(fields.value, base_value)  # Triton checks the type of each field
    return _aggregate(cls)
