"""Ten plans of a user that order updates, copies and offloads between backwards, against eager training by torch.

    python benchmarks/orders.py [--families llama ...] [--plans lomo ...] [--layers 8]

Five tiny, unmodified families of `transformers`, of equal layers, so that emitted code has loops over these. Each plan
is saved, trained for three steps of three batches on two gloo processes, and stored as a checkpoint, which is loaded
into a new module. A row has, in the code of device 0, the lines with loops over layers, updates before the last one,
backwards of weights alone, copies to the host, and offloads of tapes. Then, in float64 and in float32: the distance
of weights from those of the eager module, relative to the way that these went, or a loss that is farther off.

The oracle is the module, an optimizer and a loop of torch. In float64 its weights are float64, and what is cast to
float32 stays float64: at most 1e-9 is allowed. In float32 sums in other orders round otherwise: `order` is the distance
of eager steps on batches whose rows are in another order, and LIMIT times that is allowed. `stale` reads weights of one
update ago, so that it trains otherwise, and must be found. `lora_in_shards` trains adapters of peft. The SGD of three
families has momentum; the scale of gradients matters to it, and less to AdamW. Exits with 1 where a plan is off, or
where `stale` is not.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from eager_steps import ADAMW, LIMIT, Ran, batches, built, eager, off
from families import FAMILIES, Tiny
from order_plans import PLANS, SProgram, lora_in_shards, stale
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import superscaler as ss
from superscaler.artifact import initial_values, write
from superscaler.compiler import finish
from superscaler.launch.launch import launch
from superscaler.verify.oracles import retype

WORLD, ALLOWED = 2, 1e-9
RANK = Path(__file__).with_name("train_rank.py")
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# What the code of a plan is looked through for, by the column of the table.
MARKS = {
    "loops": "for l in", "early": "early=True", "halves": "rt.backward_weight(", "to_host": "rt.to_host(",
    "tapes": "rt.offload(",
}  # fmt: skip
COLUMNS = (*MARKS, "float64", "float32", "order")
# The families with their optimizers, and the layers that adapters are beside.
TRAINED = {
    "llama": (ADAMW, ["q_proj", "v_proj"]),
    "gpt2": (MOMENTUM, ["c_attn"]),
    "t5": (ADAMW, ["q", "v"]),
    "vit": (MOMENTUM, ["q_proj", "v_proj"]),
    "mixtral": (MOMENTUM, ["q_proj", "v_proj"]),
}


class Wide(TorchDispatchMode):
    """Makes float64 of what is cast to float32, where a float64 is read. Constants are computed as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        found = set[torch.dtype]()
        tree_map(lambda x: found.add(x.dtype) if isinstance(x, Tensor) else None, given)
        if torch.float64 in found:
            given = tree_map(_wide, given)
        return func(*given[0], **given[1])


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double() if x.dtype is torch.float32 else x
    return torch.float64 if x is torch.float32 else x


def tiny_of(name: str, layers: int) -> Tiny:
    """Return a family with so many layers, and no loss over the whole batch beside that of its tokens."""
    tiny = FAMILIES[name]
    changed = {"num_layers": layers, "num_hidden_layers": layers, "output_router_logits": False}
    return replace(tiny, values=tiny.values | {key: value for key, value in changed.items() if key in tiny.values})


def adapted(module: nn.Module, targets: Sequence[str]) -> nn.Module:
    """Return the module of a user with adapters of peft; their second factors are not zero."""
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    found: nn.Module = peft.get_peft_model(module, config)
    return found


class Case:
    """A module with its batches, and its eager training in both dtypes."""

    def __init__(self, name: str, layers: int, has_adapters: bool) -> None:
        optimizer, targets = TRAINED[name]
        tiny = tiny_of(name, layers)
        module = built(tiny, torch.float32)
        self.module = adapted(module, targets) if has_adapters else module
        self.start = {n: x.detach().clone() for n, x in self.module.named_parameters()}
        self.given = {dtype: batches(tiny, dtype) for dtype in (torch.float64, torch.float32)}
        turned = [{n: x.flip(0) for n, x in batch.items()} for batch in self.given[torch.float32]]
        with Wide():
            exact = eager(widened(self.module), self.given[torch.float64], optimizer)
        own = eager(self.module, self.given[torch.float32], optimizer)
        self.expected = {torch.float64: exact, torch.float32: own}
        self.order = off(eager(self.module, turned, optimizer), own, self.start)
        made = optimizer([p for p in self.module.parameters() if p.requires_grad])
        self.graph = ss.capture(self.module, (), self.given[torch.float32][0], made)

    def save(self, plan: SProgram, folder: Path) -> list[int]:
        """Write a plan in both dtypes, with its batches; return how often its code has each of MARKS."""
        own = ss.compile(self.graph, plan, f"local:{WORLD}")
        exact = finish(retype(own.compiled.graph, "float64"), own.compiled.cluster)
        values = initial_values(exact.graph.model, self.graph.captured.values)
        ss.Plan(exact).validate()
        write(exact, folder / "float64", {n: _wide(x) for n, x in values.items()})
        own.save(folder / "float32")
        for dtype, given in self.given.items():
            torch.save([dict(batch) for batch in given], folder / _word(dtype) / "batches")
        code = own.compiled.emitted.files["program_0.py"]
        return [code.count(mark) for mark in MARKS.values()]

    def errors(self, folder: Path) -> list[float]:
        """Return how far what was trained in float64 and in float32 is from the eager training."""
        return [off(self._trained(folder / _word(d), d), self.expected[d], self.start) for d in self.given]

    def _trained(self, folder: Path, dtype: torch.dtype) -> Ran:
        module = widened(self.module) if dtype is torch.float64 else copy.deepcopy(self.module)
        ss.load_weights(module, folder / "checkpoint")
        losses = [json.loads((folder / f"losses{rank}").read_text()) for rank in range(WORLD)]
        assert losses[0] == losses[1], losses
        return losses[0], {n: x.detach() for n, x in module.named_parameters()}


def widened(module: nn.Module) -> nn.Module:
    """Return a copy with weights in float64, and a loop over experts, whose grouped product torch has not in that."""
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.config._experts_implementation = "eager"
    for weight in module.parameters():
        weight.data = weight.data.double()
    return module


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows(name: str, plans: Sequence[SProgram], layers: int) -> Iterator[tuple[str, bool]]:
    """Yield the row of each plan of a family, and whether it is as it must be. All are trained by one launch."""
    cases = {has: Case(name, layers, has) for has in sorted({plan is lora_in_shards for plan in plans})}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        marks = {p.__name__: cases[p is lora_in_shards].save(p, folder / p.__name__) for p in plans}
        launch(RANK, [str(folder), *(f"{n}/{d}" for n in marks for d in ("float64", "float32"))], WORLD, folder)
        for plan in plans:
            case, word = cases[plan is lora_in_shards], plan.__name__
            exact, own = case.errors(folder / word)
            is_equal = exact <= ALLOWED and own <= LIMIT * case.order
            numbers = *map(str, marks[word]), f"{exact:.0e}", f"{own:.0e}", f"{case.order:.0e}"
            mark = "" if is_equal else "  found" if plan is stale else "  WRONG"
            yield _row(name, word, numbers) + mark, is_equal is not (plan is stale)


def _row(family: str, plan: str, numbers: Sequence[str]) -> str:
    return f"{family:8}{plan:18}" + "".join(f"{number:>9}" for number in numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {plan.__name__: plan for plan in (*PLANS, stale)}
    parser.add_argument("--families", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--plans", nargs="+", choices=names, default=list(names))
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(_row("family", "plan", COLUMNS), flush=True)
    wrong = 0
    for family in options.families:
        for row, is_right in rows(family, [names[plan] for plan in options.plans], options.layers):
            wrong += not is_right
            print(row, flush=True)
    print(f"{wrong} rows are not as they must be")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
