"""Documents in which no token occurs twice, and data modules that pack these documents."""

import numpy as np

from fa_train.data.datamodule import PackedDataModule
from fa_train.data.packing.best_fit import BestFit

PAD = 10**9
OPTIONS = dict(
    seq_len=16, batch_size=8, micro_batch_size=2, max_steps=6, seed=1, document_mask=True, reset_positions=True,
    val_rows=4, num_workers=0,
)  # fmt: skip


class Numbered:
    """Documents in which no token occurs twice: token i of document d is 1000 * d + i."""

    loss_mask = None

    def __init__(self, lengths):
        self.lengths = np.array(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return index * 1000 + np.arange(self.lengths[index])


class NumberedSource:
    """A source of documents of given lengths."""

    vocab_size, pad_id, cache_dir = 10**9, PAD, None

    def __init__(self, lengths):
        self.lengths = lengths

    def prepare(self, workers=1):
        pass

    def documents(self, *, held_out):
        return Numbered(self.lengths)


def lay(lengths, seq_len=16, long_documents="split", max_doc_len=None, cache_dir=None):
    """Packs numbered documents of the given lengths by best fit."""
    documents = Numbered(lengths)
    return BestFit(documents, seq_len, PAD, max_doc_len=max_doc_len, long_documents=long_documents, cache_dir=cache_dir)


def make(lengths, **changes):
    """Makes a data module of numbered documents, packed by best fit unless `changes` contains `packing`."""
    return PackedDataModule(NumberedSource(lengths), **({"packing": "best_fit"} | OPTIONS | changes))
