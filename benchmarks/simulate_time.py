"""CPU seconds of the clock (`superscaler.simulate.clock`) for plans of a GPT, with all microbatches, beside compiling.

    python benchmarks/simulate_time.py [--only NAME,NAME]

The model is the one of `compile_time.py`. Each Forward takes 1 ms, each Backward 2 ms, each Update 10 ms: how long the
clock takes does not depend on that. `first` includes writing out the loops of the program, `again` does not.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

from compile_time import Case

# Each with the number of its servers.
CASES = (
    (Case("48x32", 48, tp=32), 4),
    (Case("48x32/64", 48, tp=8, pp=4, microbatches=64), 4),
    (Case("1024", 48, 16, 8, 8, 64), 128),
    (Case("1024/256", 48, 16, 8, 8, 256), 128),
)


def main() -> None:
    import torch

    import superscaler as ss
    from superscaler.ir.cohorts import Cohort
    from superscaler.ir.program import Backward, Forward, Update
    from superscaler.models import build
    from superscaler.plans import resolve
    from superscaler.simulate.clock import Behavior, clock

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(case.name for case, _ in CASES))
    chosen = parser.parse_args().only.split(",")
    seconds = {Forward: 1e-3, Backward: 2e-3, Update: 1e-2}

    def work(cohort: Cohort, at: int) -> float:
        return seconds.get(type(cohort.code[at]), 0.0)

    print(
        f"{'case':9} {'compile':>8} {'first':>6} {'again':>6} {'slower':>6} {'programs':>8} {'events':>9} {'step':>7}"
    )
    for case, servers in (pair for pair in CASES if pair[0].name in chosen):
        batch = case.dp * max(case.microbatches, 1) * (1 if case.microbatches else 8)
        sizes = f"layers={case.layers},hidden=1024,heads=32,seq=1024,vocab=51200,batch={batch}"
        model = build(f"gpt2:{sizes},dropout=0,device=meta")
        optimizer = torch.optim.SGD(model.module.parameters(), lr=1e-2)
        graph = ss.capture(model.module, model.args, model.kwargs, optimizer=optimizer)
        cluster = ss.Cluster.preset("a100", servers, case.devices // servers)
        times = [time.process_time()]
        program = ss.compile(graph, resolve(case.plan), cluster).compiled.program
        for slowdown in (None, 1.0, 1.0, 1.2):
            if slowdown is not None:
                found = clock(program, cluster, work, Behavior(launch=1e-5, slowdown=slowdown))
            times.append(time.process_time())
        compiled, *clocks = (b - a for a, b in pairwise(times))
        shown = " ".join(f"{x:6.2f}" for x in clocks)
        events = sum(lane.start.size for lane in found.lanes)
        print(f"{case.name:9} {compiled:8.2f} {shown} {len(found.lanes):8} {events:9} {found.seconds:7.3f}", flush=True)


if __name__ == "__main__":
    main()
