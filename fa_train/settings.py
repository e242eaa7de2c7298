"""The schema of the config: the known keys, and the values that each key accepts.

`Root` lists the keys at the root. A node is a mapping whose `_target_` names a function or class. The keys of a node
are the parameters of its target. The type hints of the parameters determine the accepted values. For functions and
classes of other packages, `BOUNDS` replaces some type hints by narrower ones.

For example, the function warmup_cosine has a parameter with the type hint `warmup_steps: NonNegativeInt`:

    scheduler:
      _target_: fa_train.optim.schedule.warmup_cosine
      warmup_steps: -5

`entries` yields ("scheduler.warmup_steps", -5, NonNegativeInt). The value does not fit the hint, so `check` raises
"scheduler.warmup_steps must be an integer of at least 0; got -5".
"""

import difflib
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypedDict,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from fa_train.bounds import (
    INFINITY,
    NonEmptyText,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Precision,
    Seed,
)
from fa_train.config_options import COPIED_NODES, OTHER_NAMES, options_with

STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
MISSING = "???"  # marks a value in YAML that the user must set


# metrics that fa_train.callbacks.monitor.Monitor logs and a sweeper can optimize
Optimized = Literal[
    "train/loss", "val/loss", "train/grad_norm", "perf/tokens_per_s", "perf/step_ms", "perf/mfu", "perf/peak_gib",
    "perf/reserved_gib",
]  # fmt: skip


class Node:
    """A mapping in the config that has the key `_target_`."""


class Root(TypedDict):
    """The keys at the root of the config, in the order in which they are checked.

    Some nodes of the config contain a copy of another node. For example, trainer.strategy is a copy of `strategy`. The
    node `strategy` is checked before trainer.strategy, so an error about a wrong value names the key that the user has
    set.
    """

    seq_len: PositiveInt
    max_steps: PositiveInt
    epochs: PositiveFloat | None
    batch_size: PositiveInt
    seed: Seed
    ckpt_path: str | None
    export: bool
    run_name: Any  # checked by run_folder
    optimized_metric: Optimized | None
    choices: Mapping[str, str | None]  # the chosen option of each config group
    learning_rate: NotRequired[Mapping[str, Any]]  # for experiment=finetune: {adapter: value}
    commit: NotRequired[str]  # used by scripts/bench/profile_step.py
    attention: Node
    memory: Node
    adapter: Node
    optimizer: Node
    scheduler: Node
    strategy: Node
    logger: Node | Sequence[Node] | bool | None
    data: Node
    model: Node
    sample: NotRequired[Node]  # used by experiment=finetune
    sweep_job: NotRequired[Node]  # used by experiment=ablate_attention
    callbacks: Mapping[str, Node | None]
    trainer: Node
    lit_gpt: Node


# The config groups that must have exactly one option. If a user chose two options of one group,
# Hydra would merge the two options into one node.
ONE_OPTION = (
    "attention", "memory", "adapter", "optimizer", "scheduler", "strategy", "logger", "data", "model", "trainer",
)  # fmt: skip
PARTIAL = ("attention", "adapter", "optimizer", "scheduler")  # nodes whose missing arguments the program passes later
# keys that a config may lack, because train.py itself passes their values when it instantiates the nodes
GIVEN_LATER = {"model.vocab_size", "lit_gpt.model"}
# {class of another package: {parameter: type hint}}
BOUNDS: dict[str, dict[str, Any]] = {
    "lightning.pytorch.trainer.trainer.Trainer": {
        "accelerator": Literal["auto", "cpu", "gpu", "cuda"],
        "devices": PositiveInt | Annotated[Sequence[NonNegativeInt], Len(1)] | Literal["auto", -1],
        "num_nodes": PositiveInt,
        "precision": Precision,
        "max_steps": PositiveInt,
        "num_sanity_val_steps": Annotated[int, Ge(-1)],
        "log_every_n_steps": PositiveInt,
        "val_check_interval": PositiveInt,
        "gradient_clip_val": NonNegativeFloat | None,
        "gradient_clip_algorithm": Literal["norm"] | None,
    },
    "lightning.pytorch.loggers.csv_logs.CSVLogger": {"flush_logs_every_n_steps": PositiveInt},
    "lightning.pytorch.strategies.ddp.DDPStrategy": {"gradient_as_bucket_view": bool},
    "wandb.sdk.wandb_settings.Settings": {"init_timeout": NonNegativeFloat},
}
# {class: the function or class that gets the **kwargs of the class's constructor}
PASSED_ON = {
    "fa_train.models.gpt.GPT": "fa_train.models.config.ModelConfig",
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "lightning.pytorch.loggers.wandb.WandbLogger": "wandb.init",
}
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    NonEmptyText: "a text that is not empty",
    NoneType: "null",
    None: "null",
    PositiveInt: "a positive integer",
    PositiveFloat: "a positive number",
}
HYDRA_KEYS: dict[str, Any] = {
    "_target_": str,
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_args_": Sequence[Any],
}


@dataclass(frozen=True)
class Keys:
    """The keys that a node accepts, with their type hints.

    required: the keys that must be given. others: whether any other key is accepted as well.
    """

    hints: Mapping[str, Any]
    required: frozenset[str]
    others: bool = False


class UnknownKeyError(ValueError):
    """Raised if a config has a key that its node does not accept. key: the full key, such as scheduler.warmup_steps."""

    def __init__(self, key: str, known: Iterable[str]) -> None:
        super().__init__(unknown_key(key, known))
        self.key = key


def require_given(config: Mapping[str, Any]) -> None:
    """Checks that no value in a config is `???`. config: a config, which may contain unresolved interpolations.

    Raises: ValueError, which names all keys whose value is `???`.
    """
    missing = [key for key, value in leaves("", config) if value == MISSING]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given; got nothing")


def check(config: Mapping[str, Any], typed: Mapping[str, str] | None = None) -> None:
    """Checks the keys and values of a config without instantiating anything.

    config: a composed config as dicts and lists, without unresolved interpolations.
    typed: the overrides of the command line, {key: text}. An error message quotes numbers as the user typed them.
    Raises: ValueError, which names the first key that is unknown or has an invalid value.
    """
    typed = typed or {}
    try:
        for key, value, hint in entries(config):
            if not fits(value, hint) or (key in COPIED_NODES and isinstance(value, Mapping)):
                is_number = isinstance(value, int | float) and fits(str(value), hint)
                text = as_typed(value, typed.get(key, ""))
                quoting = f"""; quotes make it text: "{key}='{shown(text)}'\"""" if is_number else ""
                if isinstance(value, str) and fits(_parsed(value), hint):
                    quoting = ", which is text. Omit its quotes, or convert it with ${oc.decode:...}"
                original = COPIED_NODES.get(key)  # for example after ++model.loss.z_loss=1e-4
                copied = f". {key} is a copy of {original}. Set {original} instead" if original else ""
                raise ValueError(f"{key} must be {wanted(hint)}; got {shown(value)}{quoting}{copied}")
    except UnknownKeyError as error:
        options = config.get("choices", {})  # an override such as scheduler=mine chooses an option, and sets no key
        nodes = [key for key, text in typed.items() if options.get(key) != text]
        names = [(f"{error.key}.", f"{key}.") for key in nodes]  # an override can set a key in the unknown node
        if not typed or any(unknown.startswith(own) or own.startswith(unknown) for unknown, own in names):
            raise
        raise ValueError(f"{error}. A file of the config has set it; ~{error.key} removes it") from error
    run_folder(config["run_name"])


def entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields each key of a config with its value and its type hint.

    For a node, yields the keys inside the node, and not the key of the node itself.
    Raises: ValueError if a key is unknown or a required key is missing.
    """
    return _entries_of_node("", config, _keys_of_typed_dict(Root))


def _entries_of_node(node: str, values: Mapping[str, Any], keys: Keys) -> Iterator[tuple[str, Any, Any]]:
    """Yields the entries of one node. node: the key of the node, or an empty string for the root."""
    prefix = f"{node}." if node else ""
    for name in values:
        if name not in keys.hints and not keys.others:
            raise UnknownKeyError(prefix + name, keys.hints)
    for name, hint in keys.hints.items():
        key = prefix + name
        if name in values:
            yield from _entries_of_value(key, values[name], hint | None if key in GIVEN_LATER else hint)
        elif name in keys.required and key not in GIVEN_LATER:
            is_called = node in PARTIAL and values.get("_partial_") is not True
            partial = f". If the program passes {name} later, add _partial_: true to {node}" if is_called else ""
            raise ValueError(f"{key} must be {wanted(hint)}; got nothing{partial}")


def _entries_of_value(key: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, dict) and "_target_" in value:
        yield from _entries_of_node(key, value, _keys_of_target(key, value["_target_"], value.get("_partial_") is True))
    elif isinstance(value, list) and Sequence[Node] in get_args(hint):
        for number, item in enumerate(value):
            yield from _entries_of_value(f"{key}.{number}", item, Node)
    elif Node in (hint, *get_args(hint)):
        yield key, value, hint
    elif any(name.endswith("._target_") for name, _ in leaves("", value)):
        item_hint = get_args(hint)[-1] if get_origin(hint) in (Mapping, dict, Sequence, list) else Any
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries_of_value(f"{key}.{name}", item, item_hint)
    else:
        yield key, value, hint


def _keys_of_target(node: str, target: Any, partial: bool) -> Keys:
    """Returns the keys that a node accepts, from the parameters of its `_target_`.

    node: the node's key, for error messages.
    partial: whether the node has `_partial_: true`. The config may omit the positional parameters of a partial node,
    because they are passed later.
    """
    function = _resolved(node, target)
    if not callable(function):
        raise ValueError(f"{node}._target_ must name a function or a class; got {target}")
    parameters = parameters_of(function)
    if parameters is None:
        return Keys(HYDRA_KEYS, frozenset(), others=True)
    keys = _keys_of_parameters(parameters, partial)
    if keys.others and (other := PASSED_ON.get(_name(function))):
        # a config need not set the positional parameters of `other`, because `function` passes their values to `other`
        passed_on = _keys_of_parameters(parameters_of(_resolved(node, other)) or {}, partial=True)
        keys = Keys({**passed_on.hints, **keys.hints}, passed_on.required | keys.required)
    bounds: dict[str, Any] = {}
    for name in reversed(classes_of(node, target)):
        bounds |= BOUNDS.get(name, {})
    return Keys({**HYDRA_KEYS, **keys.hints, **bounds}, keys.required, keys.others)


def _keys_of_parameters(parameters: Mapping[str, inspect.Parameter], partial: bool) -> Keys:
    hints: dict[str, Any] = {}
    required: set[str] = set()
    others = False
    for name, parameter in parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            if get_origin(parameter.annotation) is Unpack:
                packed = _keys_of_typed_dict(get_args(parameter.annotation)[0])
                hints |= packed.hints
                required |= packed.required
            else:
                others = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            hints[name] = parameter.annotation
            if parameter.default is parameter.empty and not (partial and parameter.kind != parameter.KEYWORD_ONLY):
                required.add(name)
    hints = {name: Any if hint is inspect.Parameter.empty else as_list(hint) for name, hint in hints.items()}
    return Keys(hints, frozenset(required), others)


def _keys_of_typed_dict(definition: Any) -> Keys:
    hints = get_type_hints(definition, include_extras=True)
    plain = {name: get_args(h)[0] if get_origin(h) in (Required, NotRequired) else h for name, h in hints.items()}
    return Keys(plain, definition.__required_keys__)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Returns a function's parameters, with evaluated type hints if possible. Returns None for an unknown signature."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except (NameError, AttributeError, TypeError):  # `inspect` could not evaluate a type hint that is a string
        return inspect.signature(function).parameters
    except ValueError:  # the signature of a type that is written in C, such as str, is unknown
        return None


def as_list(hint: Any) -> Any:
    """Returns a type hint with tuples replaced by sequences and without `| Path`, because YAML has neither."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Union or origin is UnionType:
        return Union[tuple(as_list(argument) for argument in arguments if argument is not Path)]  # noqa: UP007
    if origin is not tuple or not arguments:
        return hint
    if arguments[-1] is ...:
        return Sequence[arguments[0]]  # type: ignore[valid-type]
    item: Any = Union[arguments]  # noqa: UP007
    return Annotated[Sequence[item], Len(len(arguments), len(arguments))]


def _resolved(node: str, target: Any) -> Any:
    """Returns what `target` names. Raises: ValueError that names the node and the reason if the import fails."""
    hidden = _hidden_error(target)  # called before resolve_name, because a second import can fail for another reason
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{node}._target_ must be a name that can be imported; got {shown(target)}: {hidden or error}"
        ) from error


def _hidden_error(target: Any) -> ImportError | None:
    """Returns the ImportError of an import inside the target's module, or None if there is no such error.

    For example, the target's module may import a package that is not installed. If an import fails in a module that is
    inside a package, pkgutil.resolve_name hides the ImportError and raises an AttributeError.
    """
    try:
        importlib.import_module(str(target).rpartition(".")[0])
    except ModuleNotFoundError as error:
        # true if the missing module is the target's module, or a package that contains the target's module
        is_own = error.name is None or f"{target}.".startswith(f"{error.name}.")
        return None if is_own else error
    except ImportError as error:
        return error
    except (TypeError, ValueError):  # the target is not a name with dots, such as package.module.name
        return None
    return None


def classes_of(node: str, target: Any) -> list[str]:
    """Returns the full names of the class that `target` names and of its base classes, or [] if it names no class.

    node: the key of the node with the `_target_`, for error messages.
    """
    function = _resolved(node, target)
    return [_name(base) for base in inspect.getmro(function)] if inspect.isclass(function) else []


def as_typed(value: Any, text: str) -> Any:
    """Returns `text` if Hydra reads it as the number `value`, and otherwise returns `value`.

    For example, Hydra reads run_name=2026_11_29 as 20261129, and run_name=3e-4 as 0.0003.
    """
    try:
        return text if float(text) == value else value
    except ValueError:
        return value


def _parsed(text: str) -> Any:
    """Returns the value of `text` if it is JSON, such as a number or a Boolean. Otherwise, returns `text`."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def run_folder(run_name: object) -> str:
    """Returns the run's folder, relative to runs/. Raises: ValueError if run_name is empty or leads out of runs/."""
    name = str(run_name) if isinstance(run_name, int) and not isinstance(run_name, bool) else run_name
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not "".join(parts).strip() or ".." in parts or parts[0].startswith("/") or "\0" in parts[-1]:
        raise ValueError(f"run_name must be the name of a folder below runs/; got {shown(run_name)}")
    return str(name)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Returns the error message for an unknown key.

    If the key exists in some options of its config group, the message names these options. If no option has the key,
    the message suggests another key. The suggestion comes from OTHER_NAMES, or is the most similar key in `known`. If
    there is no similar key, the message lists the keys of the node.
    """
    if found := options_with(key):
        return f"unknown key {key}; it is a key of {', '.join(found)}"
    if key in OTHER_NAMES:
        return f"unknown key {key}; did you mean {OTHER_NAMES[key]}?"
    node, _, name = key.rpartition(".")
    names = [other for other in known if not other.startswith("_")]
    if near := difflib.get_close_matches(name, names, n=1):
        return f"unknown key {key}; did you mean {node}{'.' if node else ''}{near[0]}?"
    return f"unknown key {key}; {node} has the keys {', '.join(names)}" if node and names else f"unknown key {key}"


def leaves(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Yields (key, value) for each scalar in nested dicts and lists. `prefix` is the key of `value`."""
    if not isinstance(value, dict | list):
        yield prefix, value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(f"{prefix}.{name}" if prefix else str(name), item)


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value that is not a node matches a type hint."""
    try:
        _adapter(hint).validate_python([value])
    except ValidationError:
        return False
    except (PydanticUserError, SchemaError):  # accept any value if pydantic cannot check the hint
        return True
    return True


def _adapter(hint: Any) -> TypeAdapter[list[Any]]:
    """Returns pydantic's validator for a list whose items match `hint`."""
    try:
        hash(hint)
    except TypeError:  # the metadata of an Annotated hint may have no hash
        return _new_adapter(hint)
    return _cached_adapter(hint)


def _new_adapter(hint: Any) -> TypeAdapter[list[Any]]:
    return TypeAdapter(list[hint], config=STRICT)


_cached_adapter = cache(_new_adapter)  # building validators takes most of the time of a check


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def shown(value: Any) -> str:
    """Returns a value on one line, in the notation of YAML."""
    return value if isinstance(value, str) and value.strip() else json.dumps(value, default=str)


def wanted(hint: Any) -> str:
    """Describes a type hint in words, for error messages."""
    if hint in WORDS:
        return WORDS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        noun, comma, items = wanted(arguments[0]).partition(", ")
        if Lt(INFINITY) in arguments:
            noun = noun.replace("a ", "a finite ")
        bounds = [_bound_in_words(bound) for bound in arguments[1:] if bound != Lt(INFINITY)]
        return f"{noun} of {' and '.join(bounds)}{comma}{items}"
    if origin in (Union, UnionType):
        *first, last = sorted(arguments, key=lambda argument: argument is NoneType)
        words = ", ".join(map(wanted, first))
        return f"{words}{',' * words.endswith(' or null')} or {wanted(last)}"
    if origin is Literal:
        values = ", ".join(map(shown, arguments))
        return f"one of {values}" if len(arguments) > 1 else values
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "a mapping" if arguments[1] is Any else f"a mapping, each value {wanted(arguments[1])}"
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return f"a list, each {wanted(arguments[0])}"
    return "a node with a _target_"


def _bound_in_words(bound: Any) -> str:
    match bound:
        case Ge(ge=limit):
            return f"at least {limit}"
        case Gt(gt=limit):
            return f"more than {limit}"
        case Le(le=limit):
            return f"at most {limit}"
        case Lt(lt=limit):
            return f"less than {limit}"
        case Len(min_length=least, max_length=most):
            return f"{least} items" if least == most else f"at least {least} item{'s' * (least > 1)}"
    return str(bound)
