"""Masks for padded and packed batches. transformers computes one mask per forward pass for all layers of the same kind.

The `generate` method of transformers computes masks itself and passes them to the model. A model does not change a mask
with four dimensions. If a mask has fewer than four dimensions, the model computes a new mask, even in compiled code.
Masks of this module therefore have four dimensions.

The dtype of a mask tells whether the transformers library asked for causal or bidirectional attention. A mask with the
dtype float64, int64 or int32 asks for causal attention. A mask with the dtype int8 or int16 asks for bidirectional
attention. If no key is masked, the mask has no columns: its shape is (batch, 1, 1, 0).

The mask of a padded batch is a mask of keys and has the shape (batch, 1, 1, seqlen_k). The element of a masked key is
0. The element of an unmasked key is 1 in a bidirectional mask, and `n + 1` in a causal mask, where n is the number of
keys in the cache. A static cache also has places for later tokens, so the number of keys in the cache can be less than
seqlen_k. If a mask has the dtype float64 or int8, the unmasked keys of each row are contiguous, and layers read them
where they are. If a mask has the dtype int64 or int16, masked keys may lie between unmasked keys, so layers move the
unmasked keys of each row to the front.

The mask of rows with several documents has the shape (batch, 1, seqlen, 1) and the dtype int32 (`packed_positions`).

A user's mask has the shape (batch, seqlen_k), and each element is 0 or 1. If a user passes a mask, layers move the
unmasked keys of each row to the front. A user's mask does not tell how many keys are in the cache, so layers assume one
key for each column of the mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels.flash_attention.schedule import Schedule, build_schedule, length_class_of, schedule_of_ranges
from fa_train.integrations.packed_rows import kept

RUNS, HOLES, PACKED = torch.float64, torch.int64, torch.int32
BIDIRECTIONAL_RUNS, BIDIRECTIONAL_HOLES = torch.int8, torch.int16
CAUSALITY = {RUNS: True, HOLES: True, PACKED: True, BIDIRECTIONAL_RUNS: False, BIDIRECTIONAL_HOLES: False}


def is_key_mask(mask: Tensor) -> bool:
    """Returns whether `mask` has the shape and dtype of a mask from this module, or the shape of a user's mask."""
    if mask.dim() == 4:
        return is_packed(mask) or (mask.shape[1:3] == (1, 1) and mask.dtype in CAUSALITY and mask.dtype != PACKED)
    return mask.dim() == 2


def causality(mask: Tensor | None) -> bool | None:
    """Returns whether transformers asked for causal attention, or None if `mask` is None or a user's mask."""
    return None if mask is None or mask.dim() != 4 else CAUSALITY.get(mask.dtype)


def is_packed(mask: Tensor | None) -> bool:
    """Returns whether `mask` has the form of the result of `packed_positions`."""
    return mask is not None and mask.dim() == 4 and mask.shape[1] == mask.shape[3] == 1 and mask.dtype == PACKED


def packed_positions(
    mask_function: Callable[..., Tensor], batch: int, seqlen: int, device: torch.device
) -> Tensor | None:
    """Returns positions that increase by one, except where a document starts. Returns None if rows are not packed.

    Some models, such as Persimmon, pass position_ids to the mask function but not to the attention function. The
    attention function then reads the positions from the mask. In compiled code, this function returns a mask even if
    each row is one document.
    mask_function: transformers' mask function for causal attention without padding and without a cache.
    Shape of the result: (batch, 1, seqlen, 1) int32.
    """
    rows, places = torch.arange(batch, device=device)[:, None], torch.arange(seqlen, device=device)
    head = torch.zeros((), dtype=torch.int64, device=device)
    # a document starts at a token that does not see the token before it
    starts = ~mask_function(rows, head, places, (places - 1).clamp(min=0)).expand(batch, seqlen)
    if not torch.compiler.is_compiling() and not starts.any():  # waits for the GPU
        return None
    return (places - 2 * starts.cumsum(-1)).to(PACKED)[:, None, :, None]


def refuse_other_masks(mask_function: Any, use_vmap: bool) -> None:
    """Raises: ValueError if a mask hides keys for any reason other than causality, a window, documents or padding."""
    if use_vmap:
        raise ValueError(
            "or_mask_function and and_mask_function must not be given, neither by the user nor by the model: fa_train "
            "has no custom masks. Gemma 3 gives them if token_type_ids are passed; for text, omit token_type_ids"
        )
    if torch.compiler.is_compiling() or mask_function is None:
        return
    blocks = _block_ids(mask_function)
    if blocks is not None and bool((blocks >= 0).any()):
        raise ValueError(
            "block_sequence_ids must all be -1: fa_train has no bidirectional blocks, such as those of image tokens"
        )


def forbid_later_keys(
    mask_function: Callable[..., Tensor], batch: int, seqlen_q: int, q_offset: int | Tensor, device: torch.device
) -> None:
    """Stops compiled code with an error if a query sees the key of the next token, as in a bidirectional block.

    On a GPU, the error is an assertion in a kernel. Call this function only for causal masks.
    """
    rows, places = torch.arange(batch, device=device)[:, None], torch.arange(seqlen_q - 1, device=device) + q_offset
    later = mask_function(rows, torch.zeros((), dtype=torch.int64, device=device), places, places + 1)
    torch._assert_async(~later.any(), "a causal mask must not show later keys: fa_train has no bidirectional blocks")


def _block_ids(mask_function: Callable[..., Tensor]) -> Tensor | None:
    """Returns the block_sequence_ids in the (nested) closures of mask_function, or None if there are none."""
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
    causal: bool,
    device: torch.device,
) -> Tensor:
    """Returns the mask of seqlen_k keys, starting at key kv_offset. The mask has no columns if no key is masked.

    Args:
        attention_mask: (batch, tokens) bool, True for the unmasked tokens. Tokens after the end of attention_mask are
        masked.
        written: the number of keys in the cache. The cache can have additional places for later tokens.
    """
    runs_dtype, holes_dtype = (RUNS, HOLES) if causal else (BIDIRECTIONAL_RUNS, BIDIRECTIONAL_HOLES)
    # the dtype is an integer type, because FSDP2 with mixed precision casts the floating-point inputs of a layer
    nothing_masked = torch.zeros(batch, 1, 1, 0, dtype=holes_dtype, device=device)
    all_written = isinstance(written, int) and written >= seqlen_k
    if attention_mask is None and all_written:
        return nothing_masked
    is_written = torch.arange(seqlen_k, device=device) < written  # [seqlen_k]
    counts = is_written.expand(batch, -1)
    dtype = runs_dtype
    if attention_mask is not None:
        counts = _of_these_keys(attention_mask.bool(), seqlen_k, kv_offset) & is_written
        if torch.compiler.is_compiling():
            dtype = holes_dtype
        else:
            runs = (counts[:, 1:] & ~counts[:, :-1]).sum(-1) + counts[:, 0]
            all_count, one_run = torch.stack([counts.all(), (runs <= 1).all()]).tolist()  # waits for the GPU once
            if all_count and all_written:
                return nothing_masked
            dtype = runs_dtype if one_run else holes_dtype
    mask = counts.to(dtype) * (is_written.sum() + 1) if causal else counts.to(dtype)
    return mask[:, None, None]


def _of_these_keys(mask: Tensor, seqlen_k: int, kv_offset: int) -> Tensor:
    """Returns the columns of a (batch, tokens) mask for the keys from kv_offset to kv_offset + seqlen_k - 1.

    A mask with at most seqlen_k columns is returned whole, padded with False. If a mask has more than seqlen_k columns,
    but fewer than kv_offset + seqlen_k columns, the result is the last seqlen_k columns of the mask.
    """
    tokens, last = mask.shape[1], kv_offset + seqlen_k
    if tokens <= seqlen_k:
        return F.pad(mask, (0, seqlen_k - tokens), value=False)
    return mask[:, kv_offset:last] if tokens >= last else mask[:, -seqlen_k:]


class Keys(NamedTuple):
    """The unmasked keys of a padded batch. The method `ordered` makes the unmasked keys of each row contiguous."""

    first: Tensor  # (batch,) int32, the index of the first unmasked key, in the key order of `ordered`
    end: Tensor  # (batch,) int32, 1 + the index of the last unmasked key, in the key order of `ordered`
    order: Tensor | None  # (batch, seqlen_k), indices that put unmasked keys first, or None to keep the order

    @classmethod
    def of(cls, mask: Tensor, seqlen_k: int) -> "Keys":
        """Returns the keys that `mask` does not mask. Keys without a column in `mask` count as masked.

        Raises: ValueError if the mask has more columns than there are keys.
        """
        if mask.shape[-1] > seqlen_k:
            raise ValueError(
                f"attention_mask must have at most {seqlen_k} columns, one per key; got {tuple(mask.shape)}"
            )
        return kept(mask, (cls, seqlen_k), lambda: cls._build(mask, seqlen_k))

    @classmethod
    def _build(cls, mask: Tensor, seqlen_k: int) -> "Keys":
        counts = _counts(mask, seqlen_k)
        first, n_keys, order = counts.int().argmax(-1), counts.sum(-1), None
        if mask.dim() == 2 or mask.dtype not in (RUNS, BIDIRECTIONAL_RUNS):
            first = torch.zeros_like(first)
            order = counts.int().argsort(dim=-1, descending=True, stable=True)
        return cls(first.int(), (first + n_keys).int(), order)

    def ordered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k and v, (batch, seqlen_k, heads, head_dim) each.

        In each row, the unmasked keys have the indices from `first` to `end - 1`.
        """
        return (k, v) if self.order is None else (_reordered(k, self.order), _reordered(v, self.order))


class Padding(NamedTuple):
    """The unmasked keys and queries of a padded batch, and a schedule that excludes the padding.

    In each row, the last unmasked query is aligned with the last unmasked key. With causality or a window, masked
    queries see no keys.
    """

    keys: Keys
    query_order: Tensor | None  # (batch, seqlen_q), indices that put unmasked queries first, or None to keep the order
    schedule: Schedule

    @classmethod
    def of(cls, mask: Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> "Padding":
        """Returns the Padding of a mask. Raises the same errors as `Keys.of`."""
        keys, options = Keys.of(mask, seqlen_k), (seqlen_q, seqlen_k, causal, window)
        return kept(mask, (cls, *options), lambda: cls._build(keys, mask, *options))

    @classmethod
    def _build(
        cls, keys: Keys, mask: Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]
    ) -> "Padding":
        first_query = torch.zeros_like(keys.first)
        n_queries, query_order = torch.full_like(first_query, seqlen_q), None
        # with causality or a window, the positions of queries matter, so masked queries must be excluded
        if causal or max(window) >= 0:
            asks = _unmasked_queries(mask, seqlen_q, seqlen_k)
            n_queries = asks.sum(-1)
            if keys.order is None:
                first_query = asks.int().argmax(-1)
            elif seqlen_q > 1:
                query_order = asks.int().argsort(dim=-1, descending=True, stable=True)
        if keys.order is not None and max(window) >= 0:
            start, end = (
                _of_queries(x, query_order, n_queries, seqlen_k) for x in visible_keys(mask, seqlen_q, seqlen_k, window)
            )
            length_class = length_class_of(min(seqlen_k, sum(window) + 1))
            return cls(keys, query_order, schedule_of_ranges(start, end, len(mask) * seqlen_k, length_class))
        schedule = _schedule(
            first_query, n_queries, seqlen_q, keys.first, keys.end - keys.first, seqlen_k, causal, window
        )
        return cls(keys, query_order, schedule)

    def compacted(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, each (batch, seqlen, heads, head_dim), with tokens in the order that `schedule` uses."""
        return q if self.query_order is None else _reordered(q, self.query_order), *self.keys.ordered(k, v)

    def restored(self, o: Tensor) -> Tensor:
        """Returns o, (batch, seqlen_q, n_heads, head_dim), with the queries in their original order."""
        return o if self.query_order is None else _reordered(o, self.query_order.argsort(dim=-1))


def _counts(mask: Tensor, seqlen_k: int) -> Tensor:
    """Returns (batch, seqlen_k) bool, True for unmasked keys."""
    return F.pad(mask.flatten(1) != 0, (0, seqlen_k - mask.shape[-1]), value=False)


def _unmasked_queries(mask: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Returns (batch, seqlen_q) bool, True for unmasked queries.

    With n keys in the cache, query i and key `n - seqlen_q + i` belong to the same token.
    """
    place = _places(mask, seqlen_q).expand(len(mask), -1)
    return _counts(mask, seqlen_k).gather(1, place.clamp(0, seqlen_k - 1)) & (place >= 0)


def _places(mask: Tensor, seqlen_q: int) -> Tensor:
    """Returns, for each query, the index of the key that belongs to the same token, (seqlen_q,)."""
    value = mask.amax().long()
    written = torch.where(value > 1, value - 1, mask.shape[-1])
    return written - seqlen_q + torch.arange(seqlen_q, device=mask.device)


def visible_keys(mask: Tensor, seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns the start and the end of the range of keys that each query sees in its window, (batch, seqlen_q) each.

    The width of a window includes masked keys, as in eager attention. Start and end are indices into the unmasked
    keys of a row.
    """
    left, right = window
    # [batch, seqlen_k + 1], entry i of a row is the number of unmasked keys among the row's first i keys
    before = F.pad(_counts(mask, seqlen_k).cumsum(-1), (1, 0))
    place = _places(mask, seqlen_q)
    return (
        before[:, (place - left).clamp(0, seqlen_k) if left >= 0 else torch.zeros_like(place)],
        before[:, (place + right + 1).clamp(0, seqlen_k) if right >= 0 else torch.full_like(place, seqlen_k)],
    )


def _of_queries(x: Tensor, query_order: Tensor | None, n_queries: Tensor, seqlen_k: int) -> Tensor:
    """Converts indices of keys in a row to indices in the flattened batch, (batch * seqlen_q,) int32.

    x: (batch, seqlen_q), the index of one key for each query, counted from the start of the row. The result is in the
    order of query_order. For a query that is padding, the result is the index after the last key of the query's row.
    """
    batch, seqlen_q = x.shape
    ordered = x if query_order is None else x.gather(1, query_order)
    is_query = torch.arange(seqlen_q, device=x.device) < n_queries[:, None]
    row = torch.arange(batch, device=x.device)[:, None] * seqlen_k
    return (torch.where(is_query, ordered, seqlen_k) + row).flatten().int()


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
    """Returns the schedule of a padded batch. Each row has one document of unmasked tokens.

    Each row's padding forms additional documents, which contain only queries or only keys.
    """
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
