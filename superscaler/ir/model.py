"""The data-flow graph of one training iteration: pTensors, operators with their indices, and shared factors.

A forward op has a *mirror*, an op of kind `backward`, exactly when `has_mirror`. Mirrors are not stored: they follow
from their ops. The gradient of a pTensor is a pTensor, too; its value is the sum of one addend per use, made by the
mirror of the using op. Each trained parameter has an op of kind `optimizer`. So has a buffer that the step sets
(`ss.write`), and a frozen weight that a plan cuts and places (`ss.rest`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, Literal

from superscaler.ir.names import later
from superscaler.ir.op import Op as Op
from superscaler.ir.op import Operand as Operand
from superscaler.specs.options import HALVES, kind_of

TensorKind = Literal["input", "parameter", "buffer", "constant", "activation", "output", "next"]

_BITS = re.compile(r"\d+")
CAST = "aten._to_copy.default"


@dataclass(frozen=True, slots=True)
class Factor:
    """A class of indices of all ops through which the same index flows: batch, sequence, heads."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class PTensor:
    """A logical tensor of the model. A dim is an ordered product of slots, major to minor; a dim of size 1 has none.

    `slots[d]`: factor names of dim `d`. `extents`: sizes of all slots, flattened over the dims. `trained_as`: the
    original dtype, if `verify` retyped this model; communication is chosen by its size, so that both plans exchange
    alike. `origin`: the original of a recomputed value or a copy, or the weight of an older version. `largest`: its
    value is the largest of its parts, not their sum; it has no gradient. A tensor of kind `next` is a weight or buffer
    in a later iteration of a step, in the same place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind
    slots: tuple[tuple[str, ...], ...]
    extents: tuple[int, ...]
    requires_grad: bool = False
    trained_as: str = ""
    origin: str = ""
    largest: bool = False

    def local_shape(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a piece whose slots have these sizes: each dim is the product of its slots."""
        return _local_shape(self.slots, extents)

    @property
    def factors(self) -> tuple[str, ...]:
        """Return the factor of each slot, as `extents` has their sizes."""
        return tuple(factor for dim in self.slots for factor in dim)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * width(self.dtype)

    @property
    def trained(self) -> PTensor:
        """Return the tensor in the dtype of the trained model, by whose size communication is chosen."""
        return replace(self, dtype=self.trained_as, trained_as="") if self.trained_as else self

    @property
    def wide_dtype(self) -> str:
        """Return the dtype in which many values of this tensor are added: float32 for halves."""
        return "float32" if self.dtype in HALVES.values() else self.dtype

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the sum of its gradients."""
        return prod(self.shape) * width(self.wide_dtype)


# optimizer -> its states of a weight, two where it is not named; and the options that each add one
_STATES = {"": 0, "SGD": 0, "RMSprop": 1, "Adagrad": 1, "ASGD": 1, "Muon": 0}
_MORE_STATES = ("momentum", "amsgrad", "centered")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A `torch.optim` optimizer: its class name and, per parameter group, the options of its constructor.

    Several have the names of all, as "Muon+AdamW", and each group names its own (`kind_of`).

    `scaler`: the state of the `torch.amp.GradScaler` that scales the loss, empty without one. `precision`: "bf16" or
    "fp16" if it updates float32 copies of weights in that dtype, else "".
    """

    name: str
    groups: tuple[tuple[tuple[str, Any], ...], ...]
    scaler: tuple[tuple[str, float], ...] = ()
    precision: str = ""

    def kind(self, group: int) -> str:
        """Return the class name of the optimizer of a parameter group."""
        return kind_of(dict(self.groups[group]), self.name)[0]

    def has_copy(self, dtype: str) -> bool:
        """Return whether a weight of a dtype has a float32 copy, which is updated instead."""
        return bool(self.precision) and dtype in HALVES.values()

    def state_bytes(self, dtype: str) -> int:
        """Return the most bytes of state for each element of a weight of a dtype, its copy included.

        >>> adam = Optimizer("AdamW", (), precision="bf16")
        >>> adam.state_bytes("float32"), adam.state_bytes("bfloat16")
        (8, 12)
        """
        most = 0
        for kind, options in (kind_of(dict(group), self.name) for group in self.groups or ((),)):
            most = max(most, _STATES.get(kind, 2) + sum(bool(options.get(name)) for name in _MORE_STATES))
        return (most + self.has_copy(dtype)) * width("float32" if self.has_copy(dtype) else dtype)


@dataclass(frozen=True)
class Model:
    """The captured model, which no plan changes. Ops are in execution order, the optimizer ops last.

    `aliases`: from each further name of a tied parameter to the kept name. `segments`: from each segment of a packed
    parameter to that parameter, the dim and the range. `unsupported`: the counts of operators without a rule. `loss`
    and the optimizer's name: '' for a model that trains nothing. `result`: the form, in JSON, of the outputs beside the
    loss, '' for none. `iterations`: of one step. `shorter`: the dim of each input along which a sequence may be filled.
    `is_whole`: the module trains otherwise by filled rows, although all ops keep rows apart.
    """

    tensors: Mapping[str, PTensor]
    ops: tuple[Op, ...]
    factors: Mapping[str, Factor]
    inputs: tuple[str, ...]
    loss: str
    optimizer: Optimizer
    aliases: Mapping[str, str]
    unsupported: Mapping[str, int]
    segments: Mapping[str, tuple[str, int, int, int]] = field(default_factory=dict)
    result: str = ""
    iterations: int = 1
    shorter: Mapping[str, int] = field(default_factory=dict)
    is_whole: bool = False

    @cached_property
    def producers(self) -> Mapping[str, tuple[Op, int]]:
        """Return, for each activation, the op that writes it and the number of the output."""
        return {o.tensor: (op, k) for op in self.forward_ops for k, o in enumerate(op.outputs)}

    @cached_property
    def uses(self) -> Mapping[str, Sequence[tuple[Op, int]]]:
        """Return, for each pTensor, the forward ops that read it, each with the number of the input, in order."""
        found: dict[str, list[tuple[Op, int]]] = {name: [] for name in self.tensors}
        for op in self.forward_ops:
            for k, operand in enumerate(op.inputs):
                found[operand.tensor].append((op, k))
        return found

    @cached_property
    def holders(self) -> Mapping[str, Op]:
        """Return, for each parameter, the op whose parts hold it at rest, if it has one."""
        return {op.inputs[0].tensor: op for op in self.ops if op.is_update or op.is_rest}

    @cached_property
    def from_weights(self) -> frozenset[str]:
        """Return the updated weights, and the tensors made of weights alone, such as casts."""
        return frozenset(o.tensor for op in self.ops if op.from_weights for o in op.outputs)

    def is_widened(self, tensor: str, rounds: bool = False) -> bool:
        """Return whether the gradient of a tensor becomes float32: it is a half, and a weight or made of weights.

        `rounds`: weights are rounded before they are gathered, so that those in `rounded` may be read as halves.
        """
        is_half = tensor in self.from_weights and self.tensors[tensor].wide_dtype != self.tensors[tensor].dtype
        is_cast = rounds and tensor in self.rounded
        return is_half or (is_cast and self.rounded[tensor].dtype != self.tensors[tensor].dtype)

    @cached_property
    def rounded(self) -> Mapping[str, PTensor]:
        """Return the weights, and copies of weights, that all readers cast to one half, each with what a cast makes."""
        copies = {o.tensor for op in self.forward_ops if op.is_copy and op.from_weights for o in op.outputs}
        found = {name: self._casts_of(name) for name in self.tensors if name in copies | self.weights}
        return {name: casts[0] for name, casts in found.items() if len({c.trained.dtype for c in casts}) == 1}

    def _casts_of(self, tensor: str) -> list[PTensor]:
        """Return the results of a tensor's readers if each of these casts it to a half, else none."""
        readers = [op for op, _ in self.uses[tensor]]
        made = [self.tensors[op.outputs[0].tensor] for op in readers]
        are_casts = all(op.target == CAST and [name for name, _ in op.kwargs] == ["dtype"] for op in readers)
        halves = HALVES.values()
        are_halves = self.tensors[tensor].trained.dtype not in halves and all(t.trained.dtype in halves for t in made)
        return made if are_casts and are_halves else []

    @cached_property
    def forward_ops(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.is_forward)

    @cached_property
    def twins(self) -> Mapping[str, tuple[Op, ...]]:
        """Return, for each op that is recomputed, its recomputed ops, those of outer regions first."""
        found: dict[str, tuple[Op, ...]] = {}
        for op in self.ops:
            if op.origin:
                found[op.origin] = (*found.get(op.origin, ()), op)
        return found

    def origin(self, tensor: str) -> str:
        """Return the original pTensor of a recomputed value or a copy, else the tensor itself."""
        return self.tensors[tensor].origin or tensor

    def gradient(self, tensor: str) -> str:
        """Return the name of the gradient of a pTensor, '' if it has none. Recomputed values share the gradient of the
        original.
        """
        return f"d({self.origin(tensor)})" if tensor and self.tensors[tensor].requires_grad else ""

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Return the older versions of weights, each with its weight, the younger ones first."""
        return {t.name: t.origin for t in self.tensors.values() if t.kind == "buffer" and t.origin}

    @property
    def ages(self) -> dict[str, int]:
        """Return the age of each trained weight at its readers, in updates."""
        found = {op.inputs[0].tensor: 0 for op in self.ops if op.is_update}
        return {**found, **Counter(self.versions.values())}

    @property
    def losses(self) -> tuple[str, ...]:
        """Return the loss of each iteration."""
        return tuple(later(self.loss, k) for k in range(self.iterations)) if self.loss else ()

    @property
    def nexts(self) -> dict[str, str]:
        """Return the weights and buffers of later iterations, each with the tensor whose update gives it."""
        made = ((op.outputs[0].tensor, op.inputs[0].tensor) for op in self.ops if not op.is_forward)
        return {new: old for new, old in made if self.tensors[new].kind == "next"}

    @property
    def weights(self) -> set[str]:
        """Return the names of parameters, of their older versions, and of their values in later iterations."""
        return {t.name for t in self.parameters()} | self.versions.keys() | self.nexts.keys()

    def with_ops(self, ops: Iterable[Op], tensors: Iterable[PTensor] = ()) -> Model:
        """Return the model with other ops, and with more tensors."""
        more = {tensor.name: tensor for tensor in tensors}
        return replace(self, ops=tuple(ops), tensors={**self.tensors, **more} if more else self.tensors)

    def mirror(self, op: Op) -> Op:
        """Return the backward op of a forward one.

        y = f(x)  ->  d(x) += d.f(d(y)): input j is the gradient of output j, output k an addend of that of input k.
        """
        given, made = ([replace(o, tensor=self.gradient(o.tensor)) for o in some] for some in (op.outputs, op.inputs))
        sides = tuple(given), tuple(made), op.indices
        return Op(f"d.{op.name}", op.target, (), (), *sides, kind="backward", module=op.module, of=op.name)

    def parameters(self) -> Iterator[PTensor]:
        """Yield the trained and frozen parameters in the order of the module."""
        return (t for t in self.tensors.values() if t.kind == "parameter")

    def trained_parameters(self) -> Iterator[PTensor]:
        """Yield the trained parameters in the order of the module."""
        return (t for t in self.parameters() if t.requires_grad)


@lru_cache(1 << 14)
def _local_shape(slots: tuple[tuple[str, ...], ...], extents: tuple[int, ...]) -> tuple[int, ...]:
    sizes = iter(extents)
    return tuple(prod(next(sizes) for _ in dim) for dim in slots)


@cache
def width(dtype: str) -> int:
    """Return the bytes of an element.

    >>> [width(dtype) for dtype in ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn")]
    [4, 2, 8, 1, 1]
    """
    bits = _BITS.search(dtype)
    return int(bits[0]) // 8 if bits else 1
