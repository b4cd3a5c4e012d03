"""Kernels of operators, and the fake tensors that they make: equal calls are computed once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves, tree_map_only

from superscaler.simulate.works import Kernel, Meta

# Of the results of a call: shape, strides, the place in the storage, dtype and device.
Form = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
# What calls make, by the call; None: it is made anew each time.
_KNOWN: dict[Hashable, Known | None] = {}
_MOST = 1 << 14
# A view by another name, whose result counts as a new tensor for autograd.
_UNSAFE = torch.ops.aten._unsafe_view.default
# Operators of which a mode of fake tensors runs the kernel for meta tensors, too, in ten times the time.
_PLAIN = frozenset(
    getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default")
    for name in (
        "view", "_unsafe_view", "transpose.int", "t", "permute", "expand", "detach", "slice.Tensor",
        "select.int", "unsqueeze", "squeeze.dim", "split.Tensor", "split_with_sizes", "cat", "clone", "empty_like",
        "mm", "bmm", "addmm", "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar",
        "pow.Tensor_Scalar", "neg", "rsqrt", "mean.dim", "sum.dim_IntList", "tanh", "tanh_backward", "gelu",
        "gelu_backward", "silu", "silu_backward", "_softmax",
        "_softmax_backward_data", "masked_fill.Scalar",
    )
)  # fmt: skip
_CPU = torch.device("cpu")


class Known(NamedTuple):
    """What a call makes: tensors of some `forms`, in a tuple or a list, or one; an argument that is `written`; its
    kernel. `viewed`: the number of the argument whose storage the tensors share; None: each has one of its own.
    """

    forms: tuple[Form, ...]
    many: type[tuple[Any, ...]] | type[list[Any]] | None
    viewed: int | None
    written: int | str | None
    kernel: Kernel | None


class Made:
    """The results of operators under a mode of fake tensors, as it makes them. Those of equal calls are like the first
    ones, which takes a fifth of the time that torch's own cache does.
    """

    mode: FakeTensorMode

    def of(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Kernel | None]:
        """Return the result of an operator, and its kernel; None if that is not known."""
        if func.namespace != "aten":
            return func(*args, **kwargs), None
        # The place of an argument in its storage is that of a view; other results do not depend on it.
        is_view = func.is_view or func is _UNSAFE
        key = _key((func, args, kwargs), is_view)
        if known := None if key is None else _KNOWN.get(key):
            return self._again(known, args, kwargs), known.kernel
        made = self._plain(func, args, kwargs) if key is not None and func in _PLAIN else func(*args, **kwargs)
        if key is not None and key not in _KNOWN:
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            # A result may be resized.
            is_same = key == _key((func, args, kwargs), is_view)
            known_of = _written if func._schema.is_mutable else _viewed if is_view else _formed
            kernel = None if func.is_view else kernel_of(func, args, kwargs, made)
            _KNOWN[key] = known_of(args, kwargs, made, kernel) if is_same else None
        return made, None

    def empty(self, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
        """Return a new tensor on a CPU, contiguous without strides."""
        with torch._C._DisableTorchDispatch():
            own = torch.empty(shape, dtype=dtype, device="meta")
            own = own if strides is None else torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            return FakeTensor(self.mode, own, _CPU)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = next(x.fake_device for x in tensors_of((args, kwargs)) if isinstance(x, FakeTensor))
        with in_kernel_invocation_manager(self.mode):
            made = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: FakeTensor(self.mode, x, device), made)

    def _again(self, known: Known, args: Any, kwargs: Any) -> Any:
        if known.written is not None:
            return args[known.written] if isinstance(known.written, int) else kwargs[known.written]
        source = None if known.viewed is None else args[known.viewed].untyped_storage()
        results = [self._fake(form, source) for form in known.forms]
        return results[0] if known.many is None else known.many(results)

    def _fake(self, form: Form, source: torch.UntypedStorage | None) -> Tensor:
        shape, strides, start, dtype, device = form
        with torch._C._DisableTorchDispatch():
            if source is None:
                own = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            else:
                own = torch.empty(0, dtype=dtype, device="meta").set_(source, start, shape, strides)
            return FakeTensor(self.mode, own, device)


def _written(args: Any, kwargs: Any, made: Any, kernel: Kernel | None) -> Known | None:
    """Return the memory of an operator that returns the argument that it writes."""
    given = [*enumerate(args), *kwargs.items()]
    found = next((at for at, x in given if x is made and isinstance(x, Tensor)), None)
    return None if found is None else Known((), None, None, found, kernel)


def _formed(args: Any, kwargs: Any, made: Any, kernel: Kernel | None) -> Known | None:
    """Return the memory of an operator whose results are new tensors, each with a storage of its size."""
    given = {x.untyped_storage()._cdata for x in tensors_of((args, kwargs))}
    own = [x.untyped_storage()._cdata for x in tensors_of(made)]
    if len({*own}) < len(own) or not given.isdisjoint(own) or any(map(_has_gaps, tensors_of(made))):
        return None
    return _tensors(made, None, kernel)


def _viewed(args: Any, kwargs: Any, made: Any, kernel: Kernel | None) -> Known | None:
    """Return the memory of an operator whose results share the storage of its first argument."""
    own = {x.untyped_storage()._cdata for x in tensors_of((args[:1], made))}
    return _tensors(made, 0, kernel) if len(own) == 1 else None


def _tensors(made: Any, viewed: int | None, kernel: Kernel | None) -> Known | None:
    results = [made] if isinstance(made, Tensor) else made
    if not isinstance(results, (tuple, list)) or not results or not all(type(x) is FakeTensor for x in results):
        return None
    forms = tuple((tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.fake_device) for x in results)
    return Known(forms, None if isinstance(made, Tensor) else type(made), viewed, None, kernel)


def _has_gaps(x: Tensor) -> bool:
    """Return whether the storage of a tensor is larger than it is, or it starts later."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.storage_offset() != 0 or x.untyped_storage().nbytes() != last * x.element_size()


def _key(value: Any, has_place: bool) -> Hashable | None:
    """Return a key of arguments, equal for equal ones; None if there is none, as for tensors with values. `has_place`:
    tensors are equal in one place of their storages only.
    """
    if isinstance(value, Tensor):
        if type(value) is not FakeTensor or value.dtype.is_complex or value.constant is not None:
            return None
        start = value.storage_offset() if has_place else 0
        return value.shape, value.stride(), value.dtype, value.fake_device, start
    if isinstance(value, (tuple, list)):
        inner = [_key(x, has_place) for x in value]
        return None if None in inner else (type(value), *inner)
    if isinstance(value, dict):
        return _key([*value.items()], has_place)
    # 1, 1.0 and True are equal, but not alike; None is a value.
    return type(value), value


def kernel_of(func: Any, args: Any, kwargs: Any, made: Any) -> Kernel:
    """Return the kernel of an operator's call, and its results."""
    names = (a.name for a in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    name, causal = func.name().partition("::")[2], bool(given.get("is_causal"))
    if given.get("approximate") == "tanh":
        # A kernel of its own, which takes another time.
        name = name.replace("gelu", "gelu_tanh")
    # An operator on lists returns nothing; a fused optimizer writes gradients only to unscale them.
    written = (a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write and a.name != "grads")
    results = tensors_of(made) or tensors_of([given.get(n) for n in written])
    read = {key: x for key, x in (kwargs or {}).items() if key != "out"}
    # A copy does not read what it overwrites.
    sources = args[1:] if name in ("copy_", "_foreach_copy_") else args
    return Kernel(name, metas_of(tensors_of((sources, read))), metas_of(results), causal)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def metas_of(tensors: Iterable[Tensor]) -> tuple[Meta, ...]:
    """Return the shape and the dtype of tensors."""
    return tuple((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in tensors)
