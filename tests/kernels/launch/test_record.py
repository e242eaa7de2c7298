"""Replayed launches (record.py) equal the launches that Triton makes, both with a simulated driver and on a GPU."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import driver as nvidia

from fa_kernels import flash_attn_func, flash_attn_with_kvcache
from fa_kernels.flash_attention import backend, checks
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import causal_schedule
from fa_kernels.launch import record, triton_launcher


@pytest.mark.slow
def test_replayed_launches_are_those_of_triton():
    """The comparison runs in a new process, because pytest's process has imported the kernels for the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.support.replayed_launches"],
        env={name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", backend.VARIABLE)}
        | {"CUDA_VISIBLE_DEVICES": ""},  # the new process must not use a real GPU
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kernel_is_launched_where_it_can_be_noted():
    """Only the function `launch` records launches. A replayed call would omit kernels that other code launches."""
    files = Path(backend.__file__).parent.rglob("*.py")
    past = [x.name for x in files if re.search(r"_kernel\[", x.read_text())]
    assert sorted(past) == ["cache.py", "decode.py"]  # kernels of calls with a KV cache, which are not replayed


@pytest.fixture
def on_gpu_0(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: -1 if x.is_meta else 0)


@pytest.fixture
def recording(monkeypatch):
    """Makes CPU tensors report that they are on a GPU, and makes the recorder record calls with these tensors."""
    monkeypatch.setattr(record, "current_device", lambda: 0)
    monkeypatch.setattr(record, "current_stream", lambda _: 7)
    monkeypatch.setattr(record, "has_launch_hooks", lambda: False)
    monkeypatch.setattr(record, "_may_record", lambda: True)
    monkeypatch.setattr(record, "_SAID", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    record.forget()
    yield
    record.forget()


def copied(x):
    """Copies x without a torch operator, because kernels write their outputs without torch operators too."""
    y = torch.empty(x.shape)
    y.numpy()[:] = x.numpy()
    return y


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (record._Recorder, "__init__"),
        (record._Recorder, "__enter__"),
        (record._Recorder, "add"),
        (record._Recorder, "recording"),
        (record._Recording, "play"),
    ],
)
def test_an_error_of_the_recorder_is_a_plain_call(owner, name, recording, monkeypatch, caplog):
    failed = []

    def fail(*arguments, **options):
        failed.append(name)
        raise RuntimeError("Triton is another one")

    monkeypatch.setattr(owner, name, fail)
    call = record.recorded(lambda x, key: ((key,), (x,)))(lambda x, key: (copied(x),))
    for key in ("one", "other"):
        for number in range(6):
            x = torch.full((4,), float(number))
            (result,) = call(x, key)
            assert torch.equal(result, x)
    assert len(failed) == 2, "no key is tried again"
    [logged] = caplog.records
    assert "RuntimeError: Triton is another one" in logged.getMessage() and "FA_TRAIN_REPLAY=0" in logged.getMessage()


def test_a_call_on_another_gpu_makes_it_the_current_gpu(recording, monkeypatch):
    """Triton launches kernels on the current GPU, which cannot read the memory of the other GPU."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 1)
    current = [0]

    @contextmanager
    def device_of(x):
        current.append(x.get_device())
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    seen = []
    call = record.recorded(lambda x: (("key",), (x,)))(lambda x: (seen.append(current[-1]), copied(x)))
    for _ in range(3):
        call(torch.zeros(4))
    assert seen == [1, 1, 1] and current == [0]


def test_an_error_of_the_call_itself_is_raised(recording, caplog):
    @record.recorded(lambda x: (("key",), (x,)))
    def call(x):
        raise ValueError("k must be like q")

    for _ in range(3):
        with pytest.raises(ValueError, match="k must be like q") as raised:
            call(torch.zeros(4))
        assert raised.value.__context__ is None, "the traceback shows one error"
    assert not caplog.records


@pytest.fixture
def asks_again():
    record._may_record.cache_clear()
    yield
    record._may_record.cache_clear()


@pytest.mark.parametrize(
    ("version", "known"),
    [
        *((version, True) for version in ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")),
        *((version, False) for version in ("3.6.1", "3.7.2", "3.7.0+git1a2b3c4", "3.7.1.dev0", "3.9.1", "3.5.1")),
    ],
)
def test_only_tested_versions_of_triton_are_recorded(version, known, asks_again, monkeypatch):
    monkeypatch.delenv(record.VARIABLE, raising=False)
    monkeypatch.setattr(triton_launcher.triton, "__version__", version)
    assert record._may_record() == known


@pytest.mark.parametrize(
    ("knobs", "name", "value"),
    [
        ("runtime", "debug", True),
        ("runtime", "launch_enter_hook", print),
        ("runtime", "add_stages_inspection_hook", print),
        ("compilation", "instrumentation_mode", "consan"),
    ],
)
def test_tools_and_modes_that_need_tritons_launcher_are_noticed(knobs, name, value, monkeypatch):
    assert not triton_launcher.has_launch_hooks()
    monkeypatch.setattr(getattr(triton_launcher.triton.knobs, knobs), name, value)
    assert triton_launcher.has_launch_hooks()


@pytest.mark.parametrize(
    "make",
    [lambda descriptor, encoding: [(descriptor, encoding)], lambda descriptor, encoding, _: [(descriptor, encoding)]],
)
def test_descriptors_are_encoded_with_each_version_of_triton(make, monkeypatch):
    """From Triton 3.8 on, `make_tensordesc_arg` has a third parameter."""
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", make)
    encoder = triton_launcher._encoder
    encoder.cache_clear()
    try:
        assert triton_launcher.encoded("descriptor", "encoding") == ("descriptor", "encoding")
    finally:
        encoder.cache_clear()


@pytest.mark.parametrize(("value", "records"), [("0", False), ("1", True)])
def test_an_environment_variable_switches_recording_off(value, records, asks_again, monkeypatch):
    monkeypatch.setattr(triton_launcher.triton, "__version__", "3.7.1")
    monkeypatch.setenv("FA_TRAIN_REPLAY", value)
    assert record._may_record() == records


def test_the_environment_variable_must_be_0_or_1(asks_again, monkeypatch):
    monkeypatch.setenv("FA_TRAIN_REPLAY", "off")
    with pytest.raises(ValueError, match="FA_TRAIN_REPLAY must be 0 or 1; got off"):
        record._may_record()


def test_another_device_is_another_key(on_gpu_0):
    """Replayed launches do not check the device of a tensor."""
    x, schedule = torch.zeros(20, 2, 16), causal_schedule(None, 20, torch.device("cpu"))
    features = Features(1.0, 0.0, None, [])
    elsewhere = schedule._replace(key_start=schedule.key_start.to("meta"))
    keys = {
        backend._description("forward", x, tensors, of, features)[0]
        for tensors, of in (((x, x), schedule), ((x, x), elsewhere), ((x, x, x[0, 0]), schedule))
    }
    assert len(keys) == 3
    on_meta = x, x, x[0, 0].to("meta")
    assert backend._description("forward", x, on_meta, schedule, features)[0] not in keys


def test_strides_that_do_not_matter_are_not_in_the_key():
    schedule, features = causal_schedule(None, 20, torch.device("cpu")), Features(1.0, 0.0, None, [])
    x = torch.zeros(20 * 64)
    strides = (16, 16), (16, 5), (32, 16), (64, 16)
    views = [x.as_strided((20, 1, 16), (step, head, 1)) for step, head in strides]
    keys = [backend._description("forward", y, (y, y), schedule, features)[0] for y in views]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_each_option_is_another_key(monkeypatch):
    x, schedule = torch.zeros(20, 2, 16), causal_schedule(None, 20, torch.device("cpu"))
    plain = Features(1.0, 0.0, None, [])
    sinks = torch.zeros(2)
    forwards = [
        (x, schedule, plain, torch.float32),
        (x, schedule, plain, torch.bfloat16),
        (x, schedule._replace(length_class="long"), plain, torch.float32),
        (x, schedule._replace(crosses_documents=True), plain, torch.float32),
        (x, schedule, plain._replace(softmax_scale=2.0), torch.float32),
        (x, schedule, plain._replace(softcap=2.0), torch.float32),
        (x, schedule, plain._replace(sinks=sinks), torch.float32),
        (x, schedule, plain._replace(alibi=[sinks]), torch.float32),
        (x.half(), schedule, plain, torch.float32),
        (x.transpose(0, 1).contiguous().transpose(0, 1), schedule, plain, torch.float32),
    ]
    keys = [backend._describe_forward(q, q, q, of, features, out_dtype)[0] for q, of, features, out_dtype in forwards]
    monkeypatch.setenv(backend.VARIABLE, "portable")
    keys.append(backend._describe_forward(x, x, x, schedule, plain, torch.float32)[0])

    def backward_key(dlse, features, deterministic):
        return backend._describe_backward(x, dlse, x, x, x, x, lse, schedule, features, deterministic)[0]

    lse = torch.zeros(2, 20)
    keys += [
        backward_key(dlse, plain, deterministic) for dlse, deterministic in ((None, False), (lse, False), (None, True))
    ]
    keys.append(backward_key(None, plain._replace(sinks=sinks), False))
    assert len(set(keys)) == len(keys) == 15
    assert backward_key(None, plain, False) in keys, "the same call has the same key"


def test_the_inputs_are_all_tensors_of_a_call():
    """A replayed call gets the new addresses of its inputs."""
    q, k, v, do, o = torch.zeros(5, 20, 2, 16)
    lse, dlse = torch.zeros(2, 2, 20)
    schedule = causal_schedule(None, 20, torch.device("cpu"))
    sinks, descale, *alibi = torch.zeros(5, 2)
    features = Features(1.0, 0.0, sinks, alibi, descale)
    _, inputs = backend._describe_forward(q, k, v, schedule, features, torch.float32)
    assert {*map(id, inputs)} == {*map(id, (q, k, v, sinks, descale, *alibi, *schedule.tensors()))}
    _, inputs = backend._describe_backward(do, dlse, q, k, v, o, lse, schedule, features, False)
    assert {*map(id, inputs)} == {*map(id, (do, dlse, q, k, v, o, lse, *alibi, *schedule.tensors()))}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"k": torch.zeros(19, 1, 16)}, id="tokens"),
        pytest.param({"v": torch.zeros(20, 2, 16)}, id="heads-of-v"),
        pytest.param({"k": torch.zeros(20, 3, 16), "v": torch.zeros(20, 3, 16)}, id="heads"),
        pytest.param({"k": torch.zeros(20, 1, 8)}, id="head-dim"),
        pytest.param({"v": torch.zeros(20, 1, 300)}, id="too-wide"),
        pytest.param({"k": torch.zeros(20, 1, 16).half()}, id="dtypes"),
        pytest.param({name: torch.zeros(20, 1, 16).double() for name in "qkv"}, id="dtype"),
        pytest.param({"v": torch.zeros(20, 1, 16, device="meta")}, id="device"),
        pytest.param({"sinks": torch.zeros(3)}, id="sinks"),
        pytest.param({"sinks": torch.zeros(2).half()}, id="dtype-of-sinks"),
        pytest.param({"sinks": torch.zeros(2, device="meta")}, id="device-of-sinks"),
    ],
)
def test_inconsistent_inputs_have_another_key(wrong, on_gpu_0, monkeypatch):
    """A call with inconsistent inputs must not replay the recording of a call with consistent inputs.

    A replayed call checks no inputs, so a replay would accept the inconsistent inputs.
    """
    monkeypatch.setattr(checks, "require_backend", lambda *_: None)
    one = torch.zeros(20, 1, 16)
    right = {"q": torch.zeros(20, 2, 16), "k": one, "v": one, "sinks": torch.zeros(2)}
    schedule = causal_schedule(None, 20, torch.device("cpu"))

    def key_of(q, k, v, sinks):
        return backend._describe_forward(q, k, v, schedule, Features(1.0, 0.0, sinks, ()), q.dtype)[0]

    checks.require_consistent(**right)
    with pytest.raises(ValueError, match="must"):
        flash_attn_packed(**right | wrong, schedule=schedule)
    assert key_of(**right) != key_of(**right | wrong)


def test_an_address_of_two_tensors_is_not_guessed():
    """The two views overlap by half a row, so an address in the overlap could belong to either view."""
    both = torch.zeros(8, 2, 96)
    one, other = both[..., :64], both[..., 32:]
    recorder = record._Recorder([one, other])
    assert recorder._place(one.data_ptr()) == (0, 0)
    with pytest.raises(record._Unclear):
        recorder._place(other.data_ptr())
    with pytest.raises(record._Unclear):
        recorder._place(torch.zeros(3).data_ptr())


def test_allocations_of_a_call_are_repeated():
    recorder = record._Recorder([])
    outputs = recorder.watch(lambda: (torch.empty(2, 3, dtype=torch.float16), torch.empty(4, dtype=torch.int32)), ())
    recording = recorder.recording(outputs, 0)
    assert isinstance(recording, record._Recording)
    again = recording.play([])
    for x, y in zip(outputs, again, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()) and x.data_ptr() != y.data_ptr()


def test_a_returned_view_keeps_its_shape():
    recorder = record._Recorder([])
    outputs = recorder.watch(lambda: (torch.empty(6, 4).view(2, 3, 4), torch.empty(4)), ())
    recording = recorder.recording(outputs, 0)
    assert isinstance(recording, record._Recording)
    assert [x.shape for x in recording.play([])] == [(2, 3, 4), (4,)]
    part = record._Recorder([])
    outputs = part.watch(lambda: (torch.empty(6, 4)[:3],), ())
    assert part.recording(outputs, 0) is record._Known.UNCLEAR, "only a part of the allocation is returned"


def recorded(recorder, addresses, outputs=()):
    """Returns a recording of one launch with the given tensors, and a list that receives the arguments of each replayed
    launch.
    """
    ran = []
    recorder.launches = [(None, (1, 1, 1), [("address", i) for i in addresses])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "prepared", lambda *_: lambda *arguments: ran.append(arguments))
        recording = recorder.recording(outputs, 0)
    assert isinstance(recording, record._Recording)
    return recording, ran


def addresses_of(made):
    """Returns the addresses that a replayed call gives to its temporary tensors, and the number of its allocations.

    made: the sizes of the temporary tensors in bytes.
    """
    recorder = record._Recorder([])

    def call():
        return *(torch.empty(n, dtype=torch.uint8) for n in made), torch.empty(3)

    *_, output = recorder.watch(call, ())
    lasting = torch.zeros(4)
    recorder.add(lasting, lambda: lasting)
    recording, ran = recorded(recorder, range(len(made) + 2), (output,))
    (again,) = recording.play([])
    ((*found, of_output, of_lasting),) = ran
    assert again.shape == output.shape and of_output == again.data_ptr() and of_lasting == lasting.data_ptr()
    return found, len(recording.allocations)


def test_temporaries_share_an_allocation():
    sizes = 100, 4096, 1, 513
    found, n_allocations = addresses_of(sizes)
    assert n_allocations == 3, "the output, the lasting tensor, and one allocation for the temporaries"
    starts, end = record._in_a_row(sizes)
    assert [address - found[0] for address in found] == starts
    assert all(start % record.SLICE_ALIGNMENT == 0 for start in starts)
    assert all(after - start >= size for start, after, size in zip(starts, [*starts[1:], end], sizes, strict=True))


def test_a_large_tensor_has_a_separate_allocation(monkeypatch):
    monkeypatch.setattr(record, "SHARED_BYTES", 1000)
    assert addresses_of([100, 1001, 1000])[1] == 4
    assert addresses_of([1001])[1] == 3


def test_addresses_of_unused_inputs_are_not_read():
    tensors = [torch.zeros(4) for _ in range(3)]
    recorder = record._Recorder([tensors[0], None, *tensors[1:]])
    recorder.add(torch.zeros(4), lambda: torch.zeros(4))
    recording, ran = recorded(recorder, [3, 4, 3])
    assert recording.read([1, 2, 3, 4]) == (4,)
    recording.play([16])
    ((first, made, again),) = ran
    assert first == again == 16 and made not in (0, 16)


def test_arguments_of_known_addresses_are_kept():
    record.forget()
    recording, ran = recorded(record._Recorder([torch.zeros(4)]), [0])
    for address in (16, 32, 16):
        recording.play([address])
    assert ran == [(16,), (32,), (16,)] and record._arguments.cache_info()[:2] == (1, 2)


@pytest.mark.parametrize(
    ("version", "scratch", "wanted"),
    [
        pytest.param("3.6.0", 0, (*"xyzsf", True, False, None, None, "packed", None, None, None, 5, 6), id="3.6"),
        pytest.param(
            "3.7.1", 0, (*"xyzsf", True, False, "packed", None, None, None, None, None, "kinds", "types", (5, 6)),
            id="3.7",
        ),
        pytest.param("3.6.0", 8, ("CudaLauncher", *"xyzsf", "packed", None, None, None, 5, 6), id="scratch"),
    ],
)  # fmt: skip
def test_the_launcher_is_left_out_unless_it_allocates(version, scratch, wanted, monkeypatch):
    found = []

    class Launcher:
        global_scratch_size, profile_scratch_size = scratch, 0
        launch_cooperative_grid, launch_pdl = True, False
        arg_annotations, kernel_signature = "kinds", "types"

        def launch(self, *arguments):
            found.append(arguments)

        def __call__(self, *arguments):
            found.append(("CudaLauncher", *arguments))

    monkeypatch.setattr(triton_launcher, "_launcher", lambda _: Launcher())
    monkeypatch.setattr(triton_launcher.triton, "__version__", version)
    triton_launcher.prepared(SimpleNamespace(function="f", packed_metadata="packed"), tuple("xyz"), "s")(5, 6)
    assert found == [wanted]


def test_inputs_that_were_the_same_tensor_must_be_again():
    one, other = torch.zeros(4), torch.zeros(4)
    recorder = record._Recorder([one, one.view(2, 2), other])
    assert recorder._place(one.data_ptr()) == (0, 0)
    recording = recorder.recording((), 0)
    assert isinstance(recording, record._Recording)
    assert recording.play([16, 16, 32]) == () and recording.play([16, 32, 48]) is None


def test_addresses_must_be_aligned():
    """Triton compiles different code for addresses that are not multiples of 16."""
    recording, ran = recorded(record._Recorder([torch.zeros(4)]), [0])
    assert recording.play([24]) is None and recording.play([32]) == () and ran == [(32,)]


@pytest.mark.gpu
@pytest.mark.parametrize("several", [pytest.param(False, id="one-document"), pytest.param(True, id="documents")])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_replayed_calls_give_the_same_bits(device, head_dim, deterministic, several, monkeypatch):
    record.forget()
    cu_seqlens = torch.tensor([0, 50, 300], device=device, dtype=torch.int32) if several else None
    schedule = causal_schedule(cu_seqlens, 300, device)
    played = []
    play = record._Recording.play
    monkeypatch.setattr(record._Recording, "play", lambda *x: played.append(1) or play(*x))
    for call in range(4):
        leaves = [torch.randn(300, n, head_dim, device=device, dtype=torch.bfloat16) for n in (4, 2, 2)]
        do = torch.randn_like(leaves[0])

        def run(leaves=leaves, do=do):
            inputs = [x.clone().requires_grad_() for x in leaves]
            o = flash_attn_packed(*inputs, schedule, deterministic=deterministic)
            return o, *torch.autograd.grad(o, inputs, do)

        got = run()
        assert len(played) == (0, 0, 2, 4)[call]
        with monkeypatch.context() as ordinary:
            ordinary.setattr(record, "_may_record", lambda: False)
            for name, x, y in zip(("o", "dq", "dk", "dv"), got, run(), strict=True):
                rounding = 0.0 if deterministic or name != "dq" else 2.0**-7  # one bf16 rounding
                torch.testing.assert_close(x, y, rtol=rounding, atol=rounding * 2.0**-13)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_runs_on_the_gpu_of_its_inputs(head_dim):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (
        torch.randn(2, 300, n, head_dim, device="cuda:1", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)
    )
    row = torch.randn(2, 1, 2, head_dim, device="cuda:1", dtype=torch.bfloat16)

    def run():
        o = flash_attn_func(q, k, v, causal=True, deterministic=True)
        keys, values = k.detach().clone(), v.detach().clone()
        decoded = flash_attn_with_kvcache(q[:, :1], keys, values, row, row, cache_seqlens=200)
        return o, *torch.autograd.grad(o.float().sum(), (q, k, v)), keys, values, decoded

    with torch.cuda.device(1):
        expected = run()
    with torch.cuda.device(0):
        for _ in range(3):
            assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))
        assert torch.cuda.current_device() == 0
