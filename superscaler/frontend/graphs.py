"""The graph of a training step: the public `capture`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from superscaler.errors import InputError, named
from superscaler.frontend.base.training import Optimizers
from superscaler.frontend.capture import capture as capture_model
from superscaler.frontend.checks.agreement import SKIPPED
from superscaler.ir.graph import Graph

# The default of `optimizer`: none was given, not even None.
_UNSAID: Any = object()


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizers | None = _UNSAID,
    autocast: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    outputs: bool = False,
    check: bool = True,
    precision: str | None = None,
) -> Graph:
    """Return the graph of a training step: `module(*args, **kwargs)` gives the loss, an object with `.loss`, or a tuple
    with one scalar.

    `optimizer` updates parameters of the module: torch's SGD, AdamW or another that works element by element, or Muon.
    Several divide the parameters: `[torch.optim.Muon(matrices), torch.optim.AdamW(rest)]`.
    It must be given if a parameter requires a gradient. None means inference, as for a frozen module and under
    `torch.no_grad()`: no gradient is computed, nothing is updated, and the step returns the module's result, a loss
    included. Several losses, as of a GAN, are a dict from the key of a loss in the module's result to the optimizer of
    the parameters that this loss alone trains; the step returns their sum. With `outputs`, and with several losses,
    `step.outputs` has the module's other results.

    `autocast` is "bf16" or "fp16" (default: the `torch.autocast` region around this call); `scaler` scales the loss.
    `precision`, instead of autocast, is "bf16" or "fp16": a copy of the module in that dtype is captured, and the
    optimizer updates float32 copies of its weights (docs/precision.md).

    `check` compares two steps of the graph with those of a copy of the module run by torch; the result is
    `graph.captured.checked`. For a large module, or one without data, a logged line replaces the comparison.
    """
    return capture_named(None, module, args, kwargs, optimizer, autocast, scaler, outputs, check, precision)


def capture_named(
    name: str | None,
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizers | None = _UNSAID,
    autocast: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    outputs: bool = False,
    check: bool = True,
    precision: str | None = None,
) -> Graph:
    """Return the graph of a training step as `capture` does, read from disk if it was captured under this name: a
    model of the library, which is its name, its options and versions of packages.
    """
    _check_kinds(
        (kwargs, dict, "a dict of arguments by name as kwargs"),
        (outputs, bool, "True or False as outputs"),
        (check, bool, "True or False as check"),
    )
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"capture needs a torch.nn.Module, not {named(module)}; give the module whose forward is the step, and its "
            "arguments as args and kwargs."
        )
    if optimizer is _UNSAID:
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            raise InputError(
                "capture needs the optimizer of the training step, which has no default; "
                "pass optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3), or an SGD or Adam, or optimizer=None "
                "for inference: no gradients, no updates, and the step returns what the module returns."
            )
        optimizer = None
    if optimizer is None and scaler is not None:
        raise InputError("a scaler scales a loss that is trained by; give capture an optimizer too, or no scaler.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"capture takes a torch.amp.GradScaler as scaler, not {scaler!r}.")
    is_trained = optimizer is not None
    is_kept = outputs or not is_trained
    captured = capture_model(
        module, args, kwargs, optimizer, autocast, scaler, name, is_trained, is_kept=is_kept, check=check,
        precision=precision,
    )  # fmt: skip
    if check and captured.checked.startswith(SKIPPED):
        logging.getLogger(__name__).warning("capture: %s", captured.checked)
    return Graph(captured.model, captured)


def _check_kinds(*given: tuple[Any, type, str]) -> None:
    """Raise InputError for an argument of capture that is of another type."""
    for value, kind, form in given:
        if value is not None and not isinstance(value, Mapping if kind is dict else kind):
            raise InputError(f"capture takes {form}, not {named(value)}.")
