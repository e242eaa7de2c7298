"""An export of a sharded checkpoint holds only one copy of the model in memory."""

import ctypes
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fa_train.checkpoints.files import write_file
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.models.attention import sdpa_attention
from fa_train.models.gpt import GPT
from fa_train.models.hf.export import load
from fa_train.models.hf.import_ import save_pretrained

LOSS = LinearCrossEntropy(chunk_size=64)


def build(vocab_size: int) -> GPT:
    """Builds a model of 74 MB, in which no tensor is larger than 9 MB."""
    return GPT(
        vocab_size=vocab_size, n_layers=4, dim=512, n_heads=4, n_kv_heads=4, head_dim=None, ffn_dim=2048,
        norm="rmsnorm", norm_eps=1e-5, positions="rope", rope_theta=1e4, max_seq_len=64, activation="swiglu",
        bias=False, qk_norm=False, tied=True, init="gpt2", attention=sdpa_attention, loss=LOSS,
        memory=Memory("none", False, None, LOSS),
    )  # fmt: skip


def memory(name: str) -> int:
    """Returns the field VmRSS (memory in use) or VmHWM (peak memory) of /proc/self/status, in bytes."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_an_export_of_a_sharded_checkpoint_holds_the_model_once(tmp_path):
    trained = build(4096)
    weights = {f"model.{name}": weight.detach() for name, weight in trained.named_parameters()}
    total = sum(weight.nbytes for weight in weights.values())
    dcp.save({"state_dict": weights}, checkpoint_id=tmp_path / "x.ckpt", no_dist=True)
    write_file({"global_step": 3}, tmp_path / "x.ckpt" / "meta.pt")
    ctypes.CDLL(None).malloc_trim(0)  # without malloc_trim, load could reuse freed memory, and VmRSS would not grow
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory (VmHWM)
    before = memory("VmRSS")
    model, step = load(tmp_path / "x.ckpt", partial(build))
    save_pretrained(model, tmp_path / "exported", dtype="bfloat16", shard_bytes=2**23)
    held = (memory("VmHWM") - before) / total
    assert step == 3 and len(list((tmp_path / "exported").glob("*.safetensors"))) > 4
    assert 0.9 < held < 1.5, "the model, and the tensors of one file"
    assert torch.equal(model.blocks[0].ffn.down.weight, trained.blocks[0].ffn.down.weight)
