"""How documents of a corpus become tokens, and which of them are learnt."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from fa_train.data.tokens.tokenizer import Tokenizer

Document = TypeVar("Document", contravariant=True)


class Encoded(NamedTuple):
    """One document: tokens (length,) int32, and whether each is learnt, (length,) bool; None is every one."""

    tokens: np.ndarray
    learned: np.ndarray | None


class Encoder(Protocol[Document]):
    """Documents into tokens; pickled to the processes that tokenise."""

    tokenizer: Tokenizer
    masked: bool  # whether some tokens are not learnt, so that a mask is stored

    @property
    def identity(self) -> str:
        """A hash or a name; other tokens for some document are another identity."""

    def encode_batch(self, documents: Sequence[Document]) -> list[Encoded]:
        """Each document. Raises: ValueError naming the document."""


class TextEncoder:
    """Text between the tokenizer's bos and eos; all of it is learnt."""

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
