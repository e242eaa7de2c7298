"""Random documents and windows, and the keys that their queries see."""

import numpy as np
from hypothesis import strategies as st

DOCUMENTS = st.lists(st.integers(0, 90), min_size=1, max_size=9)  # lengths
WINDOWS = st.sampled_from([None, 1, 7, 40])


def boundaries_of(lengths):
    return np.cumsum([0, *lengths])


def visible(start, end, n_keys):
    """Returns the mask (n_queries, n_keys) in which each query sees the keys from `start` to `end` - 1."""
    keys = np.arange(n_keys)
    return (keys >= start[:, None]) & (keys < end[:, None])
