"""The files of a compiled plan: emitted code, plan.json, the initial weights, and the journal."""

import json
import os
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superscaler.cluster import Cluster
from superscaler.compiler import Compiled
from superscaler.emit.device import Emitted
from superscaler.emit.tables import Tables
from superscaler.errors import InputError
from superscaler.ir.graph import Graph
from superscaler.ir.model import Model, PTensor
from superscaler.ir.program import Program
from superscaler.ir.text.model import print_model
from superscaler.ir.text.program import print_program
from superscaler.ir.variants import once, without_sources
from superscaler.ops.inputs import bounds, fillings, ignored, limits, pads_rows
from superscaler.report import journal
from superscaler.report.block_summary import account
from superscaler.report.identity import kept_values, manifest, origin, own_operators
from superscaler.specs.file_errors import writing
from superscaler.specs.memory import free_memory
from superscaler.store import plan as disk
from superscaler.store import plan_head as heads
from superscaler.store.folder import digest, hash_without
from superscaler.store.operators import homes
from superscaler.store.plan import plan_files, read_plan, recover, staged
from superscaler.store.tensor_file import kinds, opened, tensor_hashes

# Characters of a line of JSON.
_WIDTH = 120
# The kinds of tensors that are the user's.
_OWNED = ("parameter", "buffer")
RUN = '''"""Train with this plan on {world} devices; superscaler launch torchrun says how. Written by superscaler."""

import sys
from pathlib import Path

from superscaler.train.start import main

main([str(Path(__file__).parent), *sys.argv[1:]])
'''


def describe(compiled: Compiled, seed: int = 0) -> dict[str, Any]:
    """Return plan.json: the facts that the runtime needs beside the code."""
    return described(compiled.program, compiled.emitted, str(compiled.cluster), seed)


def of_compiled(plain: Emitted, joined: Emitted) -> dict[str, Any]:
    """Return the entry of plan.json for the code of compiled steps: tables only where they differ."""
    pairs = ((_plain(a), _plain(b)) for a, b in zip(plain.tables, joined.tables, strict=True))
    changes = [{name: own for name, own in b.items() if own != a[name]} for a, b in pairs]
    return {"compiled": {"programs": list(joined.programs), "devices": changes}}


def _plain(tables: Tables) -> dict[str, list[Any]]:
    """Return the tables of a device as lists."""
    return {name: [*rows] for name, rows in asdict(tables).items()}


def described(program: Program, emitted: Emitted, cluster: str, seed: int) -> dict[str, Any]:
    """Return plan.json of a program and its emitted code."""
    model = program.model
    resident = {w.tensor for d, _ in program.distinct for w in d.weights} | set(model.inputs)
    return {
        "version": heads.PlanHead.VERSION,
        "world": program.world,
        "cluster": cluster,
        "seed": seed,
        "programs": list(emitted.programs),
        "devices": [_plain(tables) for tables in emitted.tables],
        **reads(model),
        "slots": {name: slots_of(model, name) for name in sorted(resident)},
        "tensors": {name: owned(model, name) for name in sorted(model.tensors) if model.tensors[name].kind in _OWNED},
        "aliases": dict(model.aliases),
        "loss_dtype": model.tensors[model.loss].wide_dtype if model.loss else "",
        **({"result": model.result} if model.result else {}),
        **({"iterations": model.iterations} if model.iterations > 1 else {}),
        "optimizer": {
            "name": model.optimizer.name,
            "groups": [dict(g) for g in model.optimizer.groups],
            "scaler": dict(model.optimizer.scaler),
            **({"precision": model.optimizer.precision} if model.optimizer.precision else {}),
        },
    }


def reads(model: Model) -> dict[str, Any]:
    """Return the facts by which the batch of a step is checked."""
    model = once(model)
    fills = fillings(model)
    return {
        "inputs": {name: (model.tensors[name].shape, model.tensors[name].dtype) for name in model.inputs},
        "bounds": bounds(model),
        "limits": limits(model),
        "ignored": ignored(model),
        **({"pads": True} if pads_rows(model) else {}),
        **({"shorter": {n: (dim, fills[n]) for n, dim in model.shorter.items()}} if model.shorter else {}),
    }


def slots_of(model: Model, name: str) -> list[list[int]]:
    """Return the slot sizes of a tensor, per dim."""
    sizes = iter(model.tensors[name].extents)
    return [[next(sizes) for _ in dim] for dim in model.tensors[name].slots]


def owned(model: Model, name: str) -> dict[str, Any]:
    """Return the user's tensor that holds a tensor (name, kind, shape, dtype), and the `dim` and `start` of the tensor
    in it.
    """
    tensor, (packed, dim, start, _) = model.tensors[name], model.segments.get(name, (name, 0, 0, 0))
    shape = list(tensor.shape)
    if packed != name:
        shape[dim] = max(end for whole, _, _, end in model.segments.values() if whole == packed)
    return {"name": packed, "kind": tensor.kind, "shape": shape, "dtype": tensor.dtype, "dim": dim, "start": start}


def initial_values(model: Model, values: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return every weight, buffer and constant; those of a model captured on meta are drawn from the seed.

    Raises InputError for a seed that torch does not take.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InputError(f"seed is {seed!r}, but it must be a whole number from 0 to 2**64 - 1.")
    found = dict(values)
    _check_memory(tensor for name, tensor in model.tensors.items() if tensor.kind == "parameter" and name not in found)
    for number, (name, tensor) in enumerate(model.tensors.items()):
        if tensor.kind == "buffer" and tensor.origin:
            found.setdefault(name, found[tensor.origin])
        elif tensor.kind in ("parameter", "buffer", "constant") and name not in found:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**64)
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.02
            found[name] = drawn.to(getattr(torch, tensor.dtype))
    return found


def _check_memory(drawn: Iterable[PTensor]) -> None:
    """Raise InputError for weights of more bytes than are free: the system would end the process without a word."""
    needed, free = sum(tensor.nbytes for tensor in drawn), free_memory()
    if free is not None and needed > free:
        raise InputError(
            f"the weights of the plan take {needed / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free; write the "
            "plan directory on a machine with more memory."
        )


def write(
    compiled: Compiled,
    directory: Path,
    values: Mapping[str, Tensor],
    seed: int = 0,
    beside: Path | None = None,
    is_shape: bool = False,
) -> bool:
    """Write a plan directory. An older plan there is replaced once the new one is whole; any other non-empty directory
    is refused.

    Returns False if the same plan is there already; it then stays as it is. Files that do not belong to the older plan
    stay. `beside`: a file of weights, which becomes that of this plan if it has all of them. `is_shape`: the plan is of
    another shape than the plan that it belongs to, and only constants are written. Raises InputError for a
    directory that cannot be written, or if a user's file would be replaced.
    """
    older = plan_files(directory)
    operators = homes(own_operators(compiled.graph.model))
    for target, home in operators.items():
        if home and not home["file"]:
            raise InputError(
                f"{target} was registered outside of any file, where no process that runs the plan can find it; "
                "put it into a .py file and import that."
            )
    weights = kept_values(compiled.graph, values)
    if is_shape:
        kinds_of = compiled.graph.model.tensors
        weights = {n: x for n, x in weights.items() if n in kinds_of and kinds_of[n].kind not in _OWNED}
    data, written = {**describe(compiled, seed), "operators": operators}, dict[str, str]()
    if (joined := compiled.joined) is not compiled:
        data |= of_compiled(compiled.emitted, joined.emitted)
        written = texts_of_compiled(joined.program, joined.emitted)
    written |= {
        **texts(compiled.program, compiled.emitted),
        heads.JOURNAL_FILE: journal.text(journal.rows(compiled.graph.journal)),
        heads.EXPLAIN_FILE: _lines(account(compiled)) + "\n",
    }
    files = {name: text.encode() for name, text in written.items()}
    hashes = {name: digest(data) for name, data in files.items()}
    kept = {**manifest(compiled, values), "data": hash_without(data, "manifest"), "files": hashes}
    with writing(directory, "choose another directory"):
        recover(directory)
        if _is_there(directory, kept):
            return False
        _refuse_theirs(directory, {*files, heads.WEIGHTS_FILE, heads.PLAN_FILE}, older)
        with staged(directory) as draft:
            for name, text in files.items():
                draft.file(name, text)
            if beside is None or not _link(beside, draft.path / heads.WEIGHTS_FILE, weights):
                draft.tensors(heads.WEIGHTS_FILE, weights)
            header, tensors = tensor_hashes(draft.path / heads.WEIGHTS_FILE, "choose another directory")
            draft.finish({**data, "manifest": {**kept, "header": header, "tensors": tensors}})
            # It is of the older plan.
            disk.remove_evaluation(directory)
            disk.remove_shapes(directory)
    return True


def _link(file: Path, new: Path, weights: Mapping[str, Tensor]) -> bool:
    """Give a file of weights a second name if it has all of some; return whether it has one."""
    with opened(file, heads.REWRITE) as stored:
        found = kinds(stored)
    needed = {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in weights.items()}
    if needed.items() <= found.items():
        with suppress(OSError):
            os.link(file, new)
            return True
    return False


def _lines(data: Any, indent: str = "") -> str:
    """Return data as JSON for people: a list or a table that fits on one line is not cut."""
    whole = json.dumps(data)
    if len(indent) + len(whole) <= _WIDTH or not isinstance(data, Mapping | list | tuple):
        return whole
    inner = f"\n{indent} "
    if isinstance(data, Mapping):
        items = [f"{json.dumps(key)}: {_lines(value, indent + ' ')}" for key, value in data.items()]
        return "{" + inner + f",{inner}".join(items) + f"\n{indent}" + "}"
    return "[" + inner + f",{inner}".join(_lines(value, indent + " ") for value in data) + f"\n{indent}]"


def _refuse_theirs(directory: Path, names: Iterable[str], older: Container[str]) -> None:
    """Raise InputError if a user's file has the name of a file to be written."""
    for name in sorted(names):
        if (directory / name).is_dir() or (name not in older and os.path.lexists(directory / name)):
            raise InputError(f"{directory / name} is not of the plan there; move it, or choose another --out.")


def texts(program: Program, emitted: Emitted) -> dict[str, str]:
    """Return the files that a program determines: the code, the model, the program, and run.py."""
    return {
        **emitted.files,
        heads.MODEL_FILE: print_model(without_sources(program.model)),
        heads.PROGRAM_FILE: print_program(program),
        heads.RUN_FILE: RUN.format(world=program.world),
    }


def texts_of_compiled(program: Program, emitted: Emitted) -> dict[str, str]:
    """Return the files of the code of compiled steps, and of its program."""
    found = {**emitted.files, heads.PROGRAM_FILE: print_program(program)}
    return {f"{heads.COMPILED}{name}": text for name, text in found.items()}


def reuse(graph: Graph, cluster: Cluster, directory: Path, values: Mapping[str, Tensor], seed: int) -> Any:
    """Return explain.json of a directory that holds the plan of this transformed graph, whole and unedited, else
    None.
    """
    try:
        recover(directory)
        plan = read_plan(directory)
        # Also where operators are registered: ranks import them from there.
        facts = seed, homes(own_operators(graph.model))
        if (plan.head["seed"], plan.head["operators"]) != facts:
            return None
        if not origin(graph, cluster, values).items() <= plan.head["manifest"].items():
            return None
        plan.check()
        return json.loads(plan.text(heads.EXPLAIN_FILE))
    except (InputError, OSError):
        return None


def _is_there(directory: Path, kept: Mapping[str, Any]) -> bool:
    """Return whether a directory holds the plan of this manifest, whole."""
    try:
        found = read_plan(directory)
        found.check()
    except InputError:
        return False
    # The journal has the place of the plan's source lines, which may have moved.
    theirs, ours = ({**m, "files": {**m["files"], heads.JOURNAL_FILE: ""}} for m in (found.head["manifest"], kept))
    return bool(ours.items() <= theirs.items())
