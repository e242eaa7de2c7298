"""Reads the tensors of a Hugging Face checkpoint one by one into a GPT, and writes the weights of a GPT.

If the GPT is sharded, each rank reads only its own rows of each tensor.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fa_train.models.gpt import GPT
from fa_train.models.hf.families import Layout
from fa_train.models.shards import own_rows, whole

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# the dtypes of weights by their names in safetensors' headers
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint's tensor in the model: a range of rows of a parameter."""

    parameter: str
    rows: slice
    transposed: bool


def places_of(model: GPT, layout: Layout) -> dict[str, Place]:
    """Returns {name of a checkpoint tensor: the rows of the model's parameter that hold this tensor}.

    The result has no entry for a tied head, because a tied head shares the embedding's weight.
    Raises: ValueError if the model has a parameter that the checkpoint has no place for, such as that of an adapter.
    """
    parameters = dict(model.named_parameters())
    modules: list[tuple[str, Sequence[str], bool]] = [(ours, (theirs,), False) for ours, theirs in layout.outer.items()]
    for i in range(model.config.n_layers):
        for ours, theirs in layout.inner.items():
            linear = ours.partition(".")[0] in ("attention", "ffn") and not ours.endswith("norm")
            names = [f"{layout.layers.format(i)}.{name}" for name in theirs]
            modules.append((f"blocks.{i}.{ours}", names, layout.transposed and linear))
    places = {}
    for ours, theirs, transposed in modules:
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" not in parameters:
                continue
            rows = parameters.pop(f"{ours}.{kind}").shape[0]
            start = 0
            for name, count in zip(theirs, _row_counts(model, ours, rows, len(theirs)), strict=True):
                is_matrix = kind == "weight" and transposed
                places[f"{name}.{kind}"] = Place(f"{ours}.{kind}", slice(start, start + count), is_matrix)
                start += count
    if parameters:
        raise ValueError(
            "the model must have only the weights of its family, and adapters must be merged (fa_train.models.lora."
            f"merge); got {', '.join(list(parameters)[:3])}{' and others' if len(parameters) > 3 else ''}"
        )
    return places


def _row_counts(model: GPT, module: str, rows: int, parts: int) -> list[int]:
    """Returns the number of rows of each part of a joined matrix, such as queries, keys and values."""
    if parts == 1:
        return [rows]
    if module.endswith("qkv"):
        config = model.config
        return [config.query_dim, config.kv_dim, config.kv_dim]
    return [rows // parts] * parts


@dataclass(frozen=True)
class Stored:
    """A checked tensor of a checkpoint: its file, its name in the file, its place in the model and its dtype.

    is_copy: whether the tensor is a tied head, which must equal the token embedding.
    """

    path: Path
    name: str
    place: Place
    dtype: torch.dtype
    is_copy: bool = False


def stored_tensors(model: GPT, places: Mapping[str, Place], folder: Path, layout: Layout) -> list[Stored]:
    """Finds and checks the tensors of a checkpoint. The result is in the order of the files, with a tied head last.

    The function reads only the headers of the files.
    places: the result of `places_of`.
    Raises: ValueError if a tensor is missing, unknown, stored twice, or has a wrong shape or dtype.
    """
    known = dict(places)
    if model.config.tied:
        known[f"{layout.outer['head']}.weight"] = places[f"{layout.outer['token_embedding']}.weight"]
    missing, found = set(places), []
    for path, names in _shards(folder):
        with _opened(path) as file:
            for name in _stored_names(path, file, names):
                place_name = _place_name(name, known, layout)
                if place_name is None:
                    if _is_unused(name):
                        continue
                    raise ValueError(f"{path}: tensor {name} is not part of the model that config.json describes")
                if place_name in places and place_name not in missing:
                    raise ValueError(f"{path}: tensor {name} must be the only {place_name}; got two tensors for it")
                place = known[place_name]
                shape = model.get_parameter(place.parameter).shape
                dtype = _require_fit(file.get_slice(name), place, shape, f"{path}: tensor {name}")
                found.append(Stored(path, name, place, dtype, is_copy=place_name not in places))
                missing.discard(place_name)
    if missing:
        listed = ", ".join(sorted(missing)[:3]) + (", …" if len(missing) > 3 else "")
        raise ValueError(f"{folder} must hold all tensors of the model; {len(missing)} missing: {listed}")
    return sorted(found, key=lambda stored: stored.is_copy)


def stored_dtypes(tensors: Iterable[Stored]) -> dict[str, torch.dtype]:
    """Returns the stored dtype of each parameter.

    Raises: ValueError if weights other than those of norms have different dtypes. Products of different dtypes fail
    without autocast, and a joined matrix, such as queries and keys, has only one dtype.
    """
    own = [stored for stored in tensors if not stored.is_copy]
    first, *others = [stored for stored in own if "norm." not in stored.place.parameter]
    for stored in others:
        if stored.dtype != first.dtype:
            raise ValueError(
                f"{stored.path}: tensor {stored.name} must be {first.dtype} like {first.name}; got {stored.dtype}. Set "
                "dtype to convert them"
            )
    return {stored.place.parameter: stored.dtype for stored in own}


def read_weights(model: GPT, tensors: Sequence[Stored]) -> None:
    """Copies the tensors of a checkpoint into the model, one at a time, in the dtypes of the model's parameters.

    If the model is sharded, each rank reads only its rows.
    Raises: ValueError if the head of a tied model differs from the token embedding.
    """
    for path, group in groupby(tensors, key=lambda stored: stored.path):
        with _opened(path) as file:
            for stored in group:
                own, rows = own_rows(model.get_parameter(stored.place.parameter))
                first, last = max(rows.start, stored.place.rows.start), min(rows.stop, stored.place.rows.stop)
                if first < last:
                    wanted = slice(first - stored.place.rows.start, last - stored.place.rows.start)
                    part = own.detach()[first - rows.start : last - rows.start]
                    if stored.is_copy:
                        _require_equal(_read(file, stored, wanted), part, stored)
                    else:
                        part.copy_(_read(file, stored, wanted))


def _require_equal(head: Tensor, embedding: Tensor, stored: Stored) -> None:
    """Raises: ValueError if rows of a tied head differ from the rows of the token embedding.

    If the head and the embedding have different dtypes, one of them may be a rounded copy of the other.
    """
    expected = embedding.cpu()
    if not torch.equal(head.to(expected.dtype), expected) and not torch.equal(head, expected.to(head.dtype)):
        raise ValueError(
            f"{stored.path}: tensor {stored.name} must equal the token embedding, because tie_word_embeddings is true "
            "or missing in config.json; got another tensor. To keep it, set tie_word_embeddings to false in config.json"
        )


def _read(file: Any, stored: Stored, rows: slice) -> Tensor:
    """Reads rows of a matrix. If the checkpoint stores the matrix transposed, reads columns of the stored tensor."""
    header = file.get_slice(stored.name)
    tensor: Tensor = header[:, rows].T if stored.place.transposed else header[rows]
    return tensor


def _require_fit(header: Any, place: Place, shape: Sequence[int], what: str) -> torch.dtype:
    """Checks that a tensor fits its place in a parameter of the given shape. Returns the tensor's dtype.

    Raises: ValueError if the shape or the dtype is wrong.
    """
    stored_dtype = header.get_dtype()
    if stored_dtype not in STORED_DTYPES:
        raise ValueError(
            f"{what} must be float32, bfloat16 or float16; got {stored_dtype}. Quantized checkpoints are not supported"
        )
    wanted = (place.rows.stop - place.rows.start, *shape[1:])
    wanted = wanted[::-1] if place.transposed else wanted  # the shape that the checkpoint stores
    if tuple(header.get_shape()) != wanted:
        raise ValueError(f"{what} must be {wanted} according to config.json; got {tuple(header.get_shape())}")
    return STORED_DTYPES[stored_dtype]


def has_weights(folder: Path) -> bool:
    """Returns whether all weight files of a checkpoint are present."""
    try:
        weight_files(folder)
    except ValueError:
        return False
    return True


def weight_files(folder: Path) -> list[Path]:
    """Returns the paths of a checkpoint's weight files."""
    return [path for path, _ in _shards(folder)]


def _shards(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Yields each weight file with the names of its tensors, or with None if the checkpoint has no index."""
    if (folder / WEIGHTS).exists():
        yield folder / WEIGHTS, None
        return
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {', '.join(others)}, which is not read" if others else "neither"
        raise ValueError(f"{folder} must hold {WEIGHTS} or {INDEX}; found {found}")
    by_file: dict[str, list[str]] = {}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} must name the file of each tensor in weight_map; got {weight_map}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{folder / INDEX} must name files in its folder; got {file!r} for the tensor {name}")
        by_file.setdefault(file, []).append(name)
    for file in sorted(by_file):
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing; {INDEX} names it")
        yield folder / file, by_file[file]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a weight file. Raises: ValueError if the file is damaged."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _stored_names(path: Path, file: Any, names: list[str] | None) -> list[str]:
    """Returns `names`, or the names of all tensors in the file if `names` is None.

    Raises: ValueError if the file lacks a tensor in `names`.
    """
    stored = set(file.keys())
    absent = sorted(set(names or ()) - stored)
    if absent:
        raise ValueError(f"{path} must hold {absent[0]}, as {INDEX} says; it holds {len(stored)} other tensors")
    return names or sorted(stored)


def _place_name(name: str, places: Mapping[str, Place], layout: Layout) -> str | None:
    """Returns the key in `places` that belongs to a tensor's name, or None if `places` has no key for the name.

    In a checkpoint without a head, such as OpenAI's GPT-2, tensor names lack their first part, such as `transformer.`.
    If the model also reads images, each name has the additional part language_model.
    """
    prefixed = f"{layout.layers.partition('.')[0]}.{name}"
    candidates = name, prefixed, name.replace("language_model.", "", 1)
    return next((candidate for candidate in candidates if candidate in places), None)


def _is_unused(name: str) -> bool:
    """Returns whether a tensor can be ignored: an old buffer, or a part of an image encoder."""
    buffers = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    images = ("vision_tower.", "multi_modal_projector.")
    return name.endswith(buffers) or name.removeprefix("model.").startswith(images)


def require_finite(model: GPT, dtype: torch.dtype | None) -> None:
    """Checks the weights in the dtype that will be written. For example, 70000 is infinite in float16.

    dtype: as in `write_weights`.
    Raises: ValueError if a weight is NaN or infinite in this dtype.
    """
    for name, parameter in model.named_parameters():
        # the minimum and the maximum, which are NaN if any element is NaN
        extremes = torch.stack(whole(parameter.detach()).aminmax())
        written = extremes.to(dtype or extremes.dtype)
        if not written.isfinite().all():
            low, high = extremes.tolist()
            advice = ". Choose another dtype, such as float32" if extremes.isfinite().all() else ""
            raise ValueError(f"{name} must be finite in {written.dtype}; got values from {low:g} to {high:g}{advice}")


def write_weights(model: GPT, folder: Path, layout: Layout, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Writes the weights in files of at most shard_bytes bytes, and an index if there is more than one file.

    A tensor that is larger than shard_bytes is written to a separate file.
    """
    places = places_of(model, layout)
    parameters = dict(model.named_parameters())

    def size(place: Place) -> int:
        parameter = parameters[place.parameter]
        share = (place.rows.stop - place.rows.start) * parameter.numel() // parameter.shape[0]
        return share * (dtype or parameter.dtype).itemsize

    split = split_state_dict_into_shards_factory(
        places, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        taken = {name: _take(parameters[places[name].parameter], places[name], dtype) for name in names}
        save_tensors(taken, folder / file)
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a .safetensors file. The file gets its final name only when it is complete.

    Raises: ValueError if the file cannot be written. An unfinished file is removed.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file(tensors, str(partial), metadata={"format": "pt"})
    except SafetensorError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{path} could not be written: {error}") from error
    os.replace(partial, path)


def _take(parameter: Tensor, place: Place, dtype: torch.dtype | None) -> Tensor:
    """Converts rows of a parameter to a tensor of the checkpoint. `_take` is the inverse of `_read`."""
    rows = whole(parameter.detach())[place.rows].to(dtype or parameter.dtype).cpu()
    return (rows.T if place.transposed else rows).contiguous()


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} must hold {path.name}; it does not") from error
    except OSError as error:
        raise ValueError(f"{path} must be a readable file; {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object; got {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
