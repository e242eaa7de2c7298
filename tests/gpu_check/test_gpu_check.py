"""`make gpu-check` covers all tile sizes, finds wrong kernels, accepts right kernels, and goes on if a process dies."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fa_kernels.flash_attention.tiles import _TILES, _TILES_OF_4_BYTES, Pass, shared_bytes
from tests.gpu_check import attention, decode, fused, variants
from tests.gpu_check import schedule as gpu_check_schedule
from tests.gpu_check.__main__ import part_of
from tests.gpu_check.cases import Case, all_cases
from tests.gpu_check.workers import run_all
from tests.kernels.support import cached_attention

DEVICE = torch.device("cuda", 0)
H100_BYTES = 227 * 1024  # bytes of shared memory


@pytest.fixture
def h100(monkeypatch):
    properties = SimpleNamespace(shared_memory_per_block_optin=H100_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(variants, "arch_of", lambda device: "sm90")


@pytest.fixture
def short(monkeypatch):
    """Makes documents and caches short, so that the interpreter needs only seconds."""
    monkeypatch.setattr(attention, "SEVERAL", [40, 1, 0, 33, 10, 20])
    monkeypatch.setattr(attention, "ONE", [70])
    monkeypatch.setattr(decode, "CAPACITY", 384)
    monkeypatch.setattr(fused, "ROWS", 3)


def choices(width, itemsize):
    return [variants.own_tiles(width, itemsize, DEVICE), *variants.other_tiles(width, itemsize, DEVICE)]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_entry_of_the_tables_is_run(h100, itemsize):
    table = _TILES if itemsize == 2 else _TILES_OF_4_BYTES
    for (arch, head_dim, direction), tiles in table.items():
        width = (head_dim, head_dim)
        if shared_bytes("sm90", tiles, *width, direction, itemsize) <= H100_BYTES:
            listed = [choice.get(direction) for choice in choices(width, itemsize)]
            assert tiles in listed, (arch, head_dim, direction)


def test_tiles_for_less_shared_memory_are_run(h100):
    tiles: dict[Pass, set] = {"fwd": set(), "dkdv": set(), "dq": set()}
    for choice in choices((128, 128), 2):
        for direction in tiles:
            tiles[direction].add(choice[direction])
    entries = {direction: {_TILES[arch, 128, direction] for arch in ("sm80", "sm90", "sm100")} for direction in tiles}
    assert all(tiles[direction] > entries[direction] for direction in tiles)


def test_names_are_unique_and_parts_share_the_list(h100, monkeypatch):
    monkeypatch.setattr("tests.gpu_check.cases.is_hopper", lambda device: True)
    names = [case.name for case in all_cases(DEVICE)]
    kinds = {"hopper", "portable", "decode", "nf4", "rmsnorm", "rotary", "rows", "swiglu", "geglu", "schedule"}
    assert {name.partition(" ")[0] for name in names} == kinds
    parts = [part_of(names, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "-1/2", ""])
def test_a_wrong_part_is_named(part):
    with pytest.raises(ValueError, match=r"--part must be i/n with 1 <= i <= n; got"):
        part_of([], part)


def portable(several):
    tiles = variants.own_tiles((24, 24), 4, DEVICE)
    return partial(attention.check_portable, torch.float32, (24, 24), tiles, several, ("sinks",), (2, 1))


def cached(h100):
    (rows, tiles), *_ = variants.own_decode_tiles((24, 40), 4, True, DEVICE)
    return partial(decode.check_decode, torch.float32, (24, 40), rows, tiles, 64, 3)


def slightly_wrong(function):
    """Wraps `function` so that the last rows of its output are wrong, as if a kernel left out a tile."""

    def wrong(*arguments, **options):
        o, *rest = function(*arguments, **options)
        o = o.clone()
        o.flatten(0, -2)[-3:] *= 0.9
        return o, *rest

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_portable_kernels_pass_and_wrong_ones_fail(several, short, h100, monkeypatch):
    portable(several)()
    name = "flash_attn_varlen_func" if several else "flash_attn_func"
    monkeypatch.setattr(attention, name, slightly_wrong(getattr(attention, name)))
    with pytest.raises(AssertionError, match="o: max error"):
        portable(several)()


@pytest.mark.slow
def test_decode_kernels_pass_and_wrong_ones_fail(short, h100, monkeypatch):
    cached(h100)()
    wrong = slightly_wrong(cached_attention.flash_attn_with_kvcache)
    monkeypatch.setattr(cached_attention, "flash_attn_with_kvcache", wrong)
    with pytest.raises(AssertionError, match="o: max error"):
        cached(h100)()


@pytest.mark.parametrize(
    ("check", "size", "function"),
    [(fused.check_rmsnorm, 100, "add_rms_norm"), (fused.check_rotary, 6, "rotate_heads")],
    ids=["rmsnorm", "rotary"],
)
def test_fused_operations_pass_and_wrong_ones_fail(check, size, function, short, monkeypatch):
    check(torch.float32, size)
    right = getattr(fused, function)

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01

    monkeypatch.setattr(fused, function, wrong)
    with pytest.raises(AssertionError, match="max error"):
        check(torch.float32, size)


@pytest.mark.parametrize("function", ["copy_rows", "add_rows"])
def test_moves_of_rows_pass_and_wrong_ones_fail(function, short, monkeypatch):
    fused.check_rows(torch.float32, 3, 8)
    right = getattr(fused, function)

    def wrong(sources, targets, *arguments):
        right(sources, targets, *arguments)
        (targets if function == "copy_rows" else sources)[1][:, -1] *= 1.01

    monkeypatch.setattr(fused, function, wrong)
    with pytest.raises(AssertionError, match="max error"):
        fused.check_rows(torch.float32, 3, 8)


def test_schedules_pass_and_wrong_ones_fail(monkeypatch):
    check = partial(gpu_check_schedule.check_schedule, 3, (5, 0), keys_in_order=False)
    monkeypatch.setattr(gpu_check_schedule, "MOST_TOKENS", 200)
    check()
    right = gpu_check_schedule.schedule_tensors

    def wrong(*documents, **options):
        key_start, key_end, *rest = right(*documents, **options)
        return key_start, key_end + 1, *rest

    monkeypatch.setattr(gpu_check_schedule, "schedule_tensors", wrong)
    with pytest.raises(AssertionError, match=r"key_end: .* elements differ"):
        check()


def fails():
    raise AssertionError("wrong by much")


@pytest.mark.slow
def test_a_process_that_dies_is_replaced():
    cases = [Case("dies", partial(os._exit, 3)), Case("fails", fails), Case("passes", partial(int, 0))]
    errors = {result.case.name: result.error for result in run_all(cases, jobs=1)}
    assert errors == {"dies": "the process ended with 3", "fails": "AssertionError: wrong by much", "passes": ""}
