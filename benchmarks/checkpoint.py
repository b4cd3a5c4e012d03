"""What a checkpoint costs: how long a save holds a step up, and saving and loading against the disk's own time.

    python benchmarks/checkpoint.py [--repeat 7] [--gigabytes 1.0] [--folder DIR]

`delay` is how long a save holds training up (`Saver.save`: the copy of the state), and how much longer the next step
lasts while the files are written, both relative to a step that nobody disturbs; medians, one rank, 100 MB of state.
`disk` writes as many bytes to one file, hashes them with sha256 as a checkpoint is, and makes them last; or reads and
hashes them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import superscaler as ss
from superscaler.models import build
from superscaler.runtime.step import Step
from superscaler.store.save import Saver


def step_of(spec: str, folder: Path) -> tuple[Step, Callable[[int], dict[str, torch.Tensor]]]:
    built = build(spec)
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-4)
    graph = ss.capture(built.module, built.args, built.kwargs, optimizer=optimizer)
    ss.compile(graph, "single", "local:1").save(folder)
    assert built.make_batch is not None
    return ss.load(folder), built.make_batch


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def write_raw(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        delay(Path(name), options.repeat)
        disk(Path(name), options.gigabytes)


def delay(folder: Path, repeat: int) -> None:
    # 8.3 million parameters, with two states each.
    step, make_batch = step_of("gpt2:layers=4,hidden=384,heads=6,seq=256,vocab=3200,batch=8,dropout=0", folder / "plan")
    saver, batch = Saver(step, folder / "kept", keep=1), make_batch(0)
    step(batch)
    saver.save()
    saver.finish()
    plain, held, beside = [], [], []
    for _ in range(repeat):
        # Before and after, so that what others do on these cores at that time weighs on both.
        before = seconds(lambda: step(batch))
        held.append(seconds(saver.save))
        during = seconds(lambda: step(batch))
        saver.finish()
        plain.append((before + seconds(lambda: step(batch))) / 2)
        beside.append(during - plain[-1])
    usual = statistics.median(plain)
    held_up, slower = statistics.median(held) / usual, statistics.median(beside) / usual
    size = sum(file.stat().st_size for file in (folder / "kept").rglob("*.safetensors")) / 1e6
    print(f"delay: {size:.0f} MB, a step of {usual:.2f} s; held up {held_up:.1%}, the step beside it {slower:+.1%}")


def disk(folder: Path, gigabytes: float) -> None:
    layers = max(1, round(gigabytes * 1e9 / 12 / 12.6e6))
    step, make_batch = step_of(
        f"gpt2:layers={layers},hidden=1024,heads=16,seq=8,vocab=256,batch=1,dropout=0", folder / "big"
    )
    step(make_batch(0))
    saved = seconds(lambda: step.save(folder / "large"))
    size = sum(file.stat().st_size for file in (folder / "large").rglob("*.safetensors"))
    loaded = seconds(lambda: step.restore(folder / "large"))
    data = os.urandom(size)
    written = seconds(lambda: write_raw(folder / "raw", data))
    read = seconds(lambda: hashlib.sha256((folder / "raw").read_bytes()).hexdigest())
    print(f"save {size / 1e9:.2f} GB: {saved:.2f} s, disk {written:.2f} s, ratio {saved / written:.2f}")
    print(f"load {size / 1e9:.2f} GB: {loaded:.2f} s, disk {read:.2f} s, ratio {loaded / read:.2f}")


if __name__ == "__main__":
    main()
