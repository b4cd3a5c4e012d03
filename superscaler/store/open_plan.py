"""A plan directory as a rank reads it: plan.json, its code, its weights."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import superscaler
from superscaler.errors import InputError, unknown
from superscaler.specs.file_errors import reading
from superscaler.specs.options import OPTIMIZERS
from superscaler.specs.user_file import locating
from superscaler.store.files import OPERATORS, PLAN_FILE, WEIGHTS_FILE
from superscaler.store.plan import REWRITE, check_weights, read_file, read_plan, read_text, require_file


@dataclass(frozen=True)
class Saved:
    """A plan directory: plan.json, emitted code and copies of the user's operators, by file. `is_checked`: by
    hashes.
    """

    path: Path
    plan: Mapping[str, Any]
    code: Mapping[str, str]
    operators: Mapping[str, bytes]
    is_checked: bool

    def building(self) -> AbstractContextManager[None]:
        """Name the file in errors of code and tables that a user may have edited."""
        return nullcontext() if self.is_checked else locating(self.path / PLAN_FILE, "cannot be run")

    def weights(self, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the whole tensors of a rank's weights, and on rank 0 also those that no device holds."""
        file, kept = self.path / WEIGHTS_FILE, self.plan["manifest"]["tensors"]
        placed = [{w["tensor"] for w in device["weights"]} for device in self.plan["devices"]]
        fixed = sorted(kept.keys() - set[str]().union(*placed)) if rank == 0 else []
        require_file(file)
        if self.is_checked:
            check_weights(self.path, self.plan["manifest"], placed[rank].union(fixed))
        with reading(file, REWRITE, (SafetensorError,)), safe_open(file, framework="pt") as stored:
            found = {name: stored.get_tensor(name) for name in sorted(placed[rank])}
            left = {name: stored.get_tensor(name) for name in fixed}
        for name, value in found.items():
            _check_tensor(file, name, value, self.plan)
        return found, left


def open_plan(path: Path, manifest: bool) -> Saved:
    """Read a plan directory without its weights. Raises InputError if it cannot be run; see `load`."""
    plan = read_plan(path, manifest)
    kept = plan["manifest"] if manifest else None
    names = [f"{name}.py" for name in ("segments", *sorted(set(plan["programs"])))]
    code = {name: read_text(path, name, kept) for name in names}
    operators = {n: read_file(path, n, kept) for n in plan["manifest"]["files"] if n.startswith(f"{OPERATORS}/")}
    for name in plan["manifest"]["files"] if manifest else ():
        # Also files that no rank needs: an incomplete directory is not run.
        read_file(path, name, kept)
    _check_torch(path / PLAN_FILE, plan)
    return Saved(path, plan, code, operators, manifest)


def _check_tensor(file: Path, name: str, value: Tensor, plan: Mapping[str, Any]) -> None:
    dtype = str(value.dtype).removeprefix("torch.")
    planned = plan["tensors"].get(name, {"dtype": dtype})["dtype"]
    found, wanted = f"{dtype} {tuple(value.shape)}", f"{planned} {tuple(map(prod, plan['slots'].get(name, ())))}"
    if found != wanted:
        raise InputError(f"{file} has {name} as {found}, but the plan as {wanted}; {REWRITE}.")


def _check_torch(file: Path, plan: Mapping[str, Any]) -> None:
    """Raise InputError for a dtype, an optimizer or an option that torch lacks."""
    dtypes = [plan["loss_dtype"] or "float32", *(dtype for _, dtype in plan["inputs"].values())]
    if odd := [name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]:
        raise InputError(f"{file} has the dtype '{odd[0]}', which torch {torch.__version__} has not; {REWRITE}.")
    name = plan["optimizer"]["name"]
    if not name:
        return
    if name not in OPTIMIZERS.values():
        raise InputError(f"{file}: {unknown('optimizer', name, OPTIMIZERS.values())}")
    known = inspect.signature(getattr(torch.optim, name)).parameters
    for option in (option for group in plan["optimizer"]["groups"] for option in group):
        if option not in known:
            raise InputError(f"{file}: {unknown(f'option of torch.optim.{name}', option, known)}")


def warn_versions(saved: Saved) -> None:
    """Warn if another torch, or another superscaler, compiled a plan: its numbers may differ in the last bits."""
    versions = {"torch": torch.__version__, "superscaler": superscaler.__version__}
    kept = saved.plan["manifest"]
    if changed := [f"{name} {kept[name]}, not {now}" for name, now in versions.items() if kept[name] != now]:
        warnings.warn(
            f"{saved.path} was compiled by {' and '.join(changed)}; {REWRITE} where that matters.", stacklevel=3
        )
