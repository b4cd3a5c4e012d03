"""The outputs of a step, in the form in which the module returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Outputs(dict[str, Any]):
    """A dict whose values are attributes too, like those of an output object of a module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the step returns no {name}, but {', '.join(self)}") from None


def put_together(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a result of a form, with tensors by name, None for a tensor that is not here.

    >>> put_together({"dict": {"logits": {"tensor": "return.logits"}, "kept": {"value": 2}}}, {})
    {'logits': None, 'kept': 2}
    """
    ((kind, inner),) = (form or {"value": None}).items()
    match kind:
        case "tensor":
            return tensors.get(inner)
        case "dict":
            return Outputs({key: put_together(value, tensors) for key, value in inner.items()})
        case "list" | "tuple":
            made = [put_together(value, tensors) for value in inner]
            return made if kind == "list" else tuple(made)
    return inner
