"""The program of a schedule: a walk along the global order writes the work of each device.

Every value is named when it is made. Values are joined for a reader just before its first use, so that started
communication has the time in between.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from superscaler.ir.communication import is_met
from superscaler.ir.fold import Fold
from superscaler.ir.grid import HOSTS
from superscaler.ir.mask import extents
from superscaler.ir.program import (  # fmt: skip
    ONE,
    Backward,
    Device,
    Forward,
    Give,
    Instruction,
    Loss,
    Program,
    Update,
    Value,
    updates,
)
from superscaler.materialize.actions import Action, Arrive, Bucket, EndUpdates, Start, Sum, actions
from superscaler.materialize.all_microbatches import rolled
from superscaler.materialize.fold import fold_devices
from superscaler.materialize.frees import with_frees
from superscaler.materialize.functions import Functions
from superscaler.materialize.local_tensors import Code, Residents, task
from superscaler.materialize.loops import Aperiodic
from superscaler.materialize.lowering import Lowering
from superscaler.materialize.offload import with_offload
from superscaler.materialize.rvd.transitions import Costs
from superscaler.materialize.steps import LoweringOptions
from superscaler.materialize.values import Values
from superscaler.materialize.writer import Writer
from superscaler.schedule.dataflow import Dataflow, Key
from superscaler.schedule.dependencies import Node, Schedule
from superscaler.schedule.segments import Alias, Segment
from superscaler.schedule.steady_state import SteadyState, microbatches_of
from superscaler.schedule.transfers import BACKWARD, FORWARD, REGATHER, Place


def materialize(
    schedule: Schedule, world: int, costs: Costs, fold: Fold | None = None, steady: SteadyState | None = None
) -> Program:
    """Return the program of a complete schedule on `world` devices. `costs` price its exchanges.

    With a fold the schedule has the sampled places only, with `steady` the first microbatches only. If these do not
    determine all others, Unfoldable names an axis of the fold, and Aperiodic is raised for the microbatches.
    """
    model = schedule.flow.model
    graph, turns = schedule.flow.graph, _turns(schedule.flow)
    rounded = model.rounded if graph.policy.gathers_halves else {}
    own = steady or microbatches_of(graph)
    options = LoweringOptions(
        model.tensors, model.from_weights, costs, schedule.flow.fold, fold, graph.policy, rounded, own, turns
    )
    code = Code(model.tensors, world, own.inner if own else 0)
    lowering = Lowering(schedule.transfers, options)
    builder = _Builder(schedule, Writer(lowering, code))
    for action in actions(schedule, lowering):
        builder.do(action)
    program = builder.program()
    return program if steady is None else rolled(program, schedule, steady)


class _Builder:
    """A writer of the work of the sampled devices, whose code determines the code of all."""

    def __init__(self, schedule: Schedule, writer: Writer) -> None:
        self.schedule, self.model = schedule, schedule.flow.model
        self.writer, self.code, self.options = writer, writer.code, writer.lowering.options
        self.losses, self.nexts = self.model.losses, self.model.nexts
        self.values = Values(writer)
        self.residents = Residents(schedule.flow, self.code)
        self.functions = Functions(schedule.flow)
        self.loss_places = self._loss_places()
        self.loss_parts: list[list[tuple[Value, bool, int]]] = [[] for _ in self.code.of]
        # By device, the weights, buffers and versions that the next update sets, and those that it updates in place.
        self.updates: dict[int, tuple[list[tuple[Value, Value]], ...]] = {}
        self.kept: set[Value] = set()
        self._moving: dict[tuple[int, int], bool] = {}
        # Whether only the first microbatches are written.
        own = self.options.microbatches
        self.is_short = own is not None and own.few < own.total

        for place, name in self.residents.load_weights():
            self.values.made(place, name, place.key[0])

    def do(self, action: Action) -> None:
        """Write the instructions of an action."""
        match action:
            case Node(kind="U"):
                self._gather_update(action)
            case Node():
                work = self._forward if action.kind == "F" else self._backward
                work(self.schedule.segments[action.number], action)
            case EndUpdates():
                self._update()
            case Sum():
                self.values.add_up(action.number)
            case Start():
                self.writer.start(action)
            case Bucket():
                self.writer.collective(action)
            case Arrive():
                self.writer.arrive(action)

    def program(self) -> Program:
        fold, world = self.options.fold, len(self.code.of)
        # A fold needs its sampled devices, and one without any part.
        idle = () if fold is None else [rank for rank in range(world) if rank not in fold.places][:1]
        ranks = range(world) if fold is None else sorted((*fold.sampled, *idle))
        for rank in ranks:
            code = self.code.of[rank]
            # Global norms are sums over all devices: each takes part in a last update, after all that others wait for.
            last = next((i for i in reversed(code) if is_met(i)), None)
            if last is None or not last.updates:
                code.append(Update((), ()))
            for at, i in [*updates(code)][:-1]:
                code[at] = replace(i, is_early=True)
            parts = self.loss_parts[rank]
            turns = tuple(turn for *_, turn in parts) if self.model.iterations > 1 else ()
            code.append(Loss(tuple(name for name, *_ in parts), tuple(counted for _, counted, _ in parts), turns))
        made = {
            rank: Device(rank, tuple(self.residents.weights[rank].values()), tuple(self._offloaded(rank, code)))
            for rank, code in with_frees({rank: self.code.of[rank] for rank in ranks}, self.options).items()
        }
        devices = tuple(made.values()) if fold is None else fold_devices(made, fold, world)
        mesh = self.schedule.flow.graph.mesh
        mesh = mesh if prod(mesh.values()) == len(devices) else {}
        return Program(self.model, tuple(self.functions.made), devices, self.writer.notes(self.schedule.order), mesh)

    def _offloaded(self, rank: int, code: list[Instruction]) -> list[Instruction]:
        weights = {w.name for w in self.residents.weights[rank].values()}
        keep = self.schedule.flow.graph.policy.kept_tapes
        return with_offload(code, self.functions.made, weights, keep) if keep else code

    def _pieces(self, node: Node) -> int:
        """Return the number of pieces in which an update gets its gradient."""
        flow = self.schedule.flow
        return flow.graph.policy.pieces.get(flow.by_home[node.number].name, 1)

    def _regathered(self, segment: Segment, key: Key) -> list[Place]:
        """Return the places where a backward reads regathered weights."""
        places = [Place(REGATHER, segment.number, key, number) for number in segment.regathered]
        return [place for place in places if place in self.values.readers_of]

    def _forward(self, segment: Segment, node: Node) -> None:
        rank, key = node.device, node.key
        at = segment.at[key]
        inputs = tuple(self._input(segment, alias, number, at) for number, alias in enumerate(segment.aliases))
        outputs = tuple(self.code.fresh(rank, self.code.like(o.tensor, False, *key[1:])) for o in segment.outputs)
        function = self.functions.number(segment, at, [place.number for place in self._regathered(segment, key)])
        start = self.functions.start(segment, at)
        self.code.write(rank, Forward(task(segment.number, key), function, start, inputs, outputs))
        for number, (output, name) in enumerate(zip(segment.outputs, outputs, strict=True)):
            place = Place(FORWARD, segment.number, key, number)
            self.values.made(place, name, rank)
            if output.tensor in self.losses:
                self.loss_parts[rank].append((name, place in self.loss_places, self.losses.index(output.tensor)))

    def _input(self, segment: Segment, alias: Alias, number: int, at: int) -> Value:
        key, tensor = segment.keys[at], alias.tensor
        place = Place(FORWARD, segment.number, key, number)
        if place in self.values.readers_of:
            name = self.values.value(place)
            assert name is not None, (tensor, key)
            return name
        box = alias.box(at)
        if alias.is_zero(at) or tensor in self.schedule.flow.unread:
            # Another part reads the value, or nobody needs it; this one reads zeros.
            like = self.code.like(tensor, microbatch=key[1] if self.options.microbatches else -1)
            return self.code.join(key[0], like, tensor, (), box, self.model.tensors[tensor].dtype)
        moves = self._moves(segment, number)
        if moves and self.is_short and self.model.tensors[tensor].kind != "input":
            # A constant at rest has a slice for each microbatch.
            raise Aperiodic
        return self.residents.slice(key[0], tensor, box, key[1] if moves else -1)

    def _moves(self, segment: Segment, number: int) -> bool:
        """Return whether the box of an input depends on the microbatch (always False in a plan of few microbatches)."""
        if (own := self.options.microbatches) is None:
            return False
        if (segment.number, number) not in self._moving:
            alias, first = segment.aliases[number], dict[Key, int]()
            alike = ((device, microbatch % own.inner, part) for device, microbatch, part in segment.keys)
            others = [first.setdefault(key, at) for at, key in enumerate(alike)]
            self._moving[segment.number, number] = bool((alias.lo != alias.lo[others]).any())
        return self._moving[segment.number, number]

    def _backward(self, segment: Segment, node: Node) -> None:
        """Write a backward, or half of one. If one half makes all gradients, it is written whole."""
        kind, key = node.kind, node.key
        own, halves = segment.gradient_kinds, self._halves(segment, key)
        if kind not in halves:
            return
        taking = min(halves)
        gradients = self._gradients(segment, key) if kind == taking else ()
        mine = [n for n, half in own.items() if half == kind]
        totals = {n: total for n in mine if (total := self._total(segment, key, n)) is not None}
        made = {n: self._gradient(segment, key, n) for n in mine if n not in totals}
        outputs, sums = tuple(map(made.get, own)), tuple(map(totals.get, own)) if totals else ()
        half = "" if len(halves) == 1 else "input" if kind == taking else "weight"
        regathered = [self.values.value(place) for place in self._regathered(segment, key)]
        weights = tuple(name for name in regathered if name is not None)
        run = Backward(task(segment.number, key), gradients, outputs, half, weights, sums)
        self.code.write(node.device, run)
        at = segment.at[key] if self.schedule.flow.graph.policy.pieces else None
        for number, output in made.items():
            if output is not None:
                box = None if at is None else segment.aliases[number].box(at)
                self.values.made(Place(BACKWARD, segment.number, key, number), output, node.device, box)

    def _halves(self, segment: Segment, key: Key) -> set[str]:
        """Return the kinds of work that make a segment's gradients; the first half only where a reader needs one."""
        first, own = segment.first_backward, segment.gradient_kinds
        places = (Place(BACKWARD, segment.number, key, n) for n, half in own.items() if half == first)
        others = {half for half in own.values() if half != first}
        return {first, *others} if not others or any(place in self.values.pieces_of for place in places) else others

    def _gradients(self, segment: Segment, key: Key) -> tuple[Value | None, ...]:
        """Return the gradients of a segment's outputs."""
        at = segment.at[key]
        gradients: list[Value | None] = []
        for number, output in enumerate(segment.outputs):
            if not output.has_gradient:
                continue
            name = self.values.value(Place(BACKWARD, segment.number, key, number))
            row = int(segment.row_of[output.op.name][at])
            loss = self.model.origin(output.tensor)
            is_one = loss in self.losses and self.schedule.flow.seeds_gradient(loss, row)
            gradients.append(ONE if is_one else name)
        return tuple(gradients)

    def _total(self, segment: Segment, key: Key, number: int) -> Value | None:
        """Return the sum that a backward adds the gradient of an alias to, None if it adds to none."""
        alias = segment.aliases[number]
        if not alias.is_weight:
            return None
        place, box = Place(BACKWARD, segment.number, key, number), alias.box(segment.at[key])
        return self.values.total(place, self.model.origin(alias.tensor), box)

    def _gradient(self, segment: Segment, key: Key, alias: int) -> Value | None:
        """Return a name for the gradient of an alias, None for a gradient without readers."""
        if Place(BACKWARD, segment.number, key, alias) not in self.values.pieces_of:
            return None
        tensor = self.model.origin(segment.aliases[alias].tensor)
        return self.code.fresh(key[0], self.code.like(tensor, True, key[1] if self.options.microbatches else -1))

    def _gather_update(self, node: Node) -> None:
        """Read the gradient, or the new value, of the weight or buffer that a node updates."""
        place = Place(*node[:3], 0)
        if place in self.residents.given:
            tensor, box = self.residents.given[place]
            value = self.values.value(place)
            assert value is not None, tensor
            self.code.write(node.device, Give(value, tensor, box, self.model.tensors[tensor].local_shape(extents(box))))
            return
        weight = self.residents.of[place]
        value = self.values.gradient(place, self._pieces(node), weight.box)
        weights, buffers, versions = self.updates.setdefault(node.device % HOSTS, ([], [], []))
        if self.schedule.flow.by_home[node.number].outputs[0].tensor in self.nexts:
            self.kept.add(weight.name)
        if value is not None:
            is_version = self.model.tensors[weight.tensor].origin
            kind = weights if weight.trained else versions if is_version else buffers
            kind.append((weight.name, value))

    def _update(self) -> None:
        """Update the weights that nodes have gathered, those of one device in one instruction. Older versions of
        weights are set first.
        """
        for rank, (weights, buffers, versions) in self.updates.items():
            if versions:
                self.code.write(rank, Update((), (), *_sides(versions)))
            goes_on = tuple(name for name, _ in (*weights, *buffers) if name in self.kept)
            self.code.write(rank, Update(*_sides(weights), *_sides(buffers), goes_on=goes_on))
            self.code.changed(rank, goes_on)
        self.updates, self.kept = {}, set()

    def _loss_places(self) -> set[Place]:
        """Return the parts of losses that add up to their values: one replica of each addend."""
        found = set[Place]()
        for segment in self.schedule.segments:
            for number, output in enumerate(segment.outputs):
                if output.tensor in self.losses:
                    keys = self.schedule.flow.rows[output.op.name].keys
                    rows = self.schedule.flow.produced(output.op, output.slot).whole
                    found |= {Place(FORWARD, segment.number, keys[row], number) for row in rows}
        return found


def _turns(flow: Dataflow) -> dict[tuple[int, int], frozenset[tuple[int, int]]]:
    """Return, for each gradient (or piece of one) that a plan orders, the numbers of these orders and its side in
    each.
    """
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for number, order in enumerate(flow.graph.orders):
        for side, group in enumerate((order.before, order.after)):
            for name, _ in group.members if group.kind == "C" else ():
                home = flow.home_number[flow.graph.op(name).inputs[0].tensor]
                count = flow.graph.policy.pieces.get(name, 1)
                for piece in range(count) if group.microbatch is None else (group.microbatch,):
                    found.setdefault((home, piece), set()).add((number, side))
    return {piece: frozenset(orders) for piece, orders in found.items()}


def _sides(pairs: Sequence[tuple[Value, Value]]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
