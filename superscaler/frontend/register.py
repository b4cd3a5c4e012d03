"""Users' own operators: `@ss.register("b s h^, h^ -> b s h")` makes a function one op of every captured graph."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import cycle
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.library import Library, infer_schema

from superscaler.errors import InputError
from superscaler.frontend.notation import check as check_notation
from superscaler.frontend.notation import operand_dims
from superscaler.frontend.proof import Failure, ops_of, prove, record
from superscaler.frontend.recipes import Site
from superscaler.frontend.rules import REGISTERED, Registered, signature
from superscaler.frontend.trace import Trace, Var, substitute

Sizes = Mapping[str, int]
Example = Mapping[str, Any] | Callable[[Sizes], Mapping[str, Any]]

# Different ones, so that dims that are mixed up differ; the rank of `..` is the number of the round.
_SIZES, _ROUNDS = (4, 3, 5, 6, 2), 3
# An operator is defined as long as its library lives.
_LIBRARIES: dict[str, Library] = {}


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
    register(notation, operator) -> the operator: an OpOverload, its packet, or what torch.library.custom_op makes

    The function takes tensors and plain values, returns one or several tensors, and is differentiated as it is written.
    Parameters without annotation are tensors, or what their default is. With `check`, the op is executed on `device` in
    float64 on small random operands: every index in 2 and 3 parts, forward and backward, must give the whole.
    `sizes`: those of letters that cannot be any. `example`: arguments by name, or a function from sizes to them; needed
    for values without default, and for tensors that are not just random numbers. Raises InputError.
    """
    check_notation(notation)
    caller = sys._getframe(1)
    rule = _rule(notation, sizes or {}, caller.f_globals, caller.f_lineno)

    def add(what: Any) -> Any:
        overload = _overload(what, rule)
        made = overload or _define(what, rule)
        REGISTERED[str(made)] = rule
        try:
            _check_operands(made, rule)
            for number in range(_ROUNDS if check else 0):
                _check_round(_Round(made, rule, number, sizes or {}, example or {}, device))
        except BaseException:
            del REGISTERED[str(made)]
            raise
        return what if overload else _caller(what, made)

    return add if op is None else add(op)
