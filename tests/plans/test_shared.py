"""What several plans need: stages, the 1F1B order, tensor-parallel splits, counts that use all devices."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler import plans
from superscaler.errors import InputError
from superscaler.ir.fold import Folded
from superscaler.plans import names
from superscaler.plans.lib.shared import tensor_splits
from superscaler.plans.lib.stages import stages
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal
from tests.verbs.chains import chain


def test_stages_are_contiguous_balanced_and_whole() -> None:
    graph = chain(7)
    found = stages(graph, 3)
    assert [op for part in found for op in part] == list(graph.forward_ops)
    # Seven blocks of one FLOP each, and a sum of none.
    assert sorted(sum(op.flops for op in part) for part in found) == [2, 2, 3]


@pytest.mark.parametrize("count", [0, -1, 9])
def test_stages_that_do_not_fit_are_refused_with_both_numbers(count: int) -> None:
    with pytest.raises(InputError, match=f"{count} stages do not fit a model of 8 .*choose 1 to 8"):
        stages(chain(7), count)


def test_tensor_splits_that_divide_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="tensor parallelism into 5 parts divides no factor of this model"):
        tensor_splits(chain(3), 5)


class Deep(nn.Module):
    """Look-ups of words and of positions, which are as many, and a long row of ops behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(8, 4), nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) + self.places(torch.arange(8))
        for _ in range(400):
            y = y * 2 + 1
        return self.head(y).logsumexp(-1).mean()


def test_rows_that_constants_look_up_stay_whole_in_a_model_of_any_depth() -> None:
    graph = captured(lambda: (Deep(), torch.zeros(2, 8, dtype=torch.int64)))
    splits = tensor_splits(graph, 2, "tp", in_blocks=False, lookups=True)
    assert {graph.op(name).module for name, found in splits.items() if found} == {"words", "head"}


def test_every_plan_of_the_library_is_short() -> None:
    files = [Path(plans.__file__).with_name(f"{name}.py") for name in names()]
    lines = {file.name: len(file.read_text().splitlines()) for file in files if file.exists()}
    assert len(lines) > 20
    assert {name: count for name, count in lines.items() if count > 60} == {}


def test_devices_that_have_slices_of_a_vocabulary_of_experts_or_of_parts_of_a_block_fold() -> None:
    for spec, plan, devices, slices in (
        ("gpt2:size=tiny", "tensor_parallel", 4, 4),
        ("mixtral:size=tiny", "tensor_parallel:vocabulary=false", 4, 4),
        ("gpt2:size=tiny,layers=1,hidden=48,heads=6,vocab=96,batch=9", "tensor_parallel:3 x co_shard:3,parts=2", 9, 3),
    ):
        compiled = ss.compile(graph_of(spec), plan, f"local:{devices}")
        assert isinstance(compiled.compiled.program.devices, Folded)
        assert compiled.counts["distinct_programs"] == 1
        assert len({str(tables.parts) for tables in compiled.compiled.emitted.tables}) == slices


def test_the_devices_of_a_ring_run_one_program() -> None:
    assert ss.compile(graph_of("gpt2:size=tiny"), "ring_attention", "local:4").counts["distinct_programs"] == 1


@pytest.mark.parametrize(
    ("plan", "frozen"),
    [
        *(("pipeline_1f1b:stages=4,microbatches=2", frozen) for frozen in ((0, 1), (0, 1, 2), (3,))),
        *(("hybrid:dp=2,pp=2,microbatches=2", frozen) for frozen in ((0, 1, 2), (1, 2))),
    ],
)
def test_a_stage_may_have_nothing_to_train(plan: str, frozen: tuple[int, ...]) -> None:
    layers = [nn.Linear(8, 8).requires_grad_(k not in frozen) for k in range(4)]
    module = nn.Sequential(*layers, Around(lambda _, x: x.square().mean()))
    equal(captured(lambda: (module, torch.randn(4, 8))), plan, 4)


PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()


@pytest.mark.slow
def test_the_examples_give_what_the_page_says() -> None:
    text = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    example = doctest.DocTestParser().get_doctest(text, {}, "plans.md", None, 0)
    assert len(example.examples) > 20
    words: list[str] = []
    assert doctest.DocTestRunner().run(example, out=words.append).failed == 0, "".join(words)


def test_what_the_page_names_is_there() -> None:
    named = set(re.findall(r"\bss\.(\w+)", PAGE)) | set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    assert len(named) > 20
    assert all(hasattr(ss, name) for name in named)
