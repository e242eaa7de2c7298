"""The sizes of a model's parameters, and the bytes of its weights on one GPU."""

from fa_train.memory.planner.block import Block
from fa_train.memory.planner.shape import Shape

MATRICES = 4  # of a block
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # an element's code, and its part of a scale and of a scale's scale


def block_sizes(s: Shape) -> list[int]:
    """The elements of every parameter of one block: of its MATRICES from input to output, then of its vectors."""
    block = Block(s)
    matrices = [block.qkv_weight, block.out_weight, block.up_weight, block.down_weight]
    vectors = [s.dim] * 2 * (2 if s.bias and s.norm == "layernorm" else 1)
    vectors += [s.query_dim + 2 * s.kv_dim, s.dim, s.up_dim, s.dim] if s.bias else []
    vectors += [s.head_dim] * 2 * (2 if s.bias and s.norm == "layernorm" else 1) if s.qk_norm else []
    return matrices + vectors


def parameter_sizes(s: Shape) -> list[int]:
    """The elements of every parameter."""
    return outer_sizes(s) + block_sizes(s) * s.n_layers


def outer_sizes(s: Shape) -> list[int]:
    """The elements of every parameter outside the blocks."""
    embeddings = [s.vocab_size * s.dim] * (1 if s.tied else 2)
    embeddings += [s.learned_positions * s.dim] if s.learned_positions else []
    last_norm = [s.dim] * (2 if s.bias and s.norm == "layernorm" else 1)
    return embeddings + last_norm


def trained_sizes(s: Shape) -> list[int]:
    """The elements of every parameter with a gradient."""
    return parameter_sizes(s) if s.adapters is None else list(s.adapters.sizes)


def weights_bytes(s: Shape) -> int:
    """All parameters, trained and frozen; of several ranks', this one's part and what it gathers."""
    own = sum(parameter_sizes(s)) * s.weight_bytes
    if s.adapters is None:
        return own // s.ranks + gathered_bytes(s)
    if s.ranks > 1:
        return (own + 4 * sum(s.adapters.sizes)) // s.ranks + gathered_bytes(s)
    quantised = s.n_layers * sum(block_sizes(s)[:MATRICES]) if s.adapters.quantised else 0
    return own - quantised * s.weight_bytes + int(quantised * NF4_BYTES) + 4 * sum(s.adapters.sizes)


def gathered_bytes(s: Shape) -> int:
    """What a rank holds of the others' parts at most, by how torch's FSDP2 works; not measured.

    All outside the blocks; a block and the next, of the dtype of its products; in the backward a block's gradients, and
    their copy in fp32 that is averaged.
    """
    if s.ranks == 1:
        return 0
    gradients = s.compute_bytes + 4 if s.adapters is None else 0
    return sum(outer_sizes(s)) * s.weight_bytes + sum(block_sizes(s)) * (2 * s.compute_bytes + gradients)
