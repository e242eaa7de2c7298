"""Builds schedules for rows in which transformers has packed several documents.

In a forward pass, all layers with the same window share one schedule.

The first layer that needs a schedule builds it from a source tensor, which is position_ids or cu_seqlens. The schedule
is kept while the source tensor is alive and its version counter does not change. A new batch has a new source tensor,
and an in-place operation on a source tensor increases its version counter. The replay of a CUDA graph can change a
source tensor without increasing its version counter, so a kept schedule can be outdated after a replay. Compiled code
does not keep a schedule: the compiler finds that several layers build the same schedule, and builds it once.
"""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from fa_kernels.flash_attention.interface import may_read
from fa_kernels.flash_attention.schedule import Schedule, build_schedule
from fa_kernels.flash_attention.schedule_cache import device_and_stream

_T = TypeVar("_T")
_KEPT: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # {source: (version counter of source, {key: value})}


def kept(source: Tensor, key: Hashable, build: Callable[[], _T]) -> _T:
    """Returns build(), or the result of an earlier build() if `source`, its content and `key` have not changed.

    The result of `build` must depend only on `source` and `key`.
    """
    where = device_and_stream(source.device)
    if where is None or source.is_inference():  # an inference tensor has no version counter
        return build()
    version, values = _KEPT.get(source, (None, {}))
    if version != source._version:
        version, values = source._version, {}
        _KEPT[source] = version, values
    if (key, where) not in values:
        with torch.inference_mode(False):  # autograd cannot save inference tensors
            values[key, where] = build()
    value: _T = values[key, where]
    return value


def document_schedule(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_length: int | Tensor | None,
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: tuple[int, int],
) -> Schedule:
    """Returns the schedule of a flattened batch. cu_seqlens_q and cu_seqlens_k hold the document boundaries.

    Shapes: q (batch, seqlen_q, n_heads, head_dim); k (batch, seqlen_k, n_kv_heads, head_dim).
    Raises: ValueError unless cu_seqlens_q and cu_seqlens_k are (n_docs + 1,) integers on q's device, start at 0, do not
    decrease and end at the last row or before. The values are checked only if flash_attn_varlen_func would also check
    them.
    """
    for name, x in (("cu_seq_lens_q", cu_seqlens_q), ("cu_seq_lens_k", cu_seqlens_k)):
        if x.dim() != 1 or x.numel() < 2 or x.is_floating_point() or x.device != q.device:
            raise ValueError(
                f"{name} must be (n_docs + 1,) integers on {q.device}; got {tuple(x.shape)} {x.dtype} on {x.device}"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must hold the same number of documents; "
            f"got {cu_seqlens_q.numel() - 1} and {cu_seqlens_k.numel() - 1}"
        )
    total_q, total_k = q.shape[:2].numel(), k.shape[:2].numel()
    # A max_length on the GPU is not used, because the host would wait for it. Compiled code never uses max_length,
    # because each new value would cause a recompilation.
    seqlen = max_length if isinstance(max_length, int) and not torch.compiler.is_compiling() else None

    def build() -> Schedule:
        if may_read(cu_seqlens_q):
            _require_boundaries("cu_seq_lens_q", cu_seqlens_q, total_q)
            _require_boundaries("cu_seq_lens_k", cu_seqlens_k, total_k)
        queries = cu_seqlens_q.to(torch.int32)
        keys = queries if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.to(torch.int32)
        return build_schedule(queries, keys, total_q, total_k, causal=causal, window_size=window, seqlen=seqlen)

    if torch.compiler.is_compiling() or cu_seqlens_k.is_inference():  # an inference tensor has no version counter
        return build()
    keys = None if cu_seqlens_k is cu_seqlens_q else (WeakIdRef(cu_seqlens_k), cu_seqlens_k._version)
    return kept(cu_seqlens_q, (keys, total_q, total_k, seqlen, causal, window), build)


def _require_boundaries(name: str, cu_seqlens: Tensor, total: int) -> None:
    edges = cu_seqlens.tolist()
    if edges[0] != 0 or edges != sorted(edges) or edges[-1] > total:
        raise ValueError(f"{name} must start at 0, must not decrease and must end at {total} or before; got {edges}")


def packed_schedule(
    position_ids: Tensor | None, q: Tensor, k: Tensor, causal: bool, window: tuple[int, int]
) -> Schedule | None:
    """Returns the schedule of rows with several documents, or None if each row is one document.

    A new document starts where position_ids do not increase by one, as in the eager attention of transformers. Compiled
    code gets a schedule even if each row is one document, because compiled code cannot read position_ids on the host.
    Shapes: position_ids (1 or batch, seqlen_q) or (batch, 1, seqlen_q, 1); q and k as for document_schedule.
    """
    batch, seqlen = q.shape[:2]
    if position_ids is None or seqlen == 1 or seqlen != k.shape[1]:
        return None
    rows = position_ids[:, 0, :, 0] if position_ids.dim() == 4 else position_ids
    if rows.shape not in ((1, seqlen), q.shape[:2]):
        return None

    def build() -> Schedule | None:
        starts = F.pad(rows.diff(dim=-1) != 1, (1, 0), value=True).expand(batch, -1).flatten()
        total = batch * seqlen
        if torch.compiler.is_compiling():  # cu_seqlens has one entry per token; extra entries are empty documents
            places = torch.arange(total, dtype=torch.int32, device=q.device)
            cu_seqlens = torch.where(starts, places, total).to(torch.int32).sort().values
            longest = seqlen
        else:
            cu_seqlens = starts.nonzero().flatten().to(torch.int32)
            if cu_seqlens.numel() == batch:
                return None
            longest = int(F.pad(cu_seqlens, (0, 1), value=total).diff().max())
        cu_seqlens = F.pad(cu_seqlens, (0, 1), value=total)
        return build_schedule(cu_seqlens, cu_seqlens, total, total, causal=causal, window_size=window, seqlen=longest)

    return kept(position_ids, (batch, causal, window), build)
