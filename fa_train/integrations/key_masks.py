"""Two-dimensional masks of keys: how the mask function tells the layers what it has read, and padded batches.

A mask of this module is (batch, seqlen_k), 0 where a key does not count. Elsewhere it is 1 more than the number of keys
that are written, because a static cache has places for later tokens. transformers may take such a mask for a user's and
pass it through the mask function again, as bool. The dtype tells what the host knows:

- float64: the keys that count are one run in each row. Layers leave them where they are.
- int64: there may be holes, such as after right-padded prompts. Layers move the keys that count to the front.
- other masks come from elsewhere, hold 0 and 1, and may have holes. All their keys are written.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels.flash_attention.schedule import Schedule, build_schedule
from fa_train.integrations.packed_rows import kept

RUNS, HOLES = torch.float64, torch.int64


def refuse_other_masks(mask_function: Any, use_vmap: bool) -> None:
    """ValueError for masks that are more than causality, a window, documents and padding."""
    if use_vmap:
        raise ValueError("or_mask_function and and_mask_function must not be given: fa_train has no custom masks")
    if torch.compiler.is_compiling() or mask_function is None:
        return
    blocks = _block_ids(mask_function)
    if blocks is not None and bool((blocks >= 0).any()):
        raise ValueError(
            "block_sequence_ids must all be -1: fa_train has no bidirectional blocks, such as those of image tokens"
        )


def _block_ids(mask_function: Callable[..., Tensor]) -> Tensor | None:
    """The block_sequence_ids of transformers' blockwise_overlay, if it is a part of the mask function."""
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if getattr(mask_function, "__qualname__", "").startswith("blockwise_overlay."):
        return next(x for x in cells if isinstance(x, Tensor))
    for contents in cells:
        for part in contents if isinstance(contents, tuple) else (contents,):
            found = _block_ids(part) if callable(part) else None
            if found is not None:
                return found
    return None


def encoded(
    attention_mask: Tensor | None,
    batch: int,
    seqlen_k: int,
    kv_offset: int,
    written: int | Tensor,
    device: torch.device,
) -> Tensor | None:
    """Returns the mask of keys kv_offset to kv_offset + seqlen_k in the form of this module; None if all count.

    Args:
        attention_mask: (batch, tokens) bool, the tokens that count; tokens after its end do not.
        written: how many of the seqlen_k keys are written, counted from the first.
    """
    all_written = isinstance(written, int) and written >= seqlen_k
    if attention_mask is None and all_written:
        return None
    is_written = torch.arange(seqlen_k, device=device) < written  # [seqlen_k]
    counts = is_written.expand(batch, -1)
    dtype = RUNS
    if attention_mask is not None:
        counts = _of_these_keys(attention_mask.bool(), seqlen_k, kv_offset) & is_written
        if torch.compiler.is_compiling():
            dtype = HOLES
        else:
            runs = (counts[:, 1:] & ~counts[:, :-1]).sum(-1) + counts[:, 0]
            all_count, one_run = torch.stack([counts.all(), (runs <= 1).all()]).tolist()  # waits for the GPU once
            if all_count and all_written:
                return None
            dtype = RUNS if one_run else HOLES
    return counts.to(dtype) * (is_written.sum() + 1)


def _of_these_keys(mask: Tensor, seqlen_k: int, kv_offset: int) -> Tensor:
    """The columns of a (batch, tokens) mask that belong to the keys. A mask of seqlen_k columns is theirs already."""
    tokens, last = mask.shape[1], kv_offset + seqlen_k
    if tokens <= seqlen_k:
        return F.pad(mask, (0, seqlen_k - tokens), value=False)
    return mask[:, kv_offset:last] if tokens >= last else mask[:, -seqlen_k:]


class Padding(NamedTuple):
    """The keys and queries that count in a padded batch, as documents that leave the padding out.

    In each row, the queries that count are aligned with the last keys that count. With causality or
    a window, padding sees nothing.
    """

    first: Tensor  # (batch,) int32, the first key that counts
    end: Tensor  # (batch,) int32, the key after the last one
    schedule: Schedule
    key_order: Tensor | None  # (batch, seqlen_k), the keys that count first; None to leave them in place
    query_order: Tensor | None  # (batch, seqlen_q), the same for queries

    @classmethod
    def of(cls, mask: Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> "Padding":
        """Raises: ValueError if the mask has more keys than there are. Further keys do not count."""
        if mask.shape[1] > seqlen_k:
            raise ValueError(f"attention_mask must be of at most {seqlen_k} keys; got {tuple(mask.shape)}")
        return kept(
            mask, (seqlen_q, seqlen_k, causal, window), lambda: cls._build(mask, seqlen_q, seqlen_k, causal, window)
        )

    @classmethod
    def _build(cls, mask: Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> "Padding":
        counts, value = mask != 0, mask.amax().long()
        written = torch.where(value > 1, value - 1, mask.shape[1])
        counts = F.pad(counts, (0, seqlen_k - mask.shape[1]), value=False)
        first, n_keys = counts.int().argmax(-1), counts.sum(-1)
        # the last queries are the last written keys; without causality or a window, no query need be left out
        aligned = causal or max(window) >= 0
        place = (written - seqlen_q + torch.arange(seqlen_q, device=mask.device)).expand(len(mask), -1)
        asks = counts.gather(1, place.clamp(0, seqlen_k - 1)) & (place >= 0) if aligned else None
        key_order = query_order = None
        if mask.dtype != RUNS:
            first = torch.zeros_like(first)
            key_order = counts.int().argsort(dim=-1, descending=True, stable=True)
            if asks is not None and seqlen_q > 1:
                query_order = asks.int().argsort(dim=-1, descending=True, stable=True)
        n_queries = torch.full_like(n_keys, seqlen_q) if asks is None else asks.sum(-1)
        first_query = torch.zeros_like(first)
        if asks is not None and query_order is None:
            first_query = asks.int().argmax(-1)
        schedule = _schedule(first_query, n_queries, seqlen_q, first, n_keys, seqlen_k, causal, window)
        return cls(first.int(), (first + n_keys).int(), schedule, key_order, query_order)

    def compacted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (batch, seqlen, heads, head_dim) in the order of the schedule."""
        if self.query_order is not None:
            q = _reordered(q, self.query_order)
        if self.key_order is not None:
            k, v = _reordered(k, self.key_order), _reordered(v, self.key_order)
        return q, k, v

    def restored(self, o: Tensor) -> Tensor:
        """o (batch, seqlen_q, n_heads, head_dim) in the order of the queries that were given to `compacted`."""
        return o if self.query_order is None else _reordered(o, self.query_order.argsort(dim=-1))


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:]))


def _schedule(
    first_query: Tensor,
    n_queries: Tensor,
    seqlen_q: int,
    first_key: Tensor,
    n_keys: Tensor,
    seqlen_k: int,
    causal: bool,
    window: tuple[int, int],
) -> Schedule:
    """The schedule of rows with one document each. Padding becomes documents of only queries or only keys."""
    batch, nothing = len(n_keys), torch.zeros_like(n_keys)
    after_queries, after_keys = seqlen_q - first_query - n_queries, seqlen_k - first_key - n_keys
    queries = torch.stack([first_query, nothing, n_queries, after_queries, nothing], -1)  # [batch, 5]
    keys = torch.stack([nothing, first_key, n_keys, nothing, after_keys], -1)
    cu_seqlens_q, cu_seqlens_k = (
        F.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32) for lengths in (queries, keys)
    )
    return build_schedule(
        cu_seqlens_q,
        cu_seqlens_k,
        batch * seqlen_q,
        batch * seqlen_k,
        causal=causal,
        window_size=window,
        seqlen=seqlen_k,
    )
