"""What a recorded step cannot do: found before anything runs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from superscaler.errors import InputError, brief
from superscaler.runtime.replayable.reads import Reads
from superscaler.specs.options import kind_of

LEAVE_OUT = "leave cuda_graph (--cuda-graph) out"
# Calls of emitted code that copy to the host, which waits for them.
_COPIES = ("offload", "fetch", "to_host", "to_device")


def check_plan(plan: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], function: FunctionType) -> None:
    """Raise InputError for a plan whose steps cannot be replayed. `entries`: of the weights of a rank; `function`: its
    step.
    """
    if not plan["loss_dtype"]:
        raise InputError(f"this plan trains nothing, and cuda_graph replays steps of training; {LEAVE_OUT}.")
    if names := [entry["tensor"] for entry in entries if entry.get("host")]:
        raise InputError(
            f"weight {names[0]} is updated on the host under this plan, which no CUDA graph replays; take a plan that "
            f"keeps it on the GPU, or {LEAVE_OUT}."
        )
    if used := [name for name in _COPIES if name in function.__code__.co_names]:
        raise InputError(
            f"the step of this plan calls {used[0]}, so the host waits for copies, which no CUDA graph replays; take a "
            f"plan without swap and offload, or {LEAVE_OUT}."
        )


def check_scaler(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise InputError for a loss scale beside an optimizer whose kernels cannot leave an update out."""
    if any(not group.get("fused") for group in (optimizer.param_groups if optimizer is not None else ())):
        raise InputError(
            "the loss scale leaves out updates that are not finite, which only fused kernels (Adam, AdamW, SGD) do "
            f"without the host; leave foreach and fused of the optimizer open, train in bf16, or {LEAVE_OUT}."
        )


def kernels_of(name: str, options: Mapping[str, Any], weights: Iterable[Tensor], is_mixed: bool) -> dict[str, Any]:
    """Return options to add to those of a parameter group, so that no update reads a number.

    Raises InputError for an optimizer that reads its learning rate or its steps all the same.
    """
    kind, given = kind_of(options, name)
    takes = "capturable" in inspect.signature(getattr(torch.optim, kind)).parameters
    more = {"capturable": True} if takes else {}
    text = json.dumps({**given, **more}, sort_keys=True)
    for dtype, device in {(torch.float32 if is_mixed else x.dtype, x.device) for x in weights}:
        if why := _reads(kind, text, dtype, device):
            ways = [key for key in ("foreach", "fused") if given.get(key) is not None]
            hint = f"leave {' and '.join(ways)} of it open" if ways else "take AdamW, Adam or SGD"
            raise InputError(f"the optimizer {kind} reads numbers in each update ({why}), which no CUDA graph replays; "
                             f"{hint}, or {LEAVE_OUT}.")  # fmt: skip
    return more


@cache
def _reads(kind: str, options: str, dtype: torch.dtype, device: torch.device) -> str:
    """Return why updates of a weight with these options cannot be replayed, '' if they can."""
    weight = torch.ones(3, 43, dtype=dtype, device=device, requires_grad=True)
    reads = Reads()
    try:
        optimizer = getattr(torch.optim, kind)([weight], **json.loads(options))
        optimizer._warned_capturable_if_run_uncaptured = True
        optimizer.param_groups[0]["lr"] = torch.full((), 0.1, dtype=dtype, device=device)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            with reads:
                optimizer.step()
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        return brief(error)
    return next(iter(reads.found), "")
