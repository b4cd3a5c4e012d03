"""`superscaler doctor`: checks of this machine."""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from superscaler.cli import measure as links
from superscaler.cli.options.command import command
from superscaler.cli.options.declare import option
from superscaler.cli.printing import Printer, table
from superscaler.errors import RuntimeFailure
from superscaler.specs.memory import free_memory
from superscaler.timing import cores

# The supported versions of torch: from the first, below the second. The package's own requirement says the same.
TORCH = ((2, 11), (2, 16))
_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its finding. Training needs every required one to be ok."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    required: bool = False


@command
def doctor(
    printer: Printer,
    measure: Annotated[
        bool, option("--measure", "Time collectives and kernels instead; fit links and speeds.")
    ] = False,
    cluster: Annotated[
        str | None, option("--cluster", "With --measure: local:N; default: one process a GPU or core.", "CLUSTER")
    ] = None,
    out: Annotated[Path | None, option("--out", "With --measure: the cluster file to write, for --cluster.")] = None,
) -> bool:
    """Test what SuperScaler needs on this machine. Exit code 1 when something required is missing."""
    if measure:
        links.measure(printer, cluster, out)
        return True
    links.check_alone(cluster, out)
    checks = list(examine())
    ready = all(c.ok for c in checks if c.required)
    printer.show(
        table(("check", "", "found", "what to do"), map(_row, checks)),
        "ready to train" if ready else "not ready: see the rows that are missing",
    )
    printer.result = {"ready": ready, "checks": [asdict(c) for c in checks]}
    return ready


def examine() -> Iterator[Check]:
    """Yield the checks; those that need torch only if it is installed."""
    yield _python()
    torch = torch_in_range()
    yield torch
    if torch.ok:
        yield gloo()
        yield _compiled()
        yield from _cuda()
    yield _transformers()
    few = "more processes than cores take turns: use small models and local:2"
    yield Check("cores", cores() > 1, str(cores()), few)
    yield _memory()
    yield _cache()


def _python() -> Check:
    wanted = ".".join(map(str, _PYTHON))
    return Check(
        "python", sys.version_info >= _PYTHON, platform.python_version(), f"install Python {wanted} or newer", True
    )


def torch_in_range() -> Check:
    """Return the check that the installed torch is one of those tested; torch itself is not imported."""
    low, high = (".".join(map(str, v)) for v in TORCH)
    advice = f"pip install 'torch>={low},<{high}'"
    version = _version("torch")
    is_supported = version is not None and TORCH[0] <= parse_version(version) < TORCH[1]
    return Check("torch", is_supported, version or "not installed", advice, True)


def parse_version(version: str) -> tuple[int, int]:
    """Return the first two numbers.

    >>> parse_version("2.13.0+cpu")
    (2, 13)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def gloo() -> Check:
    """Run two processes that add their numbers up."""
    advice = "allow processes to connect on this machine: check the firewall and that 'localhost' resolves"
    return _probe("gloo", 2, Check("gloo (CPU)", True, "2 processes, all_reduce", advice, True))


def _compiled() -> Check:
    """Return the check that torch compiles here: on a CPU it needs a compiler of C++."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    from superscaler.runtime.compiled.inductor import cache_folder

    advice = "--torch-compile needs it on a CPU: install g++, or set CXX"
    try:
        found = get_cpp_compiler()
    except InvalidCxxCompiler:
        return Check("compiler of C++", False, "not found", advice)
    return Check("compiler of C++", True, f"{found}; compiled segments are kept in {cache_folder()}")


def _cuda() -> Iterator[Check]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        advice = "training runs on the CPU; for GPUs install a CUDA build of torch and the driver"
        yield Check("CUDA", False, "no device", advice)
        return
    yield Check("CUDA", True, f"{count} x {torch.cuda.get_device_name(0)}")
    world = min(count, 2)
    check = Check("nccl (GPU)", True, f"{world} processes, all_reduce", "run with NCCL_DEBUG=INFO")
    yield _probe("nccl", world, check)


def _probe(backend: str, world: int, check: Check) -> Check:
    """Run an all_reduce on `world` processes; return the check, with the error if it fails."""
    from superscaler.launch.launch import call
    from superscaler.measure.links import probe

    try:
        call(probe, world, backend)
    except RuntimeFailure as error:
        return replace(check, ok=False, found=str(error))
    return check


def _transformers() -> Check:
    version = _version("transformers")
    advice = "for gpt2 and llama: pip install 'superscaler[hf]'"
    return Check("transformers", version is not None, version or "not installed", advice)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> Check:
    """Return the check of the memory that a new process can use without swapping."""
    free = free_memory()
    if free is None:
        return Check("memory", True, "unknown on this system")
    advice = "training needs about 16 bytes a parameter beside the activations: take a smaller model"
    return Check("memory", free > 2 * 10**9, f"{free / 10**9:.1f} GB free", advice)


def _cache() -> Check:
    from superscaler.store import cache

    try:
        home = cache.folder()
    except RuntimeError:
        return Check("cache", False, "no home folder", "set XDG_CACHE_HOME, so that captures are kept")
    count, size = cache.usage()
    return Check("cache", True, f"{home}: {count} captures, {size / 10**6:.1f} MB")


def _row(check: Check) -> tuple[str, ...]:
    state = "ok" if check.ok else "MISSING" if check.required else "missing"
    return check.name, state, check.found, "" if check.ok else check.advice
