"""What a compiled plan is on disk: emitted code, plan.json, the initial weights, and the journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from superscaler.account import account, hash_values, manifest, origin
from superscaler.cluster import Cluster
from superscaler.compiler import Compiled
from superscaler.errors import InputError
from superscaler.explain import EXPLAIN_FILE, digest, plan_files
from superscaler.frontend.rules import REGISTERED
from superscaler.ir.graph import Model
from superscaler.ir.transformed import Graph
from superscaler.runtime.step import PLAN_FILE, WEIGHTS_FILE

JOURNAL_FILE = "journal.txt"
RUN = '''"""Train with this plan: torchrun --nproc-per-node {world} run.py --steps 20. Written by superscaler."""

import sys
from pathlib import Path

from superscaler.train.loop import main

main([str(Path(__file__).parent), *sys.argv[1:]])
'''


def describe(compiled: Compiled, seed: int = 0) -> dict[str, Any]:
    """Return plan.json: what the runtime needs to know beside the code."""
    model = compiled.graph.model
    resident = {w.tensor for d, _ in compiled.program.distinct for w in d.weights} | set(model.inputs)
    return {
        "version": 1,
        "world": compiled.program.world,
        "cluster": str(compiled.cluster),
        "seed": seed,
        "programs": list(compiled.emitted.programs),
        "devices": [asdict(t) for t in compiled.emitted.tables],
        "inputs": {name: (model.tensors[name].shape, model.tensors[name].dtype) for name in model.inputs},
        "slots": {name: slots_of(model, name) for name in sorted(resident)},
        "bounds": bounds(model),
        "loss_dtype": model.tensors[model.loss].wide_dtype,
        "optimizer": {
            "name": model.optimizer.name,
            "groups": [dict(g) for g in model.optimizer.groups],
            "scaler": dict(model.optimizer.scaler),
        },
        "operators": _operators(model),
    }


def _operators(model: Model) -> dict[str, tuple[str, str] | None]:
    """Return for each operator that is neither torch's nor ours the module and the file that register it, if known."""
    own = {op.target: REGISTERED.get(op.target) for op in model.ops if op.target.split(".")[0] not in ("aten", "ss")}
    return {target: (rule.module, rule.file) if rule else None for target, rule in sorted(own.items())}


def bounds(model: Model) -> dict[str, int]:
    """Return for each integer input below which number its values must be: the rows or classes that they select."""
    producers = model.producers()
    found: dict[str, int] = {}
    for op in model.ops:
        if op.target == "aten.embedding.default":
            selecting, bound = op.inputs[1].tensor, model.tensors[op.inputs[0].tensor].shape[0]
        elif op.target in ("ss.cross_entropy", "aten.cross_entropy_loss.default"):
            selecting, bound = op.inputs[1].tensor, model.tensors[op.inputs[0].tensor].shape[1]
        else:
            continue
        left = [selecting]
        while left:
            name = left.pop()
            if name in model.inputs:
                found[name] = min(bound, found.get(name, bound))
            elif name in producers and producers[name][0].from_data:
                left += [o.tensor for o in producers[name][0].inputs]
    return found


def slots_of(model: Model, name: str) -> list[list[int]]:
    """Return the slot sizes of a tensor, per dim."""
    sizes = iter(model.tensors[name].extents)
    return [[next(sizes) for _ in dim] for dim in model.tensors[name].slots]


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
    older = check_directory(directory)
    for target, home in _operators(compiled.graph.model).items():
        if home == ("", ""):
            raise InputError(
                f"{target} was registered outside of any file, where no process that runs the plan can find it; "
                "put it into a .py file and import that."
            )
    kept = {n: v for n, v in values.items() if n in compiled.graph.model.tensors}
    files = _texts(compiled, kept, seed)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if _is_there(directory, files):
            return False
        theirs = sorted(name for name in files if name not in older and (directory / name).exists())
        if theirs:
            raise InputError(f"{directory / theirs[0]} is not of the plan there; move it, or choose another --out.")
        _remove_plan(directory, older)
        _write_files(directory, files, kept)
        return True
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{directory} cannot be written: {reason}; choose another directory.") from error


def check_directory(directory: Path) -> frozenset[str]:
    """Return the files of the plan in a directory. Raises InputError for a file, and for a directory that holds
    something else than a plan.
    """
    try:
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file; choose a directory.")
        return plan_files(directory)
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror}; choose another directory.") from error


def _remove_plan(directory: Path, older: Iterable[str]) -> None:
    # First what says that the plan is whole; what a user keeps beside a plan is not ours to remove.
    for name in (PLAN_FILE, *sorted(older)):
        (directory / name).unlink(missing_ok=True)


def _texts(compiled: Compiled, values: Mapping[str, Tensor], seed: int) -> dict[str, str]:
    """Return all files but the weights; plan.json is the last."""
    explained = json.dumps(account(compiled), indent=1) + "\n"
    described = describe(compiled, seed)
    hashes = {**manifest(compiled, values), "data": _data(described), "explain": digest(explained)}
    return {
        **compiled.emitted.files,
        "run.py": RUN.format(world=compiled.program.world),
        JOURNAL_FILE: "".join(f"{entry}\n" for entry in compiled.graph.journal),
        EXPLAIN_FILE: explained,
        PLAN_FILE: json.dumps({**described, "manifest": hashes}, indent=1) + "\n",
    }


def _data(described: Mapping[str, Any]) -> str:
    return digest(json.dumps({k: v for k, v in described.items() if k != "manifest"}, sort_keys=True))


def reuse(graph: Graph, cluster: Cluster, directory: Path, values: Mapping[str, Tensor], seed: int) -> Any:
    """Return explain.json of a directory that holds the plan of a transformed graph, whole and as it was written there;
    None where it holds another one, or none.
    """
    try:
        plan = json.loads((directory / PLAN_FILE).read_text())
        kept = plan["manifest"]
        if plan["seed"] != seed or not origin(graph, cluster, values).items() <= kept.items():
            return None
        explained = (directory / EXPLAIN_FILE).read_text()
        names = ["segments.py", *(f"{name}.py" for name in set(plan["programs"]))]
        code = json.dumps({name: (directory / name).read_text() for name in names}, sort_keys=True)
        stored = hash_values(load_file(directory / WEIGHTS_FILE))
        intact = (digest(code), _data(plan), digest(explained), stored)
        if intact != tuple(kept[name] for name in ("code", "data", "explain", "weights")):
            return None
        if (directory / "run.py").read_text() != RUN.format(world=plan["world"]):
            return None
        return json.loads(explained)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None


def _is_there(directory: Path, files: Mapping[str, str]) -> bool:
    """Tell whether a directory holds these files, and weights of the hash in its manifest."""
    # The journal says where the plan was written, which may have moved.
    if any(not (directory / f).is_file() for f in (*files, WEIGHTS_FILE)):
        return False
    if any((directory / f).read_bytes() != text.encode() for f, text in files.items() if f != JOURNAL_FILE):
        return False
    try:
        stored = hash_values(load_file(directory / WEIGHTS_FILE))
    except SafetensorError:
        return False
    return bool(stored == json.loads(files[PLAN_FILE])["manifest"]["weights"])


def _write_files(directory: Path, files: Mapping[str, str], values: Mapping[str, Tensor]) -> None:
    save_file({name: value.detach().clone().contiguous() for name, value in values.items()}, directory / WEIGHTS_FILE)
    # plan.json is written last: a directory that has one is whole.
    for name, text in files.items():
        (directory / name).write_text(text)
