"""Seconds of a command without and with its capture in the cache, whole process and capture alone.

    python benchmarks/cache.py [MODEL] [RUNS]

Runs `superscaler validate MODEL` and `superscaler capture MODEL` (default gpt2:layers=12,device=meta) with an empty
cache, then RUNS times (default 3) with what that left, and as often with --no-cache; prints the first of the first kind
and the fastest of the others. Exits with 1 where the warm command is not faster than that without a cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

MODEL = "gpt2:layers=12,device=meta"
PLAN = ["--plan", "hybrid:dp=2,tp=2", "--cluster", "local:4"]


def main() -> int:
    model, runs = sys.argv[1] if sys.argv[1:] else MODEL, int((sys.argv[2:] or ["3"])[0])
    print(f"{model:44}{'none':>9}{'cold':>9}{'warm':>9}")
    faster = True
    for command, options in (("validate", PLAN), ("capture", [])):
        with tempfile.TemporaryDirectory(prefix="superscaler-cache-") as folder:
            asked = [command, model, *options]
            bare = fastest(run([*asked, "--no-cache"], folder) for _ in range(runs))
            cold = run(asked, folder)
            warm = fastest(run(asked, folder) for _ in range(runs))
        for name in cold:
            print(f"{command + ': ' + name:44}{bare[name]:9.2f}{cold[name]:9.2f}{warm[name]:9.2f}", flush=True)
        faster = faster and warm["process"] < bare["process"]
    return not faster


def fastest(found: Iterable[dict[str, float]]) -> dict[str, float]:
    return min(found, key=lambda f: f["process"])


def run(arguments: list[str], folder: str) -> dict[str, float]:
    """Return the seconds of the process, and those of capture where the command tells them."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "superscaler", *arguments, "--json"],
        env={**os.environ, "XDG_CACHE_HOME": folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    found = {"process": time.perf_counter() - start}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | told.get("seconds", {})


if __name__ == "__main__":
    sys.exit(main())
