"""`Graph`: a model, the parts that a plan made of its ops, their order, and a journal of the calls of verbs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from superscaler.errors import InputError, TransformError, named, some, unknown
from superscaler.groups import group_by
from superscaler.ir.grid import UNASSIGNED, Axis, Grid, cuts_of
from superscaler.ir.journal import Entry, caller
from superscaler.ir.model import Factor, Model, Op
from superscaler.ir.names import first, later
from superscaler.ir.orders import Group, Order, Policy
from superscaler.ir.parts import Block, Parts, Rows, block_of, expand
from superscaler.ir.variants import renamed, unrolled, with_rest
from superscaler.specs.arguments import Numbered, checked

# The most pieces of one gradient.
MOST_PIECES = 2**16
# The kinds of work that `select` accepts.
KINDS = ("F", "B", "I", "W", "R", "C")


class Ops(Numbered[Op]):
    """Ops in execution order."""

    __slots__ = ()
    NOUN = "op"


class Blocks(Numbered[Block]):
    """Blocks in order of their first op."""

    __slots__ = ()
    NOUN = "block"


class Graph:
    """A captured training step and the parts that a plan made of it. Only the verbs change it.

    A plan reads `ops`, `forward_ops`, `updates` (by the name of the parameter), `blocks` and `factors`, and names ops
    by `op(name)` and groups of parts by `select(...)`; see docs/plans.md.
    """

    def __init__(self, model: Model, captured: Any = None) -> None:
        self.captured = captured
        self.grids: dict[str, Grid] = {}
        self.orders: list[Order] = []
        self.journal: list[Entry] = []
        self.policy = Policy()
        # The sizes of the axes along which all devices lie in order, as the plan names them; for readers only.
        self.mesh: dict[str, int] = {}
        # The axes of meshes along which plans cut forward ops; and, by axis, the first op that is only copied along it
        # though it was cut without a name.
        self.cut_along: set[str] = set()
        self.only_copied: dict[str, str] = {}
        # The FLOPs by which plans balance, by op: those at the shape of the capture, for a program of another shape.
        self.costs: dict[str, int] = {}
        self.rewrite(model)

    def copy(self, model: Model | None = None) -> Graph:
        """Return a graph with its own parts, of the same model or of another one with the same ops."""
        twin = copy(self)
        for name, own in ((n, x) for n, x in vars(self).items() if isinstance(x, dict | list | set)):
            setattr(twin, name, own.copy())
        twin.grids = {name: grid.copy() for name, grid in self.grids.items()}
        twin.rewrite(model or self.model)
        return twin

    @property
    def ops(self) -> tuple[Op, ...]:
        """Return all ops in execution order: forward, then optimizer. Mirrors and recomputed ops follow their forward
        ops.
        """
        return self._ops

    @property
    def forward_ops(self) -> tuple[Op, ...]:
        """Return the forward ops in execution order."""
        return self._forward_ops

    def cost(self, op: Op) -> int:
        """Return the FLOPs by which plans balance an op."""
        return self.costs.get(op.name, op.flops)

    @property
    def factors(self) -> dict[str, Factor]:
        """Return the factors by name; each has a `size` in elements."""
        return dict(self.model.factors)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the repeated blocks in order of their first op."""
        found = group_by(self.forward_ops, lambda op: block_of(op.module))
        return Blocks(Block(path, tuple(ops)) for path, ops in found.items() if path)

    def last(self, verb: str, op: str) -> Entry | None:
        """Return the last entry of the journal about a verb's call on an op."""
        return next((e for e in reversed(self.journal) if e.op == op and e.verb == verb), None)

    def op(self, name: str) -> Op:
        """Return an op by its name. Raises InputError for an unknown one, with the nearest names."""
        if not isinstance(name, str) or name not in self._by_name:
            if (entry := self.last("op_trans", name)) is not None:
                raise InputError(f"{name} was replaced by {entry.detail} at {entry.where}; use what op_trans returned.")
            if found := [op.name for op in self.forward_ops if op.module == name]:
                raise InputError(f"'{name}' is a module, not an op; its ops are {some(found, 8)}.")
            raise InputError(unknown("op", name, self._by_name))
        return self._by_name[name]

    @checked
    def rename_factor(self, old: str, new: str) -> None:
        """Rename factor `old` to `new`. Raises InputError for an unknown or a taken name."""
        if old not in self.model.factors:
            raise InputError(unknown("factor", old, self.model.factors))
        if (is_taken := new in self.model.factors) or not re.fullmatch(r"[\w.]+", new):
            why = "is the name of another factor" if is_taken else "is no name (letters, digits, _ and .)"
            raise InputError(f"rename_factor('{old}', '{new}'): '{new}' {why}; choose another.")
        self.rewrite(renamed(self.model, old, new))
        self.journal.append(Entry("rename_factor", old, f"to {new}", caller()))

    @checked
    def unroll(self, iterations: int = 2) -> None:
        """Make a step of several iterations, each on a batch of its own, with the weights after the one before it.

        y = f(x, w); w = update(w, d(w))
        ->  y = f(x, w); w+1 = update(w, d(w)); y+1 = f(x+1, w+1); w = update(w+1, d(w+1))

        Ops of iteration k have `op.iteration` k, the same factors, and the parts, places and orders made so far. All
        updates of a weight stay at the place of the first one. A step then takes a list with one batch per iteration,
        and returns their losses. Raises TransformError for a model that cannot be unrolled.
        """
        where = caller()
        try:
            model = unrolled(self.model, iterations)
        except TransformError as error:
            raise TransformError(f"unroll at {where}: {error}") from None
        more = [(op, first(op.name)) for op in model.ops if op.iteration]
        self.grids |= {op.name: self.grids[name].copy() for op, name in more}
        named = self.policy.gathered_once.union(self.policy.ahead)
        weights = {later(name, k): name for name in named for k in range(1, iterations)}
        self.policy = self.policy.inherited({op.name: name for op, name in more}, weights)
        self.orders += [order.later(k) for k in range(1, iterations) for order in self.orders]
        self.rewrite(model)
        self.journal.append(Entry("unroll", "", str(iterations), where))

    def send_gradients_last(self) -> None:
        """Send the gradients of weights after the whole backward of a device, not while others are computed."""
        self.ask("send_gradients_last", overlaps=False)

    def send_halves(self) -> None:
        """Send gradients of weights in bf16 or fp16 in that dtype; they are added in float32, in slices. A device's own
        sum over microbatches is rounded before, and a sum that several devices keep once more, on its way to them.
        """
        self.ask("send_halves", sends_halves=True)

    def gather_halves(self) -> None:
        """Gather weights in bf16 or fp16 where all their readers cast them to it, as under autocast: each device casts
        its slice. They rest, and are updated, in float32. With `send_halves`, their gradients are sent in that dtype.
        """
        if not self.model.rounded:
            raise InputError(
                "gather_halves: no weight is read by casts to bf16 or fp16 alone; capture with autocast='bf16' "
                "(--autocast bf16), or leave it out."
            )
        self.ask("gather_halves", gathers_halves=True)

    def gather_once(self) -> None:
        """Gather weights once for all microbatches: for the forward, and again for the backward if ops are recomputed
        or regathered. It is meant for orders in which all microbatches of an op follow each other.
        """
        self.ask("gather_once", gathers_each=False)

    @checked
    def keep_gathered(self, weights: Iterable[str]) -> None:
        """Gather weights once a step, and keep each until its last reader, as ZeRO-1 and ZeRO-2 do. Otherwise they are
        gathered again where ops are recomputed or regathered, as under ZeRO-3.
        """
        names, known = [self.model.aliases.get(name, name) for name in weights], dict.fromkeys(self.model.weights)
        if wrong := next((name for name in names if name not in known), None):
            raise InputError(unknown("parameter", wrong, known))
        self.ask("keep_gathered", "", f"{len(names)} weights", gathered_once=self.policy.gathered_once.union(names))

    @checked
    def offload_tapes(self, keep: int) -> None:
        """Let a device keep at most so many tapes, each of a stage and a microbatch; others are on its host between
        forward and backward.
        """
        if keep < 1:
            raise InputError(f"offload_tapes({keep}) at {caller()}: a device keeps 1 tape or more; choose 1, 2, ...")
        self.ask("offload_tapes", "", str(keep), kept_tapes=int(keep))

    @checked
    def send_in_pieces(self, update: Op | str, count: int) -> None:
        """Send the gradient of an update in `count` pieces along a dim, each separately.

        `update`: the op, or the name of its weight. Piece k is `select(ops=[update], microbatch=k, kind="C")`.
        """
        op = self._update(update)
        if not 1 <= count <= MOST_PIECES:
            raise InputError(f"send_in_pieces at {caller()}: {op.name} in {count!r} pieces; choose 1 to {MOST_PIECES}.")
        self.ask("send_in_pieces", op.name, str(count), pieces={**self.policy.pieces, op.name: int(count)})

    def ask(self, verb: str, op: str = "", detail: str = "", **changes: Any) -> None:
        """Change fields of the policy, with a line of the journal."""
        self.policy = replace(self.policy, **changes)
        self.journal.append(Entry(verb, op, detail, caller()))

    def _update(self, update: Op | str) -> Op:
        """Return an optimizer op, given itself or the name of its weight."""
        name = update.inputs[0].tensor if isinstance(update, Op) else self.model.aliases.get(update, update)
        if name not in self.updates:
            raise InputError(unknown("trained parameter", name, self.updates))
        return self.updates[name]

    def resting(self, weight: str) -> Op | None:
        """Return the op whose parts hold a weight at rest: its update or, for a frozen one, an op made on the first
        call. None if the name is of no parameter.
        """
        found = self.model.holders
        if weight not in found and weight in {tensor.name for tensor in self.model.parameters()}:
            self.rewrite(with_rest(self.model, weight))
            return self.model.ops[-1]
        return found.get(weight)

    def rewrite(self, model: Model) -> None:
        """Replace the model by one with other ops; new ones have no parts yet.

        `twins`: for each op, its recomputed op that has the mirror. `updates`: optimizer ops by the name of their
        weight.
        """
        self.model = model
        self.twins = {name: twins[-1] for name, twins in model.twins.items()}
        self.updates = {op.inputs[0].tensor: op for op in model.ops if op.is_update}
        self.grids = {op.name: self.grids[op.name] if op.name in self.grids else Grid() for op in model.ops}
        self._by_name = {op.name: op for op in model.ops}
        self._ops = Ops(op for op in model.ops if not op.origin)
        self._forward_ops = Ops(op for op in self._ops if op.is_forward)

    @checked
    def parts(self, op: Op) -> Parts:
        """Return the parts of an op that was not cut irregularly, as one grid."""
        op, grid = self.op(op.name), self.grids[op.name]
        shape = [len(a.sizes) for a in grid.axes]
        return Parts(op, grid, (), np.arange(prod(shape)).reshape(shape), len(shape))

    @checked
    def follow(self, update: Op | str) -> Parts:
        """Cut an optimizer op, given itself or the name of its weight, in the same way as the weight's readers; or a
        copy (`Insert`) as its readers. A frozen weight gets an op whose parts hold it at rest.

        x @ w cut on w's rows by 2, and on x's by 4  ->  update(w[0:8]), update(w[8:16])

        Returns its parts, to be cut further and placed. Replicas of a weight are no cut. Of several readers, only the
        common cuts are taken, and the stage of the first. Raises InputError for a tensor that is no parameter,
        TransformError if the op is cut or placed already.
        """
        name = update.inputs[0].tensor if isinstance(update, Op) else self.model.aliases.get(update, update)
        op = update if isinstance(update, Op) and update.is_copy else self.resting(name)
        if op is None:
            raise InputError(unknown("parameter", name, [tensor.name for tensor in self.model.parameters()]))
        if self.grids[op.name].is_touched:
            raise TransformError(f"graph.follow of {op.name} comes after it was cut or placed; follow first.")
        return self.cut_as_read(op)

    def cut_as_read(self, op: Op) -> Parts:
        """Cut an op that updates a weight, sets a buffer, or makes a copy, as the readers of that tensor are cut."""
        name = op.outputs[0].tensor if op.is_copy else op.inputs[0].tensor
        read = [name, *(older for older, weight in self.model.versions.items() if weight == name)]
        found = list[tuple[Axis, ...]]()
        for reader, k in (use for tensor in read for use in self.model.uses[tensor]):
            grid = self.grids[reader.name]
            # An untouched recomputed op gets the grid of its op in the end.
            grid = grid if grid.is_touched else self.grids.get(reader.origin, grid)
            found.append(cuts_of(grid, reader.inputs[k].slots))
        kept = [a for a in (found[0] if found else ()) if a.is_stage or all(a in axes for axes in found)]
        kept = [a for a in kept if a.index is None or not op.is_whole]
        axes = [a if a.index is None else replace(a, index=op.inputs[0].slots[a.index]) for a in kept]
        self.grids[op.name] = Grid(tuple(axes), np.full([len(a.sizes) for a in axes], UNASSIGNED))
        return self.parts(op)

    @checked
    def rows(self, op: Op) -> Rows:
        """Return the parts of an op, a row for each."""
        return expand(op, self.grids[op.name])

    @checked
    def select(
        self,
        module: str | None = None,
        ops: Iterable[Op | Parts] | None = None,
        microbatch: int | None = None,
        kind: str = "F",
        label: str = "",
    ) -> Group:
        """Return the parts of the ops inside `module` (a path, submodules included) or of `ops`, as one group. Of some
        parts of an op, which `op_trans` returned, it has these alone.

        In a group of kind C, `microbatch` is the number of the piece (`send_in_pieces`). Raises InputError when nothing
        matches.
        """
        where = f"select at {caller()}"
        if kind not in KINDS:
            raise InputError(f"{where}: {unknown('kind of work', kind, KINDS)}")
        given = self.forward_ops if ops is None else tuple(ops)
        if wrong := [o for o in given if not isinstance(o, Op | Parts)]:
            raise InputError(f"{where}: it takes ops and parts, not {named(wrong[0])}; graph.op(NAME) returns an op.")
        some = {o.op.name: tuple(o.paths()) for o in given if isinstance(o, Parts)}
        chosen = tuple(o.op if isinstance(o, Parts) else o for o in given)
        if module is not None:
            chosen = tuple(o for o in chosen if o.module == module or o.module.startswith(module + "."))
        if kind in ("I", "W") and not any(o.split for o in self.model.ops):
            raise InputError(f"{where}: {kind} selects ops whose backward is split; op_trans(SplitBackward()) these.")
        if kind in ("B", "I", "W"):
            mirrored = ((o, self.twins.get(o.name, self.op(o.name))) for o in chosen)
            chosen = tuple(o for o, of in mirrored if of.has_mirror and (kind == "B" or of.split))
        chosen = tuple(o for o in chosen if not o.from_data and (kind != "R" or o.name in self.twins))
        chosen = tuple(o for o in chosen if kind != "C" or not (o.is_forward or o.is_write))
        if kind == "C" and microbatch is not None:
            for name, count in ((o.name, self.policy.pieces.get(o.name, 1)) for o in chosen):
                if not 0 <= microbatch < count:
                    raise InputError(
                        f"{where}: {name} has no piece {microbatch} of {count}; call send_in_pieces first."
                    )
        if not chosen:
            paths = {o.module for o in self.forward_ops}
            raise InputError(f"{where}: {unknown('module', module, paths) if module else 'it matches no op.'}")
        of = f" of microbatch {microbatch}" if microbatch is not None else ""
        name = label or f"{kind}({module or chosen[0].name}){of}"
        return Group(kind, tuple((o.name, some.get(o.name, ())) for o in chosen), microbatch, name)
