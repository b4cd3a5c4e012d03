"""Every SPMD plan of the library on every model that it applies to: equal to the model in float64.

A plan joins by a row: its spec, and its models. A few run always, all of them with `-m slow`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from _pytest.mark import ParameterSet

import superscaler as ss
from superscaler.plans import resolve
from tests.graphs import graph_of

MODELS = {
    "alphafold2": "alphafold2:size=tiny,layers=1,passes=2,sequences=8,residues=8,hidden=32,heads=8,pair_heads=8",
    "bert": "bert:size=tiny,seq=16,heads=8",
    "gpt2": "gpt2:size=tiny,heads=8",
    "gpt3": "gpt3:size=tiny,seq=16,heads=8",
    "llama": "llama:size=tiny,heads=8,kv_heads=8",
    "mbart": "mbart:size=tiny,seq=16,target=16,heads=8",
    "mixtral": "mixtral:size=tiny,seq=16",
    "swin": "swin:size=tiny",
    "t5": "t5:size=tiny,seq=16,target=16,heads=8",
    "vit": "vit:size=tiny",
}
CAUSAL = ("gpt2", "gpt3", "llama", "mixtral")
# Attention without a learned bias.
PLAIN = (*CAUSAL, "bert", "mbart", "vit")
ROWS: Mapping[str, tuple[str, ...]] = {
    "ring_attention": PLAIN,
    "ring_attention:zigzag=true": CAUSAL,
    "data_parallel:2 x ring_attention": PLAIN,
    "sequence_parallel": (*PLAIN, "swin", "t5"),
    "data_parallel:2 x sequence_parallel": (*PLAIN, "swin", "t5"),
    "ulysses": (*PLAIN, "alphafold2", "t5"),
    "data_parallel:2 x ulysses": (*PLAIN, "t5"),
    "dap": ("alphafold2",),
    "data_parallel:2 x dap": ("alphafold2",),
    "zero:2,stage=3 x sequence_parallel": CAUSAL,
    "zero:2,stage=3 x ulysses": CAUSAL,
    "zero:2,stage=3 x ring_attention": CAUSAL,
    "data_parallel:2 x tensor_parallel:2 x ulysses": CAUSAL,
    "data_parallel:2 x tensor_parallel:2 x ring_attention": CAUSAL,
    "zero:2,stage=3 x tensor_parallel:2 x sequence_parallel": CAUSAL,
}
ALWAYS = {
    ("ring_attention", "gpt2", 4),
    ("ring_attention:zigzag=true", "llama", 2),
    ("data_parallel:2 x ring_attention", "mbart", 4),
    ("data_parallel:2 x sequence_parallel", "llama", 4),
    ("sequence_parallel", "gpt2", 2),
    ("ulysses", "llama", 4),
    ("dap", "alphafold2", 2),
    ("zero:2,stage=3 x ring_attention", "gpt2", 4),
}


def cases() -> Iterator[ParameterSet]:
    for plan, models in ROWS.items():
        for model in models:
            for devices in (2, 4, 8)[plan.count(" x ") :]:
                if model in ("swin", "vit") and devices > 2 * 2 ** plan.count(" x "):
                    # The tokens of their blocks are along factors of 2 and 3, and along one of 26.
                    continue
                marks = () if (plan, model, devices) in ALWAYS else (pytest.mark.slow,)
                yield pytest.param(plan, model, devices, marks=marks, id=f"{plan}-{model}-{devices}")


@pytest.mark.parametrize(("plan", "model", "devices"), list(cases()))
def test_equal(plan: str, model: str, devices: int) -> None:
    found = ss.compile(graph_of(MODELS[model]), resolve(plan), f"local:{devices}").verify()
    assert found["equal"], found
