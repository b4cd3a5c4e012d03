"""One rank of the doctor's test: a real all_reduce. Started as `python -m superscaler.cli.probe`."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta


def main() -> None:
    """Exit with 0 if the sum over all ranks came out right, else with 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=("gloo", "nccl"))
    parser.add_argument("store", help="file in which the ranks find each other")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    options = parser.parse_args()
    total = all_reduce(options.backend, options.store, options.rank, options.world)
    sys.exit(0 if total == sum(range(1, options.world + 1)) else 1)


def all_reduce(backend: str, store: str, rank: int, world: int) -> float:
    """Return the sum of rank + 1 over all ranks, as torch.distributed finds it."""
    import torch
    from torch import distributed

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    value = torch.full((1024,), float(rank + 1), device=device)
    distributed.all_reduce(value)
    total = float(value[0].item())
    distributed.destroy_process_group()
    return total


if __name__ == "__main__":
    main()
