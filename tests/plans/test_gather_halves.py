"""Weights that rest in float32, and are cast to bf16 before they are gathered: traffic, bits, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import InputError, ScheduleError
from superscaler.ir.program import Collective, Instruction, Program
from superscaler.runtime.compiled import inductor
from superscaler.runtime.compiled.segments import CompiledSegments
from superscaler.runtime.step import Step
from superscaler.simulate.memory import memories
from tests.helpers.counted import counted
from tests.helpers.ran import Around, captured, equal, moved, on_ranks
from tests.helpers.random_meshes import mesh_plan
from tests.helpers.sweeps import slow

HIDDEN, CLASSES, ROWS, BLOCKS = 64, 32, 8, 4


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def run(m: Around, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.embed(ids)
    for block in m.h:
        x = block(x)
    return nn.functional.cross_entropy(nn.functional.linear(x, m.embed.weight) + m.head(x), labels)


@cache
def made(autocast: str | None = "bf16", hidden: int = HIDDEN, is_frozen: bool = False) -> ss.Graph:
    """Return a model of blocks; with `is_frozen` their products are not trained."""

    def model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        blocks = nn.ModuleList(Block(hidden) for _ in range(BLOCKS))
        for product in (x for block in blocks for x in (block.up, block.down)):
            product.requires_grad_(not is_frozen)
        layers = {"embed": nn.Embedding(CLASSES, hidden), "h": blocks, "head": nn.Linear(hidden, CLASSES)}
        return Around(run, **layers), (torch.randint(0, CLASSES, (ROWS,)), torch.randint(0, CLASSES, (ROWS,)))

    return captured(model, kind=torch.optim.AdamW, lr=1e-2, autocast=autocast)


def elements(*inside: str, hidden: int = HIDDEN) -> int:
    found = (t for t in made(hidden=hidden).model.parameters() if any(part in t.name for part in inside))
    return sum(prod(t.shape) for t in found)


PRODUCTS = ("up.", "down.", "head.")


def test_only_weights_without_a_float32_reader_are_rounded() -> None:
    """An embedding is looked up in float32, so that its second use as a head gets what is gathered for the first."""
    names = {t.name for t in made().model.parameters()}
    assert set(made().model.rounded) == {name for name in names if any(part in name for part in PRODUCTS)}
    assert {t.dtype for t in made().model.rounded.values()} == {"bfloat16"}


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("devices", "microbatches"), [(4, 1), (2, 2)])
def test_products_are_gathered_in_two_bytes_and_the_others_in_four(
    halves: bool, devices: int, microbatches: int
) -> None:
    plan = f"fsdp:microbatches={microbatches},halves={halves},gather_halves=true"
    program = ss.compile(made(), plan, f"local:{devices}").compiled.program
    check_program(program)
    found, links = moved(program), devices - 1
    # Blocks are gathered twice in each microbatch; the embedding and the head have no second reader, and are kept.
    twice = 2 * microbatches
    narrow = twice * elements("up.", "down.") + elements("head.")
    wide = twice * elements("norm.") + elements("embed.")
    assert found["all_gather", "bfloat16", ""] == 2 * links * narrow
    assert found["all_gather", "float32", ""] == 4 * links * wide
    sums = microbatches * elements(*PRODUCTS), microbatches * elements("norm.", "embed.")
    if halves:
        assert found["reduce_scatter", "bfloat16", "float32"] == 2 * links * sums[0]
        assert found["reduce_scatter", "float32", ""] == 4 * links * sums[1]
    else:
        assert found["reduce_scatter", "float32", ""] == 4 * links * sum(sums)


def trained(steps: int, is_compiled: bool = False, graph: ss.Graph | None = None) -> Callable[[Step], Any]:
    def train(step: Step) -> Any:
        step.state.compiled = CompiledSegments() if is_compiled else None
        batch = (graph or made()).captured.batch
        found = [step(batch if step.iterations == 1 else [batch] * step.iterations) for _ in range(steps)]
        losses = [float(x) for loss in found for x in (loss if step.iterations > 1 else [loss])]
        return losses, {name: w.detach().clone() for name, w in step.state.weights.items()}

    return train


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for (losses, weights), (known, others) in zip(found, expected, strict=True):
        assert losses == known
        assert weights.keys() == others.keys()
        assert not [name for name, w in weights.items() if not torch.equal(w, others[name])]


@pytest.mark.parametrize(
    ("plan", "devices"),
    [
        ("zero:stage=3,keep=2,shard=2,{}", 4),
        *slow(
            ("fsdp:{}", 2),
            ("zero:{}", 2),
            ("zero:stage=2,microbatches=2,{}", 2),
            ("fsdp:recompute=true,microbatches=2,{}", 2),
            ("fsdp:secondary=2,{}", 4),
            ("zero:2,stage=3,{} x tensor_parallel:2", 4),
            ("zero:2,stage=3,{} x pipeline_1f1b:2,microbatches=2", 4),
            ("zero:2,stage=3,{} x swap:1,what=optimizer", 2),
            ("hybrid:dp=2,tp=2,zero=1,{}", 4),
        ),
    ],
)
def test_steps_have_the_bits_of_those_that_cast_what_is_gathered(plan: str, devices: int) -> None:
    """A cast of gathered slices is what is gathered of cast slices; and each device puts fewer bytes on links."""
    plans = [ss.compile(made(), plan.format(way), f"local:{devices}") for way in ("", "gather_halves=true")]
    wide, narrow = (on_ranks(one, trained(3)) for one in plans)
    assert_same(narrow, wide)
    before, after = (moved(one.compiled.program) for one in plans)
    assert after["all_gather", "bfloat16", ""] > 0 == before["all_gather", "bfloat16", ""]
    spared = before["all_gather", "float32", ""] - after["all_gather", "float32", ""]
    assert spared == 2 * after["all_gather", "bfloat16", ""]


def test_frozen_products_are_gathered_in_two_bytes_too() -> None:
    graph = made(is_frozen=True)
    plans = [ss.compile(graph, f"zero:stage=3{way}", "local:2") for way in ("", ",gather_halves=true")]
    assert_same(*(on_ranks(plan, trained(2, graph=graph)) for plan in plans))
    # Again for the backward, but for what is added to the result of a block.
    again = elements("up.", "down.weight")
    bytes_each = 2 * (2 * again + elements("down.bias", "head."))
    assert moved(plans[1].compiled.program)["all_gather", "bfloat16", ""] == bytes_each


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 24))])
def test_random_plans_have_these_bits(seed: int) -> None:
    shape = ((2,), (4,), (2, 2))[seed % 3]

    def planned(is_narrow: bool) -> Callable[[ss.Graph, ss.Cluster], None]:
        def sprogram(graph: ss.Graph, cluster: ss.Cluster) -> None:
            if is_narrow:
                graph.gather_halves()
            mesh_plan(seed, 4, shape, 0.05, 1 + seed % 2)(graph, cluster)

        return sprogram

    try:
        plans = [ss.compile(made(), planned(is_narrow), "local:4") for is_narrow in (False, True)]
    except ScheduleError:
        # Its own random orders make a cycle.
        return
    check_program(plans[1].compiled.program)
    assert_same(*(on_ranks(plan, trained(2)) for plan in plans))


@pytest.mark.slow
def test_verify_compares_it_with_the_module_in_float64_and_as_trained() -> None:
    found = ss.compile(made(), "fsdp:recompute=true,gather_halves=true", "local:2").verify()
    assert found["equal"], found["first_difference"]
    assert found["bytes_moved"] == found["bytes_planned"]
    assert equal(made(), "zero:stage=3,microbatches=2,gather_halves=true", 2).found["equal"]


@pytest.mark.slow
def test_segments_that_torch_compiles_read_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs run as torch traced them, by Inductor's operators."""
    monkeypatch.setattr(inductor, "compiled", lambda graph, *_: inductor.plain(graph))
    plan = ss.compile(made(), "fsdp:gather_halves=true", "local:2")
    found, expected = on_ranks(plan, trained(2, is_compiled=True)), on_ranks(plan, trained(2))
    # Of the 0.02 that two updates move a weight: products are rounded to bfloat16, and sums ordered otherwise.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_run_goes_on_under_a_plan_that_gathers_in_float32(tmp_path: Path) -> None:
    narrow, wide = (ss.compile(made(), f"fsdp{way}", "local:2") for way in (":gather_halves=true", ""))

    def first(step: Step) -> None:
        trained(3)(step)
        step.save(tmp_path)

    def second(step: Step) -> Any:
        step.restore(tmp_path)
        return trained(3)(step)

    whole = on_ranks(narrow, lambda step: (trained(3)(step), trained(3)(step))[1])
    on_ranks(narrow, first)
    assert_same(on_ranks(wide, second), whole)


def test_no_block_keeps_a_copy_of_its_weights_and_the_peak_is_what_is_predicted() -> None:
    """Casts of what is gathered in float32 are kept from the forward to the backward of each block."""
    plans = [ss.compile(made(hidden=512), f"fsdp{way}", "local:2") for way in ("", ":gather_halves=true")]
    wide, narrow = (counted(plan, 0) for plan in plans)
    assert memories(plans[1].compiled.program)[0].peak == pytest.approx(narrow, rel=0.01)
    # All but those of the last block.
    assert wide - narrow > 2 * elements("up.", "down.", hidden=512) * (BLOCKS - 1) / BLOCKS


def changed(program: Program, change: Callable[[Instruction], Instruction]) -> Program:
    first, *others = program.devices
    return replace(program, devices=(replace(first, instructions=tuple(map(change, first.instructions[:]))), *others))


def test_the_certificate_refuses_other_roundings() -> None:
    program = ss.compile(made(), "fsdp:gather_halves=true", "local:2").compiled.program

    def given(i: Instruction) -> bool:
        return isinstance(i, Collective) and bool(i.given)

    def to_float16(i: Instruction) -> Instruction:
        return replace(i, dtype="float16") if isinstance(i, Collective) and i.given else i

    def norms(i: Instruction) -> Instruction:
        is_wide = isinstance(i, Collective) and i.kind == "all_gather" and not i.given
        return replace(i, dtype="bfloat16", given="float32", bytes=i.bytes // 2) if is_wide else i  # type: ignore[union-attr]

    assert any(map(given, program.devices[0].instructions))
    with pytest.raises(ScheduleError, match=r"rounds h\.0\..* to float16 to move it"):
        check_program(changed(program, to_float16))
    with pytest.raises(ScheduleError, match=r"rounds (embed|h\.0\.norm)\.weight to bfloat16 to move it"):
        check_program(changed(program, norms))
    # The gradient of what is read in bf16 would be added in bf16.
    narrow = tuple(replace(f, wide=()) for f in program.functions)
    with pytest.raises(ScheduleError, match=r"reads bfloat16 as float32 h\.0\."):
        check_program(replace(program, functions=narrow))


def test_options_without_an_effect_are_refused_in_one_line() -> None:
    for plan, text in (
        ("fsdp:gather_halves=true", "gather_halves: no weight is read by casts to bf16 or fp16 alone"),
        (
            "zero:shard=1,gather_halves=true",
            "shard=1: each of 2 devices has whole weights, so none is gathered; choose",
        ),
        ("fsdp:gather_halves=maybe", "gather_halves=maybe"),
    ):
        with pytest.raises(InputError, match=text) as found:
            ss.compile(made(None), plan, "local:2")
        assert "\n" not in str(found.value)
    with pytest.raises(InputError, match="hybrid:gather_halves=true,zero=0: no weight is gathered"):
        ss.compile(made(), "hybrid:dp=2,gather_halves=true", "local:2")
