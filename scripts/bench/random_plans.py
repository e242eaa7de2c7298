"""Draws random configurations of train.py: models, memory levers, precisions, optimizers and adapters.

train.py refuses some of the configurations, because the values of different settings are drawn independently.
"""

import random
from typing import Any

OPTIMIZERS = {
    "bf16-mixed": ("adamw", "adamw_8bit", "adamw_offload"),
    "bf16-true": ("adamw", "adamw_bf16", "adamw_master", "adamw_8bit"),
    "32-true": ("adamw",),
}
SOME_LAYERS = "[q_proj,v_proj]"  # peft's default for Llama


def overrides_of(number: int) -> tuple[int, list[str]]:
    """Returns the seq_len of a configuration, and the overrides of train.py for all other settings.

    number: the seed of the random choices.
    """
    draw = random.Random(number)
    has_adapter = draw.random() < 0.35
    model = _model_of(draw, has_adapter)
    rows = draw.choice((1, 1, 1, 2))
    seq_len = draw.choice((4096, 8192, 12345, 16384, 32768, 40000, 65536, 98304)) // rows
    precision = draw.choice(("bf16-mixed", "bf16-mixed", "bf16-true", "bf16-true", "32-true"))
    checkpointing = draw.choice(("none", "none", "selective", "selective", "full"))
    settings = model | {
        "data.micro_batch_size": rows,
        "data.document_len": draw.choice((seq_len, seq_len, 777, 4000)),
        "batch_size": rows * draw.choice((1, 1, 2, 3)),
        "trainer.precision": precision,
        "optimizer": draw.choice(("adamw", "adamw_8bit") if has_adapter else OPTIMIZERS[precision]),
        "adapter": draw.choice(("lora", "qlora")) if has_adapter else "none",
        "memory.checkpointing": checkpointing,
        "memory.offload": draw.choice(("false", "false", "true", "all" if checkpointing == "none" else "true")),
        "memory.mlp_chunk": draw.choice(("null", "null", 4096, 16384)),
        "memory.loss.chunk_size": draw.choice((1024, 4096, 4096, 16384)),
        "lit_gpt.compile_model": draw.choice(("true", "true", "false")),
    }
    if has_adapter:
        settings["adapter.r"] = draw.choice((8, 16, 64))
        settings["adapter.target_modules"] = draw.choice(("all-linear", "all-linear", SOME_LAYERS))
    if settings["model.positions"] == "learned":
        settings["model.max_seq_len"] = seq_len
    return seq_len, [f"{key}={value}" for key, value in settings.items()]


def _model_of(draw: random.Random, has_adapter: bool) -> dict[str, Any]:
    """Draws a model. Models with adapters have the architecture of Llama, because adapters must be exportable."""
    head_dim = draw.choice((64, 64, 64, 128, 128, 128, 96, 80, 256, 192))
    dim = draw.choice((768, 1024, 1536, 2048, 3072, 4096))
    n_heads = max(1, round(dim / head_dim * draw.choice((1, 1, 1, 0.5, 1.25))))
    if has_adapter:  # train.py refuses other models, because transformers cannot read them as a Llama
        n_heads = next(fewer for fewer in range(n_heads, 0, -1) if dim % fewer == 0)
    layers = draw.choice((2, 3, 5, 8, 12) if dim <= 2048 else (2, 3, 5))
    family = {
        "post_norms": draw.choice(("true", "false", "false")),
        "softcap": draw.choice((50.0, 0.0, 0.0)),
        "logit_softcap": draw.choice((30.0, 0.0, 0.0)),
        "windows": draw.choice((str(["1024" if i % 2 else "null" for i in range(layers)]).replace("'", ""), "null")),
    }
    chosen: dict[str, Any] = {
        "norm": draw.choice(("rmsnorm", "rmsnorm", "layernorm", "offset_rmsnorm")),
        "activation": draw.choice(("swiglu", "swiglu", "gelu", "geglu")),
        "positions": draw.choice(("rope", "rope", "rope", "learned", "none")),
        "bias": draw.choice(("false", "false", "true")),
        "qk_norm": draw.choice(("false", "false", "true")),
        "family": f"{{_target_: fa_train.models.config.Family, {', '.join(f'{k}: {v}' for k, v in family.items())}}}",
    }
    if has_adapter:
        chosen = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": "false", "qk_norm": "false"}
    chosen |= {
        "dim": dim,
        "n_layers": layers,
        "n_heads": n_heads,
        "n_kv_heads": draw.choice([k for k in (1, 2, 4, 8, n_heads) if n_heads % k == 0]),
        "head_dim": head_dim,
        "ffn_dim": int(dim * draw.choice((2, 2.6875, 3.5, 4))) // 64 * 64,
        "vocab_size": draw.choice((1024, 1024, 16000, 50257, 128256)),
        "tied": draw.choice(("true", "false")),
    }
    return {f"model.{key}": value for key, value in chosen.items()}
