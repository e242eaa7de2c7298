"""The sizes of a model's parameters, and the bytes of its weights on one GPU."""

from fa_train.memory.planner.plan import Plan
from fa_train.models.config import ModelConfig

# bytes per element for the 4-bit code, the 8-bit scales and the fp32 second-level scales
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def block_sizes(model: ModelConfig) -> list[int]:
    """Returns the number of elements of each parameter of one block: first the matrices, then the vectors."""
    vectors = [model.dim] * (4 if model.extras.post_norms else 2) * _vectors_of_norm(model)
    vectors += [model.query_dim + 2 * model.kv_dim] if model.qkv_bias else []
    vectors += [model.dim] if model.out_bias else []
    vectors += [model.up_dim, model.dim] if model.ffn_bias else []
    vectors += [model.heads.dim] * 2 * _vectors_of_norm(model) if model.qk_norm else []
    return [*model.block_matrices, *vectors]


def parameter_sizes(model: ModelConfig) -> list[int]:
    """Returns the number of elements of each parameter of the model."""
    embeddings = [model.vocab_size * model.dim] * (1 if model.tied else 2)
    embeddings += [(model.max_seq_len or 0) * model.dim] if model.positions == "learned" else []
    last_norm = [model.dim] * _vectors_of_norm(model)
    return embeddings + last_norm + block_sizes(model) * model.n_layers


def norm_size(model: ModelConfig) -> int:
    """Returns the number of parameter elements in a norm over hidden states."""
    return model.dim * _vectors_of_norm(model)


def _vectors_of_norm(model: ModelConfig) -> int:
    """Returns the number of vectors in a norm: a weight and, in a LayerNorm with bias, the bias."""
    return 2 if model.bias and model.norm == "layernorm" else 1


def trained_sizes(plan: Plan) -> list[int]:
    """Returns the number of elements of each parameter that has a gradient."""
    return parameter_sizes(plan.model) if plan.run.adapters is None else list(plan.run.adapters.sizes)


def weights_bytes(plan: Plan) -> int:
    """Returns the bytes of the parameters that a GPU always holds: all parameters, or its shards in a sharded run.

    fa_train.memory.planner.sharded computes the bytes of the weights that FSDP2 gathers.
    """
    model, run = plan.model, plan.run
    own = sum(parameter_sizes(model)) * run.weight_bytes
    if run.adapters is None:
        return own // run.ranks
    if run.ranks > 1:
        return (own + 4 * sum(run.adapters.sizes)) // run.ranks
    quantized = model.n_layers * sum(model.block_matrices) if run.adapters.quantized else 0
    return own - quantized * run.weight_bytes + int(quantized * NF4_BYTES) + 4 * sum(run.adapters.sizes)
