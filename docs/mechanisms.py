"""Writes docs/mechanisms.md: each mechanism of the paper's table 1 as a plan, the models that it equals, its lines.

    python docs/mechanisms.py [--only gpt2,llama]

Takes about half an hour of one core.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import superscaler as ss
from superscaler.models import build
from superscaler.plans import resolve

HERE = Path(__file__).parent
PLANS = HERE.parent / "superscaler" / "plans"
MODELS = {
    "alphafold2": "alphafold2:size=tiny,layers=2,sequences=8,residues=8,hidden=32,heads=8,batch=4",
    "bert": "bert:size=tiny,seq=16,heads=8,batch=8",
    "gpt2": "gpt2:size=tiny,heads=8,batch=8,layers=4",
    "gpt3": "gpt3:size=tiny,seq=16,heads=8,batch=8",
    "llama": "llama:size=tiny,heads=8,kv_heads=8,batch=8",
    "mbart": "mbart:size=tiny,seq=16,target=16,heads=8,batch=8",
    "mixtral": "mixtral:size=tiny,seq=16,batch=8",
    "swin": "swin:size=tiny,batch=8",
    "t5": "t5:size=tiny,seq=16,target=16,heads=8,batch=8",
    "vit": "vit:size=tiny,batch=8",
}
# Mechanism, plan, devices. What the paper leaves out is in italics.
MECHANISMS = [
    ("Data parallelism", "data_parallel", 2),
    ("Sequence parallelism (Megatron-LM)", "sequence_parallel", 2),
    ("Transformer (tensor) parallelism", "tensor_parallel", 2),
    ("DAP", "dap", 2),
    ("ZeRO", "zero:stage=3", 2),
    ("Sequence parallelism (ring)", "ring_attention", 2),
    ("Flexible tensor parallelism", "flexible", 2),
    ("1F1B", "pipeline_1f1b:microbatches=4", 2),
    ("GPipe", "gpipe:microbatches=4", 2),
    ("Chimera", "chimera:microbatches=4", 2),
    ("*PipeDream* (its recurrence)", "pipedream:microbatches=4", 2),
    ("*PipeDream-2BW* (its recurrence)", "pipedream_2bw:microbatches=4", 2),
    ("*TeraPipe*", "terapipe:microbatches=2,slices=2", 2),
    ("Gradient accumulation", "gradient_accumulation:microbatches=2", 2),
    ("Recompute", "recompute", 2),
    ("Chain recompute", "chain_recompute:every=sqrt", 2),
    ("Swap", "swap:what=both", 2),
    ("*ByteScheduler*", "bytescheduler", 2),
    ("All-reduce overlap", "data_parallel", 2),
    ("co-shard (the paper's)", "co_shard:parts=2", 2),
    ("Interlaced pipeline (the paper's)", "interlaced:microbatches=4", 2),
    ("3F1B (the paper's)", "three_f_one_b:microbatches=4", 2),
    ("Ulysses", "ulysses", 2),
    ("Expert parallelism", "expert_parallel", 2),
    ("Zero bubble", "zb_h1:microbatches=4", 2),
    ("Zero bubble, V", "zbv:microbatches=4", 2),
    ("Seq1F1B", "seq1f1b:microbatches=2,slices=2", 2),
    ("DualPipe on a V", "dualpipe:microbatches=4", 2),
]
PRODUCTS = [
    "data_parallel:2 x tensor_parallel:2", "data_parallel:2 x tensor_parallel:2 x pipeline_1f1b:2,microbatches=2",
    "zero:2,stage=3 x tensor_parallel:2", "zero:2,stage=3 x tensor_parallel:2 x sequence_parallel:2",
    "zero:2,stage=1 x zb_h1:2,microbatches=2", "zero:2,stage=1 x interleaved:2,microbatches=2",
    "data_parallel:2 x ring_attention:2", "data_parallel:2 x ulysses:2", "data_parallel:2 x chimera:2,microbatches=2",
    "tensor_parallel:2 x zb_h1:2,microbatches=4", "interlaced:2,microbatches=2 x tensor_parallel:2",
    "co_shard:2,parts=2 x pipeline_1f1b:2,microbatches=2",
]  # fmt: skip
HEAD = """# Mechanisms

Written by `python docs/mechanisms.py`: the mechanisms of the paper's table of support, and some more, as plans of the
library. A model counts as equal where `verify` found one step of the plan (two devices) equal to the unmodified module
on one, in float64 within 1e-9. Mechanisms in italics were out of reach for the paper.

| mechanism | plan | lines | equal | refused |
|---|---|---|---|---|
"""


def found(graph: ss.Graph, plan: str, devices: int) -> str:
    """Return "equal", what differs, or why the plan is refused."""
    try:
        result = ss.compile(graph, resolve(plan), f"local:{devices}").verify()
    except ss.PlanError as error:
        return _short(str(error))
    return "equal" if result["equal"] else f"NOT EQUAL: {result['first_difference']}"


def _short(text: str) -> str:
    """Return the first sentence of a message, without the place of the plan."""
    found = re.sub(r"^op_\w+ at \S+: ", "", text.splitlines()[0])
    return re.split(r"[;.] ", found)[0][:160]


def verify(models: list[str]) -> dict[str, dict[str, str]]:
    """Return per model and plan what was found."""
    results: dict[str, dict[str, str]] = {}
    for name in models:
        built = build(MODELS[name])
        optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
        graph = ss.capture(built.module, built.args, built.kwargs, optimizer)
        plans = {plan: devices for _, plan, devices in MECHANISMS if plan and plan != "flexible"}
        plans |= {plan: 2 ** (plan.count(" x ") + 1) for plan in PRODUCTS} if name in ("gpt2", "llama") else {}
        results[name] = {plan: found(graph, plan, devices) for plan, devices in plans.items()}
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    return results


def lines_of(plan: str) -> str:
    """Return the lines of a plan's file."""
    name = plan.partition(":")[0]
    file = PLANS / f"{name if (PLANS / f'{name}.py').exists() else 'schedules'}.py"
    return str(len(file.read_text().splitlines())) if file.stem == name else "[a table](pipelines.md)"


def page(results: Mapping[str, Mapping[str, str]]) -> str:
    rows = []
    for mechanism, plan, _ in MECHANISMS:
        own = {model: told[plan] for model, told in results.items() if plan in told}
        equal = ", ".join(model for model, told in own.items() if told == "equal") or "of a table of choices"
        reasons: dict[str, list[str]] = {}
        for model, told in own.items():
            reasons.setdefault(_short(told), []).append(model)
        rest = (f"{', '.join(names)}: {why}" for why, names in reasons.items() if why != "equal")
        told = "<br>".join(rest).replace("|", "\\|")
        rows.append(
            f"| {mechanism} | `{plan}` | {lines_of(plan)} | {equal} | {told} |"
            if plan
            else f"| {mechanism} | | | not yet | |"
        )
    products = [f"| `{plan}` | {results['gpt2'][plan]} | {results['llama'][plan]} |" for plan in PRODUCTS]
    tail = "\n## Products\n\nTwo plans on 4 devices, three on 8.\n\n| plan | gpt2 | llama |\n|---|---|---|\n"
    return HEAD + "\n".join(rows) + "\n" + tail + "\n".join(products) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--into", type=Path, help="write what was found as JSON, to be joined by --join")
    parser.add_argument("--join", type=Path, nargs="*", help="write the page from such files")
    options = parser.parse_args()
    if options.join:
        results = {name: told for file in options.join for name, told in json.loads(file.read_text()).items()}
    else:
        results = verify(options.only.split(","))
    if options.into:
        options.into.write_text(json.dumps(results))
    else:
        Path(__file__).with_suffix(".md").write_text(page({name: results[name] for name in MODELS if name in results}))


if __name__ == "__main__":
    main()
