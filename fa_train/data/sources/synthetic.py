"""Documents of random tokens, for benchmarks."""

import numpy as np

from fa_train.data.packing.rows import LossMask

N_TOKENS = 2**26  # the minimum number of tokens per epoch


class SyntheticDocuments:
    """Documents of equal length. Document i is drawn with the seed (seed, i)."""

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
    """A source of documents with document_len random tokens each.

    Raises: ValueError if vocab_size or document_len is not positive.
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
        """Does nothing: random tokens need no preparation."""

    def documents(self, *, held_out: bool) -> SyntheticDocuments:
        """Returns the training documents, or the documents that are held out for validation."""
        count = max(2, -(-N_TOKENS // self.document_len))
        return SyntheticDocuments(count, self.document_len, self.vocab_size, seed=int(held_out))
