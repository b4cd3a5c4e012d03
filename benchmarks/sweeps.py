"""The sweeps of docs/tests.md: runs the slow tests of its rows, and writes into each when it ran, and what came out.

    python benchmarks/sweeps.py [WORD ...] [--check]

A row runs if one of its files has one of the words in its name; without words all run, which takes hours. A row whose
tests fail says so, and the exit code is 1. `--check` looks only whether all files of the table are there, once each.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tests.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    missing = [file for row in rows for file in files_of(row) if not (ROOT / file).is_file()]
    if missing:
        raise SystemExit(f"{PAGE} names {missing[0]}, which is not there; mend the table.")
    if options.check:
        print(f"{len(rows)} sweeps of {sum(len(files_of(row)) for row in rows)} files.")
        return 0
    asked = [row for row in rows if not options.words or any(w in f for w in options.words for f in files_of(row))]
    return max([run(row) for row in asked], default=0)


def files_of(row: str) -> list[str]:
    """Return the files of a row; those without a folder are in that of the file before them."""
    found: list[str] = []
    for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
        found.append(name if "/" in name else f"{found[-1].rpartition('/')[0]}/{name}")
    return found


def run(row: str) -> int:
    """Run the slow tests of a row, and write the outcome into it; return the exit code."""
    files = files_of(row)
    print(" ".join(files), flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    said = outcome(done.stdout.splitlines(), done.returncode)
    print(f"  {said}", flush=True)
    # Read again: somebody may have changed another row meanwhile.
    text, (*head, _, end) = PAGE.read_text(), row.split("|")
    PAGE.write_text(text.replace(row, "|".join([*head, f" {datetime.date.today()}: {said} ", end])))
    return min(done.returncode, 1)


def outcome(lines: Sequence[str], code: int) -> str:
    """Return how many tests passed and failed, from the last lines that pytest printed."""
    counts = Counter({kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|error)", lines[-1])})
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return said if said and (code == 0) == (counts.keys() <= {"passed"}) else f"pytest ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
