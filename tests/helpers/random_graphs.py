"""Random small graphs and random nested cuts, placed at random: the rules of parts and masks under attack."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from superscaler.cluster import Cluster
from superscaler.compiler import Compiled, complete_placement, finish
from superscaler.ir.communication import bytes_moved
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Axis, Grid
from superscaler.ir.model import Factor, Model, Op, Operand, Optimizer, PTensor
from superscaler.ir.op import Index, Ref
from superscaler.runtime.step import Step
from superscaler.verify.locate import on_threads

LETTERS = "abcdefghij"


@dataclass
class Builder:
    """Draws a model: products (repeated operands, square weights, sums), softmax, tanh, slices, additions."""

    draw: random.Random
    tensors: dict[str, PTensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    factors: dict[str, Factor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    weights_only: set[str] = field(default_factory=set)

    def tensor(self, name: str, shape: tuple[int, ...], kind: str, grad: bool) -> str:
        slots = tuple((f"{name}.{d}",) for d in range(len(shape)))
        self.tensors[name] = PTensor(name, shape, "float64", kind, slots, shape, grad)  # type: ignore[arg-type]
        if kind != "activation":
            self.values[name] = torch.randn(shape, dtype=torch.float64)
        if kind in ("parameter", "constant"):
            self.weights_only.add(name)
        return name

    def op(
        self,
        target: str,
        args: tuple,
        inputs: list[tuple[str, tuple]],
        sizes: list[int],
        marks: list[str],
        out: tuple,
        linear: tuple[tuple[int, ...], ...] = (),
    ):  # type: ignore[type-arg]
        name = f"op{len(self.ops)}"
        indices = []
        for i, (size, mark) in enumerate(zip(sizes, marks, strict=True)):
            factor = f"{name}.{i}"
            self.factors[factor] = Factor(factor, size)
            indices.append(Index(size, factor, mark))  # type: ignore[arg-type]
        grad = any(self.tensors[t].requires_grad for t, _ in inputs)
        made = self.tensor(f"t{len(self.ops)}", tuple(sizes[i] for i in out), "activation", grad)
        only = all(t in self.weights_only for t, _ in inputs)
        if only:
            self.weights_only.add(made)
        operands = tuple(Operand(t, slots) for t, slots in inputs)
        kept = {"has_mirror": grad, "linear": linear, "from_weights": only}
        self.ops.append(Op(name, target, args, (), operands, (Operand(made, out),), tuple(indices), **kept))
        return made

    def product(self, a: str, b: str) -> str:
        sizes: list[int] = []
        used = []
        for t in (a, b):
            mine: list[int] = []
            for size in self.tensors[t].shape:
                same = [i for i, s in enumerate(sizes) if s == size and i not in mine]
                if same and self.draw.random() < 0.6:
                    mine.append(self.draw.choice(same))
                else:
                    sizes.append(size)
                    mine.append(len(sizes) - 1)
            used.append(tuple(mine))
        kept = self.draw.sample(range(len(sizes)), min(2, len(sizes)))
        equation = ",".join("".join(LETTERS[i] for i in u) for u in used) + "->" + "".join(LETTERS[i] for i in kept)
        marks = ["spatial" if i in kept else "summed" for i in range(len(sizes))]
        args = (equation, (Ref(0), Ref(1)))
        return self.op(
            "aten.einsum.default", args, [(a, used[0]), (b, used[1])], sizes, marks, tuple(kept), ((0,), (1,))
        )

    def step(self) -> None:
        names = list(self.tensors)[-5:]
        a = self.draw.choice(names)
        shape = self.tensors[a].shape
        kind = self.draw.choice(["product", "product", "product", "tanh", "softmax", "slice", "add", "add"])
        free = ["spatial", "spatial"]
        if kind == "product":
            self.product(a, self.draw.choice([*names, a]))
        elif kind == "tanh":
            self.op("aten.tanh.default", (Ref(0),), [(a, (0, 1))], list(shape), free, (0, 1))
        elif kind == "softmax":
            self.op(
                "aten._softmax.default", (Ref(0), 1, False), [(a, (0, 1))], list(shape), ["spatial", "frozen"], (0, 1)
            )
        elif kind == "slice" and shape[0] == 4:
            self.op(
                "aten.slice.Tensor", (Ref(0), 0, 1, 4), [(a, (None, 1))], [3, shape[1]], ["frozen", "spatial"], (0, 1)
            )
        else:
            b = self.draw.choice([n for n, t in self.tensors.items() if t.shape == shape])
            self.op(
                "aten.sub.Tensor", (Ref(0), Ref(1)), [(a, (0, 1)), (b, (0, 1))], list(shape), free, (0, 1), ((0, 1),)
            )

    def close(self) -> Model:
        """Weigh every tensor that nobody reads, and add up: the loss."""
        read = {o.tensor for op in self.ops for o in op.inputs}
        total = None
        for name in [n for n, t in self.tensors.items() if n not in read and t.kind == "activation"]:
            shape = self.tensors[name].shape
            weight = self.tensor(f"c_{name}", shape, "constant", False)
            args = ("ab,ab->", (Ref(0), Ref(1)))
            marks = ["summed", "summed"]
            one = self.op("aten.einsum.default", args, [(name, (0, 1)), (weight, (0, 1))], list(shape), marks, ())
            total = (
                one
                if total is None
                else self.op("aten.add.Tensor", (Ref(0), Ref(1)), [(total, ()), (one, ())], [], [], (), ((0, 1),))
            )
        assert total is not None
        updates = []
        for name, t in self.tensors.items():
            if t.kind == "parameter":
                indices = []
                for d, size in enumerate(t.shape):
                    self.factors[f"{name}.{d}"] = Factor(f"{name}.{d}", size)
                    indices.append(Index(size, f"{name}.{d}", "spatial"))
                o = Operand(name, tuple(range(len(t.shape))))
                updates.append(Op(f"update.{name}", "ss.SGD", (), (), (o,), (o,), tuple(indices), kind="optimizer"))
        inputs = tuple(n for n, t in self.tensors.items() if t.kind == "input")
        optimizer = Optimizer("SGD", ((("lr", 0.1),),))
        return Model(self.tensors, (*self.ops, *updates), self.factors, inputs, total, optimizer, {}, {})


def random_model(seed: int, ops: int, sizes: Sequence[int] = (3, 4)) -> tuple[Model, dict[str, Tensor]]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    b = Builder(draw)
    for k in range(3):
        b.tensor(f"w{k}", (draw.choice(sizes), draw.choice(sizes)), "parameter", True)
    b.tensor("x", (draw.choice(sizes), draw.choice(sizes)), "input", False)
    b.product("w0", draw.choice(["w1", "w2", "x"]))
    for _ in range(ops):
        b.step()
    return b.close(), b.values


def random_grid(op: Op, draw: random.Random, devices: int, depth: int, extents: list[int]) -> Grid:
    """Return a random tree of cuts (even or not) and replications (copied or routed), each leaf anywhere."""
    axes: list[Axis] = []
    local = list(extents)
    for _ in range(draw.randint(0, depth)):
        cuttable = [i for i, index in enumerate(op.indices) if index.mark != "frozen" and local[i] > 1]
        uneven = any(len(set(a.sizes)) > 1 for a in axes)
        if op.linear and draw.random() < 0.35:
            axes.append(Axis(None, (1,) * draw.choice([2, 3]), partial_inputs=draw.choice(op.linear)))
        elif cuttable and draw.random() < 0.65 and not uneven:
            i = draw.choice(cuttable)
            first = draw.randint(1, local[i] - 1)
            axes.append(Axis(i, (first, local[i] - first)))
            local[i] = first if first * 2 == local[i] else local[i]
        else:
            axes.append(Axis(None, (1, 1), draw.choice(["copy", "route"])))
    shape = [len(a.sizes) for a in axes]
    grid = Grid(tuple(axes), np.array([draw.randrange(devices) for _ in range(int(np.prod(shape)))]).reshape(shape))
    uneven = any(len(set(a.sizes)) > 1 for a in axes)
    if depth > 1 and axes and not uneven and draw.random() < 0.6:
        cell = draw.randrange(int(np.prod(shape)))
        grid.children[cell] = random_grid(op, draw, devices, depth - 1, local)
    return grid


def random_plan(model: Model, seed: int, devices: int, irregular: bool = True) -> Compiled:
    draw = random.Random(seed)
    graph = Graph(model)
    for op in model.ops:
        depth = draw.choice([0, 1, 2, 3] if irregular else [0, 1, 1])
        grid = random_grid(op, draw, devices, depth, [i.size for i in op.indices])
        graph.grids[op.name] = grid
    return finish(complete_placement(graph, Cluster.local(devices)), Cluster.local(devices))


def whole_step(model: Model, values: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Execute the unsplit ops and differentiate: the oracle."""
    env = {n: v.clone().requires_grad_(model.tensors[n].kind == "parameter") for n, v in values.items()}
    for op in model.ops:
        if op.is_forward:
            got = [env[o.tensor] for o in op.inputs]

            def fill(a: object, got: list[Tensor] = got) -> object:
                return got[a.operand] if isinstance(a, Ref) else [fill(x) for x in a] if isinstance(a, tuple) else a

            _, name, overload = op.target.split(".")
            env[op.outputs[0].tensor] = getattr(getattr(torch.ops.aten, name), overload)(*[fill(a) for a in op.args])
    names = [n for n, t in model.tensors.items() if t.kind == "parameter"]
    grads = torch.autograd.grad(env[model.loss], [env[n] for n in names], allow_unused=True)
    return env[model.loss].detach(), {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def largest_error(compiled: Compiled, values: dict[str, Tensor]) -> tuple[float, str]:
    """Run the plan on threads; return the largest error of the loss and of all gradients on all devices.

    Other bytes on links than the plan says are an infinite error.
    """
    model = compiled.graph.model
    loss, expected = whole_step(model, values)

    def run(step: Step) -> tuple[Tensor, dict[str, Tensor], int]:
        step.state.updates.keep_gradients = True
        return step({n: values[n] for n in model.inputs}), step.state.updates.gradients, step.bytes_moved

    # Some true gradients are zero, or all are; their rounding noise is measured against the model's largest, or values.
    floor = max(1e-4, 1e-6 * max(float(g.abs().max()) for g in expected.values()))
    worst, where = 0.0, ""
    ran = on_threads(compiled, values, run, 20.0)
    moved = sum(bytes_moved for *_, bytes_moved in ran)
    if moved != bytes_moved(compiled.program):
        worst, where = float("inf"), f"{moved} bytes on links, not {bytes_moved(compiled.program)}"
    for rank, (found, gradients, _) in enumerate(ran):
        worst = max(worst, float((found - loss).abs() / (loss.abs() + 1e-6)))
        for weight in compiled.program.devices[rank].weights:
            if not weight.trained:
                continue
            whole = expected.get(weight.tensor)
            have = gradients.get(str(weight.name))
            if whole is None or have is None:
                error = 0.0 if whole is None or float(whole.abs().max()) <= floor else float("inf")
            else:
                want = whole[tuple(slice(lo, hi) for lo, hi in weight.box)]
                error = float((have - want).abs().max()) / max(float(whole.abs().max()), floor)
            if error > worst:
                worst, where = error, f"{weight.name} on {rank}"
    return worst, where
