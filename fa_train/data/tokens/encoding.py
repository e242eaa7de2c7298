"""Encoders convert documents to tokens and mark the tokens that are trained on."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from fa_train.data.tokens.tokenizer import Tokenizer

Document = TypeVar("Document", contravariant=True)


class Encoded(NamedTuple):
    """One encoded document: its tokens, (length,) int32, and whether each token is trained on, (length,) bool.

    loss_mask None means that all tokens are trained on.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None


class Encoder(Protocol[Document]):
    """Converts documents to tokens. It must be picklable, because worker processes receive a copy."""

    tokenizer: Tokenizer
    masked: bool  # whether a loss mask is stored, because some tokens are not trained on

    @property
    def identity(self) -> str:
        """A hash or a name. Encoders that produce different tokens have different identities."""

    def encode_batch(self, documents: Sequence[Document]) -> list[Encoded]:
        """Encodes each document. Raises: ValueError that names the document."""


class TextEncoder:
    """Encodes text between the tokenizer's bos and eos. All tokens are trained on."""

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
        return [Encoded(np.concatenate([before, body, after]), None) for body in self.tokenizer.encode_batch(documents)]
