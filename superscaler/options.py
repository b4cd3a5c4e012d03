"""Options in text: `key=value,...` against the defaults of a size, or against the signature of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from superscaler.errors import InputError, unknown

Options = Mapping[str, Any]

DEVICES = ("cpu", "meta")
# What the command line says -> what torch calls it.
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
AUTOCASTS = {"bf16": "bfloat16", "fp16": "float16"}
# What every named model understands beside its own keys.
_COMMON = {"seed": 0, "device": "cpu"}
# Other integers are sizes, of which at least one is needed.
_FROM_ZERO = ("seed",)
_TYPES = {
    int: "a whole number, as 4",
    float: "a number, as 0.1",
    bool: "true or false",
    str: "text",
}
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_pairs(spec: str, text: str) -> dict[str, str]:
    """Return the `key=value` pairs of a text. Raises InputError for a key without a value, or given twice.

    >>> read_pairs("mlp:layers=2,hidden=8", "layers=2,hidden=8")
    {'layers': '2', 'hidden': '8'}
    """
    found: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise InputError(f"'{spec}': the key '{key}' has no value; write {key}=VALUE.")
        if key in found:
            raise InputError(f"'{spec}': the key '{key}' is given twice, {found[key]} and {value}; give it once.")
        found[key] = value
    return found


def read_value(spec: str, key: str, text: str, kind: type) -> Any:
    """Return the value of a key as the type that is expected. Raises InputError that says both."""
    try:
        return _BOOLS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise InputError(f"'{spec}': {key} is '{text}', but it must be {_TYPES[kind]}.") from None


def settle(spec: str, given: Mapping[str, str], sizes: Mapping[str, Options], default: str) -> Options:
    """Return the options of the size that was asked for, with those that were given in place of its own.

    A model of one size only, called "", has no key `size`.
    """
    size = given.get("size", default) if default else ""
    if size not in sizes:
        raise InputError(f"'{spec}': {unknown('size', size, sizes)}")
    options = {**_COMMON, **sizes[size]}
    named = {"size": size} if default else {}
    for key, text in given.items():
        if key not in options and key not in named:
            raise InputError(f"'{spec}': {unknown('key', key, [*options, *named])}")
        if key in options:
            options[key] = read_value(spec, key, text, type(options[key]))
    _check(spec, options)
    return options


def _check(spec: str, options: Options) -> None:
    for key, value in options.items():
        least = 0 if key in _FROM_ZERO else 1
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value < 2**63:
            raise InputError(f"'{spec}': {key} is {value}, but it must be {least} or more, and below 2**63.")
    if options["device"] not in DEVICES:
        raise InputError(f"'{spec}': {unknown('device', options['device'], DEVICES)}")
    for rate in ("dropout", "drop_path"):
        if not 0 <= options.get(rate, 0.0) < 1:
            raise InputError(f"'{spec}': {rate} is {options[rate]}, but it must be at least 0 and below 1.")


def check_divides(model: str, whole: str, part: str, options: Options) -> None:
    """Raise InputError unless the option `part` divides the option `whole`."""
    if options[whole] % options[part]:
        raise InputError(
            f"{model}: {whole}={options[whole]} cannot be shared by {part}={options[part]}; "
            f"give numbers where {part} divides {whole}."
        )


def for_function(spec: str, given: Mapping[str, str], function: Callable[..., Any], skip: int = 0) -> dict[str, Any]:
    """Return the keyword arguments of a function after its first `skip`, typed by its annotations and defaults."""
    parameters = dict(list(inspect.signature(function).parameters.items())[skip:])
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {k: p for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    options: dict[str, Any] = {}
    for key, text in given.items():
        if key not in named and not takes_any:
            raise InputError(f"'{spec}': {_unknown_key(key, list(named))}")
        options[key] = _typed(spec, key, text, named.get(key))
    missing = [k for k, p in named.items() if p.default is p.empty and k not in options]
    if missing:
        raise InputError(f"'{spec}' needs a value for {', '.join(missing)}; add {missing[0]}=VALUE.")
    return options


def _unknown_key(key: str, known: list[str]) -> str:
    return unknown("key", key, known) if known else f"unknown key '{key}'; the function takes no keys."


def _typed(spec: str, key: str, text: str, parameter: inspect.Parameter | None) -> Any:
    """Return the value by the annotation, else by the type of the default, else by its looks."""
    annotation = "" if parameter is None else str(getattr(parameter.annotation, "__name__", parameter.annotation))
    words = {word.strip() for word in annotation.split("|")}
    if "None" in words and text.lower() == "none":
        return None
    for kind in (bool, int, float, str):
        if kind.__name__ in words or (parameter is not None and type(parameter.default) is kind):
            return read_value(spec, key, text, kind)
    return _by_looks(text)


def _by_looks(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return _BOOLS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
