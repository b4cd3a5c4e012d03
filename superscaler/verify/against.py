"""Comparison of a plan directory with a module: its model and weights, beyond what hashes show."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superscaler.artifact import initial_values
from superscaler.bits import bytes_of
from superscaler.frontend.base.oracle import largest, retyped
from superscaler.ir.graph import Graph
from superscaler.ir.model import Model
from superscaler.ir.text.model import parse_model, print_model
from superscaler.ir.variants import once, renamed, without_sources, without_twins
from superscaler.report.identity import kept_values, own_operators
from superscaler.specs.options import FULL, HALVES
from superscaler.store.folder import Whole
from superscaler.store.operators import homes
from superscaler.store.plan import read_plan
from superscaler.store.plan_head import MODEL_FILE, REWRITE, WEIGHTS_FILE
from superscaler.store.tensor_file import opened
from superscaler.verify.compare import relative_error
from superscaler.verify.locate import FLOOR, TOLERANCE, Values, model_step
from superscaler.verify.oracles import retype_model

# Characters of a differing line that are shown, and how many of them before the difference.
_SHOWN, _BEFORE = 80, 20


def compare_directory(graph: Graph, directory: Path, batch: Values | None) -> dict[str, Any]:
    """Compare the model and the weights of a readable plan directory with those of a fresh capture.

    Returns `equal`; `first_difference` (text, empty when equal); `operators` and `weights` (their numbers);
    `rewritten`: the number of operators that the plan decomposes. If it is not 0, both models run in float64, without
    dropout, on the saved weights and a `batch` (default: that of the capture), and all common tensors and gradients are
    compared.
    """
    plan, captured = read_plan(directory, has_hashes=False), graph.captured
    saved = parse_model(plan.text(MODEL_FILE))
    drawn = initial_values(saved, captured.values, plan.head["seed"])
    weights = kept_values(graph.copy(saved), drawn)
    mine, theirs = _plain(graph.model), _plain(saved)
    for old, new in zip(mine.factors, list(theirs.factors), strict=False):
        mine = renamed(mine, old, new) if old not in theirs.factors else mine
    names = {op.name for op in theirs.ops}
    rewritten = [op.name for op in mine.ops if op.name not in names]
    first = next(_of_texts(mine, theirs), "") or next(_of_files(theirs, plan, weights), "")
    if rewritten and not first:
        first = next(_of_numbers(mine, theirs, {**drawn, **(batch or captured.batch)}), "")
    counts = {"operators": len(mine.ops), "weights": len(weights), "rewritten": len(rewritten)}
    return {"equal": not first, "first_difference": first, **counts}


def precision_of(directory: Path) -> str:
    """Return the precision in which the model of a plan directory was captured, as --precision takes it."""
    saved = parse_model(read_plan(directory, has_hashes=False).text(MODEL_FILE))
    kept = {tensor.dtype for tensor in saved.parameters()}
    found = next((name for name, dtype in HALVES.items() if dtype in kept), FULL)
    # The weights of a module that is trained in halves as it is have no copies.
    return saved.optimizer.precision or FULL if saved.loss else found


def _plain(model: Model) -> Model:
    """Return a model without recomputed ops, further iterations and source lines, as capture has it."""
    return without_sources(without_twins(once(model)))


def _of_texts(mine: Model, theirs: Model) -> Iterator[str]:
    """Yield the differences between the texts of two models; operators that a plan rewrote are not compared."""
    is_rewritten = not {op.name for op in mine.ops} <= {op.name for op in theirs.ops}
    if is_rewritten:
        theirs = replace(theirs, factors={name: f for name, f in theirs.factors.items() if name in mine.factors})
    ours, found = _lines(mine), _lines(theirs)
    for name in (*ours, *(name for name in found if name not in ours)):
        if name in ours and name in found and ours[name] != found[name]:
            pairs = enumerate(zip_longest(ours[name], found[name]))
            at = max(0, next(k for k, (a, b) in pairs if a != b) - _BEFORE)
            a, b = (line[at : at + _SHOWN] for line in (found[name], ours[name]))
            yield f"{name} is '.. {a} ..' in {MODEL_FILE}, but '.. {b} ..' in the module"
        elif (name in ours) != (name in found) and not is_rewritten:
            yield f"{name} is in {'the module' if name in ours else MODEL_FILE} only"


def _lines(model: Model) -> Mapping[str, str]:
    """Return the lines of a model's text, by the kind and name at the start of each."""
    head, *lines = print_model(model).splitlines()
    return {"the first line": head, **{" ".join(line.split(" ", 2)[:2]): line for line in lines}}


def _of_files(model: Model, plan: Whole, weights: Values) -> Iterator[str]:
    """Yield the operators' files and the weights that differ from those of this process."""
    for target, home in homes(own_operators(model)).items():
        saved = plan.head["operators"].get(target)
        if home and saved and home["sha256"] != saved["sha256"]:
            theirs, ours = (f"sha256 {x['sha256'][:12]} ({x['file']})" for x in (saved, home))
            yield f"{target} is registered by a file with {theirs} in the plan, but {ours} here"
    with opened(plan.path / WEIGHTS_FILE, REWRITE) as stored:
        for name in sorted(weights.keys() ^ set(stored.keys())):
            yield f"{name} is in {'the module' if name in weights else WEIGHTS_FILE} only"
        for name, own in sorted(weights.items()):
            yield from _of_weight(name, stored.get_tensor(name), own.detach().cpu())


def _of_weight(name: str, found: Tensor, own: Tensor) -> Iterator[str]:
    if (found.dtype, found.shape) != (own.dtype, own.shape):
        here, there = (f"{x.dtype} {list(x.shape)}" for x in (found, own))
        yield f"{name} is {here} in {WEIGHTS_FILE}, but {there} in the module"
        return
    bits = (bytes_of(x).reshape(x.numel(), x.itemsize) for x in (found, own))
    is_other = torch.ne(*bits).any(dim=1)
    if is_other.any():
        at = int(is_other.nonzero()[0])
        a, b = (x.reshape(-1)[at].item() for x in (found, own))
        where = list(map(int, torch.unravel_index(torch.tensor(at), own.shape))) if own.shape else ""
        count = f"{int(is_other.sum())} of {own.numel()} elements differ"
        yield f"{name}{where} is {a!r} in {WEIGHTS_FILE}, but {b!r} in the module ({count})"


def _of_numbers(mine: Model, theirs: Model, values: Values) -> Iterator[str]:
    """Yield the tensors, in execution order, that differ between two models run on the same values."""
    known = {name: retyped(x, torch.float64) for name, x in values.items()}
    order = [*known, *(o.tensor for op in theirs.forward_ops for o in op.outputs)]
    # Module paths are only comments in emitted code.
    bare = (model.with_ops(replace(op, module="") for op in model.ops) for model in (theirs, mine))
    steps = (model_step(retype_model(model, "float64"), known) for model in bare)
    for what, have, want in zip(("", "the gradient of "), *steps, strict=True):
        floor = FLOOR * max((largest(x) for x in want.values() if x.is_floating_point()), default=1.0)
        for name in sorted(have.keys() & want.keys(), key=order.index):
            error = relative_error(have[name], want[name], want[name], floor)
            if not error <= TOLERANCE:
                yield f"{what}{name} of the plan is off by {error:.2g}, run in float64 on one device"
