"""Disables garbage collection during the imports of a server process. tests.support.frozen enables it again."""

import gc

gc.disable()
