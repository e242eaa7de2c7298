"""How much memory a training step takes, by arithmetic: nothing is allocated.

What autograd keeps of each block is read off the code, tensor by tensor. A step's peak is the largest of a few moments:
the loss; within a block, whichever of its forward (again, if checkpointed), its FFN's or its attention's backward holds
most; the end of the backward, when all gradients exist; the optimizer. tests/memory/planner/test_planner.py runs the
real model on fake tensors and compares, and holds the formula against peaks measured on GPUs.

Attention is counted as flash attention; the other kinds keep at least as much. What to change where a step does not fit
is fa_train.memory.planner.levers' to say.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from fa_train.memory.checkpointing import Checkpointing, require_checkpointing
from fa_train.memory.offload import IN_FLIGHT, Offloaded, require_offload, worth_a_copy

GIB = 2**30
LIBRARIES = 96 * 2**20  # cuBLAS's workspaces, by torch's allocator; measured on an H200
CONTEXT = 600 * 2**20  # CUDA's context and the kernels' code, beside torch's allocator
OFFLOADED_FROM = QUANTISED_FROM = 4096  # elements: torchao leaves smaller tensors alone
QUANTISATION_BLOCK = 256  # elements that share a scale
MATRICES = 4  # of a block
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # an element's code, and its part of a scale and of a scale's scale
DEQUANTISATION_BYTES = 20  # of an element while its code is looked up; fp32, torchao 0.18, by the operators
FRAGMENTATION = 0.03  # of what is allocated: what the allocator has reserved and cannot use
Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
OptimizerKind = Literal["adamw", "adamw_8bit", "adamw_bf16", "adamw_offload"]
Activation = Literal["swiglu", "geglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True)
class Adapters:
    """What LoRA trains while the model's own weights are frozen (fa_train.models.lora).

    sizes: the elements of each matrix A and B, all fp32. attention_rank, ffn_rank: numbers between A and B that a block
    has for each token. attention_joined, ffn_joined: elements of a block's A and B as they are multiplied, those of
    parts of one matrix joined. quantised: whether the blocks' matrices are in 4 bits.
    """

    sizes: tuple[int, ...]
    attention_rank: int
    ffn_rank: int
    attention_joined: int
    ffn_joined: int
    quantised: bool


@dataclass(frozen=True)
class Shape:
    """The numbers that decide a run's memory.

    Units: tokens is what one GPU holds at a time (data.micro_batch_size x seq_len); mlp_chunk and loss_chunk in tokens;
    ffn_dim, dim, head_dim in channels. accumulates: whether a step has several micro-batches, so that gradients stay
    while the next one runs. learned_positions: rows of the table of learned positions, 0 for none. adapters: None where
    all weights are trained. ranks: GPUs over which weights, gradients and the optimizer's states are spread
    (fa_train.parallel.fsdp), 1 where each has them whole.
    """

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    activation: Activation
    tied: bool
    norm: Norm
    qk_norm: bool
    bias: bool
    rope: bool
    learned_positions: int
    precision: Precision
    tokens: int
    checkpointing: Checkpointing
    offload: Offloaded
    mlp_chunk: int | None
    loss_chunk: int
    optimizer: OptimizerKind
    accumulates: bool
    compiled: bool
    adapters: Adapters | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        require_checkpointing(self.checkpointing)
        require_offload(self.offload, self.checkpointing)
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise ValueError(f"trainer.precision must be one of {known}; got {self.precision}")

    @property
    def weight_bytes(self) -> int:
        """Of one element of a parameter, its gradient and the hidden states between blocks."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def gradient_bytes(self) -> int:
        """Of one element of a trained parameter and of its gradient."""
        return self.weight_bytes if self.adapters is None else 4

    @property
    def compute_bytes(self) -> int:
        """Of one element of a matrix product's operands."""
        return 4 if self.precision == "32-true" else 2

    @property
    def eager(self) -> bool:
        return not self.compiled

    @property
    def mixed(self) -> bool:
        return self.weight_bytes != self.compute_bytes

    @property
    def everything(self) -> bool:
        """Whether all that blocks keep leaves."""
        return self.offload == "all"

    @property
    def query_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def norm_statistics(self) -> int:
        """fp32 numbers a row that a norm keeps."""
        return 1 if self.norm == "rmsnorm" else 2

    @property
    def up_dim(self) -> int:
        return 2 * self.ffn_dim if self.gated else self.ffn_dim

    @property
    def gated(self) -> bool:
        return self.activation != "gelu"


@dataclass(frozen=True)
class _Moment:
    """What is held at one moment beside weights and the optimizer's states, in bytes."""

    name: str
    gradients: int = 0
    rounded_weights: int = 0
    activations: int = 0
    outside: int = 0
    loss: int = 0
    working: int = 0

    def total(self) -> int:
        return self.gradients + self.rounded_weights + self.activations + self.outside + self.loss + self.working


@dataclass(frozen=True)
class Prediction:
    """What one GPU and its process hold at the largest moment of a step, in bytes.

    rounded_weights are autocast's copies; activations is what blocks keep for their backward, outside what the
    embeddings, the data and the last norm do; working is what the moment itself needs; loss is the logits and gradients
    of the last layer. allocated is what torch.cuda.max_memory_allocated will say; overhead is the CUDA context, the
    kernels' code and what the caching allocator cannot use. host is pinned memory.
    """

    shape: Shape
    moment: str
    weights: int
    optimizer: int
    gradients: int
    rounded_weights: int
    activations: int
    outside: int
    loss: int
    working: int
    libraries: int
    overhead: int
    host: int

    @property
    def allocated(self) -> int:
        return sum(getattr(self, name) for name in COMPONENTS if name != "overhead")

    @property
    def gpu_bytes(self) -> int:
        return self.allocated + self.overhead


COMPONENTS = (
    "weights",
    "optimizer",
    "gradients",
    "rounded_weights",
    "activations",
    "outside",
    "loss",
    "working",
    "libraries",
    "overhead",
)


class _Block:
    """The tensors of one decoder block, in bytes, and how many of them live at a time."""

    def __init__(self, s: Shape) -> None:
        t, c = s.tokens, s.compute_bytes
        self.shape, self.eager = s, s.eager
        self.x = t * s.dim * s.weight_bytes  # a hidden state between blocks, and its gradient
        self.x_rounded = t * s.dim * c
        self.q, self.kv = t * s.query_dim * c, t * s.kv_dim * c
        self.q_full, self.kv_full = t * s.query_dim * 4, t * s.kv_dim * 4
        self.qkv = self.q + 2 * self.kv
        self.lse = t * s.n_heads * 4
        self.hidden, self.up = t * s.ffn_dim * c, t * s.up_dim * c
        self.statistics = t * 4 * s.norm_statistics
        self.qk_statistics = t * (s.n_heads + s.n_kv_heads) * 4 * s.norm_statistics
        self.qkv_weight, self.out_weight = s.dim * (s.query_dim + 2 * s.kv_dim), s.query_dim * s.dim
        self.up_weight, self.down_weight = s.dim * s.up_dim, s.ffn_dim * s.dim
        a = s.adapters
        self.attention_adapters = (t * a.attention_rank + a.attention_joined) * c if a else 0
        self.ffn_adapters = (t * a.ffn_rank + a.ffn_joined) * c if a else 0

    def rounded_weights(self) -> int:
        """Autocast's copies that autograd keeps; the FFN by chunks makes its own and drops them.

        Blocks that are gathered from several ranks are gathered in autocast's dtype.
        """
        s = self.shape
        if not s.mixed or s.ranks > 1 or (s.adapters and s.adapters.quantised):
            return 0
        ffn = 0 if s.mlp_chunk else self.up_weight + (self.down_weight if s.adapters else 0)
        return (self.qkv_weight + self.out_weight + ffn) * s.compute_bytes

    def rounded_down(self) -> int:
        """The copy of the FFN's last weight, which the backward makes again as it does the activations."""
        s = self.shape
        return 0 if s.adapters or s.mlp_chunk or s.ranks > 1 or not s.mixed else self.down_weight * s.compute_bytes

    def attention_kept(self) -> int:
        """From the block's input to attention's result."""
        s = self.shape
        kept = self.x + self.statistics + self.x_rounded + self.qkv + self.q + self.lse + self.attention_adapters
        if s.qk_norm:
            kept += self.q + self.kv  # else views of the buffer in which values are, rotated or not
            kept += self.qk_statistics
            kept += self.q_full + self.kv_full if s.mixed and self.eager else 0
        return kept

    def ffn_kept(self) -> int:
        """From the hidden state between attention and FFN, which torch.compile adds up again, to the FFN's result."""
        kept = (self.x if self.eager else self.x_rounded) + self.statistics + self.x_rounded
        if self.shape.mlp_chunk and not keeps_up(self.shape):
            return kept + (self.x - self.x_rounded if self.torchs_chunks() else 0)  # chunks of the norm's own result
        return kept + self.up + self.activated_kept() + self.ffn_adapters

    def activated(self) -> int:
        """The FFN's operand of its last product; SwiGLU's silu too, which torch.compile does not write."""
        return self.hidden * (2 if self.shape.gated and self.eager else 1)

    def activated_kept(self) -> int:
        """Those of the first forward; the backward computes them again, but for adapters."""
        return self.activated() if self.shape.adapters else 0

    def kept(self) -> int:
        """What autograd keeps of a block that computes nothing again."""
        return self.attention_kept() + self.ffn_kept()

    def boundary(self) -> int:
        """What is kept of a block from its forward to its backward, on the GPU or on the host."""
        if self.shape.checkpointing == "none":
            return self.kept()
        return self.x + (self.q + self.lse if self.shape.checkpointing == "selective" else 0)

    def torchs_chunks(self) -> bool:
        """Whether chunks of the FFN pass through torch's own operators and checkpoints (fa_train.models.gpt)."""
        s = self.shape
        return s.mlp_chunk is not None and (s.adapters is not None or s.activation == "geglu")

    def sent(self) -> int:
        """What of it waits on the host."""
        if not self.shape.everything:
            return self.x if self.shape.offload else 0
        s = self.shape
        stays = 2 * self.statistics + self.lse + self.attention_adapters + (0 if s.mlp_chunk else self.ffn_adapters)
        if s.qk_norm:
            stays += self.qk_statistics + (0 if worth_a_copy(self.kv, s.tokens, s.dim) else self.kv)
        return self.kept() - stays

    def forward(self) -> dict[str, int]:
        """The most at a time in each part of the first forward, the block's own tensors included."""
        ffn = self._ffn_forward()
        if self.shape.checkpointing != "none":  # nothing is kept for longer than it is read
            activated = self.up + self.activated()
            ffn = self.boundary() + 2 * self.x + (self._chunk_forward() if self.shape.mlp_chunk else activated)
        return {"attention": self._attention_forward(), "FFN": ffn}

    def backward(self) -> dict[str, int]:
        """The same of the backward, with the forward again where it is checkpointed."""
        again = {}
        if self.shape.checkpointing != "none":
            waiting = self.x + (self.x_rounded if self.shape.mixed else 0)  # the gradient of the block's result
            ffn = self.kept() + self._argument()  # recomputation ends before the activations, or the last product
            parts = {"attention": self._attention_forward(), "FFN": ffn}
            again = {f"{part} again": waiting + nbytes for part, nbytes in parts.items()}
        return again | {
            "FFN's backward": self._ffn_backward(),
            "norm's backward": self._norm_backward(),
            "attention's backward": self._attention_backward(),
        }

    def _argument(self) -> int:
        """A norm's result in fp32: Python holds it while attention or FFN run on a rounded copy of it."""
        return self.x if self.shape.mixed and self.eager else 0

    def _attention_forward(self) -> int:
        """Until attention's result is projected."""
        return self.attention_kept() + self._argument() + self.x_rounded

    def _ffn_forward(self) -> int:
        held = self.kept() + self._argument()
        if self.shape.mlp_chunk or self.shape.adapters:
            return held + self.x_rounded + self._chunk_forward()
        return held + max(self.activated(), self.hidden + self.x_rounded)

    def _chunk_forward(self) -> int:
        """Rounded weights, and a chunk from its first product to its last."""
        if not self.shape.mlp_chunk:
            return 0
        # GELU's result takes the place of its argument, unless that is kept
        operands = 1 if keeps_up(self.shape) or not self.shape.gated else 3
        if self.torchs_chunks():
            operands = 4 if self.shape.gated else 2
        return self._ffn_rounded() + self._chunk(self.shape.tokens) * operands

    def _ffn_backward(self) -> int:
        """The gradient of the last product's operand; SwiGLU's, of its two factors; or a chunk's tensors."""
        s, held = self.shape, self.kept() + self.x
        if s.checkpointing == "selective" and not self.eager and not s.adapters:
            held -= self.attention_kept() - self.boundary()  # compiled code makes queries, keys and values after this
        rounded = self.x_rounded if s.mixed else 0  # the gradient of the FFN's result
        if s.adapters:  # that operand has a gradient through frozen weights and one through A, let go for the sum
            chunk = self._chunk(s.tokens)
            if not s.mlp_chunk:
                return held + 2 * chunk + self._dequantised()
            again = (5 if s.gated else 3) * chunk + self._ffn_rounded() + self.ffn_adapters
            return held + rounded + again + 2 * chunk + self._dequantised()
        if not s.mlp_chunk:  # the activations again, and autocast's copy of the last weight
            again = self.activated() + self.rounded_down()
            of_operand = rounded + again + self.hidden + self.down_weight * s.compute_bytes
            # the gradient of that weight, which compiled code hands over at its end
            its_own = 0 if self.eager and s.accumulates else self.down_weight * s.weight_bytes
            of_factors = self.hidden * (4 if self.eager else 3) + its_own if s.gated else 0
            return held + max(of_operand, of_factors)
        weights = (self.up_weight + self.down_weight) * 4
        chunk = self._chunk(s.tokens)
        if self.torchs_chunks():  # a chunk again, its operands' gradients, and the weights' of one precision and both
            return held + rounded + 7 * chunk + self._ffn_rounded() + weights
        d_projected = (2 if s.gated else 1) * chunk  # which, like the activations, takes the place of an operand
        chunks = d_projected + chunk
        if s.compute_bytes == 4:  # products of lower precisions are added up by one call
            chunks = max(self.down_weight * 4 + chunks, self.up_weight * 4 + d_projected)
        if s.weight_bytes != 4:  # the sums are rounded when the loop has ended
            chunks = max(chunks, weights // 2)
        return held + rounded + self.x_rounded + weights + self._ffn_rounded() + chunks

    def _norm_backward(self) -> int:
        """Of the FFN's norm: its input, the gradients of its result and input, and of the residual."""
        between = self.x if self.eager else self.x_rounded
        return self.attention_kept() + between + self.statistics + 3 * self.x

    def _attention_backward(self) -> int:
        """Hopper's kernels add up the gradient of queries in fp32."""
        s = self.shape
        held = self.attention_kept() + self.x + self.q
        on_hopper = s.compute_bytes == 2 and s.head_dim in (64, 96, 128)
        operator = self.lse * (3 if on_hopper else 1) + (self.q_full if on_hopper else 0) + self.qkv
        return held + operator + (0 if self.eager else self._held_by_compiled_code())

    def _held_by_compiled_code(self) -> int:
        """What eager code has let go by the time of attention's backward; as torch 2.11's inductor orders an H200's."""
        s = self.shape
        held = self.x  # the gradient of the block's result: all of the block is one node, whose argument it is
        if s.adapters:
            return held
        # one kernel at the end sums for both norms' weights: attention's projected result, the FFN's gradient of its x;
        # blocks that add in the norm's own pass (GPT.may_add_later) hold one of them less, where no peak was measured
        held += 2 * self.x_rounded + self.statistics
        held += self.x_rounded if s.mixed and not s.mlp_chunk else 0  # of that result, for its weight's gradient
        return held + (self.up_weight + self.down_weight) * s.weight_bytes  # gradients, handed over at the end

    def _chunk(self, tokens: int) -> int:
        """(chunk, ffn_dim), one operand, with `tokens` left."""
        s = self.shape
        return min(s.mlp_chunk or s.tokens, tokens) * s.ffn_dim * s.compute_bytes

    def _dequantised(self) -> int:
        """torchao's steps from codes of 4 bits to one matrix, the largest of a block; 64-bit indices are most of it."""
        s = self.shape
        if s.adapters is None or not s.adapters.quantised:
            return 0
        matrices = (self.qkv_weight, self.out_weight, self.up_weight, self.down_weight)
        return max(matrices) * DEQUANTISATION_BYTES

    def _ffn_rounded(self) -> int:
        return (self.up_weight + self.down_weight) * self.shape.compute_bytes if self.shape.mixed else 0


def predict(shape: Shape) -> Prediction:
    """The peak of a training step after the first, by component."""
    s = shape
    largest = max(_moments(s), key=_Moment.total)
    weights = weights_bytes(s)
    optimizer, host = optimizer_bytes(s)
    return Prediction(
        shape=s,
        moment=largest.name,
        weights=weights,
        optimizer=optimizer,
        gradients=largest.gradients,
        rounded_weights=largest.rounded_weights,
        activations=largest.activations,
        outside=largest.outside,
        loss=largest.loss,
        working=largest.working,
        libraries=LIBRARIES,
        overhead=CONTEXT + int(FRAGMENTATION * (weights + optimizer + largest.total())),
        host=host + (s.n_layers - 1) * _Block(s).sent(),
    )


def kept_per_layer(shape: Shape) -> int:
    """What the GPU keeps of a block but the last between its forward and its backward, copies of weights included."""
    block = _Block(shape)
    rounded = block.rounded_weights() if shape.checkpointing == "none" else 0
    return block.boundary() - block.sent() + rounded


def keeps_up(shape: Shape) -> bool:
    """Whether chunks of the FFN's first product are kept; those of adapters and GeGLU are torch's checkpoints."""
    return shape.everything and shape.adapters is None and shape.activation != "geglu"


def sent_per_layer(shape: Shape) -> int:
    """What waits on the host of a block but the last."""
    return _Block(shape).sent()


def _moments(s: Shape) -> list[_Moment]:
    """Those that may be the largest of a step."""
    block, again = _Block(s), s.checkpointing != "none"
    vocabulary = s.vocab_size * s.dim * s.weight_bytes
    gradients = sum(trained_sizes(s)) * s.gradient_bytes // s.ranks
    rounded = block.rounded_weights()
    cached = s.eager and s.adapters is None  # autocast forgets its copies of frozen weights
    rounded_in_forward = s.n_layers * (rounded + block.rounded_down() * cached) if cached or not again else 0
    boundaries = s.n_layers * block.boundary() - (s.n_layers - 1) * block.sent()
    # the states of blocks before, until their copies have ended
    underway = min(IN_FLIGHT if s.everything else 1, s.n_layers - 1) * block.sent()
    lagging = underway if s.everything else 0  # also when the last block has ended
    data = s.tokens * (3 * 8 + 4 * 4)  # tokens, labels, positions; the four ends of visible ranges
    data += s.tokens * s.head_dim * 4 if s.rope else 0  # cosines and sines
    last_norm = block.x + block.statistics + 2 * block.x  # its input, and its result with a gradient or both gradients
    # the gradient that the loss has left: a tied one waits for the embedding's, another is the parameter's own
    of_head = vocabulary if s.tied or not s.accumulates or s.ranks > 1 else 0
    of_block = sum(block_sizes(s)) * s.weight_bytes // s.ranks
    embeddings = vocabulary
    # gradients that are averaged over ranks at the end, and their copy in fp32
    outer = sum(outer_sizes(s)) * (s.weight_bytes + 4) if s.ranks > 1 and s.adapters is None else 0
    if s.adapters:  # nothing waits for frozen weights
        of_head = embeddings = 0
        of_block = gradients // s.n_layers
    before = gradients if s.accumulates else 0  # those of the step's other micro-batches; the last step's are gone
    forward, in_forward = max(block.forward().items(), key=_nbytes)
    moments = [
        _Moment(
            f"{forward} of the last block",
            gradients=before,
            rounded_weights=rounded_in_forward or rounded + block.rounded_down(),
            activations=boundaries,
            outside=data,
            working=underway + in_forward - block.boundary(),
        ),
        _Moment(
            "the loss",
            gradients=before,
            rounded_weights=rounded_in_forward,
            activations=boundaries,
            outside=data + last_norm,
            loss=loss_bytes(s),
            working=lagging,
        ),
        _Moment(
            "the last norm's backward",
            gradients=before,
            rounded_weights=0 if again else s.n_layers * rounded,
            activations=boundaries,
            outside=data + last_norm,
            loss=of_head,
            working=lagging,
        ),
        _Moment(
            "the embedding's backward",
            gradients=gradients - (0 if s.accumulates else embeddings // s.ranks),
            outside=data,
            # a tied one's is added to the head's in place
            working=(block.x + 2 * embeddings if s.tied else block.x + embeddings) + outer,
        ),
        _Moment("the optimizer", gradients=gradients, outside=data, working=optimizer_working(s)),
    ]
    # activations become fewer from block to block, gradients more, unless they are there from other micro-batches
    backward, in_backward = max(block.backward().items(), key=_nbytes)
    for left, which in {s.n_layers: "last", 2: "second", 1: "first"}.items():
        if left > s.n_layers:
            continue
        fetched = block.sent() if (again or s.everything) and left > 1 else 0  # of the block below, ahead of its turn
        moments.append(
            _Moment(
                f"{backward} of the {which} block",
                gradients=before or (s.n_layers - left) * of_block,
                rounded_weights=rounded if again else left * rounded,
                activations=left * block.boundary() - (left - 1) * block.sent(),
                outside=data,
                loss=of_head,
                working=fetched + in_backward - block.boundary(),
            )
        )
    return moments


def _nbytes(item: tuple[str, int]) -> int:
    return item[1]


def block_sizes(s: Shape) -> list[int]:
    """The elements of every parameter of one block: of its MATRICES from input to output, then of its vectors."""
    block = _Block(s)
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


def loss_bytes(s: Shape) -> int:
    """The most that linear_cross_entropy holds beside hidden states: a chunk's logits and the weight's gradient."""
    chunk = min(s.loss_chunk, s.tokens)
    logits, hidden = chunk * s.vocab_size * s.compute_bytes, chunk * s.dim * s.compute_bytes
    rounded_hidden = hidden if s.mixed else 0
    weight = s.vocab_size * s.dim
    rounded_weight = weight * s.compute_bytes if s.mixed else 0
    of_weight, product, result = weight * 4, weight * 4, weight * s.weight_bytes
    if s.adapters:  # the head is frozen
        of_weight = product = result = 0
    if s.compute_bytes != 4:  # added up by one call
        product = 0
    if s.weight_bytes == 4:  # the sum itself
        result = 0
    in_loop = rounded_hidden + logits + max(hidden, product)
    return of_weight + rounded_weight + max(in_loop, result) + s.tokens * 4


def optimizer_bytes(s: Shape) -> tuple[int, int]:
    """The optimizer's states on the GPU, and what it holds on the host, pinned copies included."""
    sizes, w = trained_sizes(s), s.gradient_bytes
    if s.optimizer == "adamw_offload":
        moved = [n for n in sizes if n >= OFFLOADED_FROM]
        pinned = sum(2 * _power_of_two(n * w) for n in moved)  # weight and gradient; torch pins powers of two
        return 2 * w * (sum(sizes) - sum(moved)), pinned + 2 * w * sum(moved)
    if s.optimizer == "adamw_8bit":
        quantised = sum(n for n in sizes if n >= QUANTISED_FROM and n % QUANTISATION_BLOCK == 0)
        scales = 2 * 4 * quantised // QUANTISATION_BLOCK
        return 2 * quantised + scales + 2 * w * (sum(sizes) - quantised), 0
    return 2 * w * sum(sizes) // s.ranks, 0


def optimizer_working(s: Shape) -> int:
    """AdamW in 8 bits goes parameter by parameter, through two copies in fp32; the others need none."""
    return 8 * max(trained_sizes(s)) if s.optimizer == "adamw_8bit" else 0


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
