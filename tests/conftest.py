"""What all tests share: a cache, workers, the generators of random graphs and faults, the flag for golden files."""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from superscaler.store import cache
from superscaler.timing import cores
from tests.helpers.quick import KEPT, quick_python

PYTHON = os.environ["REAL_PYTHON"] = sys.executable

# A busy machine is no fault.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files again")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a process per core for the whole suite, and none for what is named (workers take seconds to start) or to
    write golden files, of which several tests share one.
    """
    return min(cores(), 8) if is_whole(config) and not config.option.update_golden else 0


def is_whole(config: pytest.Config) -> bool:
    """Return whether all tests are asked for. A worker gets the folders by name."""
    return [Path(name).name for name in config.args] == [Path(name).name for name in config.getini("testpaths")]


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    cache.ENTRIES = KEPT
    # A shell that starts pytest in the background lets it, and what tests start, ignore an interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        # The cores are shared out already; torch, which reads it once, is not there yet.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _keep_to_a_core(int(config.workerinput["workerid"].removeprefix("gw")))
        return
    folder = tempfile.TemporaryDirectory(prefix="superscaler-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    config.add_cleanup(folder.cleanup)
    if config.getoption("numprocesses"):
        # Without bytecode each worker compiles all tests, and the package, for five seconds.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["QUICK_PYTHON"] = str(quick_python(Path(folder.name)))
    else:
        os.environ.pop("QUICK_PYTHON", None)


def _keep_to_a_core(worker: int) -> None:
    """Threads that are ranks hold one lock in turn: on two cores they take twice the time, for the cores' own locks."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[worker % len(allowed)]})


# Ends of names. torch 2.11 exports no quantile, cuts no LSTM by its batch, and does not tag leaky_relu, so that
# it is not cut; it does not name the devices that a line mixes.
NOT_WITH_2_11 = (
    "[windows-unknown4]", "test_plans.py::test_a_plan_along_the_dim_is_equal[lstm]", "test_every_rule_has_a_sample",
    "test_rule[aten.leaky_relu.default]", "[y = y + torch.ones(4, device='meta')]",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if version("torch").startswith("2.11."):
        for item in items:
            if item.nodeid.endswith(NOT_WITH_2_11):
                item.add_marker(pytest.mark.skip(reason="torch 2.11"))


def pytest_collection_finish(session: pytest.Session) -> None:
    # No collection of garbage looks through what has been imported, or captured and compiled for tests before: after
    # these blocks the package unfreezes all objects (`superscaler.timing`). pytest collects five times at its end.
    gc.enable()
    gc.freeze()
    gc.unfreeze = lambda: None
    if "torch" in sys.modules and session.items:
        from tests.helpers.exports import quick_exports
        from tests.helpers.quick import quick_launches

        quick_exports()
        quick_launches()


def _seed(torch: Any) -> None:
    """Seed torch. For each kind of GPU that is not there, `manual_seed` writes down all calls that led to it."""
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch where it is loaded. Let processes of tests that are marked `dist` start at once, but for those of
    `dist(python="real")`.
    """
    if "torch" in sys.modules:
        _seed(sys.modules["torch"])
    mark = item.get_closest_marker("dist")
    if mark is None or mark.kwargs.get("python") == "real":
        _start_by(PYTHON)
        return
    if "QUICK_PYTHON" not in os.environ:
        os.environ["QUICK_PYTHON"] = str(quick_python(Path(os.environ["XDG_CACHE_HOME"])))
    _start_by(os.environ["QUICK_PYTHON"])


def _start_by(program: str) -> None:
    """Let a program be the Python that starts processes, and the server of those that multiprocessing forks."""
    sys.executable = program
    multiprocessing.set_executable(program)
