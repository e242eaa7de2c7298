"""LoRA and QLoRA adapters (arXiv:2106.09685, arXiv:2305.14314).

The model's weights are frozen. QLoRA also quantizes the frozen weights to 4 bits. Each adapted matrix W of a linear
layer has two low-rank matrices A and B, which are trained. A multiple of the product `B A` is added to W. Tensor names
and files are those of peft, so peft and fa_train can load each other's adapters. The GPT joins some matrices of a
checkpoint into one, such as the matrices of queries, keys and values. Each part of a joined matrix has a separate
adapter, as in peft.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fa_train.bounds import FractionBelowOne, PositiveFloat, PositiveInt
from fa_train.memory.planner.plan import LINEARS, Adapters
from fa_train.memory.tiled_ffn import LinearTensors
from fa_train.models.autocast import compute_dtype
from fa_train.models.gpt import GPT
from fa_train.models.hf.import_ import tensor_places
from fa_train.models.hf.weights import Place, read_json, save_tensors, write_json
from fa_train.models.initial import draw
from fa_train.models.nf4 import NF4_PARTS, nf4_matmul, nf4_weight, quantized
from fa_train.models.shards import own_rows

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # the prefix of every tensor name in peft's files
ALL_LINEAR = "all-linear"


def whole_model(model: GPT) -> GPT:
    """Returns the model unchanged, for adapter=none. All weights are trained."""
    return model


@dataclass(frozen=True)
class LoRA:
    """The settings of LoRA adapters. `LoRA(...)(model)` freezes the model and adds adapters to its linear layers.

    r: the rank. A has r rows, and B has r columns.
    lora_alpha: the product `B A` is multiplied by `lora_alpha / r`, or by `lora_alpha / sqrt(r)` if use_rslora is true
    (arXiv:2312.03732).
    lora_dropout: the dropout probability of adapter inputs.
    target_modules: a list of Hugging Face's module names or of their last parts, such as q_proj. The string
    "all-linear" means all linear layers of the blocks. A string other than "all-linear" is a regular expression that
    full module names must match.
    quantization: "nf4" quantizes the weights of all linear layers of the blocks to 4 bits with torchao.
    path: the folder of a peft adapter to train further, or None for new adapters. The adapter_config.json in the folder
    replaces r, lora_alpha, use_rslora and target_modules.
    A is initialised like nn.Linear's weight. B starts as 0, so that training starts from the base model. A and B are
    stored in fp32, as in peft, because bf16 would lose small updates. Matrix products with A and B use the dtype of the
    layer's input.
    Raises: ValueError if a setting is out of range, a name in target_modules matches no layer, no Hugging Face family
    has the model's architecture, or torchao is not installed but quantization needs it.
    """

    r: PositiveInt
    lora_alpha: PositiveFloat
    lora_dropout: FractionBelowOne
    target_modules: str | Sequence[str]
    use_rslora: bool
    quantization: Literal["nf4"] | None
    path: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"adapter.r must be an integer of at least 1; got {self.r}")
        if not 0 < self.lora_alpha < float("inf"):
            raise ValueError(f"adapter.lora_alpha must be positive; got {self.lora_alpha}")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(f"adapter.lora_dropout must be at least 0 and less than 1; got {self.lora_dropout}")
        if not self.target_modules:
            raise ValueError("adapter.target_modules must name at least one module; got none")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ValueError(
                    f"adapter.target_modules must be {ALL_LINEAR}, a list of names or a regular expression; "
                    f"got {self.target_modules}: {error}"
                ) from error
        if self.quantization not in (None, "nf4"):
            raise ValueError(f"adapter.quantization must be nf4 or null; got {self.quantization}")

    @property
    def scale(self) -> float:
        """The factor that the product `B A` is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def targets(self, name: str) -> bool:
        """Returns whether target_modules matches `name`, a module name of Hugging Face, by peft's rules."""
        if self.target_modules == ALL_LINEAR:
            return True
        if isinstance(self.target_modules, str):
            return any(re.fullmatch(self.target_modules, known) for known in _known_names(name))
        return any(f".{known}".endswith(f".{target}") for known in _known_names(name) for target in self.target_modules)

    def __call__(self, model: GPT) -> GPT:
        settings = self if self.path is None else _settings(Path(self.path), self)
        settings._require_no_recomputation(model)
        try:
            linears = _linears(model)
        except ValueError as error:
            raise ValueError(f"adapter=lora and adapter=qlora need a model that can be exported: {error}") from error
        names = [name for parts in linears.values() for name in parts]
        settings._require_names(names)
        model.requires_grad_(False)
        for path, parts in linears.items():
            wanted = {name: place for name, place in parts.items() if settings.targets(name)}
            if wanted or settings.quantization:
                parent, _, attribute = path.rpartition(".")
                linear = model.get_submodule(path)
                assert isinstance(linear, nn.Linear)
                setattr(model.get_submodule(parent), attribute, LoRALinear(linear, path, wanted, settings))
        if model.origin is not None:
            model.base_weights = frozenset(
                name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
            )
        model.register_load_state_dict_pre_hook(_keep_loaded_base)
        model.choose_ffns()
        load = partial(load_adapter, folder=Path(settings.path)) if settings.path is not None else None
        model.add_initialiser(load or init_adapters)
        return model

    def _require_names(self, names: Sequence[str]) -> None:
        """Raises: ValueError if an entry of target_modules matches no module in `names`."""
        if isinstance(self.target_modules, str):
            useless = [] if any(map(self.targets, names)) else [self.target_modules]
        else:
            useless = [t for t in self.target_modules if not any(map(replace(self, target_modules=[t]).targets, names))]
        if useless:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise ValueError(
                f"adapter.target_modules must be {ALL_LINEAR} or name some of {known}; got {', '.join(useless)}"
            )

    def _require_no_recomputation(self, model: GPT) -> None:
        """Rejects dropout if a memory setting recomputes activations, because recomputation would draw another mask."""
        memory = model.memory
        if self.lora_dropout and (memory.checkpointing != "none" or memory.mlp_chunk):
            raise ValueError(
                f"adapter.lora_dropout={self.lora_dropout} needs memory.checkpointing=none and memory.mlp_chunk=null; "
                f"got {memory.checkpointing} and {memory.mlp_chunk}. Choose adapter.lora_dropout=0"
            )


class LoRALinear(nn.Linear):
    """A frozen linear layer with adapters, quantized weights, or both. Computes `x W^T + scale * (x A^T) B^T`.

    lora_A, lora_B: the fp32 matrices A and B of each adapter. A is (r, in_features), and B is (rows, r). The keys of
    lora_A and lora_B are the last parts of Hugging Face's module names, such as q_proj. An adapter changes only those
    rows of W that belong to its module.
    If W is quantized, `weight` holds the 4-bit codes, (out_features * in_features / 2,) uint8 with two codes per byte.
    `nf4` holds the scales and the table of values of a quantized W, under the names of torchao's NF4Tensor.
    """

    def __init__(self, linear: nn.Linear, path: str, parts: Mapping[str, Place], settings: LoRA) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.settings = settings
        self.names = {name.rpartition(".")[2]: name for name in parts}
        self.rows = {name.rpartition(".")[2]: place.rows for name, place in parts.items()}
        self.transposed = any(place.transposed for place in parts.values())  # GPT-2 stores (in, out)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        device = linear.weight.device
        for name, rows in self.rows.items():
            a = torch.empty(settings.r, self.in_features, dtype=torch.float32, device=device)
            b = torch.empty(rows.stop - rows.start, settings.r, dtype=torch.float32, device=device)
            self.lora_A[name], self.lora_B[name] = nn.Parameter(a), nn.Parameter(b)
        self.nf4 = nn.ParameterDict()
        if settings.quantization == "nf4":
            codes, others = quantized(linear.weight.detach(), f"{path}.weight")
            self.weight = nn.Parameter(codes, requires_grad=False)
            for name, tensor in others.items():
                self.nf4[name] = nn.Parameter(tensor, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (total, in_features) -> (total, out_features)."""
        x = x.to(compute_dtype(x))  # W and all matrices A are multiplied by the same rounded copy of x
        y = self._base(x)
        if not self.lora_A:
            return y
        down, up = self._factors()
        seen = F.dropout(x, self.settings.lora_dropout, self.training) if self.settings.lora_dropout else x
        return torch.addmm(y, F.linear(seen, down.to(x.dtype)), up.to(x.dtype).T)

    def tensors(self) -> LinearTensors:
        """Returns the tensors of this layer that TiledFFN needs. memory.mlp_chunk refuses dropout."""
        a, b = self._factors() if self.lora_A else (None, None)
        return LinearTensors(self.weight, self.bias, a, b, *self._nf4_parts())

    def dense_weight(self) -> Tensor:
        """Returns the weight without adapters, (out_features, in_features), dequantized to its original dtype."""
        if not self.nf4:
            return self.weight
        parts = [self.weight, *self._nf4_parts()]
        return nf4_weight(parts, self.out_features, self.in_features, self.nf4["nf4"].dtype)

    def merged(self) -> nn.Linear:
        """Returns an nn.Linear with the adapters added to its weight.

        The weight and the adapters are added in fp32, or in fp64 for fp64 weights.
        """
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = self.dense_weight().detach()
        if self.lora_A:
            down, up = self._factors()
            weight = (weight.to(torch.promote_types(weight.dtype, torch.float32)) + up @ down).to(weight.dtype)
        linear.weight, linear.bias = nn.Parameter(weight.detach()), self.bias
        return linear

    def _base(self, x: Tensor) -> Tensor:
        if not self.nf4:
            return F.linear(x, self.weight, self.bias)
        sizes = self.out_features, self.in_features
        y: Tensor = nf4_matmul(x, self.weight, *self._nf4_parts(), *sizes, transposed=True)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _nf4_parts(self) -> list[Tensor]:
        return [self.nf4[name] for name in NF4_PARTS] if self.nf4 else []

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Returns the matrices A as one concatenated matrix, and the scaled matrices B as one block-diagonal matrix.

        Example without an adapter of k_proj, and with scale 1: [A_q; A_v] and [[B_q, 0], [0, 0], [0, B_v]].
        """
        down = torch.cat([self.lora_A[name] for name in self.rows])
        blocks, end = [], 0
        for name, rows in self.rows.items():
            blocks += [down.new_zeros(rows.start - end, 0), self.lora_B[name] * self.settings.scale]
            end = rows.stop
        return down, torch.block_diag(*blocks, down.new_zeros(self.out_features - end, 0))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LoRALinear":
        """Moves adapters and scales to another device without changing their dtype, even with precision=bf16-true."""

        def keeping_dtype(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        for child in (self.lora_A, self.lora_B, self.nf4):
            child._apply(keeping_dtype)
        super()._apply(fn, recurse=False)
        return self


def adapted(model: GPT) -> Iterator[tuple[str, LoRALinear]]:
    """Returns each LoRA layer of a model with its module name."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, LoRALinear))


def adapter_values(model: GPT) -> dict[str, Any]:
    """Returns the adapter settings that change what a model computes without changing the shapes of its weights.

    lora_dropout is omitted, because it affects only training. Returns an empty dict for a model without adapters.
    """
    settings = next((linear.settings for _, linear in adapted(model)), None)
    names = ("lora_alpha", "use_rslora", "quantization") if settings is not None else ()
    return {name: getattr(settings, name) for name in names}


def init_adapters(model: GPT) -> None:
    """Draws each A like nn.Linear's weight and sets each B to 0."""
    for path, linear in adapted(model):
        for name in linear.rows:
            uniform = partial(nn.init.uniform_, a=-(linear.in_features**-0.5), b=linear.in_features**-0.5)
            draw(linear.lora_A[name], uniform, model.seed, f"{path}.lora_A.{name}")
            nn.init.zeros_(linear.lora_B[name])


def adapters_of(model: GPT) -> Adapters | None:
    """Returns the sizes of a model's adapters for the memory planner, or None for a model without adapters.

    If a size differs between blocks, such as Adapters.ffn_rank, the result has the maximum over all blocks.
    """
    layers = list(adapted(model))
    if not layers:
        return None
    blocks: dict[tuple[str, str], list[LoRALinear]] = {}  # {(block, "attention" or "ffn"): LoRA layers}
    for path, linear in layers:
        _, block, part, _ = path.split(".")
        blocks.setdefault((block, part), []).append(linear)

    def largest(wanted: str, size: Callable[[LoRALinear], int]) -> int:
        return max((sum(map(size, linears)) for (_, part), linears in blocks.items() if part == wanted), default=0)

    return Adapters(
        sizes=tuple(p.numel() for _, linear in layers for p in (*linear.lora_A.values(), *linear.lora_B.values())),
        attention_rank=largest("attention", _rank),
        ffn_rank=largest("ffn", _rank),
        attention_joined=largest("attention", _joined_size),
        ffn_joined=largest("ffn", _joined_size),
        quantized=any(linear.nf4 for _, linear in layers),
        has_dropout=any(linear.settings.lora_dropout > 0 for _, linear in layers),
        adapted=tuple(
            name for name in LINEARS if any(linear.lora_A and path.endswith(f".{name}") for path, linear in layers)
        ),
    )


def _rank(linear: LoRALinear) -> int:
    """Returns the sum of the ranks of a layer's adapters."""
    return len(linear.lora_A) * linear.settings.r


def _joined_size(linear: LoRALinear) -> int:
    """Returns the number of elements of a layer's joined matrices A and B."""
    return _rank(linear) * (linear.in_features + linear.out_features)


def adapter_tensors(model: GPT) -> dict[str, nn.Parameter]:
    """Returns the matrices A and B of every adapter. The keys are peft's tensor names."""
    return {
        f"{PREFIX}{name}.{kind}.weight": matrices[part]
        for _, linear in adapted(model)
        for part, name in linear.names.items()
        for kind, matrices in (("lora_A", linear.lora_A), ("lora_B", linear.lora_B))
    }


def merge(model: GPT) -> GPT:
    """Replaces each LoRA layer of the model with an nn.Linear, in place.

    Each new weight is the sum of the dequantized weight and its adapters.
    """
    for path, linear in list(adapted(model)):
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, linear.merged())
    model.choose_ffns()
    return model


def save_adapter(model: GPT, folder: str | Path, base: str | None) -> None:
    """Saves the adapters in the format of peft.PeftModel.from_pretrained. base: the base model's folder or hub name.

    adapter_config.json is written last, so an unfinished folder does not contain adapter_config.json.
    Raises: ValueError if the model has no adapters, or the folder already contains an adapter.
    """
    folder = Path(folder)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in adapter_tensors(model).items()}
    if not tensors:
        raise ValueError(
            "an adapter can only be exported from a run with adapter=lora or adapter=qlora; got adapter=none"
        )
    if (folder / ADAPTER_CONFIG).exists() or (folder / ADAPTER_WEIGHTS).exists():
        raise ValueError(f"an export needs a new folder or one without an adapter; {folder} contains an adapter")
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / ADAPTER_WEIGHTS)
    settings = next(linear.settings for _, linear in adapted(model))
    targets = settings.target_modules
    if model.origin is not None and model.origin.has_images:
        # full names, because the last part of an adapted module's name can also occur in the image encoder
        targets = sorted(name for _, linear in adapted(model) for name in linear.names.values())
    elif targets == ALL_LINEAR:
        targets = sorted({part for _, linear in adapted(model) for part in linear.names})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.r,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "use_rslora": settings.use_rslora,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
        "fan_in_fan_out": any(linear.transposed for _, linear in adapted(model)),
    }
    write_json(folder / ADAPTER_CONFIG, config)


def load_adapter(model: GPT, folder: Path) -> None:
    """Loads a peft adapter into a model whose adapters have the same settings.

    Raises: ValueError if a tensor is missing, has a wrong shape, or belongs to a module without an adapter.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        stored = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    places = adapter_tensors(model)
    if model.origin is not None and model.origin.has_images:  # earlier versions saved names without `language_model.`
        stored = {
            re.sub(r"^(base_model\.model\.model\.)(?=layers\.)", r"\1language_model.", n): x for n, x in stored.items()
        }
    if stored.keys() != places.keys():
        missing, unknown = sorted(places.keys() - stored.keys()), sorted(stored.keys() - places.keys())
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} belongs to no adapter of this model"
        raise ValueError(f"{path}: tensor {what}")
    for name, tensor in stored.items():
        if tensor.shape != places[name].shape:
            wanted, found = tuple(places[name].shape), tuple(tensor.shape)
            raise ValueError(f"{path}: tensor {name} must be {wanted} in this model; got {found}")
        own, rows = own_rows(places[name])
        with torch.no_grad():
            own.copy_(tensor[rows])


# In adapter_config.json, fields in `READ` are used, fields in `IRRELEVANT` can have any value, and fields in `REQUIRED`
# must have one of the listed values. A field outside `READ`, `IRRELEVANT` and `REQUIRED` must be unset.
READ = {"r", "lora_alpha", "use_rslora", "target_modules"}
IRRELEVANT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "fan_in_fan_out", "inference_mode",
    "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config",
}  # fmt: skip
REQUIRED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change frozen weights
}


def _settings(folder: Path, own: LoRA) -> LoRA:
    """Returns a copy of `own` that takes the fields listed in `READ` from adapter_config.json in `folder`.

    Raises: ValueError if adapter_config.json is missing, lacks a field, or has an unsupported field or value.
    """
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        raise ValueError(f"adapter.path must be a folder with {ADAPTER_CONFIG}; got {folder}")
    config = read_json(path)
    for name, supported in REQUIRED.items():
        if config.get(name, supported[0]) not in supported:
            raise ValueError(f"{path}: {name} must be {json.dumps(supported[0])}; got {json.dumps(config[name])}")
    known = READ | IRRELEVANT | REQUIRED.keys()
    unknown = sorted(name for name, value in config.items() if name not in known and value)
    if unknown:
        raise ValueError(f"{path}: not supported: {', '.join(f'{n}={json.dumps(config[n])}' for n in unknown)}")
    missing = sorted(READ - {"use_rslora"} - config.keys())
    if missing:
        raise ValueError(f"{path} must have {', '.join(missing)}; it does not")
    alpha, targets = config["lora_alpha"], config["target_modules"]
    if not isinstance(alpha, int | float):
        raise ValueError(f"{path}: lora_alpha must be a number; got {json.dumps(alpha)}")
    if not isinstance(targets, str | list):
        raise ValueError(f"{path}: target_modules must be a text or a list; got {json.dumps(targets)}")
    return replace(own, **{name: config[name] for name in READ & config.keys()})


def _keep_loaded_base(model: GPT, weights: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
    """Makes later checkpoints hold all weights if load_state_dict changes the weights of the base model.

    torch calls this function before load_state_dict copies `weights`. The keys of `weights` start with `prefix`.
    """
    for name, own in model.named_parameters():
        loaded = weights.get(prefix + name) if name in model.base_weights else None
        if loaded is None or isinstance(own, DTensor):  # when a sharded run resumes, it never loads another base model
            continue
        if own.is_meta or not torch.equal(own, loaded.to(own)):
            model.base_weights = frozenset()
            return


def _linears(model: GPT) -> dict[str, dict[str, Place]]:
    """Returns {module name: {name of a checkpoint's matrix: the rows of the module's weight that hold this matrix}}.

    The result contains all linear layers of the blocks. A linear layer can join several matrices of a checkpoint.
    """
    modules = dict(model.named_modules())
    linears: dict[str, dict[str, Place]] = {}
    for name, place in tensor_places(model).items():
        path, _, kind = place.parameter.rpartition(".")
        if kind == "weight" and path.startswith("blocks.") and isinstance(modules[path], nn.Linear):
            linears.setdefault(path, {})[name.removesuffix(".weight")] = place
    return linears


def _known_names(name: str) -> set[str]:
    """Returns `name`, and the name of the same module in adapters that earlier versions of fa_train wrote.

    The two names differ only for Gemma 3 models with images.
    """
    return {name, name.replace("model.language_model.", "model.", 1)}
