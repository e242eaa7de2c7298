"""Tests the compiled kernels with thousands of combinations of shape, mask and feature, 55 combinations per test.

Each combination is compared with dense attention, forward and backward (see tests/kernels/support/attention_check.py).
A fixed list has combinations of features, head counts and layouts. Each combination of two lengths and a mask is tested
with one entry of the list, and the next combination with the next entry. The head_dims of Hopper's kernels are tested
with all combinations of features, head counts and layouts. Other head_dims are tested with fewer combinations, because
each combination is compiled separately. If the environment variable MATRIX_REPORT names a folder, the tests write our
largest errors and torch's largest errors to this folder.
"""

import itertools
import json
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from fa_kernels import flash_attn_varlen_func
from tests.kernels.support.attention_check import MASKS, compare, cumulative

# On a busy machine, the compilations of one test can take longer than the usual limit.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

# pairs (seqlen_q, seqlen_k) from flash-attn's tests
PAIRS = [
    (1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024),
    (1024, 1023), (2048, 2048),
]  # fmt: skip
HEADS = [(4, 4), (4, 2), (4, 1)]  # MHA, GQA, MQA
FEATURES = [(), ("softcap",), ("alibi",), ("sinks",), ("scale",), ("softcap", "sinks"), ("alibi", "sinks", "scale")]
LAYOUTS = ["dense", "varlen", "deterministic", "deterministic-varlen", "strided", "fp32-out"]
HEAD_DIMS = [8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256]
WIDTHS = [*((d, d) for d in HEAD_DIMS), (192, 128), (64, 128)]
IN_FULL = [(64, 64), (128, 128)]
ON_HOPPER = [(64, 64), (96, 96), (128, 128), (256, 256)]  # (head_dim, v_head_dim) of the Hopper kernels


def n_rounds(dtype, width) -> int:
    """Returns the number of rounds for a dtype and a pair of head_dims.

    A round tests each of the 55 combinations of lengths and mask once. Three rounds test all combinations of features,
    head counts and layouts.
    """
    if dtype == torch.float32 or width not in ON_HOPPER:
        return 2
    return 5 if width in IN_FULL else 3


def combinations(dtype, width, round_):
    """Yields the 55 combinations of lengths, mask, head counts, features and layout that one round tests.

    In the list of head counts, features and layouts, each round starts where the previous round stopped.
    """
    index = WIDTHS.index(width)
    every = itertools.product(HEADS, FEATURES, LAYOUTS)
    some = itertools.product(HEADS[index % 3 :][:1], FEATURES[index % 2 :: 2], LAYOUTS)
    variants = itertools.cycle(some if n_rounds(dtype, width) == 2 else every)
    pairs = list(itertools.product(PAIRS, MASKS))
    variants = itertools.islice(variants, round_ * len(pairs), None)
    for (pair, mask), (heads, features, layout) in zip(pairs, variants, strict=False):
        yield pair, mask, heads, features, layout


def documents(pair, layout, generator) -> tuple[list[int], list[int]]:
    """Returns two lists: the number of queries of each document, and the number of keys of each document.

    pair: the number of queries and the number of keys of one document.
    """
    if "varlen" not in layout:
        return ([pair[0]], [pair[1]]) if pair[0] > 1000 else ([pair[0]] * 2, [pair[1]] * 2)
    lengths = [pair, (0, 7), (5, 0), (0, 0), (1, 1), (generator.randrange(200), generator.randrange(1, 300))]
    generator.shuffle(lengths)
    return [q for q, _ in lengths], [k for _, k in lengths]


def check(dtype, width, pair, mask, heads, names, layout, generator) -> dict[str, tuple[float, float]]:
    """Returns our error and torch's error for each result.

    Raises: AssertionError if one of our results is less accurate than allowed.
    """
    lens_q, lens_k = documents(pair, layout, generator)
    (n_heads, n_kv_heads), (head_dim, v_head_dim) = heads, width
    total_q, total_k = sum(lens_q) + generator.choice((0, 3)), sum(lens_k)
    shapes = [
        (total_q, n_heads, head_dim), (total_k, n_kv_heads, head_dim), (total_k, n_kv_heads, v_head_dim),
        (total_q, n_heads, v_head_dim),
    ]  # fmt: skip
    inputs = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    if layout == "strided":  # each head is half of a wider head, and TMA reads the half in place
        inputs[:3] = [torch.cat([x, x], dim=2)[..., : x.shape[2]] for x in inputs[:3]]
        if total_q % 2:
            inputs[0] = inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
    *inputs, do = inputs
    dlse = torch.randn(n_heads, total_q, device="cuda")
    features = dict(mask, cu_seqlens_q=cumulative(lens_q), cu_seqlens_k=cumulative(lens_k))
    if "softcap" in names:
        features["softcap"] = generator.choice((2.0, 30.0))
    if "scale" in names:
        features["softmax_scale"] = 0.3
    if "alibi" in names:
        rows = generator.choice(((n_heads,), (len(lens_q), n_heads)))
        features["alibi_slopes"] = 0.3 * torch.rand(rows, device="cuda")
    sinks = torch.randn(n_heads, device="cuda") if "sinks" in names else None
    ours = partial(
        flash_attn_varlen_func, max_seqlen_q=max(lens_q), max_seqlen_k=max(lens_k), return_lse=True,
        deterministic="deterministic" in layout, out_dtype=torch.float32 if layout == "fp32-out" else None,
    )  # fmt: skip
    return compare(ours, inputs, features, sinks, do, dlse)


TESTS = [
    (dtype, width, backend, round_)
    for dtype, width in itertools.product([torch.bfloat16, torch.float16, torch.float32], WIDTHS)
    for backend in ("auto", "portable")
    for round_ in range(n_rounds(dtype, width))
    if backend == "portable" or (dtype != torch.float32 and width in ON_HOPPER)
]


@pytest.mark.parametrize(
    ("dtype", "width", "backend", "round_"), TESTS, ids=lambda x: f"d{x[0]}v{x[1]}" if isinstance(x, tuple) else str(x)
)
def test_every_combination_is_as_accurate_as_torch(dtype, width, backend, round_, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_BACKEND", backend)
    generator = random.Random(width[0] + 1000 * round_)
    worst: dict[str, tuple[float, float]] = {}
    failures, count = [], 0
    for case in combinations(dtype, width, round_):
        count += 1
        try:
            errors = check(dtype, width, *case, generator)
        except AssertionError as error:
            failures.append(f"{case}: {error}")
            continue
        for name, (ours, torchs) in errors.items():
            if ours >= worst.get(name, (-1.0, 0.0))[0]:
                worst[name] = ours, torchs
    if "MATRIX_REPORT" in os.environ:
        line = {"dtype": str(dtype), "width": width, "backend": backend, "cases": count, "failed": len(failures)}
        path = Path(os.environ["MATRIX_REPORT"], f"{dtype}-{width[0]}-{width[1]}-{backend}-{round_}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(line | {"worst": worst}) + "\n")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures[:10])
