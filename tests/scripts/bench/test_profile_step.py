"""Tests scripts/bench/profile_step.py."""

import csv
import gzip
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scripts.bench.profile_step import report, table
from scripts.bench.step_memory import (
    ATTENTION,
    GRADIENTS,
    KEPT,
    OTHER,
    TEMPORARY,
    WEIGHTS,
    draw_memory,
    memory_over_time,
)
from scripts.bench.step_trace import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    IDLE,
    LOSS,
    MATMULS,
    NORMS,
    OPTIMIZER,
    PARTS,
    Interval,
    Step,
    exclusive,
    hidden,
    idle,
    part_of,
    step_of,
)
from tests.support import processes
from tests.support.ranks import ranks_of_torchrun
from tests.support.training import REPOSITORY, quiet_environment

TINY = (
    "preset=cpu", "seq_len=64", "model.n_layers=2", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2",
    "model.ffn_dim=64", "model.vocab_size=259", "data.vocab_size=259", "trainer.accelerator=cpu",
)  # fmt: skip


def profile_step(folder, *overrides, **environment):
    arguments = [*TINY, *overrides, f"hydra.run.dir={folder}"]
    environment = quiet_environment() | {"CUDA_VISIBLE_DEVICES": ""} | environment
    return processes.finish("scripts.bench.profile_step", arguments, REPOSITORY, environment)


@pytest.mark.slow
def test_a_step_from_its_command_line(tmp_path):
    done = profile_step(tmp_path, "+commit=abc", "data.num_workers=0", "data.vocab_size=259", "batch_size=2")
    assert done.returncode == 0, done.stderr
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    phases = [event["name"] for event in events if event["name"].startswith("step: ")]
    assert sorted(phases) == sorted(["step: forward", "step: backward"] * 2 + ["step: optimizer"])
    with (tmp_path / "profile.csv").open() as file:
        rows = {row["part"]: float(row["ms"]) for row in csv.DictReader(file)}
    step = step_of(events)
    assert list(rows) == list(PARTS) and not step.on_gpu
    assert sum(rows.values()) == pytest.approx((step.end - step.start) / 1e3)
    for part in (ATTENTION_FORWARD, ATTENTION_BACKWARD, MATMULS, NORMS, ELEMENTWISE, LOSS, OPTIMIZER):
        assert rows[part] > 0, part
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "profile.md").read_text()
    assert "- commit: `abc`" in text and "128 tokens in 2 micro-batches" in text
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_a_step_of_two_ranks(tmp_path):
    processes.start_server()  # start one server now, because otherwise each of the two threads would start a server
    settings = "trainer.devices=2", "strategy=fsdp", "strategy.context=2", "data.num_workers=0"
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(profile_step, tmp_path, *settings, **rank) for rank in ranks_of_torchrun(2)]
    for done in (rank.result() for rank in ranks):
        assert done.returncode == 0, done.stderr
    with (tmp_path / "profile.csv").open() as file:
        rows = {row["part"]: float(row["ms"]) for row in csv.DictReader(file)}
    assert rows[COMMUNICATION] > 0 and rows[ATTENTION_FORWARD] > 0
    assert [file.name for file in tmp_path.glob("trace*")] == ["trace.json.gz"], "only rank 0 is profiled"


@pytest.mark.slow
def test_a_wrong_override_ends_with_one_line(tmp_path):
    done = profile_step(tmp_path, "model.norm=batchnorm")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: model.norm must be one of")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_fwd_kernel", ATTENTION_FORWARD),
        ("_bwd_kernel", ATTENTION_BACKWARD),
        ("_dkdv_kernel", ATTENTION_BACKWARD),
        ("_dq_kernel", ATTENTION_BACKWARD),
        ("_delta_kernel", ATTENTION_BACKWARD),
        ("_prepare_kernel", ATTENTION_BACKWARD),
        ("_finish_kernel", ATTENTION_BACKWARD),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, "
         "cutlass::bfloat16_t>>", ATTENTION_FORWARD),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64, "
         "128, 128, 8, cutlass::bfloat16_t>>", ATTENTION_BACKWARD),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits>",
         ATTENTION_BACKWARD),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1", ATTENTION_FORWARD),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", ATTENTION_BACKWARD),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", ATTENTION_FORWARD),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", ATTENTION_BACKWARD),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION_FORWARD),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION_BACKWARD),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", MATMULS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", MATMULS),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", MATMULS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, float>", MATMULS),
        ("triton_tem_fused_mm_3", MATMULS),
        ("aten::mm", MATMULS),
        ("aten::mul", ELEMENTWISE),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>", NORMS),
        ("void at::native::(anonymous namespace)::cuComputePartGradGammaBeta<float, float, true>", NORMS),
        ("triton_red_fused__fused_rms_norm_add_2", NORMS),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_4", NORMS),
        ("triton_poi_fused_cat_mul_sub_5", ELEMENTWISE),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
         "direct_copy_kernel_cuda>>", ELEMENTWISE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel>",
         ELEMENTWISE),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<OpaqueType<4u>>", ELEMENTWISE),
        ("liger_cross_entropy_kernel", LOSS),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::"
         "(anonymous namespace)::LogSoftMaxForwardEpilogue>", LOSS),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>",
         OPTIMIZER),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float, (at::native::NormType)1>>",
         OPTIMIZER),
        ("Memcpy DtoH (Device -> Pinned)", COPIES),
        ("Memcpy HtoD (Pinned -> Device)", COPIES),
        ("Memcpy DtoD (Device -> Device)", ELEMENTWISE),
        ("Memset (Device)", ELEMENTWISE),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
    ],
)  # fmt: skip
def test_parts_by_name(name, part):
    assert part_of(name) == part


def test_the_names_of_our_kernels():
    """Attention kernels that are not in the set `forward` belong to the backward pass."""
    forward = {
        "_fwd_kernel", "_repair_fwd_kernel", "_append_kernel", "_decode_kernel", "_merge_kernel", "_schedule_kernel",
    }  # fmt: skip
    for path in (REPOSITORY / "kernels" / "fa_kernels" / "flash_attention").rglob("*.py"):
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE):
            backward = name not in forward
            assert part_of(name) == (ATTENTION_BACKWARD if backward else ATTENTION_FORWARD), f"{path.name} {name}"


def spans(*ends, part=MATMULS):
    return [Interval(start, end, part) for start, end in ends]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        pytest.param([], 100, id="nothing"),
        pytest.param(spans((10, 30), (40, 90)), 30, id="apart"),
        pytest.param(spans((10, 50), (20, 30), (40, 60)), 50, id="overlapping-and-inside"),
        pytest.param(spans((40, 90), (10, 30)), 30, id="unsorted"),
        pytest.param(spans((-20, 10), (95, 130)), 85, id="over-the-edges"),
        pytest.param(spans((-20, -10), (120, 130)), 100, id="outside"),
        pytest.param(spans((0, 50), (50, 100)), 0, id="none"),
    ],
)
def test_idle(intervals, expected):
    assert idle(intervals, 0, 100) == expected
    parts = exclusive(Step(0, 100, intervals, on_gpu=True))
    assert parts[IDLE] == expected and sum(parts.values()) == 100


def test_copies_count_where_they_run_alone():
    intervals = [*spans((10, 50), (60, 70)), *spans((0, 20), (45, 65), part=COPIES)]
    parts = exclusive(Step(0, 100, intervals, on_gpu=True))
    assert (parts[MATMULS], parts[COPIES], parts[IDLE]) == (50, 20, 30)
    assert hidden(intervals, COPIES) == 20


def test_the_kernel_that_began_first_counts():
    step = Step(0, 10, [*spans((0, 6)), *spans((4, 10), part=NORMS)], on_gpu=True)
    assert (exclusive(step)[MATMULS], exclusive(step)[NORMS]) == (6, 4)
    rows = {part: (ms, kernels_ms, number) for part, ms, _, kernels_ms, number in table(step)}
    assert rows[NORMS] == pytest.approx((4e-3, 6e-3, 1))


def test_the_innermost_operator_counts():
    step = Step(0, 10, [*spans((0, 10), part=ELEMENTWISE), *spans((2, 6)), *spans((3, 4), part=NORMS)], on_gpu=False)
    parts = exclusive(step)
    assert (parts[ELEMENTWISE], parts[MATMULS], parts[NORMS]) == (6, 3, 1)


def ran(cat, name, start, end, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def gpu_trace():
    """Returns the trace of a step of 100 us. Two host threads launch kernels, which run later on the GPU."""
    gemm = "nvjet_sm90_tst_128x256"
    return [
        {"ph": "M", "name": "process_name", "args": {}},
        ran("user_annotation", "step", 0, 100),
        ran("cpu_op", "fa_train::linear_cross_entropy", 10, 20),
        ran("cpu_op", "aten::mm", 11, 13),
        ran("cuda_runtime", "cudaLaunchKernel", 12, 13, correlation=1),
        ran("cuda_runtime", "cudaLaunchKernel", 25, 26, correlation=2),
        ran("cpu_op", "flash_attention::backward", 30, 40, tid=2),
        ran("cuda_driver", "cuLaunchKernelEx", 35, 36, tid=2, correlation=3),
        ran("cuda_runtime", "cudaMemcpyAsync", 36, 37, tid=2, correlation=4),
        ran("user_annotation", "step: optimizer", 50, 60),
        ran("cuda_runtime", "cudaLaunchKernel", 55, 56, correlation=5),
        ran("kernel", gemm, 20, 30, tid=7, correlation=1),
        ran("kernel", gemm, 30, 50, tid=7, correlation=2),
        ran("kernel", "void at::native::elementwise_kernel", 50, 55, tid=7, correlation=3),
        ran("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 52, 62, tid=8, correlation=4),
        ran("kernel", "multi_tensor_apply_kernel", 70, 80, tid=7, correlation=5),
        ran("kernel", gemm, 120, 130, tid=7, correlation=2),
    ]


def test_a_kernel_belongs_to_the_operator_that_launched_it():
    step = step_of(gpu_trace())
    assert step.on_gpu and (step.start, step.end) == (0, 100)
    assert [interval.part for interval in step.intervals] == [LOSS, MATMULS, ATTENTION_BACKWARD, COPIES, OPTIMIZER]
    parts = exclusive(step)
    assert {part: us for part, us in parts.items() if us} == {
        LOSS: 10, MATMULS: 20, ATTENTION_BACKWARD: 5, COPIES: 7, OPTIMIZER: 10, IDLE: 48,
    }  # fmt: skip
    text = report(step, {"GPU": "none"})
    assert "30.0% of the copies' 0.0 ms overlapped with computing kernels." in text
    assert "| `nvjet_sm90_tst_128x256` | matmuls | 1 | 0.02 | 20.0% |" in text


def changed(moment, address, size, total, tid=1):
    args = {"Addr": address, "Bytes": size, "Total Allocated": total, "Device Type": 1, "Device Id": 0}
    return {"ph": "i", "name": "[memory]", "ts": moment, "tid": tid, "args": args}


def test_memory_by_component():
    events = [
        ran("user_annotation", "step: forward", 0, 40),
        ran("cpu_op", "flash_attention::forward", 10, 15),
        ran("cpu_op", "fa_train::linear_cross_entropy", 30, 35),
        ran("user_annotation", "step: backward", 40, 80, tid=2),
        ran("user_annotation", "step: optimizer", 80, 95),
        changed(5, 100, 8, 1000 + 8),  # kept until the backward
        changed(6, 200, 4, 1000 + 12),
        changed(7, 200, -4, 1000 + 8),  # freed within the forward
        changed(12, 300, 16, 1000 + 24),
        changed(32, 400, 32, 1000 + 56),
        changed(41, 50, -64, 1000 - 8),  # frees the gradient of the previous step
        changed(45, 200, 64, 1000 + 56, tid=2),  # allocates the new gradient at the address of a freed tensor
        changed(50, 100, -8, 1000 + 48, tid=2),
        changed(60, 999, -20, 1000 + 28, tid=2),  # frees memory of unknown origin, allocated before the step
        changed(96, 200, -64, 1000 - 36),  # zero_grad
    ]
    before = {1: (WEIGHTS, 500), 50: (GRADIENTS, 64)}
    moments, over_time = memory_over_time(events, before, {200}, torch.device("cuda", 0))
    assert moments == [5, 6, 7, 12, 32, 41, 45, 50, 60, 96]
    assert over_time[WEIGHTS] == [500] * 10
    assert over_time[GRADIENTS] == [64, 64, 64, 64, 64, 0, 64, 64, 64, 0]
    assert over_time[KEPT] == [8, 8, 8, 8, 8, 8, 8, 0, 0, 0]
    assert over_time[TEMPORARY] == [0, 4, 0, 0, 0, 0, 0, 0, 0, 0]
    assert over_time[ATTENTION][3:] == [16] * 7 and over_time[LOSS][4:] == [32] * 6
    assert over_time[OTHER] == [1000 - 564] * 8 + [1000 - 584] * 2
    totals = [sum(sizes) for sizes in zip(*over_time.values(), strict=True)]
    assert totals == [event["args"]["Total Allocated"] for event in events[5:]]
    axes = draw_memory(moments, over_time, 0.0, "title").axes[0]
    assert "peak" in axes.texts[0].get_text() and axes.get_title() == "title"


def test_memory_without_events():
    moments, over_time = memory_over_time([], {}, set(), torch.device("cpu"))
    assert moments == [] and not any(over_time.values())
    assert draw_memory(moments, over_time, 0.0, "title").axes[0].get_title() == "title"
