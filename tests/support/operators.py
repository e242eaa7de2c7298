"""Records the names of the torch operators that run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})
