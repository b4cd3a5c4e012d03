"""Every schedule trains as one device does, alone and in products; what does not fit is told."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError, ScheduleError
from superscaler.ir.orders import print_schedule
from superscaler.plans.lib import schedules
from superscaler.report.block_summary import summary
from superscaler.simulate.memory import memories
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, exact
from tests.helpers.sweeps import few, slow

GPT = "gpt2:size=tiny,layers=4,batch=16"


def plan_of(spec: str, plan: Any, devices: int) -> ss.Plan:
    return ss.compile(graph_of(spec, "SGD"), plan, f"local:{devices}")


@pytest.mark.parametrize("name", few(schedules.RULES, 3, 4, 5, 8, 9, 10))
def test_a_schedule_equals_the_model_and_prints_its_table(name: str) -> None:
    lines = summary(equal(decoder(), f"{name}:microbatches=4").compiled).splitlines()
    told = [set(line.split()) for line in lines if line.startswith("    ")]
    for row in print_schedule(schedules.RULES[name](2, 4)).splitlines():
        # A stage that gives gradients of one kind only is not split; one that is split anywhere is so everywhere.
        rows = [row, *(row.translate(str.maketrans("IWB", 3 * kind)) for kind in "BIW")]
        words = {word for some in rows for word in some.split()}
        assert any(words >= found and len(found) >= len(row.split()) / 2 for found in told), (row, told)


class Decoder(nn.Module):
    """Causal attention in torch's own words, and a loss over some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(12, 8), nn.ModuleList(nn.Linear(8, 24) for _ in range(4))
        self.head = nn.Linear(8, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def decoder() -> ss.Graph:
    ids = torch.randint(0, 12, (4, 8), generator=torch.Generator().manual_seed(0))
    return captured(lambda: (Decoder(), (ids, ids.masked_fill(ids % 5 == 1, -100))))


@pytest.mark.parametrize(
    "plan",
    [
        ("terapipe:microbatches=1,slices=4", 2),
        *slow((("seq1f1b:microbatches=2,slices=2", 4),)),
        *slow((("seq1f1b:2,microbatches=2,slices=2 x data_parallel:2", 4),)),
        *slow((("terapipe:2,slices=2 x tensor_parallel:2", 4),)),
    ],
)
def test_slices_of_a_sequence_equal_the_model(plan: tuple[str, int]) -> None:
    equal(decoder(), *plan)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "slices", "microbatches"), list(product((2, 4), (2, 4), (1, 2, 4))))
@pytest.mark.parametrize("name", ["terapipe", "seq1f1b"])
@pytest.mark.parametrize("model", ["decoder", GPT, "llama:size=tiny,layers=4"])
def test_any_number_of_slices(model: str, name: str, devices: int, slices: int, microbatches: int) -> None:
    graph = decoder() if model == "decoder" else graph_of(model, "SGD")
    equal(graph, f"{name}:microbatches={microbatches},slices={slices}", devices)


def test_a_table_of_slices_in_a_wrong_order_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(print_schedule(schedules.gpipe(2, 4)))
    message = r"causal attention reads earlier ones, but 0B0 is ordered before 0B1 .* their backwards in reverse"
    with pytest.raises(ScheduleError, match=message):
        ss.compile(decoder(), f"pipeline:schedule={file},slices=2,recompute=late", "local:2")
    with pytest.raises(InputError, match="a table of 4 microbatches is not one of 3 slices each; choose 1, 2 or 4"):
        ss.compile(decoder(), f"pipeline:schedule={file},slices=3", "local:2")
    file.write_text(print_schedule(schedules.chimera(2, 4)))
    with pytest.raises(InputError, match="stage 0 has slices on several devices"):
        ss.compile(decoder(), f"pipeline:schedule={file},slices=2", "local:2")


SLICED = list(product(("gpt2", "llama", "gpt3"), ("seq1f1b", "terapipe"), (" x recompute", ",recompute=early")))


@pytest.mark.parametrize(("model", "name", "more"), few(SLICED, 0))
def test_slices_are_recomputed_from_the_keys_and_values_of_others(model: str, name: str, more: str) -> None:
    graph, plan = graph_of(f"{model}:size=tiny,layers=4,batch=16", "SGD"), f"{name}:2,microbatches=2,slices=2"
    programs = exact(graph, plan).program, equal(graph, plan + more).program
    plain, again = (max(found.peak for found in memories(program)) for program in programs)
    assert again < 0.85 * plain


def test_slices_of_what_is_not_causal_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"attention\.self.* not known to be causal along sequence.*its queries may read keys of slice 1",
    ):
        ss.compile(graph_of("bert:size=tiny,layers=1"), "terapipe", "local:2")


class Mixer(nn.Module):
    """A block that looks back at tokens, as no rule says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.mix = how, nn.Conv1d(8, 8, 3) if how == "conv" else nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "conv":
            return x + self.mix(F.pad(x.mT, (2, 0))).mT
        h, seen = self.mix(x), torch.ones(8, 8, dtype=torch.bool).tril()
        if self.how == "window":
            return x + F.scaled_dot_product_attention(*[h[:, None]] * 3, attn_mask=seen & ~seen.tril(-3))[:, 0]
        return x + (h @ h.mT).masked_fill(~seen, -1e9).softmax(-1) @ h


class Mixers(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("window", r"its queries may read keys of slice 1 \(known is is_causal, or a constant mask"),
        ("eager", r"it may read \S+ of slice 1 \(the rule of aten\.\S+ says of no dim"),
        ("conv", r"it may read \S+ of slice 1 \(the rule of aten\.pad.default says of no dim"),
    ],
)
def test_what_may_be_causal_is_not_said_not_to_be(how: str, why: str) -> None:
    graph = captured(lambda: (Mixers(Mixer(how), Mixer(how)), torch.randn(4, 8, 8)))
    with pytest.raises(InputError, match=rf"is not known to be causal along .*{why}"):
        ss.compile(graph, "terapipe:slices=2,microbatches=2", "local:2")


def test_stages_may_be_uneven() -> None:
    graph = equal(decoder(), "pipeline_1f1b:blocks=3+1").graph
    where = {op.module: graph.grids[op.name].used() for op in graph.forward_ops}
    assert [sorted(where[f"blocks.{k}"]) for k in range(4)] == [[0], [0], [0], [1]]


def head_alone(options: str = "layers=4,batch=8") -> list[Any]:
    """Return plans whose first or last stage has no blocks: under several schedules, and of two models."""
    plans = {
        "pipeline_1f1b:3,blocks=0+4+0": 3, "zb_h1:3,blocks=2+2+0": 3, "zbv:2,microbatches=4,blocks=0+2+2+0": 2,
        "hybrid:dp=2,pp=3,microbatches=2,blocks=0+4+0,zero=1": 6, "interleaved:2,blocks=1+2+1+0": 2,
        "hybrid:pp=2,dp=2+1,tp=1+2,microbatches=2,blocks=4+0,recompute=full": 4,
        "pipeline_1f1b:3,blocks=0+4+0,recompute=late x tensor_parallel:2": 6,
    }  # fmt: skip
    return [(f"{name}:size=tiny,{options}", *plan) for name in ("gpt2", "llama") for plan in plans.items()]


@pytest.mark.parametrize(("model", "plan", "devices"), few(head_alone(), 2, 5))
def test_first_and_last_stages_without_blocks_equal_the_model(model: str, plan: str, devices: int) -> None:
    equal(graph_of(model), plan, devices)


def test_stages_without_blocks_have_what_is_before_and_after_them() -> None:
    graph = equal(decoder(), "pipeline_1f1b:blocks=0+4+0,microbatches=2", 3).graph
    where: dict[str, set[int]] = {}
    for op in graph.forward_ops:
        where.setdefault(op.module.split(".")[0], set()).update(graph.grids[op.name].used())
    assert (where["words"], where["blocks"], where["head"]) == ({0}, {1}, {2})


def test_a_schedule_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(print_schedule(schedules.gpipe(2, 4)))
    equal(decoder(), f"pipeline:schedule={file}")
    file.write_text("0F0 0B0\n1B0 1F0")
    with pytest.raises(InputError, match="1B0 waits for 1F0"):
        plan_of(GPT, f"pipeline:schedule={file}", 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("pipeline:schedule=gpip", "unknown schedule 'gpip'.*gpipe"),
        ("gpipe:chunks=2", "no choice of chunks"),
        ("gpipe:blocks=2+1", r"blocks=2\+1 is 2 stages of 3 blocks, but there are 2 and 4"),
        ("gpipe:blocks=two", "blocks=two is 1 stages of 0 blocks"),
        ("gpipe:blocks=two+4", r"blocks=two\+4 is 2 stages of 4 blocks"),
        (
            "breadth_first:blocks=2+0+2+0",
            r"blocks=2\+0\+2\+0 leaves stage 1 of 4 without blocks; only the first and the",
        ),
        ("gpipe:blocks=0+5", r"blocks=0\+5 is 2 stages of 5 blocks, but there are 2 and 4"),
        ("gpipe:slices=2", "slices=2: this schedule has no choice of slices"),
        ("terapipe:slices=0", "1 or more slices, but 0"),
        ("terapipe:slices=5", "5 slices cuts the tokens that transformer.h.0 gives, which are along sequence of 32"),
        ("gpipe:stages=3", "stages=3 on 2 devices"),
        ("gpipe:microbatches=0", "microbatches=0 of a batch of"),
        ("gpipe:microbatches=1000000000", "microbatches=1000000000 of a batch of"),
        ("breadth_first:chunks=1000000000", "2 devices x 4 microbatches x 1000000000 chunks has 8000000000 forwards"),
        ("terapipe:slices=1000000000", "has 8000000000 forwards; choose at most 1048576"),
        ("gpipe:2 x zbv", "two pipelines, but a model is cut into stages once"),
        ("pipeline_1f1b:1 x interlaced:2", "two pipelines, but a model is cut into stages once"),
    ],
)
def test_what_does_not_fit_is_told(plan: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(GPT, plan, 2)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_stage_without_anything_to_train_is_refused(is_frozen: bool) -> None:
    """Blocks that read the input, or what a frozen layer makes of it."""

    def built() -> tuple[nn.Module, Tensor]:
        before = nn.Linear(4, 4).requires_grad_(False) if is_frozen else nn.Identity()
        blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        return Around(chained, before=before, blocks=blocks), torch.randn(4, 4)

    with pytest.raises(InputError, match="stage 0 of 2 without blocks, but before its blocks the model trains nothing"):
        ss.compile(captured(built), "gpipe:blocks=0+2", "local:2")


def chained(m: Around, x: Tensor) -> Tensor:
    x = m.before(x)
    for block in m.blocks:
        x = torch.tanh(block(x))
    return x.square().mean()


def recycled(m: Around, x: Tensor) -> Tensor:
    """Return the loss of three passes, the last of which is trained, each on the results of the one before."""
    h = m.into(x)
    for number in range(3):
        with torch.set_grad_enabled(number == 2):
            found = m.into(x) + h.detach()
            for block in m.blocks:
                found = found + torch.tanh(block(found))
        h = found
    return m.out(h).square().mean()


def test_three_passes_and_one_backward_equal_the_model() -> None:
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    graph = captured(
        lambda: (Around(recycled, into=nn.Linear(8, 8), blocks=blocks, out=nn.Linear(8, 4)), torch.randn(8, 8))
    )
    equal(graph, "three_f_one_b:microbatches=4")
    with pytest.raises(InputError, match="runs 1 times a step, 1 of them with a backward"):
        plan_of(GPT, "three_f_one_b", 2)
    with pytest.raises(InputError, match=r"over 4 devices: stage . of the passes .* has none of the model's 2 blocks"):
        ss.compile(graph, "three_f_one_b", "local:4")


@pytest.mark.slow
def test_three_passes_of_alphafold_equal_it() -> None:
    equal(graph_of("alphafold2:size=tiny", "SGD"), "three_f_one_b:microbatches=4")


def test_embedding_and_head_are_interlaced() -> None:
    plan = equal(decoder(), "interlaced:microbatches=4")
    heads = [op for op in plan.graph.forward_ops if op.module == "head" and op.flops]
    assert [sorted(plan.graph.grids[op.name].used()) for op in heads] == [[0, 1]]
    assert "0F0 1F0" in summary(plan.compiled)


def test_a_sum_of_a_head_that_is_cut_and_one_that_is_not_is_interlaced() -> None:
    def losses(m: Any, ids: Tensor) -> Tensor:
        x = m.words(ids)
        for block in m.blocks:
            x = x + block(x).relu()
        return m.odd(x).square().mean() + F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten())

    layers = {"words": nn.Embedding(12, 8), "head": nn.Linear(8, 12), "odd": nn.Linear(8, 3)}
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    ids = torch.arange(32).reshape(4, 8) % 12
    equal(captured(lambda: (Around(losses, **layers, blocks=blocks), ids)), "interlaced:microbatches=2")


def test_two_versions_of_weights_equal_their_recurrence() -> None:
    assert equal(decoder(), "pipedream_2bw:microbatches=4").found["stale"] == [1]


PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"


@pytest.mark.parametrize("name", [*schedules.RULES, "interlaced", "three_f_one_b"])
def test_the_page_shows_the_table_of_a_schedule(name: str) -> None:
    rule = schedules.RULES.get(name) or getattr(schedules, name)
    shown = PAGE.read_text().partition(f"**`{name}`**")[2].split("```")[1]
    assert shown.strip() == print_schedule(rule(2, 4))


def test_the_schedule_of_the_page_equals_the_model() -> None:
    example = next(text for text in PAGE.read_text().split("```") if text.startswith("python"))
    names: dict[str, Any] = {}
    exec(example.removeprefix("python"), names)
    equal(decoder(), names["last_first"])


def test_what_cannot_be_interlaced_is_told() -> None:
    with pytest.raises(InputError, match="needs an embedding, repeated blocks and a head"):
        plan_of("mlp:batch=16", "interlaced", 2)
    with pytest.raises(InputError, match="5 devices divide nothing outside the blocks"):
        plan_of(GPT, "interlaced", 5)
