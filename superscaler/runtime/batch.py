"""The batches that a step takes: checked, and filled where they are smaller; and the results that it returns."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from superscaler.errors import InputError, named
from superscaler.ir.names import later
from superscaler.store.pieces import runs

Batch = dict[str, Tensor]


def check_batches(given: Any, plan: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the tensors of a batch, or of one for each iteration, by name. Raises InputError for anything else."""
    count = plan.get("iterations", 1)
    if count == 1:
        given = flat(given, plan["inputs"])
        check_batch(given, plan)
        return cast(Mapping[str, Tensor], given)
    if not isinstance(given, Sequence) or len(given) != count:
        found = f"{len(given)} batches" if isinstance(given, Sequence) else type(given).__name__
        raise InputError(
            f"this plan runs {count} iterations at once: a step takes a list of {count} batches, not {found}."
        )
    given = [flat(batch, plan["inputs"]) for batch in given]
    for batch in given:
        check_batch(batch, plan)
    return {later(name, k): x for k, batch in enumerate(given) for name, x in batch.items()}


def flat(batch: Any, inputs: Container[str]) -> Any:
    """Return a batch as tensors by the names of a capture: nested dicts, lists and tuples by paths, in lower case.

    >>> flat({"batch": {"Image": 1, "boxes": [2]}, "Scale": 3}, ["batch_image", "batch_boxes_0", "scale"])
    {'batch_image': 1, 'batch_boxes_0': 2, 'scale': 3}
    """
    if not isinstance(batch, Mapping) or all(name in inputs for name in batch):
        return batch
    leaves = [pair for name, x in batch.items() for pair in ([(name, x)] if name in inputs else _leaves(name, x))]
    return dict(leaves) if all(name in inputs for name, _ in leaves) else batch


def _leaves(path: object, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a value by the names that torch.export gives them."""
    name = re.sub("[^a-zA-Z0-9]", "_", str(path).lower())
    if isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name}_{key}", inner)
    else:
        yield name, value


def check_batch(batch: Mapping[str, Tensor], plan: Mapping[str, Any]) -> None:
    """Raise InputError unless a batch has the inputs of a plan, of their shapes, dtypes and rows."""
    check_dtypes(batch, plan)
    for name, (shape, _) in plan["inputs"].items():
        if tuple(batch[name].shape) != tuple(shape):
            raise InputError(
                f"'{name}' has shape {tuple(batch[name].shape)}, but this plan was compiled for {tuple(shape)}; "
                "give the global batch of that shape, or list its own: ss.compile(..., shapes=[...])."
            )
        if batch[name].is_meta or batch[name].layout != torch.strided:
            kind = "meta" if batch[name].is_meta else batch[name].layout
            raise InputError(f"'{name}' is a {kind} tensor; give a dense one with data.")
        _check_rows(name, batch[name], plan)


def check_dtypes(batch: Mapping[str, Tensor], plan: Mapping[str, Any]) -> None:
    """Raise InputError unless a batch has the inputs of a plan, of their dtypes."""
    inputs = plan["inputs"]
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch is a dict of tensors by name, not {type(batch).__name__}.")
    if unread := [name for name in batch if name not in inputs]:
        raise InputError(f"the batch has '{unread[0]}'; this plan reads {', '.join(inputs)} only.")
    for name, (_, dtype) in inputs.items():
        if name not in batch:
            has = ", ".join(batch) or "nothing"
            raise InputError(f"the batch has {has}, but no '{name}'; this plan reads {', '.join(inputs)}.")
        if not isinstance(batch[name], Tensor) or batch[name].dtype != getattr(torch, dtype):
            raise wrong_dtype(name, batch[name], dtype)


def wrong_dtype(name: str, given: Any, dtype: str) -> InputError:
    """Return the error of an input of another dtype than a plan's."""
    found = getattr(given, "dtype", type(given).__name__)
    return InputError(
        f"'{name}' is of {found}, but this plan was compiled for torch.{dtype} tensors; cast it where it is made, or "
        "capture with inputs of that dtype."
    )


def in_dtype(name: str, given: Any, dtype: str) -> Tensor:
    """Return the value of an input in data, as a tensor of a plan's dtype: float64, numpy's own, becomes float32, and
    Python's numbers become what they fit in. Raises InputError for another dtype.

    >>> in_dtype("x", [1, 2.5], "bfloat16").tolist(), in_dtype("x", [True, 3], "int64").tolist()
    ([1.0, 2.5], [1, 3])
    >>> in_dtype("x", torch.tensor(1.9), "int64")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    superscaler.errors.InputError: 'x' is of torch.float32, but this plan was compiled for torch.int64 tensors; ...
    """
    wanted = getattr(torch, dtype)
    try:
        found = torch.as_tensor(given)
        if not hasattr(given, "dtype") and torch.can_cast(found.dtype, wanted):
            return torch.as_tensor(given, dtype=wanted)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"'{name}' is no tensor, but {named(given)}, of which torch makes none: {error}") from None
    if found.dtype == wanted or (found.dtype, wanted) == (torch.float64, torch.float32):
        return found.to(wanted)
    raise wrong_dtype(name, found, dtype)


def _check_rows(name: str, values: Tensor, plan: Mapping[str, Any]) -> None:
    # Values on a GPU are not read, because that would wait for the GPU.
    if name not in plan["limits"] or values.is_cuda:
        return
    # Ignored labels may be any number, for example 255 for pixels without a class.
    values = values[values != plan["ignored"][name]] if name in plan["ignored"] else values
    if not values.numel():
        return
    (low, high), least, most = plan["limits"][name], int(values.min()), int(values.max())
    if least < low or most >= high:
        wrong = most if most >= high else least
        raise InputError(f"'{name}' has {wrong}, but the model has {high} rows for it, from 0 on.")


@dataclass(frozen=True)
class Padding:
    """The filling of a batch. `rows`: the label to ignore of each input of labels, if rows may be missing. `sequences`:
    for each input with a sequence that may be shorter, its dim, and the value that fills it (None: its last).
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    sequences: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Mapping[str, Any]) -> "Padding":
        """Return the padding of a plan."""
        return Padding(plan["ignored"] if plan.get("pads") else {}, plan.get("shorter", {}))

    def filled(self, batch: Batch, inputs: Mapping[str, Any]) -> Batch:
        """Return a batch of the shapes of a plan, if this one can be filled; itself, otherwise.

        >>> whole = {"x": ((2, 1), "float32"), "labels": ((2,), "int64")}
        >>> given = {"x": torch.ones(1, 1), "labels": torch.tensor([3])}
        >>> Padding(rows={"labels": -100}).filled(given, whole)["labels"].tolist()
        [3, -100]
        >>> Padding(rows={"labels": -100}).filled(given, {**whole, "image": ((2, 3), "float32")}) is given
        True
        """
        if not inputs.keys() <= batch.keys():
            return batch
        longer = self.lengthened(batch, inputs)
        counts = {(len(longer[name]), shape[0]) for name, (shape, _) in inputs.items() if shape and longer[name].dim()}
        if not self.rows or len(counts) != 1 or not 0 < (count := min(counts)[0]) < (rows := min(counts)[1]):
            return longer
        more = {name: _end(x, 0, self.rows.get(name), rows - count) for name, x in longer.items() if x.dim()}
        return {name: torch.cat([x, more[name]]) if name in more else x for name, x in longer.items()}

    def lengthened(self, batch: Batch, inputs: Mapping[str, Any]) -> Batch:
        """Return a batch with sequences of the plan's lengths, if all of a length are shorter by as much.

        >>> padding = Padding(sequences={"ids": (1, None), "mask": (1, 0), "labels": (1, -100)})
        >>> short = {"ids": torch.tensor([[5, 6]]), "mask": torch.tensor([[1, 1]]), "labels": torch.tensor([[7]])}
        >>> whole = {"ids": ((1, 4), "int64"), "mask": ((1, 4), "int64"), "labels": ((1, 3), "int64")}
        >>> [x.tolist() for x in padding.lengthened(short, whole).values()]
        [[[5, 6, 6, 6]], [[1, 1, 0, 0]], [[7, -100, -100]]]
        >>> padding.lengthened({**short, "mask": torch.tensor([[1]])}, whole)["ids"].tolist()
        [[5, 6]]
        """
        own = {name: pair for name, pair in self.sequences.items() if name in batch}
        if any(batch[name].dim() != len(inputs[name][0]) for name in own):
            return batch
        sizes = {(inputs[name][0][dim], batch[name].shape[dim]) for name, (dim, _) in own.items()}
        if len(sizes) > len(dict(sizes)) or any(not 0 < size <= long for long, size in sizes):
            return batch
        longer = dict(batch)
        for name, (dim, value) in own.items():
            if missing := inputs[name][0][dim] - batch[name].shape[dim]:
                longer[name] = torch.cat([batch[name], _end(batch[name], dim, value, missing)], dim)
        return longer


def _end(x: Tensor, dim: int, value: int | None, count: int) -> Tensor:
    """Return so many slices of a dim, filled with a value, or copies of the last slice."""
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    last = last if value is None else torch.full_like(last, value)
    return last.expand(*(count if d == dim else size for d, size in enumerate(x.shape)))


def rows_read(plan: Mapping[str, Any], rank: int) -> dict[str, set[int]]:
    """Return the rows of each input that a rank reads under a plan; all if it runs several iterations a step."""
    shapes = {name: shape for name, (shape, _) in plan["inputs"].items() if shape}
    if plan.get("iterations", 1) > 1:
        return {name: set(range(shape[0])) for name, shape in shapes.items()}
    found: dict[str, set[int]] = {name: set() for name in shapes}
    for name, box in plan["devices"][rank]["inputs"]:
        if name in found:
            found[name].update(_rows(plan["slots"][name][0], box))
    return found


def _rows(sizes: Sequence[int], box: Sequence[Sequence[int]]) -> Iterator[int]:
    return (row for low, high in runs(sizes, box[: len(sizes)]) for row in range(low, high))


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
