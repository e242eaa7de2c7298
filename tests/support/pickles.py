"""A pickled program, for tests which check that loading a damaged or hostile file runs no code."""

import os
from pathlib import Path


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)
