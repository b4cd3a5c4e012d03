"""The types of plan.json. Read it by `superscaler.specs.saved_plan`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from superscaler.store.files import is_inside

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Box = list[tuple[Count, Count]]
Option = bool | Number | FiniteFloat | str | list[FiniteFloat] | None


def _inside(name: str) -> str:
    if not is_inside(name):
        raise ValueError("a path inside of the plan directory is needed")
    return name


Path = Annotated[str, AfterValidator(_inside)]
Target = Annotated[str, Field(pattern=r"^\w+\.\w+\.\w+$")]


class Checked(BaseModel):
    """Has these fields, of these types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
    """Of one device."""

    weights: list[Weight]
    inputs: list[tuple[str, Box]]
    groups: list[list[Count]]
    messages: list[tuple[Count, Count]]
    boxes: list[Box | list[Box]]
    draws: list[list[Draw]]
    parts: list[list[Box]]
    counted: list[list[bool]]


class Owned(Checked):
    """Which of the user's tensors a tensor is."""

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


class Operator(Checked):
    """Who registers an operator of the user's: `file` is the copy, empty for a module that is installed."""

    module: str
    file: Path | Literal[""]
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
    files: dict[Path, Hash]
    header: Hash
    tensors: dict[str, Hash]
    self: Hash


class PlanFile(Checked):
    version: Number
    world: Count
    cluster: str
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    programs: list[Annotated[str, Field(pattern=r"^program_\d+$")]]
    devices: list[Tables]
    inputs: dict[str, tuple[list[Count], str]]
    bounds: dict[str, Count]
    limits: dict[str, tuple[Number, Number]]
    ignored: dict[str, Number] = {}
    slots: dict[str, list[list[Count]]]
    tensors: dict[str, Owned]
    aliases: dict[str, str]
    loss_dtype: str
    result: str = ""
    iterations: Count = 1
    optimizer: Optimizer
    operators: dict[Target, Operator | None]
    manifest: Manifest
