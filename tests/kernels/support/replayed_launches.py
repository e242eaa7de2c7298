"""Compares replayed launches with the launches that Triton makes. launch/test_record.py runs this file.

Triton's launcher calls a simulated driver. The simulated driver compiles and runs no kernel, and only records the
arguments of each launch.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fa_kernels import torch_private
from fa_kernels.flash_attention import backend, checks, interface
from fa_kernels.flash_attention import schedule as schedule_module
from fa_kernels.flash_attention.delta import attention_delta
from fa_kernels.flash_attention.hopper.primitives import queue
from fa_kernels.flash_attention.schedule import Schedule, build_schedule, dense_cu_seqlens, dense_schedule
from fa_kernels.launch import record

LAUNCHES: list[tuple[Any, ...]] = []
ALLOCATED: list[Tensor] = []  # all tensors of a case, kept alive so that no two tensors have the same address
ADDRESSES: set[int] = set()  # addresses of tensors, which replayed launches pass as plain integers
TOTAL = 128


def _note_3_6(*arguments: Any) -> None:
    x, y, z, stream, function, _, _, _, _, metadata, _, _, _, *of_kernel = arguments
    LAUNCHES.append(((x, y, z), stream, function, metadata, None, of_kernel))


def _note_3_7(
    x: int, y: int, z: int, stream: int, function: int, cooperative: bool, pdl: bool, metadata: Any, of_launch: Any,
    enter: Any, leave: Any, scratch: Any, profile: Any, annotations: Any, signature: Any, of_kernel: Any,
) -> None:  # fmt: skip
    LAUNCHES.append(((x, y, z), stream, function, metadata, (annotations, signature), [*of_kernel]))


def _kept(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_and_keep(*arguments: Any, **options: Any) -> Tensor:
        ALLOCATED.append(allocate(*arguments, **options))
        return ALLOCATED[-1]

    return allocate_and_keep


def _encoded(address: int, *how: Any) -> tuple[Any, ...]:
    return ("map", address, *(tuple(x) if isinstance(x, list) else x for x in how))


class _Driver:
    launcher_cls = nvidia.CudaLauncher
    utils = SimpleNamespace(
        launch=_note_3_7,
        fill_tma_descriptor=_encoded,
        fill_tma_descriptor_tiled=_encoded,
        build_signature_metadata=tuple,
    )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Metadata(NamedTuple):
    tensordesc_meta: list[dict[str, Any]] | None
    num_ctas: int = 1
    global_scratch_size: int = 0
    global_scratch_align: int = 1
    profile_scratch_size: int = 0
    profile_scratch_align: int = 1
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False


def _compile(
    kernel: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: Any
) -> CompiledKernel:
    descriptors = [x for x in signature.values() if isinstance(x, str) and x.startswith("tensordesc")]
    encodings = [
        {"swizzle": i, "elem_size": 2, "elem_type": 1, "block_size": [i], "fp4_padded": False}
        for i in range(len(descriptors))
    ]
    compiled = CompiledKernel.__new__(CompiledKernel)
    compiled.src = SimpleNamespace(signature=signature, constants=constexprs, fn=kernel)
    compiled.metadata = _Metadata(encodings)
    compiled.module, compiled.function, compiled.packed_metadata = 1, hash((kernel._fn_name, key)), (4, 1, 0)
    compiled.name = kernel._fn_name
    compiled._run = nvidia.CudaLauncher(compiled.src, compiled.metadata)
    kernel.device_caches[device][0][key] = compiled
    return compiled


@contextmanager
def without_gpu() -> Iterator[None]:
    """Makes CPU tensors report that they are on an H200, and appends each launch to `LAUNCHES`."""
    before = driver._active
    driver.set_active(_Driver())
    properties = SimpleNamespace(name="Made Up", multi_processor_count=132, shared_memory_per_block_optin=232448)
    fakes = [
        (JITFunction, "_do_compile", _compile),
        (CompiledKernel, "launch_metadata", lambda *_: None),
        *((torch, name, _kept(getattr(torch, name))) for name in ("empty", "empty_strided", "zeros")),
        (torch.Tensor, "is_cuda", property(lambda _: True)),
        (torch.Tensor, "get_device", lambda _: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_of", lambda _: nullcontext()),
        (torch_private, "_raw_stream", lambda _: 7),
        (torch.cuda, "current_stream", lambda _=None: SimpleNamespace(cuda_stream=7)),
        (torch.cuda, "get_device_capability", lambda _=None: (9, 0)),
        (torch.cuda, "get_device_properties", lambda _=None: properties),
        (queue, "_zero", lambda _: torch.zeros(1, dtype=torch.int32)),
        (checks, "require_backend", lambda *_: None),
        (schedule_module, "dense_cu_seqlens", lambda *x: dense_cu_seqlens(x[0], x[1], x[2], torch.device("cpu"))),
        (nvidia, "PyKernelArg", lambda nested_tuple, type: (nested_tuple, type)),
        (nvidia, "ARG_CONSTEXPR", 0),
        (nvidia, "ARG_KERNEL", 1),
        (nvidia, "ARG_TUPLE", 2),
        (nvidia, "library_dirs", list),
    ]
    if hasattr(nvidia, "make_launcher"):  # for each signature, Triton 3.6 compiles a launcher from C code
        modules: dict[str, Any] = {}
        fakes.append((nvidia, "compile_module_from_src", lambda src, **_: modules.setdefault(src, _noting(src))))
    patches = [mock.patch.object(owner, name, fake, create=True) for owner, name, fake in fakes]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        driver._active = before


def _noting(source: str) -> SimpleNamespace:
    def launch(*arguments: Any) -> None:
        _note_3_6(*arguments)
        *rest, _, of_kernel = LAUNCHES.pop()
        LAUNCHES.append((*rest, source, of_kernel))

    return SimpleNamespace(launch=launch)


def _named(launches: list[tuple[Any, ...]], inputs: list[Tensor]) -> list[Any]:
    """Replaces the addresses in launches by names. "input 2 + 64" is the address 64 bytes after the start of input 2,
    and "new 3" is an address outside of all inputs.
    """
    names: dict[int, str] = {}
    blocks = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in ALLOCATED if x.dtype == torch.uint8]
    ADDRESSES.update(x.data_ptr() for x in (*inputs, *ALLOCATED))

    def name(address: int) -> str:
        for i, x in enumerate(inputs):
            if address == x.data_ptr():
                return f"input {i}"
        for i, x in enumerate(inputs):  # the address of the second block of head columns
            if x.dim() >= 3 and 0 < address - x.data_ptr() < x.shape[-1] * x.element_size():
                return f"input {i} + {address - x.data_ptr()}"
        return names.setdefault(address, f"new {len(names)}")

    def of(x: Any) -> Any:
        if isinstance(x, tuple) and x and x[0] == "map":
            return ("map", name(x[1]), *x[2:])
        if hasattr(x, "data_ptr"):
            ADDRESSES.add(x.data_ptr())
            return name(x.data_ptr())
        is_address = isinstance(x, int) and (x in ADDRESSES or any(x in block for block in blocks))
        return name(x) if is_address else x

    return [(*rest, [of(x) for x in of_kernel]) for *rest, of_kernel in launches]


class Case(NamedTuple):
    head_dim: int
    several: bool = False
    dtype: torch.dtype = torch.bfloat16
    n_kv_heads: int = 4
    causal: bool = True
    softcap: float = 0.0
    sinks: bool = False
    deterministic: bool = False
    packed: bool = False  # whether q, k and v are views of one tensor
    total: int = TOTAL
    batch: int = 0  # number of sequences in a call of flash_attn_func, or 0 for flash_attn_packed

    def inputs(self) -> tuple[list[Tensor], Schedule]:
        heads = 4, self.n_kv_heads, self.n_kv_heads
        if self.packed:
            all_three = torch.zeros(self.total, sum(heads), self.head_dim, dtype=self.dtype)
            tensors = [x.detach().requires_grad_() for x in all_three.split(heads, dim=1)]
        else:
            tensors = [torch.zeros(self.total, n, self.head_dim, dtype=self.dtype, requires_grad=True) for n in heads]
        cu_seqlens = torch.tensor((0, 50, self.total) if self.several else (0, self.total), dtype=torch.int32)
        schedule = build_schedule(cu_seqlens, cu_seqlens, self.total, self.total, causal=self.causal, padded=False)
        sinks = [torch.zeros(4, requires_grad=True)] if self.sinks else []
        return [*tensors, *sinks, *schedule.tensors()], schedule

    def call(self) -> list[Any]:
        inputs, schedule = self.inputs()
        q, k, v = inputs[:3]
        sinks = inputs[3] if self.sinks else None
        if self.batch:  # build the schedule before launches are recorded, because only the first call builds it
            length = self.total // self.batch
            dense_schedule(self.batch, length, length, q.get_device(), causal=self.causal)
        LAUNCHES.clear()
        ALLOCATED.clear()
        if self.batch:
            q, k, v = (x.detach().unflatten(0, (self.batch, -1)).requires_grad_() for x in (q, k, v))
            o = interface.flash_attn_func(q, k, v, causal=self.causal, softcap=self.softcap, sinks=sinks)
            assert isinstance(o, Tensor) and o.shape == q.shape
        else:
            o = interface.flash_attn_packed(
                q, k, v, schedule, softcap=self.softcap, sinks=sinks, deterministic=self.deterministic
            )
        do = torch.zeros_like(o)
        torch.autograd.grad(o, (q, k, v), do)
        return _named([*LAUNCHES], [*inputs, do])


CASES = [
    *(Case(head_dim, several) for head_dim in (64, 96, 128, 256) for several in (False, True)),
    *(Case(head_dim, True, deterministic=True) for head_dim in (64, 96)),
    Case(128, n_kv_heads=2, softcap=20.0, sinks=True),
    Case(64, causal=False),
    Case(96, True, packed=True),
    Case(128, packed=True, n_kv_heads=1),
    *(Case(96, packed=packed, n_kv_heads=2, batch=batch) for batch in (1, 2) for packed in (False, True)),
    Case(80, True),
    Case(80, batch=2),
    Case(64, dtype=torch.float32),
]


def differences() -> list[str]:
    """Returns an error message for each case whose launches differ from Triton's."""
    found = []
    for case in CASES:
        record.forget()
        with mock.patch.object(record, "_may_record", lambda: False):
            wanted = case.call()
        with mock.patch.object(record._Recording, "play", autospec=True, side_effect=record._Recording.play) as played:
            for number in range(4):
                if case.call() != wanted:
                    found.append(f"{case}: call {number} makes different launches")
        if played.call_count != 4:
            found.append(f"{case}: {played.call_count} passes replayed, of 4")
    return found


def delta(o: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    return (attention_delta(o, do, None),)


def replays(call: Callable[..., tuple[Tensor, ...]], first: tuple[Tensor, ...], third: tuple[Tensor, ...]) -> bool:
    """Makes three calls with the same key, and returns whether the third call is replayed without running `call`."""
    record.forget()
    calls = []

    @record.recorded(lambda *inputs: (("key",), inputs))
    def counted(*inputs: Tensor) -> tuple[Tensor, ...]:
        calls.append(inputs)
        return call(*inputs)

    for inputs in (first, first, third):
        counted(*inputs)
    return len(calls) == 2


def unclear() -> list[str]:
    """Returns an error message for each call that must not be replayed, but is replayed.

    A replay repeats only the launches of a recorded call. A replay of one of these calls would skip a torch operator,
    or would use an old tensor that belongs to the recorded call.
    """
    o, do, other = torch.zeros(3, TOTAL, 4, 64)

    calls: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        "an operator on the output of the launch": lambda o, do: (delta(o, do)[0].neg_(),),
        "an operator before the launch": lambda o, do: delta(o.add_(1), do),
        "a launch that reads a copy": lambda o, do: delta(o, do.clone()),
        "a launch that reads a tensor from elsewhere": lambda o, _: delta(o, other),
        "an output from elsewhere": lambda o, do: (*delta(o, do), other),
    }
    assert replays(delta, (o, do), (do, o))
    return [f"replayed in spite of {name}" for name, call in calls.items() if replays(call, (o, do), (o, do.clone()))]


def misplaced() -> list[str]:
    """Returns an error message for each recorded launch that is replayed with inputs of another alignment."""
    o, do = torch.zeros(2, TOTAL, 4, 64)
    shifted = torch.zeros(o.numel() + 1)[1:].view_as(o)
    # Triton compiles different code for addresses that are not multiples of 16.
    third = {
        "an unaligned address in place of an aligned one": ((o, do), (o, shifted)),
        "an aligned address in place of an unaligned one": ((o, shifted), (o, do)),
        "two tensors in place of one": ((o, o), (o, do)),
    }
    return [f"replayed with {name}" for name, inputs in third.items() if replays(delta, *inputs)]


def launchers() -> list[str]:
    """Returns an error message if calls with different recording keys do not share Triton's launchers.

    A launcher is an object that starts a kernel. Making new launchers for each recording key would take more time than
    the replayed calls save.
    """
    counts = []
    with mock.patch.object(_Driver, "launcher_cls", side_effect=nvidia.CudaLauncher) as made:
        for total in (256, 384):
            for _ in range(3):
                Case(64, total=total).call()
            counts.append(made.call_count)
    return [] if counts[0] == counts[1] else [f"launchers made for a second length: {counts[1] - counts[0]}"]


def schedules() -> list[str]:
    """Returns an error message for each schedule whose launch is not replayed, or is replayed with wrong arguments."""
    found = []
    for n_docs, total in ((1, 128), (2, 128), (300, 1001)):
        launches: list[Any] = []
        for may_record in (False, True, True):
            cu_seqlens = torch.zeros(n_docs + 2, dtype=torch.int32)[1:]  # cu_seqlens need not be aligned to 16 bytes
            LAUNCHES.clear()
            with (
                mock.patch.object(record, "_may_record", lambda may_record=may_record: may_record),
                mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run,
            ):
                schedule = build_schedule(cu_seqlens, cu_seqlens, total, total, causal=True)
            launches.append(_named([*LAUNCHES], [cu_seqlens, schedule.key_start]))
        if launches != launches[:1] * 3 or len(launches[0]) != 1:
            found.append(f"{n_docs} documents are launched as {launches}")
        if run.called:
            found.append(f"a schedule of {n_docs} documents is launched by Triton")
    return found


def held() -> list[str]:
    """Returns an error message for each tensor that a recording or an encoded descriptor keeps alive."""
    record.forget()
    left: list[StorageWeakRef] = []
    for _ in range(3):
        inputs, schedule = Case(64).inputs()
        q, k, v = inputs[:3]
        o = interface.flash_attn_packed(q, k, v, schedule)
        left += [StorageWeakRef(x.untyped_storage()) for x in (q, k, v, o)]
    LAUNCHES.clear()
    ALLOCATED.clear()
    del inputs, q, k, v, o
    gc.collect()
    return ["a tensor is held" for x in left if not x.expired()]


def untouched(change: Callable[[], Any]) -> bool:
    """Returns True if a call inside the context manager `change()` is not replayed."""
    case = Case(64)
    record.forget()
    for _ in range(2):
        case.call()
    spy = mock.patch.object(record._Recording, "play", autospec=True, side_effect=record._Recording.play)
    with change(), spy as played:
        case.call()
    return not played.called


@contextmanager
def asked_again(change: Any) -> Iterator[None]:
    """Enters the context manager `change`, and makes the recorder check again whether recording is allowed."""
    record._may_record.cache_clear()
    with change:
        yield
    record._may_record.cache_clear()


def ordinary() -> list[str]:
    """Returns an error message for each setting that must disable replays but does not."""
    runtime = triton.knobs.runtime
    changes: dict[str, Callable[[], Any]] = {
        "a hook on launches": lambda: mock.patch.object(runtime, "launch_enter_hook", lambda *_: None),
        "a hook after launches": lambda: mock.patch.object(runtime, "launch_exit_hook", lambda *_: None),
        "debug": lambda: mock.patch.object(runtime, "debug", True),
        "a graph being captured": lambda: mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        "another backend": lambda: mock.patch.dict(os.environ, {backend.VARIABLE: "portable"}),
        "another device": lambda: mock.patch.object(_Driver, "get_current_device", lambda _: 1),
        "another stream": lambda: mock.patch.object(_Driver, "get_current_stream", lambda *_: 8),
        "FA_TRAIN_REPLAY=0": lambda: asked_again(mock.patch.dict(os.environ, {record.VARIABLE: "0"})),
        "another Triton": lambda: asked_again(mock.patch.object(triton, "__version__", "3.8.0+git0")),
    }
    return [f"replayed in spite of {name}" for name, change in changes.items() if not untouched(change)]


if __name__ == "__main__":
    with without_gpu():
        wrong = [*differences(), *ordinary(), *unclear(), *misplaced(), *launchers(), *schedules(), *held()]
    print("\n".join(wrong) or f"{len(CASES)} cases agree")
    sys.exit(bool(wrong))
