"""Encoders convert documents to tokens, and mark the tokens that the model is trained on."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from fa_train.data.tokens.tokenizer import Tokenizer

Document = TypeVar("Document", contravariant=True)


class Encoded(NamedTuple):
    """One encoded document. Shapes: tokens (length,) int32, loss_mask (length,) bool.

    loss_mask: which tokens the model is trained on, or None for all tokens.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None


class Rejection(ValueError):
    """The error of a document that cannot be encoded and that may be skipped. The message names the document."""


class Encoder(Protocol[Document]):
    """Converts documents to tokens. An encoder must be picklable, because worker processes receive a copy of it."""

    tokenizer: Tokenizer
    masked: bool  # whether the encoder returns loss masks

    @property
    def identity(self) -> str:
        """A hash or a name of the encoder. Two encoders that produce different tokens have different identities."""

    def encode_batch(self, documents: Sequence[Document]) -> Sequence[Encoded | Rejection]:
        """Returns the tokens of each document, or a Rejection in place of each document that the encoder skips.

        Raises: ValueError if a document cannot be encoded. The error message names the document.
        """


def outside_vocabulary(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Returns the first token that is not between 0 and vocab_size - 1, or None if there is no such token."""
    if not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocab_size:
        return None
    return next(token for token in tokens.tolist() if not 0 <= token < vocab_size)


class TextEncoder:
    """Encodes a text and puts it between the tokenizer's bos and eos. The model is trained on all tokens of a text.

    An empty text gets no tokens, not even bos and eos.
    """

    masked = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def identity(self) -> str:
        return self.tokenizer.identity

    def encode_batch(self, documents: Sequence[str]) -> list[Encoded]:
        before, after = (
            np.array([] if i is None else [i], np.int32) for i in (self.tokenizer.bos_id, self.tokenizer.eos_id)
        )
        bodies = self.tokenizer.encode_batch(documents)
        return [Encoded(np.concatenate([before, body, after]) if len(body) else body, None) for body in bodies]
