"""A pickled program, for tests that damaged or hostile files run no code."""

import os
from pathlib import Path


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)
