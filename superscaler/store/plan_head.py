"""The names of the files of a plan directory, and the types of plan.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import Field, FiniteFloat, model_validator

from superscaler.specs.file_errors import refuse
from superscaler.store.folder import Checked, Count, Hash, Head, hash_without

PLAN_FILE, EXPLAIN_FILE, JOURNAL_FILE = "plan.json", "explain.json", "journal.txt"
MODEL_FILE, PROGRAM_FILE, RUN_FILE = "model.txt", "program.txt", "run.py"
WEIGHTS_FILE = "initial.safetensors"
# The prefix of the files of the code of compiled steps.
COMPILED = "compiled_"
# The folder with the plan of the module in eval mode.
EVALUATION = "evaluation"
# The folder with the plans of other shapes, by number. Their files of weights have constants only.
SHAPES = "shapes"
# In the place of a plan of evaluation: the reason why there is none.
REFUSED_FILE = "refused.txt"
# The folder of a new plan until it is whole.
NEW = ".superscaler-new"
REWRITE = "write it again with superscaler compile --out"
_TEXTS = "|".join(map(re.escape, (RUN_FILE, MODEL_FILE, PROGRAM_FILE, JOURNAL_FILE, EXPLAIN_FILE)))
OURS = rf"^(({COMPILED})?(program_[0-9]+|segments)\.py|{COMPILED}{re.escape(PROGRAM_FILE)}|{_TEXTS})$"

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Box = list[tuple[Count, Count]]
Option = bool | Number | FiniteFloat | str | list[FiniteFloat] | None
Ours = Annotated[str, Field(pattern=OURS)]
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
