"""Plan directories: the types of plan.json, reading without running any code, and replacing an older plan.

A new plan is written aside, into a folder in its directory, and then replaces the files of the older one. While its
files are moved, the directory holds neither plan. Its hashes show this; the next writer finishes the move.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self

from pydantic import Field, FiniteFloat, model_validator

from superscaler.errors import InputError, unknown
from superscaler.specs.file_errors import reading, refuse
from superscaler.specs.options import OPTIMIZERS, kind_of
from superscaler.specs.whole_file import sync
from superscaler.store import folder as disk
from superscaler.store.folder import Checked, Count, Draft, Hash, Head, hash_without
from superscaler.store.tensor_file import kinds, opened

if TYPE_CHECKING:
    from torch import Tensor

PLAN_FILE, EXPLAIN_FILE, JOURNAL_FILE = "plan.json", "explain.json", "journal.txt"
MODEL_FILE, PROGRAM_FILE, RUN_FILE = "model.txt", "program.txt", "run.py"
WEIGHTS_FILE = "initial.safetensors"
# The prefix of the files of the code of compiled steps.
COMPILED = "compiled_"
# The folder with the plan of the module in eval mode.
EVALUATION = "evaluation"
# There, in the place of a plan: the reason why there is none.
REFUSED_FILE = "refused.txt"
# The folder of a new plan until it is whole.
NEW = ".superscaler-new"
REWRITE = "write it again with superscaler compile --out"
_TEXTS = "|".join(map(re.escape, (RUN_FILE, MODEL_FILE, PROGRAM_FILE, JOURNAL_FILE, EXPLAIN_FILE)))
_OURS = rf"^(({COMPILED})?(program_[0-9]+|segments)\.py|{COMPILED}{re.escape(PROGRAM_FILE)}|{_TEXTS})$"

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Box = list[tuple[Count, Count]]
Option = bool | Number | FiniteFloat | str | list[FiniteFloat] | None


Ours = Annotated[str, Field(pattern=_OURS)]
ProgramName = Annotated[str, Field(pattern=r"^program_\d+$")]
Target = Annotated[str, Field(pattern=r"^\w+\.\w+\.\w+$")]


class Weight(Checked):
    name: str
    tensor: str
    box: Box
    trained: bool
    counted: bool
    group: Count
    host: bool = False


class Draw(Checked):
    op: Count
    box: Box
    extents: list[Count]
    shape: list[Count]
    ahead: Count = 0


class Tables(Checked):
    """The tables of one device."""

    weights: list[Weight]
    inputs: list[tuple[str, Box]]
    groups: list[list[Count]]
    messages: list[tuple[Count, Count]]
    boxes: list[Box | list[Box]]
    draws: list[list[Draw]]
    parts: list[list[Box]]
    counted: list[list[bool]]
    ways: list[list[tuple[list[Count], Number, list[Count]]]]
    shapes: list[list[list[Count]]]
    updates: list[list[str]]


class Changes(Checked):
    """The tables of one device for compiled steps, where they differ."""

    inputs: list[tuple[str, Box]] | None = None
    groups: list[list[Count]] | None = None
    messages: list[tuple[Count, Count]] | None = None
    boxes: list[Box | list[Box]] | None = None
    draws: list[list[Draw]] | None = None
    parts: list[list[Box]] | None = None
    counted: list[list[bool]] | None = None
    ways: list[list[tuple[list[Count], Number, list[Count]]]] | None = None
    shapes: list[list[list[Count]]] | None = None
    updates: list[list[str]] | None = None


class CompiledCode(Checked):
    """The code of compiled steps, where their segments are longer than those of the plan."""

    programs: list[ProgramName]
    devices: list[Changes]


class Owned(Checked):
    """The user's tensor that holds a tensor."""

    name: str
    kind: Literal["parameter", "buffer"]
    shape: list[Count]
    dtype: str
    dim: Count
    start: Count


class Optimizer(Checked):
    name: str
    groups: list[dict[str, Option]]
    scaler: dict[str, Option]
    precision: Literal["", "bf16", "fp16"] = ""


class Operator(Checked):
    """The registration of a user's operator; see `operators.homes`."""

    module: Annotated[str, Field(pattern=r"^(\w+(\.\w+)*)?$")]
    file: Annotated[str, Field(min_length=1)]
    sha256: Hash


class Manifest(Checked):
    """Hashes of a plan's sources (`model` to `sources`), the versions that compiled it, and hashes of its files.

    `header`: of the weights file up to the data; `tensors`: of the data; `self`: of the manifest.
    """

    model: Hash
    plan: Hash
    cluster: Hash
    operators: Hash
    weights: Hash
    sources: Hash
    superscaler: str
    torch: str
    python: str
    code: Hash
    data: Hash
    files: dict[Ours, Hash]
    header: Hash
    tensors: dict[str, Hash]
    self: Hash


class PlanHead(Head):
    """The types of plan.json."""

    NAME = PLAN_FILE
    VERSION = 4
    DIFFERS = "is not what compile wrote there"
    REMEDY = REWRITE

    version: Number
    world: Count
    cluster: str
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    programs: list[ProgramName]
    devices: list[Tables]
    inputs: dict[str, tuple[list[Count], str]]
    bounds: dict[str, Count]
    limits: dict[str, tuple[Number, Number]]
    ignored: dict[str, Number] = Field(default_factory=dict)
    pads: bool = False
    shorter: dict[str, tuple[Count, Number | None]] = Field(default_factory=dict)
    slots: dict[str, list[list[Count]]]
    tensors: dict[str, Owned]
    aliases: dict[str, str]
    loss_dtype: str
    result: str = ""
    iterations: Count = 1
    optimizer: Optimizer
    operators: dict[Target, Operator | None]
    compiled: CompiledCode | None = None
    manifest: Manifest

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if not len(self.devices) == len(self.programs) == self.world > 0:
            counts = f"{len(self.devices)} devices, {len(self.programs)} programs and a world of {self.world}"
            raise ValueError(f"it has {counts}, which must be one number above 0")
        own = self.compiled
        if own is not None and not len(own.devices) == len(own.programs) == self.world:
            counts = f"{len(own.devices)} devices and {len(own.programs)} programs for compiled steps"
            raise ValueError(f"it has {counts}, which must be the {self.world} of the plan")
        return self

    @staticmethod
    def signed(data: Mapping[str, Any]) -> dict[str, Any]:
        kept = {**data["manifest"], "data": hash_without(data, "manifest")}
        return {**data, "manifest": {**kept, "self": hash_without(kept, "self")}}

    @staticmethod
    def stamps(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        kept = data["manifest"]
        files = {name: {"sha256": found} for name, found in kept["files"].items()}
        return {**files, WEIGHTS_FILE: {"header": kept["header"], "tensors": kept["tensors"]}}

    @classmethod
    def refuse(cls, file: Path, found: str, kept: str) -> NoReturn:
        mine = "; a plan edited on purpose runs by ss.load(DIR, manifest=False)" if file.suffix == ".py" else ""
        refuse(file, cls.DIFFERS, cls.REMEDY + mine)


def read_plan(directory: Path, has_hashes: bool = True) -> disk.Whole:
    """Open a plan directory: plan.json, checked for its version and types, with `has_hashes` also by its hashes."""
    with reading(directory / PLAN_FILE, REWRITE):
        is_there = (directory / PLAN_FILE).exists()
    if not is_there:
        raise InputError(
            f"{directory} is not a plan directory (it has no {PLAN_FILE}); name one that superscaler compile --out has "
            "written."
        )
    return disk.read(directory, PlanHead, has_hashes)


def open_plan(path: Path, has_hashes: bool) -> disk.Whole:
    """Open a plan directory, its weights unread. Raises InputError if it cannot be run; see `load`."""
    plan = read_plan(path, has_hashes)
    # Also files that no rank needs: an incomplete directory is not run.
    plan.check(name for name in plan.stamps if name != WEIGHTS_FILE)
    _check_torch(plan)
    return plan


def code_of(plan: disk.Whole, prefix: str = "") -> dict[str, str]:
    """Return the emitted code of a plan directory by file, whose names there have a prefix."""
    programs = plan.head["compiled"]["programs"] if prefix else plan.head["programs"]
    return {f"{name}.py": plan.text(f"{prefix}{name}.py") for name in ("segments", *sorted(set(programs)))}


def of_compiled(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return plan.json with the programs and the tables of compiled steps."""
    own = plan["compiled"]
    devices = [{**plain, **changes} for plain, changes in zip(plan["devices"], own["devices"], strict=True)]
    return {**plan, "programs": own["programs"], "devices": devices}


def weights_of(plan: disk.Whole, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the whole tensors of a rank's weights, and on rank 0 also the tensors that no device holds."""
    placed = [{w["tensor"] for w in device["weights"]} for device in plan.head["devices"]]
    fixed = plan.head["manifest"]["tensors"].keys() - set[str]().union(*placed) if rank == 0 else set()
    if plan.stamps:
        plan.check_tensors(WEIGHTS_FILE, placed[rank] | fixed)
    with opened(plan.path / WEIGHTS_FILE, REWRITE) as stored:
        found = {name: stored.get_tensor(name) for name in sorted(placed[rank] | fixed)}
        shown = kinds(stored)
    for name in sorted(placed[rank]):
        shape, dtype = shown[name]
        planned = plan.head["tensors"].get(name, {"dtype": dtype})["dtype"]
        sizes = tuple(map(prod, plan.head["slots"].get(name, ())))
        if (dtype, shape) != (planned, sizes):
            fault = f"has {name} as {dtype} {shape}, but the plan as {planned} {sizes}"
            refuse(plan.path / WEIGHTS_FILE, fault, REWRITE)
    return {name: found[name] for name in placed[rank]}, {name: found[name] for name in fixed}


def _check_torch(saved: disk.Whole) -> None:
    """Raise InputError for a dtype, an optimizer or an option that torch lacks."""
    import torch

    plan, file = saved.head, saved.path / PLAN_FILE
    dtypes = [plan["loss_dtype"] or "float32", *(dtype for _, dtype in plan["inputs"].values())]
    if odd := [name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]:
        raise InputError(f"{file} has the dtype '{odd[0]}', which torch {torch.__version__} lacks; {REWRITE}.")
    for group in plan["optimizer"]["groups"]:
        name, options = kind_of(group, plan["optimizer"]["name"])
        if name not in OPTIMIZERS.values():
            raise InputError(f"{file}: {unknown('optimizer', name, OPTIMIZERS.values())}")
        known = inspect.signature(getattr(torch.optim, name)).parameters
        for option in (option for option in options if option not in known):
            raise InputError(f"{file}: {unknown(f'option of torch.optim.{name}', option, known)}")


def warn_versions(saved: disk.Whole) -> None:
    """Warn if another torch, or another superscaler, compiled a plan: its numbers may differ in the last bits."""
    import torch

    import superscaler

    versions = {"torch": torch.__version__, "superscaler": superscaler.__version__}
    kept = saved.head["manifest"]
    if changed := [f"{name} {kept[name]}, not {now}" for name, now in versions.items() if kept[name] != now]:
        warnings.warn(
            f"{saved.path} was compiled by {' and '.join(changed)}; {REWRITE} where that matters.", stacklevel=3
        )


def plan_files(directory: Path) -> frozenset[str]:
    """Return the names of the plan's files in a directory, also of an unfinished plan; none if it is empty or missing.
    Raises InputError for a file, and for a directory that holds something, but no plan of ours.
    """
    with reading(directory, "choose another directory"):
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file; choose a directory.")
        there = {entry.name for entry in directory.iterdir()} if directory.exists() else set()
        plans = [folder for folder in (directory, directory / NEW) if (folder / PLAN_FILE).is_file()]
    if there - {NEW} and not plans:
        raise InputError(f"{directory} is not empty and is not a plan directory; choose another --out.")
    return frozenset[str]().union(*map(_listed, plans))


def _listed(folder: Path) -> frozenset[str]:
    """Return the names of all files of the plan of any version whose plan.json is in a folder."""
    hint = "nothing beside it is replaced; choose another --out, or empty that directory yourself"
    with reading(folder / PLAN_FILE, hint, kind="plan that compile writes"):
        names = json.loads((folder / PLAN_FILE).read_bytes())["manifest"]["files"].keys()
        if not {EXPLAIN_FILE, RUN_FILE} <= names or not all(re.fullmatch(_OURS, n) for n in names):
            raise ValueError("it lists other files")
    return frozenset((PLAN_FILE, WEIGHTS_FILE, *names))


@contextmanager
def staged(directory: Path) -> Iterator[Draft]:
    """Yield a draft of a new plan, which replaces the older plan of a directory; after an error the older one stays."""
    recover(directory)
    with disk.written(directory / NEW) as folder:
        yield Draft(folder, PlanHead)
    recover(directory)


def remove_evaluation(directory: Path) -> None:
    """Remove the plan of evaluation in a plan directory, or the reason why there is none; a folder of others stays."""
    own = directory / EVALUATION
    if any((own / name).exists() for name in (PLAN_FILE, REFUSED_FILE)):
        shutil.rmtree(own)


def recover(directory: Path) -> None:
    """Move a whole plan that is aside into its place; remove an unfinished one. It may be repeated from any point."""
    folder = directory / NEW
    if (folder / PLAN_FILE).is_file():
        _move(folder, directory)
    if folder.exists():
        shutil.rmtree(folder)


def _move(folder: Path, directory: Path) -> None:
    names = _listed(folder)
    older = _listed(directory) if (directory / PLAN_FILE).is_file() else frozenset[str]()
    for name in sorted(names - {PLAN_FILE}):
        if (folder / name).is_file():
            os.replace(folder / name, directory / name)
    for name in older - names:
        (directory / name).unlink(missing_ok=True)
    sync(directory)
    # Last: this file shows that the plan is whole.
    os.replace(folder / PLAN_FILE, directory / PLAN_FILE)
    sync(directory)
