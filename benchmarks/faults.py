"""Bugs put into compiled plans, one a line: what catches each, and what it names.

    python benchmarks/faults.py

The plans are of an MLP, a GPT-2 and a model with random numbers, under data, tensor and pipeline parallelism. Caught
by: one of the checks that every plan must pass (`superscaler.certify.certificate`), or `numbers` (a step in float64
against the exported model). The last line counts those whose report names the culprit.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    from tests.helpers.mutations import TABLE, report

    print(f"{'mutation':52} {'plan':16} {'caught by':14} report")
    caught_by: Counter[str] = Counter()
    named = 0
    for mutation in TABLE:
        caught, text = report(mutation)
        caught_by[caught or "nothing"] += 1
        named += any(culprit in text for culprit in mutation.culprits)
        plan = mutation.spec.split(":")[0]
        print(f"{mutation.name:52} {plan:16} {caught or 'NOTHING':14} {' '.join(text.split())}")
    told = ", ".join(f"{count} by {name}" for name, count in caught_by.most_common())
    print(f"{len(TABLE)} mutations: {told}; culprit named in {named}")


if __name__ == "__main__":
    main()
