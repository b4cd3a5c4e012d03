"""What a process frees stays with it: the second step gets its memory without the system."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys
from superscaler.comm.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [bytearray(8 << 20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(*(step() for _ in range(3)))
"""


def test_a_step_after_the_first_faults_on_no_page() -> None:
    faults = {}
    for how in ("kept", "plain"):
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        faults[how] = list(map(int, done.stdout.split()))
    first, *others = faults["kept"]
    assert first > 8000
    assert max(others) < 100
    assert min(faults["plain"]) > 8000
