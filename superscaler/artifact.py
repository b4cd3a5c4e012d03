"""What a compiled plan is on disk: emitted code, plan.json, the initial weights, and the journal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from superscaler.cluster import Cluster
from superscaler.compiler import Compiled
from superscaler.emit.steps import Emitted
from superscaler.errors import InputError
from superscaler.frontend.rules import REGISTERED
from superscaler.ir.graph import Model, Op, without_sources
from superscaler.ir.listing import print_program
from superscaler.ir.program import Program
from superscaler.ir.text import print_model
from superscaler.ir.transformed import Graph
from superscaler.report.account import account, hash_values, kept_values, manifest, origin
from superscaler.specs import files as disk

RUN = '''"""Train with this plan: torchrun --nproc-per-node {world} run.py --steps 20. Written by superscaler."""

import sys
from pathlib import Path

from superscaler.train.loop import main

main([str(Path(__file__).parent), *sys.argv[1:]])
'''


def describe(compiled: Compiled, seed: int = 0) -> dict[str, Any]:
    """Return plan.json: what the runtime needs to know beside the code."""
    return described(compiled.program, compiled.emitted, str(compiled.cluster), seed)


def described(program: Program, emitted: Emitted, cluster: str, seed: int) -> dict[str, Any]:
    """Return plan.json of a program and the code that is emitted from it."""
    model = program.model
    resident = {w.tensor for d, _ in program.distinct for w in d.weights} | set(model.inputs)
    return {
        "version": 1,
        "world": program.world,
        "cluster": cluster,
        "seed": seed,
        "programs": list(emitted.programs),
        "devices": [asdict(t) for t in emitted.tables],
        **reads(model),
        "slots": {name: slots_of(model, name) for name in sorted(resident)},
        "tensors": {name: owned(model, name) for name in sorted(model.tensors) if is_owned(model, name)},
        "aliases": dict(model.aliases),
        "loss_dtype": model.tensors[model.loss].wide_dtype,
        "optimizer": {
            "name": model.optimizer.name,
            "groups": [dict(g) for g in model.optimizer.groups],
            "scaler": dict(model.optimizer.scaler),
        },
        "operators": _operators(model),
    }


def reads(model: Model) -> dict[str, Any]:
    """Return of the inputs of a step what a batch is checked by."""
    return {
        "inputs": {name: (model.tensors[name].shape, model.tensors[name].dtype) for name in model.inputs},
        "bounds": bounds(model),
        "limits": limits(model),
    }


def _operators(model: Model) -> dict[str, tuple[str, str] | None]:
    """Return for each operator that is neither torch's nor ours the module and the file that register it, if known."""
    own = {op.target: REGISTERED.get(op.target) for op in model.ops if op.target.split(".")[0] not in ("aten", "ss")}
    return {target: (rule.module, rule.file) if rule else None for target, rule in sorted(own.items())}


# The ops that select by an integer input, and the dim of their first operand that they select along.
_ROWS = {"aten.embedding.default": 0}
_SELECTING = {**_ROWS, "ss.cross_entropy": 1, "aten.cross_entropy_loss.default": 1}
# What leaves the values of its operand as they are, but for some that a label does not count.
_MOVES = ("view", "_unsafe_view", "reshape", "slice", "select", "squeeze", "unsqueeze", "expand", "clone", "detach",
          "permute", "transpose", "_to_copy", "constant_pad_nd", "flatten")  # fmt: skip


def limits(model: Model) -> dict[str, tuple[int, int]]:
    """Return for each input whose own values select rows or classes the least one, and the first that is too large."""
    classes, rows = bounds(model, moves=_MOVES), bounds(model, _ROWS, _MOVES)
    return {name: (0 if name in rows else -(2**63), bound) for name, bound in classes.items()}


def bounds(
    model: Model, selecting: Mapping[str, int] = _SELECTING, moves: Sequence[str] | None = None
) -> dict[str, int]:
    """Return for each integer input below which number its values must be: the rows or classes that they select, as
    they are or after what is done to them (after `moves` only, if given).
    """
    producers = model.producers()
    found: dict[str, int] = {}
    for op in model.ops:
        if op.target not in selecting:
            continue
        bound = model.tensors[op.inputs[0].tensor].shape[selecting[op.target]]
        left = [op.inputs[1].tensor]
        while left:
            name = left.pop()
            if name in model.inputs:
                found[name] = min(bound, found.get(name, bound))
            elif name in producers and producers[name][0].from_data and _is_among(producers[name][0], moves):
                left += [o.tensor for o in producers[name][0].inputs]
    return found


def _is_among(op: Op, moves: Sequence[str] | None) -> bool:
    return moves is None or op.target.split(".")[1] in moves


def slots_of(model: Model, name: str) -> list[list[int]]:
    """Return the slot sizes of a tensor, per dim."""
    sizes = iter(model.tensors[name].extents)
    return [[next(sizes) for _ in dim] for dim in model.tensors[name].slots]


def is_owned(model: Model, name: str) -> bool:
    """Tell whether a tensor is a parameter or buffer of the user's module, or a segment of one."""
    return model.tensors[name].kind in ("parameter", "buffer")


def owned(model: Model, name: str) -> dict[str, Any]:
    """Return which of the user's tensors this one is: its name, shape and dtype, and where this one starts on a dim."""
    tensor, (packed, dim, start, _) = model.tensors[name], model.segments.get(name, (name, 0, 0, 0))
    shape = list(tensor.shape)
    if packed != name:
        shape[dim] = max(end for whole, _, _, end in model.segments.values() if whole == packed)
    return {"name": packed, "kind": tensor.kind, "shape": shape, "dtype": tensor.dtype, "dim": dim, "start": start}


def initial_values(model: Model, values: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return every weight, buffer and constant; those of a model captured on meta are drawn from the seed."""
    found = dict(values)
    for number, (name, tensor) in enumerate(model.tensors.items()):
        if tensor.kind in ("parameter", "buffer", "constant") and name not in found:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.02
            found[name] = drawn.to(getattr(torch, tensor.dtype))
    return found


def write(compiled: Compiled, directory: Path, values: Mapping[str, Tensor], seed: int = 0) -> bool:
    """Write a plan directory. An older plan there is replaced; any other non-empty directory is refused.

    Returns False where the same plan is there already, which stays as it is. Files that are not of the older plan stay.
    Raises InputError for a directory that cannot be written, or where a file of that kind would be replaced.
    """
    older = disk.plan_files(directory)
    for target, home in _operators(compiled.graph.model).items():
        if home == ("", ""):
            raise InputError(
                f"{target} was registered outside of any file, where no process that runs the plan can find it; "
                "put it into a .py file and import that."
            )
    kept = kept_values(compiled.graph, values)
    files = _texts(compiled, kept, seed)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if _is_there(directory, files):
            return False
        theirs = sorted(name for name in files if name not in older and (directory / name).exists())
        if theirs:
            raise InputError(f"{directory / theirs[0]} is not of the plan there; move it, or choose another --out.")
        # First what says that the plan is whole; what a user keeps beside a plan is not ours to remove.
        for name in (disk.PLAN_FILE, *sorted(older)):
            (directory / name).unlink(missing_ok=True)
        _write_files(directory, files, kept)
        return True
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{directory} cannot be written: {reason}; choose another directory.") from error


def texts(program: Program, emitted: Emitted) -> dict[str, str]:
    """Return the files that follow from a program: the code, the model, the program itself, what starts it."""
    return {
        **emitted.files,
        disk.MODEL_FILE: print_model(without_sources(program.model)),
        disk.PROGRAM_FILE: print_program(program),
        disk.RUN_FILE: RUN.format(world=program.world),
    }


def _texts(compiled: Compiled, values: Mapping[str, Tensor], seed: int) -> dict[str, str]:
    """Return all files but the weights; plan.json is the last."""
    data = describe(compiled, seed)
    files = {
        **texts(compiled.program, compiled.emitted),
        disk.JOURNAL_FILE: "".join(f"{entry}\n" for entry in compiled.graph.journal),
        disk.EXPLAIN_FILE: json.dumps(account(compiled), indent=1) + "\n",
    }
    hashes = {name: disk.digest(text) for name, text in files.items()}
    kept = {**manifest(compiled, values), "data": disk.data_hash(data), "files": hashes}
    kept["self"] = _own_hash(kept)
    return {**files, disk.PLAN_FILE: json.dumps({**data, "manifest": kept}, indent=1) + "\n"}


def _own_hash(kept: Mapping[str, Any]) -> str:
    return disk.digest(json.dumps({k: v for k, v in kept.items() if k != "self"}, sort_keys=True))


def damaged(directory: Path, plan: Mapping[str, Any]) -> str:
    """Return which file of a plan directory is not what the manifest of plan.json says; empty where all are."""
    kept = plan["manifest"]
    if disk.data_hash(plan) != kept.get("data") or _own_hash(kept) != kept.get("self"):
        return disk.PLAN_FILE
    for name, shown in kept["files"].items():
        try:
            if disk.digest((directory / name).read_text()) != shown:
                return str(name)
        except (OSError, UnicodeDecodeError):
            return str(name)
    try:
        stored = hash_values(load_file(directory / disk.WEIGHTS_FILE))
    except (OSError, SafetensorError):
        return disk.WEIGHTS_FILE
    return "" if stored == kept.get("weights") else disk.WEIGHTS_FILE


def reuse(graph: Graph, cluster: Cluster, directory: Path, values: Mapping[str, Tensor], seed: int) -> Any:
    """Return explain.json of a directory that holds the plan of a transformed graph, whole and as it was written there;
    None where it holds another one, or none.
    """
    try:
        plan = disk.read_plan(directory)
        if plan["seed"] != seed or not origin(graph, cluster, values).items() <= plan["manifest"].items():
            return None
        return None if damaged(directory, plan) else json.loads((directory / disk.EXPLAIN_FILE).read_text())
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return None


def _is_there(directory: Path, files: Mapping[str, str]) -> bool:
    """Tell whether a directory holds these files, and weights of the hash in its manifest."""
    try:
        plan, other = disk.read_plan(directory), json.loads(files[disk.PLAN_FILE])
        # The journal says where the plan was written, which may have moved.
        is_whole = not damaged(directory, plan)
        for one in (plan, other):
            del one["manifest"]["files"][disk.JOURNAL_FILE], one["manifest"]["self"]
        return bool(is_whole and plan == other)
    except (InputError, KeyError, OSError):
        return False


def _write_files(directory: Path, files: Mapping[str, str], values: Mapping[str, Tensor]) -> None:
    save_file(
        {name: value.detach().clone().contiguous() for name, value in values.items()}, directory / disk.WEIGHTS_FILE
    )
    # plan.json is written last: a directory that has one is whole.
    for name, text in files.items():
        (directory / name).write_text(text)
