"""Seconds and memory of capturing a model, each in a process of its own.

    python benchmarks/capture.py [MODEL ...]

Without arguments: GPT-3 with 175 billion parameters on meta tensors, and the tiny size of every named model. `export`
is torch.export and what makes its program functional, `capture` the rest; `peak` is the largest resident memory of the
process, torch and the building of the model included; `weights` the bytes of parameters that were allocated. Exits with
1 where the first model takes more than 60 s or 4 GB, or allocates a weight on meta.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

LARGE = "gpt3:size=175b,batch=1,device=meta"
SECONDS, BYTES = 60, 4e9
COLUMNS = ("build", "export", "capture", "peak GB", "weights", "ops", "no rule", "factors")


def main() -> int:
    specs = sys.argv[1:] or [LARGE, *tiny()]
    print(f"{'model':44}" + "".join(f"{c:>9}" for c in COLUMNS))
    kept = True
    for k, spec in enumerate(specs):
        run = subprocess.run([sys.executable, __file__, "--one", spec], capture_output=True, text=True)
        if run.returncode:
            print(f"{spec:44} {run.stderr.strip().splitlines()[-1]}", flush=True)
            kept = kept and k > 0
            continue
        found = json.loads(run.stdout.splitlines()[-1])
        seconds = "".join(f"{found[c]:9.2f}" for c in COLUMNS[:3])
        counts = "".join(f"{found[c]:9}" for c in COLUMNS[4:])
        print(f"{spec:44}{seconds}{found['peak'] / 1e9:9.2f}{counts}", flush=True)
        within = found["export"] + found["capture"] < SECONDS and found["peak"] < BYTES
        is_bare = "device=meta" not in spec or not found["weights"]
        kept = kept and (k > 0 or (within and is_bare))
    print(f"limits of the first ({SECONDS} s, {BYTES / 1e9:.0f} GB, no weight): {'kept' if kept else 'EXCEEDED'}")
    return not kept


def tiny() -> list[str]:
    from superscaler.models import names

    return [name if name == "mlp" else f"{name}:size=tiny" for name in names()]


def one(spec: str) -> dict[str, Any]:
    import torch

    import superscaler as ss
    from superscaler.models import build

    start = time.perf_counter()
    built = build(spec)
    built_at = time.perf_counter()
    captured = ss.capture(
        built.module, built.args, built.kwargs, optimizer=torch.optim.SGD(built.module.parameters(), lr=1e-2)
    ).captured
    scale = 1 if sys.platform == "darwin" else 1024
    return {
        "build": built_at - start,
        **captured.seconds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        "weights": sum(p.nbytes for p in built.module.parameters() if not p.is_meta),
        "ops": sum(op.is_forward for op in captured.model.ops),
        "no rule": sum(captured.model.unsupported.values()),
        "factors": len(captured.model.factors),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2])))
    else:
        sys.exit(main())
