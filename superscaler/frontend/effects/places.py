"""The places of parameters and buffers in a module, and what a forward puts there."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from superscaler.errors import CaptureError
from superscaler.frontend.base.refusals import forward_line, user_line
from superscaler.replaced import replaced

_MISSING = object()
# The identity of a module and the name of its attribute -> the line that set it last.
Lines = dict[tuple[int, str], str]


class Places:
    """The parameters and buffers of a module by their places, and the tensors that a call has put there.

    torch.export sees that a buffer changes in place, and reads the names of all tensors after the call.
    """

    def __init__(self, module: nn.Module, lines: Lines) -> None:
        self.name, self.lines = type(module).__name__, lines
        self.owners = [
            (path, owner, dict(owner._parameters), dict(owner._buffers), set(owner._non_persistent_buffers_set))
            for path, owner in module.named_modules()
        ]
        self.made: dict[str, tuple[nn.Module, Tensor, Any]] = {}

    def take(self) -> None:
        """Put the buffers back in their places, and keep what was there. Raises CaptureError for a set parameter."""
        self.made = {}
        for path, owner, parameters, buffers, _ in self.owners:
            for name, parameter in owner._parameters.items():
                if parameter is not parameters.get(name):
                    raise CaptureError(
                        f"{line_of_set(self.lines, owner, name)} sets parameter {join(path, name)} of {self.name} in "
                        "the forward, but the optimizer of a captured step has the one from before; compute the new "
                        "tensor under another name, and use that."
                    )
            for name, old in buffers.items():
                new = owner._buffers.get(name, _MISSING)
                if old is not None and new is not old:
                    self.made[join(path, name)] = owner, old, new
                    owner._buffers[name] = old

    def write(self) -> None:
        """Write what the last call has put in the place of buffers into them, and take new buffers away."""
        for _, owner, _, buffers, passing in self.owners:
            for name in owner._buffers.keys() - buffers.keys():
                del owner._buffers[name]
            owner._buffers.update(buffers)
            owner._non_persistent_buffers_set = passing
        for path, (owner, old, new) in self.made.items():
            if not isinstance(new, Tensor) or (new.shape, new.dtype) != (old.shape, old.dtype):
                value = f"a tensor of {_form(new)}" if isinstance(new, Tensor) else "no tensor"
                where = line_of_set(self.lines, owner, path.rpartition(".")[2])
                raise CaptureError(
                    f"{where} sets buffer {path} of {self.name}, which has {_form(old)}, to {value}; "
                    "a captured step keeps the shape and the dtype of a buffer: cast or expand the new value."
                )
        # A new value may be another buffer, or a view of one.
        with torch.no_grad():
            values = [(old, new.detach().clone()) for _, old, new in self.made.values()]
            for old, value in values:
                old.copy_(value)


def join(*names: str) -> str:
    return ".".join(filter(None, names))


def line_of_set(lines: Lines, owner: nn.Module, name: str) -> str:
    """Return the line that set an attribute of a module last, or its forward."""
    return lines.get((id(owner), name)) or forward_line(owner)


def _form(x: Tensor) -> str:
    return f"shape {tuple(x.shape)} and dtype {str(x.dtype).removeprefix('torch.')}"


@contextmanager
def recorded() -> Iterator[Lines]:
    """Record the line that last set each attribute or buffer of a module."""
    lines: Lines = {}

    def recording(original: Callable[..., None]) -> Callable[..., None]:
        def record(self: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            frame = sys._getframe(1)
            # torch sets a buffer by registering it.
            if where := user_line([(frame.f_code.co_filename, frame.f_lineno)]):
                lines[id(self), name] = where
            original(self, name, *args, **kwargs)

        return record

    ways = ("__setattr__", "register_buffer")
    with replaced(*((nn.Module, way, recording(vars(nn.Module)[way])) for way in ways)):
        yield lines
