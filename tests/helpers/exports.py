"""Exports of small modules in less than half of their time, with the same results: each registers 500 operators."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn, random
from torch._C import _dispatch_get_registrations_for_dispatch_key
from torch._logging import _internal
from torch._ops import OperatorBase
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import exported_program
from torch.fx import GraphModule, _symbolic_trace, graph, proxy
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree

from superscaler.frontend.export import _TALKATIVE


def quick_exports() -> None:
    """Let an export look for operators once, build once what it registers for all of them, write the code of graphs
    that are called only, name each kind of node once, see only the frames of the model, and seed what there is: for
    each kind of GPU that is not there, torch writes down all calls that led to its seed. It keeps no log of
    itself, which pytest would. What it sets in all modules while it traces stops at the class of graphs, below which
    there is one more for each graph.
    """
    collect, known = exported_program._collect_all_valid_cia_ops, dict[tuple[str, ...], set[OperatorBase]]()

    def collect_once() -> set[OperatorBase]:
        names = tuple(_dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if names not in known:
            known[names] = collect()
        return known[names]

    def lazy(cls: type[GraphModule], *args: Any, **kwargs: Any) -> GraphModule:
        return make(_LazyGraphModule if cls is GraphModule else cls, *args, **kwargs)

    make = GraphModule.__new__
    GraphModule.__new__ = lazy  # type: ignore[method-assign, assignment]
    exported_program._collect_all_valid_cia_ops = collect_once
    exported_program._override_composite_implicit_decomp = _once(exported_program._override_composite_implicit_decomp)
    if hasattr(proxy.TracerBase, "_filter_traceback_frames"):
        proxy.CapturedTraceback = _Frames  # type: ignore[misc, assignment]
        proxy.TracerBase._filter_traceback_frames = lambda tracer, found: found  # type: ignore[method-assign]
    graph._snake_case = cache(graph._snake_case)
    _pytree.is_namedtuple_class = cache(_pytree.is_namedtuple_class)
    # Strides and formats of results, which are printed only.
    proxy_tensor._extract_tensor_metadata = lambda result: None  # type: ignore[assignment]
    if not torch.cuda.is_available():
        random._manual_seed_impl = lambda seed: torch.default_generator.manual_seed(int(seed))  # type: ignore[assignment]
    _internal.trace_log = logging.Logger("nobody reads it")
    for name in ("__call__", "__getattr__", "__setattr__"):
        setattr(GraphModule, name, vars(nn.Module)[name])
    _symbolic_trace.setattr = _stacking("__call__", "__getattr__")  # type: ignore[attr-defined]
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _use_lazy_graph_module(True).__enter__()


def _stacking(*names: str) -> Callable[[Any, str, Any], None]:
    """Let these methods of all modules call the last of a stack, which is that of torch at first. Returns what sets
    attributes: a method of all modules goes on the stack, and the method that is there now takes the last one off. A
    class would tell each of a thousand below it.
    """
    stacks: dict[Any, list[Any]] = {}

    def stacked(stack: list[Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: stack[-1](module, *args, **kwargs)

    for name in names:
        stack = [vars(nn.Module)[name]]
        method = stacked(stack)
        stacks[method] = stack
        setattr(nn.Module, name, method)

    def put(owner: Any, name: str, value: Any) -> None:
        if owner is not nn.Module or name not in names:
            setattr(owner, name, value)
        elif value in stacks:
            stacks[value].pop()
        else:
            stacks[vars(nn.Module)[name]].append(value)

    return put


class _Frames(list[str]):
    """The frames of modules' `forward`, outermost first, without their lines of code."""

    @classmethod
    def extract(cls) -> _Frames:
        found, frame = [], sys._getframe(1).f_back
        while frame is not None:
            if frame.f_code.co_name == "forward":
                found.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in forward\n')
            frame = frame.f_back
        return cls(reversed(found))

    def summary(self) -> _Frames:
        return self

    def format(self) -> _Frames:
        return self


def _once(override: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's registration of what operators decompose into, for a block, which makes the functions that it
    registers for an operator once.
    """
    # Of an operator and its decomposition: what is registered outside of the block, inside, and for fake tensors.
    made: dict[Any, tuple[Any, Any, Any]] = {}

    @contextmanager
    def again(decompositions: Mapping[OperatorBase, Any]) -> Iterator[None]:
        outside = {op: dict(op.py_kernels) for op in decompositions}
        new = {op: f for op, f in decompositions.items() if (op, f) not in made or made[op, f][0] != outside[op]}
        with override(new):
            for op, f in new.items():
                made[op, f] = outside[op], dict(op.py_kernels), op_implementations_dict[op]
        for op, f in decompositions.items():
            _, inside, rule = made[op, f]
            _register(op, inside)
            op_implementations_dict.setdefault(op, rule)
        try:
            yield
        finally:
            for op, kernels in outside.items():
                _register(op, kernels)
                op_implementations_dict.pop(op, None)

    return again


def _register(op: OperatorBase, kernels: Mapping[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
