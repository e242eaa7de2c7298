"""Random tokens, for benchmarks: nothing to read, nothing to learn."""

import numpy as np

from fa_train.data.packing.rows import LossMask

N_TOKENS = 2**26  # in an epoch, at least


class SyntheticDocuments:
    """Documents of one length; item i is drawn from (seed, i)."""

    loss_mask: LossMask | None = None

    def __init__(self, count: int, length: int, vocab_size: int, seed: int) -> None:
        self.lengths = np.full(count, length)
        self.vocab_size, self.seed = vocab_size, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, int(index)))
        return generator.integers(self.vocab_size, size=self.lengths[index], dtype=np.int32)


class SyntheticSource:
    """Documents of document_len random tokens.

    Raises: ValueError on a length or vocabulary that is not positive.
    """

    def __init__(self, vocab_size: int, document_len: int) -> None:
        if vocab_size < 1 or document_len < 1:
            raise ValueError(
                f"data.vocab_size and data.document_len must be positive; got {vocab_size} and {document_len}"
            )
        self.vocab_size, self.document_len = vocab_size, document_len
        self.pad_id = 0
        self.cache_dir = None

    def prepare(self, workers: int = 1) -> None:
        """Nothing to do."""

    def documents(self, *, held_out: bool) -> SyntheticDocuments:
        """Those for training, or those for validation."""
        count = max(2, -(-N_TOKENS // self.document_len))
        return SyntheticDocuments(count, self.document_len, self.vocab_size, seed=int(held_out))
