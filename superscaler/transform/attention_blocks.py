"""Attention in blocks of queries and keys, whose results are merged: the algorithm behind ring attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from superscaler.errors import TransformError, divisors
from superscaler.ir.model import Model, Op, Operand, PTensor
from superscaler.ir.op import Index, Ref
from superscaler.specs.arguments import checked_class
from superscaler.transform.algorithms import check_parts
from superscaler.transform.recompute import with_twins
from superscaler.transform.rewrite import copy_op

TARGET, DOCUMENTS = "aten.scaled_dot_product_attention.default", "ss.attention_documents"
BLOCK, GRADIENT = "ss.attention_block", "ss.attention_gradient"
# The arguments of the attentions that are known by blocks.
_NAMES = {
    TARGET: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    DOCUMENTS: ("query", "key", "value", "mine", "theirs", "is_causal", "scale"),
}
# Operators that repeat a tensor, and those that may be around them.
REPEATING = ("expand", "unsqueeze", "view", "_unsafe_view", "clone")


@checked_class
@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Compute attention in `parts` steps; in each, a chunk of queries sees one chunk of the keys.

    y = attention(q, k, v)  ->  k.0 = identity(k); k.1 = identity(k.0); ..; so v;
                                y.t, y.t.sum = block(q, k.t, v.t); y = merge(y.0, y.0.sum, y.1, y.1.sum), ..

    Queries and keys have `parts` equal chunks each. In step t, chunk i of the queries sees chunk i - t of the keys,
    modulo the number of chunks. On devices in a ring that hold one chunk of queries each, with the copies of step t
    placed t devices further, keys pass from neighbour to neighbour. Repeated heads are repeated after that. Causal
    attention skips blocks without visible keys.

    No block has a tape. The backward of each needs the attention to all keys and its log-sum-exp, and makes no scores
    that outlive it:

    d(q), d(k.t), d(v.t) += block.r(q, k.t, v.t, y, y.sum; d(y))

    These are one region of recomputed ops. With `again` the copies are in it, so that keys pass around a second time
    and a device keeps only its own.
    """

    parts: int
    again: bool = False

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        for op in ops:
            check_parts(self.parts, op)
            new = _Blocks(model, op, self.parts)
            made = tuple(new.ops())
            changed = (other for each in model.ops for other in (made if each.name == op.name else (each,)))
            model = model.with_ops(changed, new.tensors.values())
            model = _with_gradients(model, new, made, self.again) if op.has_mirror else model
        return model


def _with_gradients(model: Model, blocks: _Blocks, made: tuple[Op, ...], again: bool) -> Model:
    """Return the model with recomputed blocks, which have a gradient only; again also with copies of keys and values.

    All ops of the attention are in the region of these.
    """
    before = {op.name for op in model.ops}
    model = with_twins(model, [op for op in made if op.has_mirror or (again and op.is_copy)])
    region = next(op.region for op in model.ops if op.name not in before)
    tensors, names = dict(model.tensors), {op.name for op in made if again or not op.is_copy}

    def changed(op: Op) -> Op:
        if op.target != BLOCK or op.name in before:
            return op.asking(region=region) if op.name in names else op
        (out, total), whole = op.outputs, blocks.op.outputs[0].tensor
        tensors[out.tensor] = replace(tensors[whole], name=out.tensor, origin=model.origin(whole))
        del tensors[total.tensor]
        inputs, count = (*op.inputs, *blocks.whole), len(op.inputs)
        return replace(op, target=GRADIENT, inputs=inputs, outputs=(out,), args=(*op.args, Ref(count), Ref(count + 1)))

    ops = tuple(map(changed, model.ops))
    return replace(model, tensors=tensors, ops=ops)


class _Blocks:
    """The ops that replace one attention, and their tensors."""

    def __init__(self, model: Model, op: Op, parts: int) -> None:
        self.op, self.parts, self.known = op, parts, dict(model.tensors)
        self.makers = {name: maker for name, (maker, _) in model.producers.items()}
        self.tensors: dict[str, PTensor] = {}
        self.whole: tuple[Operand, ...] = ()
        # The arguments that the attention was given, by name.
        names = _NAMES.get(op.target, ())
        self.given = {**dict(zip(names, op.args, strict=False)), **dict(op.kwargs)}
        if not names or self.given.get("dropout_p"):
            why = "has dropout on its probabilities" if "attention" in op.target else f"is {op.target}"
            raise TransformError(f"AttentionBlocks needs attention without dropout, but {op.name} {why}; leave it out.")
        learned = next((o.tensor for o in op.inputs[3:] if self.known[o.tensor].requires_grad), None)
        if learned is not None:
            raise TransformError(
                f"AttentionBlocks of {op.name} ({op.module}): its mask {learned} has a gradient, but a block "
                "makes only some of its elements; leave it out."
            )
        self.queries, self.keys = (self._along(k) for k in (0, 1))
        counts = [op.indices[k].size for k in (self.queries, self.keys)]
        if self.given.get("is_causal") and counts[0] != counts[1]:
            raise TransformError(
                f"AttentionBlocks of {op.name} ({op.module}) needs as many queries as keys, because it is causal, but "
                f"there are {counts[0]} and {counts[1]}; leave it out."
            )

    def _along(self, k: int) -> int:
        """Return the index of the dim before the last of an operand."""
        op, dims = self.op, self.known[self.op.inputs[k].tensor].slots
        first = sum(len(slots) for slots in dims[:-2])
        own = op.inputs[k].slots[first : first + len(dims[-2])]
        if len(own) != 1 or own[0] is None:
            factors = " ".join(dims[-2]) or "nothing"
            raise TransformError(
                f"AttentionBlocks({self.parts}) of {op.name} ({op.module}) needs {['queries', 'keys'][k]} along one "
                f"factor, but they are along {factors}; leave it out."
            )
        index = op.indices[own[0]]
        if index.size % self.parts:
            raise TransformError(
                f"AttentionBlocks({self.parts}) of {op.name} ({op.module}) does not divide factor {index.factor} of "
                f"{index.size}; choose {divisors(index.size)}."
            )
        return own[0]

    def ops(self) -> Iterator[Op]:
        """Yield the steps in turn: the copies of keys and values of one, its block, and its merge with those before."""
        op, before = self.op, tuple[Operand, ...]()
        read, made_from = [o.tensor for o in op.inputs], [self._made_from(o.tensor) for o in op.inputs]
        carried = [self._origin(chain, tensor) for chain, tensor in zip(made_from, read, strict=True)]
        for step in range(self.parts):
            for k in (k for k in (1, 2) if self.parts > 1 and self._is_carried(carried[k])):
                hop = self._copy(carried[k], f"{op.name}.{'kv'[k - 1]}{step}")
                repeated = self._repeated(made_from[k], hop.name) if step else []
                yield from (hop, *repeated)
                carried[k], read[k] = hop.name, repeated[-1].name if repeated else hop.name if step else read[k]
            inputs = tuple(replace(o, tensor=tensor) for o, tensor in zip(op.inputs, read, strict=True))
            is_last = step == self.parts - 1
            found = self._outputs(f"{op.name}.{step}", is_last and not step)
            yield self._block(inputs, found, step)
            if step:
                merged = self._outputs(f"{op.name}.to{step}", is_last)
                yield self._merge((*before, *found), merged)
                found = merged
            before = found
        if op.has_mirror:
            yield self._detached(*before)

    def _made_from(self, tensor: str) -> list[Op]:
        """Return the ops that repeat the heads of keys for all queries that share them."""
        found, least = list[Op](), 0
        while (maker := self.makers.get(tensor)) and maker.target.split(".")[1] in REPEATING:
            found.append(maker)
            smaller = maker.inputs[0].tensor
            least = len(found) if prod(self.known[smaller].shape) < prod(self.known[tensor].shape) else least
            tensor = smaller
        return found[:least][::-1]

    @staticmethod
    def _origin(chain: list[Op], tensor: str) -> str:
        return chain[0].inputs[0].tensor if chain else tensor

    def _is_carried(self, tensor: str) -> bool:
        """Return whether a tensor is copied: neither at rest, nor made of data alone."""
        return tensor in self.makers and not self.makers[tensor].from_data

    def _copy(self, tensor: str, name: str) -> Op:
        maker = self.makers[tensor]
        copied = replace(self.known[tensor], name=name, origin=self.known[tensor].origin or tensor)
        self.known[name] = self.tensors[name] = copied
        self.makers[name] = maker
        return replace(copy_op(tensor, copied, maker), module=self.op.module)

    def _repeated(self, chain: list[Op], tensor: str) -> list[Op]:
        """Return copies of the ops of a chain that start from another tensor."""
        made = list[Op]()
        for n, op in enumerate(chain):
            found = replace(self.known[op.outputs[0].tensor], name=f"{tensor}.{n}")
            self.tensors[found.name] = found
            read = made[-1].name if made else tensor
            ends = replace(op.inputs[0], tensor=read), replace(op.outputs[0], tensor=found.name)
            made.append(replace(op, name=found.name, inputs=ends[:1], outputs=ends[1:], module=self.op.module))
        return made

    def _outputs(self, name: str, is_last: bool) -> tuple[Operand, Operand]:
        """Return the operands of attention and log-sum-exp: new tensors, but for the attention to all keys."""
        own = self.op.outputs[0]
        like = self.known[own.tensor]
        count = len(own.slots) - len(like.slots[-1])
        inner = replace(like, requires_grad=False)
        smaller = replace(inner, shape=like.shape[:-1], slots=like.slots[:-1], extents=like.extents[:count])
        made = like if is_last else replace(inner, name=name)
        total = replace(smaller, name=f"{name}.sum", dtype=like.wide_dtype)
        self.tensors |= {made.name: made, total.name: total}
        return Operand(made.name, own.slots), Operand(total.name, own.slots[:count])

    def _block(self, inputs: tuple[Operand, ...], outputs: tuple[Operand, Operand], step: int) -> Op:
        args = *self.op.args[:3], *map(self.given.get, ("attn_mask", "is_causal", "scale"))
        indices = [self._index(n, outputs) for n in range(len(self.op.indices))]
        indices[self.keys] = replace(indices[self.keys], mark="spatial", follows=(self.queries, step, self.parts))
        numbers = (self.given["mine"], self.given["theirs"]) if "mine" in self.given else ()
        kwargs = (("documents", numbers),) * bool(numbers)
        made = replace(self.op, name=f"{self.op.name}.{step}", target=BLOCK, args=args, kwargs=kwargs)
        flops = self.op.flops // self.parts
        return replace(made, inputs=inputs, outputs=outputs, indices=tuple(indices), flops=flops)

    def _index(self, n: int, outputs: tuple[Operand, Operand]) -> Index:
        """Return an index of the attention. What the log-sum-exp lacks, the values' own dim, is not cut: parts of the
        sum that an index of an op makes are added.
        """
        is_lacking = n in set(outputs[0].slots) - set(outputs[1].slots)
        return replace(self.op.indices[n], mark="frozen") if is_lacking else self.op.indices[n]

    def _merge(self, inputs: tuple[Operand, ...], outputs: tuple[Operand, Operand]) -> Op:
        used = [i for i in outputs[0].slots if i is not None]
        indices = tuple(self._index(n, outputs) for n in used)

        def renumbered(side: tuple[Operand, ...]) -> tuple[Operand, ...]:
            return tuple(replace(o, slots=tuple(used.index(i) for i in o.slots if i is not None)) for o in side)

        name = outputs[1].tensor.removesuffix(".sum")
        made = replace(self.op, name=name, target="ss.attention_merge", args=tuple(map(Ref, range(4))), kwargs=())
        made = replace(made, indices=indices, flops=0, has_mirror=False)
        return replace(made, inputs=renumbered(inputs), outputs=renumbered(outputs))

    def _detached(self, out: Operand, total: Operand) -> Op:
        """Return the op that gives the attention to all keys to the gradients of blocks, without a gradient itself."""
        detached = replace(self.tensors[out.tensor], name=f"{self.op.name}.whole", requires_grad=False)
        self.tensors[detached.name], own = detached, self.op.outputs[0].slots
        count = len(self.tensors[total.tensor].extents)
        self.whole = Operand(detached.name, own), Operand(total.tensor, own[:count])
        return replace(copy_op(out.tensor, detached, self.op), target="aten.detach.default")
