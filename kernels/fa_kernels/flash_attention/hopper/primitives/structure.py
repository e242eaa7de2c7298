"""Structures: values that travel together through a kernel, under names."""

from typing import TypeVar, dataclass_transform

from triton.experimental import gluon
from triton.language.core import _aggregate, base_value, constexpr

_Class = TypeVar("_Class")


@dataclass_transform()
def structure(cls: type[_Class]) -> type[_Class]:
    """Makes a class with annotated fields a value that kernels create, pass, return and carry through loops.

    A field holds any value of a kernel: a tensor, a buffer, a descriptor, a tuple, None or another structure. Methods
    are `gluon.jit` functions. Fields cannot be assigned again.
    """
    fields = constexpr(tuple(cls.__annotations__))  # as a constexpr, it is part of the key of compiled kernels

    def __init__(self, *values):
        for field, value in zip(fields.value, values, strict=True):
            setattr(self, field, value if isinstance(value, base_value) else constexpr(value))

    cls.__init__ = gluon.constexpr_function(__init__)
    cls.__annotations__ = dict.fromkeys(fields.value, base_value)  # Triton checks the type of each field
    return _aggregate(cls)
