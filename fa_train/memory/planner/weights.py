"""The sizes of a model's parameters, and the bytes of its weights on one GPU."""

from fa_train.memory.planner.plan import Plan
from fa_train.models.config import ModelConfig

NF4_BYTES = (
    0.5 + 1 / 64 + 4 / (64 * 256)
)  # bytes per element for the 4-bit code, the 8-bit scales and the fp32 second-level scales


def block_sizes(model: ModelConfig) -> list[int]:
    """Returns the number of elements of each parameter of one block: first the matrices, then the vectors."""
    vectors = [model.dim] * 2 * _vectors_of_norm(model)
    vectors += [model.query_dim + 2 * model.kv_dim] if model.qkv_bias else []
    vectors += [model.dim] if model.out_bias else []
    vectors += [model.up_dim, model.dim] if model.ffn_bias else []
    vectors += [model.heads.dim] * 2 * _vectors_of_norm(model) if model.qk_norm else []
    return [*model.block_matrices, *vectors]


def parameter_sizes(model: ModelConfig) -> list[int]:
    """Returns the number of elements of each parameter of the model."""
    return outer_sizes(model) + block_sizes(model) * model.n_layers


def outer_sizes(model: ModelConfig) -> list[int]:
    """Returns the number of elements of each parameter outside the blocks."""
    embeddings = [model.vocab_size * model.dim] * (1 if model.tied else 2)
    embeddings += [(model.max_seq_len or 0) * model.dim] if model.positions == "learned" else []
    return embeddings + [model.dim] * _vectors_of_norm(model)


def _vectors_of_norm(model: ModelConfig) -> int:
    """Returns the number of parameters of a norm: a weight, and in a LayerNorm also a bias."""
    return 2 if model.bias and model.norm == "layernorm" else 1


def trained_sizes(plan: Plan) -> list[int]:
    """Returns the number of elements of each parameter that has a gradient."""
    return parameter_sizes(plan.model) if plan.run.adapters is None else list(plan.run.adapters.sizes)


def weights_bytes(plan: Plan) -> int:
    """Returns the bytes of all parameters. In a sharded run, counts this rank's shard and what FSDP2 gathers."""
    model, run = plan.model, plan.run
    own = sum(parameter_sizes(model)) * run.weight_bytes
    if run.adapters is None:
        return own // run.ranks + gathered_bytes(plan)
    if run.ranks > 1:
        return (own + 4 * sum(run.adapters.sizes)) // run.ranks + gathered_bytes(plan)
    quantized = model.n_layers * sum(model.block_matrices) if run.adapters.quantized else 0
    return own - quantized * run.weight_bytes + int(quantized * NF4_BYTES) + 4 * sum(run.adapters.sizes)


def gathered_bytes(plan: Plan) -> int:
    """Returns the peak bytes of the weights and gradients that FSDP2 gathers on a rank.

    The formula counts the weights in `gathered_outside`, the weights of two blocks (of all blocks without
    reshard_after_forward), and the gradients of one block and their fp32 copy. With reduce_once, the formula also
    counts whole gradients in fp32. No measurement has confirmed the formula.
    """
    model, run = plan.model, plan.run
    if run.ranks == 1:
        return 0
    trained = run.adapters is None
    blocks = min(2, model.n_layers) if run.reshard_after_forward else model.n_layers
    of_block = sum(block_sizes(model)) * (blocks * run.compute_bytes + (run.compute_bytes + 4) * trained)
    whole_gradients = sum(trained_sizes(plan)) * 4 if run.reduce_once and run.accumulates else 0
    return sum(gathered_outside(model)) * run.weight_bytes + of_block + whole_gradients


def gathered_outside(model: ModelConfig) -> list[int]:
    """Returns the sizes, in elements, of the non-block parameters that FSDP2 holds gathered at the same time.

    If embedding and head have separate weights, the result holds only one of their two sizes, which are equal.
    """
    return outer_sizes(model)[0 if model.tied else 1 :]
