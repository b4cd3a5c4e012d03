"""The oracle of every equality check: the exported program itself, run by torch, retyped; none of our rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter

if TYPE_CHECKING:
    from superscaler.frontend.capture import Captured

_ATTENTION = "aten.scaled_dot_product_attention.default"


def reference_step(
    captured: Captured,
    batch: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    dropout: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradient of every trained parameter, on one device, by canonical name.

    `dtype` replaces every floating dtype, also of casts and factories. Dropout keeps everything unless `dropout`.
    """
    model = captured.model
    trained = [t.name for t in model.parameters() if t.requires_grad]
    leaves = {name: _retype(values[name].detach(), dtype).clone().requires_grad_() for name in trained}
    device = next(iter(leaves.values())).device
    known = {**values, **leaves, **batch}
    inputs = [_argument(captured, spec, known, dtype, device) for spec in captured.exported.graph_signature.input_specs]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        interpreter = _Retyped(captured.exported.graph_module, dtype, device, dropout)
        with torch.enable_grad():
            loss = interpreter.run(*inputs)[-1]
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    finally:
        torch.set_default_dtype(before)
    gradients = zip(leaves.items(), found, strict=True)
    return loss.detach(), {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in gradients}


def _argument(
    captured: Captured, spec: Any, known: Mapping[str, Tensor], dtype: torch.dtype | None, device: torch.device
) -> Any:
    """Return the value of one placeholder: the given one, or what the program itself holds."""
    name = captured.model.aliases.get(spec.target, spec.target) if spec.target else getattr(spec.arg, "name", "")
    value = known.get(name)
    if value is None and spec.kind is not InputKind.USER_INPUT:
        exported = captured.exported
        value = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
    if value is None:
        return getattr(spec.arg, "value", None)
    return _retype(value.to(device), dtype)


def _retype(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.dtype.is_floating_point else value


class _Retyped(Interpreter):
    """Runs a graph with other floating dtypes, on another device, without dropout."""

    def __init__(
        self, graph_module: torch.fx.GraphModule, dtype: torch.dtype | None, device: torch.device, dropout: bool
    ) -> None:
        super().__init__(graph_module)
        self.dtype = dtype
        self.device = device
        self.dropout = dropout

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(target)
        if "_assert" in name:
            return None
        args, kwargs = self._convert(args), self._convert(kwargs)
        if not self.dropout and name == "aten.native_dropout.default":
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if not self.dropout and name == _ATTENTION and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        if not self.dropout and name == _ATTENTION:
            kwargs.pop("dropout_p", None)
        return target(*args, **kwargs)

    def _convert(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, torch.dtype):
            return self.dtype if self.dtype is not None and value.is_floating_point else value
        if isinstance(value, dict):
            return {k: self._convert(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._convert(v) for v in value)
        return value
