"""Operators of users: `@ss.register("b s h^, h^ -> b s h")` makes a function one op of every captured graph."""

import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.library import Library, infer_schema

from superscaler.errors import InputError, brief, named
from superscaler.frontend.users.check_notation import Example, Sizes, Trial
from superscaler.ops.notation import check as check_notation
from superscaler.ops.notation import operand_dims
from superscaler.specs.arguments import fits
from superscaler.specs.registered import REGISTERED, Registered
from superscaler.specs.user_file import root_of

# Operator -> its schema, its library, with which it ends, and the function that was registered last, which it calls.
_DEFINED: dict[str, tuple[str, Library, FunctionType]] = {}


def register(
    notation: str,
    op: Any = None,
    *,
    sizes: Sizes | None = None,
    example: Example | None = None,
    check: bool = True,
    device: str = "cpu",
) -> Any:
    """Give a function or a torch operator its notation (see docs/ops.md), so that plans can cut it.

    register(notation)(function) -> a function that calls a new torch operator, one op of every captured graph
    register(notation, operator) -> the operator: an OpOverload, its packet, or the result of torch.library.custom_op

    The function takes tensors and plain values, returns one or several tensors, and is differentiated as it is written.
    Parameters without annotation are tensors, or have the type of their default. With `check`, the op is executed on
    `device` in float64 on small random operands: every index in 2 and 3 parts, forward and backward, must give the
    whole. `sizes`: of letters that cannot have any size. `example`: arguments by name, or a function from sizes to
    them; needed for values without default, and for tensors that are not just random numbers. Raises InputError.
    """
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    _check_kinds(where, notation, sizes, example, check, device)
    try:
        check_notation(notation)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    rule = _rule(notation, sizes or {}, caller.f_globals, caller.f_lineno)

    def add(what: Any) -> Any:
        overload = _overload(what, rule)
        made = overload or _define(what, rule)
        own = rule if overload else replace(rule, code=what.__code__)
        REGISTERED[str(made)] = own
        try:
            _check_operands(made, rule)
            if check:
                trial = Trial(made, rule, sizes or {}, example or {}, torch.device(device))
                trial.check()
                REGISTERED[str(made)] = replace(own, check=trial.check_call)
        except BaseException:
            # Whatever ended the check, the operator is not registered.
            del REGISTERED[str(made)]
            raise
        return what if overload else wraps(what)(lambda *args, **kwargs: made(*args, **kwargs))

    return add if op is None else add(op)


def _check_kinds(where: str, notation: Any, sizes: Any, example: Any, check: Any, device: Any) -> None:
    """Raise InputError for an argument of `register` of another type, and for a device that torch does not know."""
    if callable(notation):
        raise InputError(f'{where}: register needs a notation; write @ss.register("b s h^ -> b s h") above the def.')
    is_named = isinstance(sizes, Mapping) and all(isinstance(letter, str) for letter in sizes)
    table = (
        ("notation", notation, isinstance(notation, str), 'text, as "b s h^ -> b s h"'),
        ("sizes", sizes, sizes is None or (is_named and fits([*sizes.values()], list[int])), "a dict, as {'h': 64}"),
        ("example", example, example is None or isinstance(example, Mapping) or callable(example), "arguments by name"),
        ("check", check, isinstance(check, bool), "True or False"),
        ("device", device, isinstance(device, str | torch.device), "the name of a device, as 'cpu'"),
    )
    if wrong := next(((name, value, form) for name, value, is_right, form in table if not is_right), None):
        raise InputError(f"{where}: {wrong[0]} of register is {named(wrong[1])}; give {wrong[2]}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise InputError(f"{where}: device of register is {device!r}, where no tensor can be: {brief(error)}") from None


def _rule(notation: str, sizes: Sizes, home: Mapping[str, Any], line: int) -> Registered:
    """Return the record of a registration in the module with these globals."""
    alone = {dim[0] for dims in operand_dims(notation, 0) for dim in dims if dim is not None and len(dim) == 1}
    spec = home.get("__spec__")
    file = str(Path(home["__file__"]).resolve()) if home.get("__file__") else ""
    module = spec.name if spec and root_of(spec.name, Path(file)) else ""
    fixed = {letter: size for letter, size in sizes.items() if letter not in alone}
    source = b""
    # Code from a prompt or an archive is in no file.
    with suppress(OSError):
        source = Path(file).read_bytes() if file else b""
    return Registered(notation, fixed, module, file if source else "", line, source)


def _overload(what: Any, rule: Registered) -> OpOverload | None:
    """Return the given torch operator, or None for a function."""
    if isinstance(what, OpOverloadPacket) and len(what.overloads()) > 1:
        known = ", ".join(str(getattr(what, name)) for name in what.overloads())
        raise InputError(f"{rule.place}: {what} has {len(what.overloads())} overloads; register one: {known}.")
    if isinstance(what, OpOverloadPacket):
        return getattr(what, what.overloads()[0])
    return what._opoverload if isinstance(what, CustomOpDef) else what if isinstance(what, OpOverload) else None


def _define(function: Any, rule: Registered) -> OpOverload:
    """Define `torch.ops.ss_<file>.<function>`, which torch.export keeps whole and autograd differentiates inside."""
    name = getattr(function, "__name__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise InputError(
            f"{rule.place}: {function!r} is neither a function with a name nor a torch operator; "
            "call it in a function (def) and register that."
        )
    path = Path(rule.file or "main")
    stem = path.parent.name if path.stem == "__init__" else path.stem
    namespace = "ss_" + re.sub(r"\W", "_", stem)
    target = f"{namespace}.{name}.default"
    # An equal file elsewhere is the same one: a saved plan is loaded with it.
    if target in REGISTERED and REGISTERED[target].file != rule.file and REGISTERED[target].source != rule.source:
        raise InputError(
            f"{rule.place}: the name {name} is taken by {REGISTERED[target].place}, a file of the same name; "
            "rename the function or the file."
        )
    try:
        schema = infer_schema(_annotated(function, rule.notation), mutates_args=())
    except ValueError as error:
        raise InputError(f"{rule.place}: {name} cannot be an operator: {error}") from None
    library: Any
    known, library, _ = _DEFINED.get(target, ("", None, None))
    if known != schema:
        if library is not None:
            library._destroy()
        library = Library(namespace, "FRAGMENT")
        library.define(name + schema)
        # A composite operator: autograd differentiates its inner calls, and run_decompositions({}) does not split it.
        # Captured graphs keep the operator, and torch does not check that it still exists.
        library.impl(name, lambda *args, **kwargs: _DEFINED[target][2](*args, **kwargs), "CompositeImplicitAutograd")
    _DEFINED[target] = schema, library, function
    return getattr(getattr(torch.ops, namespace), name).default


def _annotated(function: FunctionType, notation: str) -> Any:
    """Return a function with the same signature and no missing annotation."""
    written = inspect.signature(function)
    empty, results = inspect.Parameter.empty, notation.split("->")[1].count(",") + 1
    parameters = [
        p.replace(annotation=_type_of(p.default)) if p.annotation is empty else p for p in written.parameters.values()
    ]
    result = written.return_annotation
    if result is empty:
        result = Tensor if results == 1 else tuple[(Tensor,) * results]  # type: ignore[misc]
    twin = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    twin.__signature__ = written.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    return twin


def _type_of(default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return Tensor
    return Tensor | None if default is None else type(default)


def _check_operands(overload: OpOverload, rule: Registered) -> None:
    """Raise InputError unless the notation has an operand and a result per tensor, and no operand is changed."""
    schema = overload._schema
    if schema.is_mutable:
        raise InputError(f"{rule.place}: {schema} changes its operands; register an op that returns new tensors.")
    left, right = (side.count(",") + 1 for side in rule.notation.split("->"))
    tensors = [str(a.type) for a in schema.arguments if "Tensor" in str(a.type)]
    results = [str(r.type) for r in schema.returns]
    pairs = (("operands", left, tensors, "takes"), ("results", right, results, "gives"))
    for kind, count, types, verb in pairs:
        if count != len(types) and not any("List" in t for t in types):
            raise InputError(
                f"{rule.place}: '{rule.notation}' has {count} {kind}, and {overload} {verb} {len(types)}: {schema}."
            )
