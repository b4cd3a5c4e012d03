"""The second process of a search: the same answer with it, without it, and after it is killed."""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from superscaler.cluster import Cluster
from superscaler.launch import second as process
from superscaler.launch.second import Job, Second, serve
from superscaler.planner.menu import Menu
from superscaler.planner.search import Answer, search
from superscaler.planner.space import Choice, Use
from superscaler.planner.whole.programs import Found, Programs
from superscaler.simulate.system import PLAIN
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

GPT = "gpt2:size=tiny,layers=4,batch=8"
FEW = "rows = 4, no recompute, tp = 1, no pp"
ONE, TWO, THREE = (Job("costs", n, is_short=True) for n in (1, 2, 3))


class Work:
    """The jobs of a process: each waits until it may go on, and tells that it has begun."""

    def __init__(self) -> None:
        self.done, self.begun, self.free = list[int](), Event(), Event()

    def costs(self, number: int) -> str:
        self.begun.set()
        assert self.free.wait(10)
        self.done.append(number)
        return f"{number} there"

    def whole(self, number: int) -> str:
        raise ValueError(f"{number} cannot be done there")


class Peer:
    """A thread in the place of a process."""

    def __init__(self, work: Work) -> None:
        self.work, (ours, theirs) = work, Pipe()
        self.thread = Thread(target=serve, args=(theirs, work), daemon=True)
        self.thread.start()
        self.parts: Any = self, ours, TemporaryFile()  # noqa: SIM115

    def kill(self) -> None:
        self.work.free.set()

    def wait(self) -> None:
        self.thread.join(10)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """What the process of each `Second` does, which is a thread."""
    found = Work()
    monkeypatch.setattr(process, "_started", lambda work: process._Process(*Peer(found).parts))
    monkeypatch.setattr(process, "_has_core", lambda: True)
    yield found
    found.free.set()


def here(job: Job) -> str:
    return f"{job.of} here"


def test_both_processes_work_at_a_time(work: Work) -> None:
    """This one does the job that it needs, then those that the other has not begun, then what it can spare time for,
    and waits for the last.
    """
    with Second("any:Work", ()) as second:
        second.fill("costs", lambda: [ONE, TWO, THREE])
        assert work.begun.wait(10)
        assert [second.has(job) for job in (ONE, TWO, THREE)] == [True, True, False]
        assert second.result(THREE, here) == "3 here"
        # It is taken back from the other one.
        assert second.result(TWO, here) == "2 here"

        spared = list[bool]()

        def spare() -> bool:
            if spared:
                work.free.set()
            spared.append(not spared)
            return spared[-1]

        four = Job("costs", 4, is_short=True)
        assert second.result(ONE, here, lambda: [four], spare) == "1 there"
        assert second.result(four, here, spare=spare) == "4 here"
        assert spared == [True, False]
    assert work.done == [1]


def test_what_the_other_process_cannot_do_is_done_here(work: Work) -> None:
    """So it is if that one fails, if it has ended, if there is none, and if it cannot get what the jobs need."""
    whole = Job("whole", 1)
    with Second("any:Work", ()) as second:
        second.ask(whole)
        assert second.result(whole, here) == "1 here"
        second.ask(ONE)
        assert work.begun.wait(10)
        second.end()
        assert not second.has(ONE)
        assert second.result(ONE, here) == "1 here"
    for alone in (Second(), Second("any:Work", (lambda: 0,))):
        alone.ask(TWO)
        assert alone.result(TWO, here) == "2 here"


def test_a_process_that_is_ready_and_not_needed_ends(work: Work) -> None:
    """As for a model with operators of the user, whose search gives it no state."""
    process.prepare("any:Work")
    peer: Any = process._ready["any:Work"].running
    assert peer.thread.is_alive()
    with Second("any:Work"):
        peer.wait()
        assert not peer.thread.is_alive()
    assert process._ready == {}


def test_the_best_plan_is_certified_while_the_other_process_compiles(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that has nothing to do, it certifies the plan; without it, nothing is done ahead."""
    done, best, other = list[Job](), Choice(2, 1, 1, 1, 1), Choice(1, 2, 1, 1, 2)
    fits: Any = SimpleNamespace(fits=True)

    def ahead(second: Second, others: Sequence[Choice]) -> list[Job]:
        graph: Any = None
        programs = Programs(graph, Cluster.parse("a100:1x2"), None, PLAIN, (), second, [Found("best", best, fits)])
        done.clear()
        programs.certify_ahead(others)
        return [Job(name, choice) for name in ("whole", "certified") for choice in (best, other)
                if second.has(Job(name, choice))]  # fmt: skip

    monkeypatch.setattr(Programs, "done", lambda _, job: done.append(job))
    with Second("any:Work", ()) as second:
        second.ask(ONE)
        assert work.begun.wait(10)
        assert ahead(second, [other]) == [Job("whole", other), Job("certified", best)]
        assert done == [Job("certified", best)]
        work.free.set()
    with Second("any:Work", ()) as second:
        assert ahead(second, [other]) == [Job("certified", best)]
        assert done == []
    assert ahead(Second(), [other]) == []
    assert done == []


@pytest.mark.parametrize("is_killed", [True, *slow(False)])
def test_a_search_has_the_same_answer_with_a_second_process(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph, measured = graph_of(GPT), list[Use]()
    measure, fill, start = Menu.measured, Second.fill, process._started

    def counted(menu: Menu, use: Use) -> Any:
        measured.append(use)
        return measure(menu, use)

    def filled(second: Second, *given: Any) -> None:
        """Wait for the first job: the process loads its modules longer than this search takes."""
        fill(second, *given)
        if second._asked and not second._done:
            second._receive(is_awaited=True)

    def started(work: str) -> process._Process:
        found = start(work)
        if is_killed:
            found.running.kill()
        return found

    def answer(name: str) -> tuple[Answer, int]:
        measured.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return search(graph, "a100:1x2", where=FEW), len(measured)

    monkeypatch.setattr(Menu, "measured", counted)
    monkeypatch.setattr(Second, "fill", filled)
    monkeypatch.setattr(process, "_started", started)
    monkeypatch.setattr(process, "_has_core", lambda: False)
    alone, every = answer("alone")
    monkeypatch.setattr(process, "_has_core", lambda: True)
    found, here = answer("two")
    assert found == alone
    assert here == every if is_killed else here < every
