"""A loop of your own: python loop.py writes a plan, torchrun --nproc-per-node 2 loop.py trains it."""

import os

import torch

import superscaler as ss
from superscaler.models import build


def compile_plan() -> None:
    """Write the plan that all ranks load."""
    built = build("mlp")
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
    graph = ss.capture(built.module, kwargs=built.kwargs, optimizer=optimizer)
    ss.compile(graph, "data_parallel", "local:2").save("plan")


def train(steps: int = 3) -> None:
    """Train in a rank. A batch is the global one, by the names of the inputs of `forward`."""
    step = ss.load("plan")
    for _ in range(steps):
        loss = step({"x": torch.randn(16, 32), "labels": torch.randint(0, 10, (16,))})
        if step.rank == 0:
            print(float(loss))


if __name__ == "__main__":
    train() if "RANK" in os.environ else compile_plan()
