"""Structures: groups of named values in a kernel."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from triton import constexpr_function
from triton.language.core import _aggregate, base_value, constexpr

from fa_kernels.device import interpreted

_Class = TypeVar("_Class")


@dataclass_transform()
def structure(cls: type[_Class]) -> type[_Class]:
    """Decorator that turns a class with annotated fields into a structure.

    Objects of the class can be arguments, results and loop variables in kernels. A field may be any value of a kernel:
    a tensor, a buffer, a descriptor, a tuple, None or another structure. Fields cannot be reassigned. Methods must be
    `gluon.jit` functions. In the interpreter, structures must not have methods.
    """
    if interpreted():  # interpreted kernels are Python functions, in which `constexpr(None) is None` would be false
        return dataclass(frozen=True, eq=False)(cls)
    fields = constexpr(tuple(cls.__annotations__))  # a constexpr, so that new names of fields cause a recompilation

    def __init__(self, *values):
        for field, value in zip(fields.value, values, strict=True):
            setattr(self, field, value if isinstance(value, base_value) else constexpr(value))

    cls.__init__ = constexpr_function(__init__)  # type: ignore[method-assign]
    cls.__annotations__ = dict.fromkeys(fields.value, base_value)  # Triton checks the type of each field
    return _aggregate(cls)
