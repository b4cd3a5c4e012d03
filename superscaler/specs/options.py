"""Options in text: `key=value,...` against the defaults of a size, or against the signature of a function."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from superscaler.errors import InputError, brief, divisors, unknown

Options = Mapping[str, Any]

DEVICES = ("cpu", "meta")
# Optimizers of torch whose update of an element needs the whole matrix.
WHOLE = ("Muon",)
# the name on the command line -> the name in torch; the others work element by element
OPTIMIZERS = {
    name.lower(): name
    for name in (
        "AdamW", "Adam", "SGD", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", *WHOLE
    )
}  # fmt: skip
# The option of a parameter group that names its optimizer, where a step has several.
CLASS = "class"
# Options that a plan chooses, or that no schedule changes.
CHOSEN = (CLASS, "params", "fused", "foreach", "capturable", "differentiable")
# What torch's schedules keep in a parameter group, from which one that is made after a resume goes on.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
# Options that an optimizer takes from its own arguments, whatever a parameter group has: Adagrad's first states.
CONSTRUCTED = ("initial_accumulator_value",)
# 16-bit dtypes of autocast and of weights.
HALVES = {"bf16": "bfloat16", "fp16": "float16"}
# The precision of a module as it is.
FULL = "fp32"
# Other names of options.
ALIASES = {"vocabulary": "vocab", "intermediate": "mlp"}
# Options of every named model, beside its own.
_COMMON = {"seed": 0, "device": "cpu"}
# Integers that may be 0. The others are sizes, at least 1.
_FROM_ZERO = ("seed", "head")
# Each layer is a module: more would take minutes to build.
_MOST_LAYERS = 10_000
_TYPES = {
    "int": "a whole number, as 4",
    "float": "a number, as 0.1",
    "bool": "true or false",
    "str": "text",
}


def read_pairs(spec: str, text: str) -> dict[str, str]:
    """Return the `key=value` pairs of a text. Raises InputError for a key without a value, or given twice.

    >>> read_pairs("mlp:layers=2, hidden=8", "layers=2, hidden=8")
    {'layers': '2', 'hidden': '8'}
    """
    found: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise InputError(f"'{spec}': the key '{key}' has no value; write {key}=VALUE.")
        if key in found:
            raise InputError(f"'{spec}': the key '{key}' is given twice, {found[key]} and {value}; give it once.")
        found[key] = value
    return found


def with_key(spec: str, key: str, value: str, is_replaced: bool = False) -> str:
    """Return the spec of a model of the library with a key, which stays as it is unless `is_replaced`; one of a file.

    >>> with_key("gpt2:size=tiny", "batch", "4"), with_key("gpt2:batch=8,seq=4", "batch", "4", is_replaced=True)
    ('gpt2:size=tiny,batch=4', 'gpt2:batch=4,seq=4')
    """
    name, _, keys = spec.partition(":")
    if name.endswith(".py"):
        return spec
    pairs = [pair.strip() for pair in keys.split(",") if pair.strip()]
    there = [pair for pair in pairs if pair.partition("=")[0].strip() == key]
    if there and is_replaced:
        pairs = [f"{key}={value}" if pair in there else pair for pair in pairs]
    return f"{name}:{','.join(pairs if there else [*pairs, f'{key}={value}'])}"


def read_value(spec: str, key: str, text: str, annotation: Any) -> Any:
    """Return the value of a key as its expected type; a type without a form in text is guessed from the text.

    Raises InputError that names the text and the type.
    """
    # Imported late: it is slow to import, and every command has options.
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    name = str(getattr(annotation, "__name__", annotation))
    words = re.findall(r"\w+", name)
    if "None" in words and text.lower() == "none":
        return None
    try:
        return TypeAdapter(annotation).validate_strings(text)
    except ValidationError:
        kinds = " or ".join(_TYPES[word] for word in words if word in _TYPES) or name
        raise InputError(f"'{brief(spec)}': {key} is '{brief(text)}', but it must be {kinds}.") from None
    except PydanticUserError:
        return by_looks(text)


def by_looks(text: str) -> Any:
    """Return the value that a text looks like: a number, true or false, a list, or itself."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def options_of(spec: str, given: Mapping[str, str], sizes: Mapping[str, Options], default: str) -> Options:
    """Return the options of the requested size, overridden by the given ones.

    A model of one size only, called "", has no key `size`.
    """
    size = given.get("size", default) if default else ""
    if size not in sizes:
        raise InputError(f"'{spec}': {unknown('size', size, sizes)}")
    options = {**_COMMON, **sizes[size]}
    named = {"size": size} if default else {}
    for word, text in given.items():
        key = ALIASES.get(word, word)
        if key != word and key in given:
            raise InputError(f"'{spec}': {key} and {word} are one key; give it once.")
        if key not in options and key not in named:
            raise InputError(f"'{spec}': {unknown('key', word, [*options, *named])}")
        if key in options:
            options[key] = read_value(spec, key, text, type(options[key]))
    _check(spec, options)
    return options


def _check(spec: str, options: Options) -> None:
    for key, value in options.items():
        least = 0 if key in _FROM_ZERO else 1
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value < 2**63:
            raise InputError(f"'{spec}': {key} is {value}, but it must be {least} or more, and below 2**63.")
        if key == "layers" and value > _MOST_LAYERS:
            raise InputError(f"'{spec}': layers is {value}, but no more than {_MOST_LAYERS} can be built; give fewer.")
    if options["device"] not in DEVICES:
        raise InputError(f"'{spec}': {unknown('device', options['device'], DEVICES)}")
    for rate in ("dropout", "drop_path"):
        if not 0 <= options.get(rate, 0.0) < 1:
            raise InputError(f"'{spec}': {rate} is {options[rate]}, but it must be at least 0 and below 1.")


def kind_of(group: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """Return the class of the optimizer of a parameter group, and its options. `name`: that of all optimizers.

    >>> kind_of({"class": "Muon", "lr": 0.1}, "Muon+AdamW"), kind_of({"lr": 0.1}, "SGD")
    (('Muon', {'lr': 0.1}), ('SGD', {'lr': 0.1}))
    """
    options = dict(group)
    return options.pop(CLASS, name), options


def check_divides(model: str, whole: str, part: str, options: Options) -> None:
    """Raise InputError unless the option `part` of a model divides the option `whole`."""
    check_divisible(options, whole, f"{model}: ", **{part: options[part]})


def check_divisible(sizes: Mapping[str, int], whole: str, label: str = "", /, **counts: int) -> None:
    """Raise InputError unless the product of some counts divides a size; an unknown size is not checked.

    >>> check_divisible({"batch": 12}, "batch", dp=4, microbatches=3)
    """
    size, parts = sizes.get(whole, 0), prod(counts.values())
    if size % parts:
        several = {name: count for name, count in counts.items() if count > 1}
        shown = " x ".join(f"{name}={count}" for name, count in several.items())
        multiples = [str(n) for n in (size // parts * parts, -(-size // parts) * parts) if n]
        raise InputError(
            f"{label}{whole}={size} is not divisible by {shown}; give {whole}={' or '.join(multiples)}, or choose "
            f"{' x '.join(several)} from {divisors(size)}."
        )


def for_function(spec: str, text: str, function: Callable[..., Any], skip: int) -> dict[str, Any]:
    """Return the keyword arguments of a function after its first `skip`, typed by its annotations and defaults."""
    parameters = dict(list(inspect.signature(function).parameters.items())[skip:])
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    options: dict[str, Any] = {}
    for key, value in read_pairs(spec, text).items():
        if key not in named and not takes_any:
            message = unknown("key", key, named) if named else f"unknown key '{key}'; the function takes no keys."
            raise InputError(f"'{spec}': {message}")
        options[key] = read_value(spec, key, value, _type_of(named[key])) if key in named else by_looks(value)
    missing = [k for k, p in named.items() if p.default is p.empty and k not in options]
    if missing:
        raise InputError(f"'{spec}' needs a value for {', '.join(missing)}; add {missing[0]}=VALUE.")
    return options


def _type_of(parameter: inspect.Parameter) -> Any:
    """Return the annotation of a parameter, else the type of its default; "?" for a parameter without both."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    return "?" if parameter.default in (parameter.empty, None) else type(parameter.default)
