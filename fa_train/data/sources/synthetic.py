"""Documents of random tokens, for benchmarks."""

import math

import numpy as np

from fa_train.data.packing.rows import LossMask

N_TOKENS = 2**26  # the minimum number of tokens per epoch
SHORTEST = 16  # random lengths are at least min(SHORTEST, document_len) tokens
LONGEST = 32  # random lengths are at most LONGEST * document_len tokens


class SyntheticDocuments:
    """Documents of random tokens. Document i has lengths[i] tokens, which are drawn with the seed (seed, i).

    Shapes: lengths (n,) int64.
    """

    loss_mask: LossMask | None = None

    def __init__(self, lengths: np.ndarray, vocab_size: int, seed: int) -> None:
        self.lengths = lengths
        self.vocab_size, self.seed = vocab_size, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, int(index)))
        return generator.integers(self.vocab_size, size=self.lengths[index], dtype=np.int32)


class SyntheticSource:
    """A source of documents of random tokens.

    document_len: the median length of the documents, in tokens.
    length_sigma: the standard deviation of the logarithm of the lengths. If length_sigma is 0, all documents have
    document_len tokens. If length_sigma is positive, `log_normal_lengths` draws the lengths.
    Raises: ValueError if vocab_size or document_len is not positive, or if length_sigma is negative or not finite.
    """

    def __init__(self, vocab_size: int, document_len: int, length_sigma: float) -> None:
        if vocab_size < 1 or document_len < 1:
            raise ValueError(
                f"data.vocab_size and data.document_len must be positive; got {vocab_size} and {document_len}"
            )
        if not 0 <= length_sigma < math.inf:
            raise ValueError(f"data.length_sigma must be finite and at least 0; got {length_sigma}")
        self.vocab_size, self.document_len, self.length_sigma = vocab_size, document_len, length_sigma
        self.pad_id = 0
        self.cache_dir = None

    def prepare(self, workers: int = 1) -> None:
        """Does nothing: random tokens need no preparation."""

    def documents(self, *, held_out: bool) -> SyntheticDocuments:
        """Returns the training documents, or the documents that are held out for validation."""
        seed = int(held_out)
        if self.length_sigma:
            lengths = log_normal_lengths(self.document_len, self.length_sigma, seed)
        else:
            lengths = np.full(max(2, -(-N_TOKENS // self.document_len)), self.document_len)
        return SyntheticDocuments(lengths, self.vocab_size, seed)


def log_normal_lengths(median: int, sigma: float, seed: int) -> np.ndarray:
    """Draws document lengths until there are at least two documents and at least N_TOKENS tokens.

    sigma: the standard deviation of the logarithms of the lengths. Each drawn length is limited to the range from
    min(SHORTEST, median) to LONGEST * median tokens.
    Returns: the lengths in tokens, (n,) int64. The lengths depend only on the arguments and on N_TOKENS.
    """
    # no document uses the seed (seed, 0, 1), because the tokens of document i are drawn with the seed (seed, i)
    generator = np.random.default_rng((seed, 0, 1))
    block = max(2, -(-N_TOKENS // median))
    lengths = np.empty(0, np.int64)
    while lengths.sum() < N_TOKENS:
        drawn = generator.lognormal(math.log(median), sigma, block)
        limited = np.clip(drawn, min(SHORTEST, median), LONGEST * median)
        lengths = np.append(lengths, np.rint(limited).astype(np.int64))
    enough = int(np.searchsorted(np.cumsum(lengths), N_TOKENS)) + 1
    return lengths[: max(2, enough)]
