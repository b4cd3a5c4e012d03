"""Files that users, editors, disks and other programs make: plans, models and clusters that cannot be read.

Tables of text by what is wrong with it; each is refused with exit code 2 and one line that has the words beside it;
nothing is written and nothing is removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.commands import run


class Case(NamedTuple):
    """A file, the function in it that is asked for, and words of the line that refuses it."""

    text: str | bytes
    told: str
    function: str = "f"


_DEEP = "(" * 3000 + ")" * 3000
_HEAD = "import superscaler as ss\n\n"


def plan(body: str, head: str = "def f(graph, cluster):") -> str:
    return f"{_HEAD}{head}\n    {body}\n"


# sPrograms: `f(graph, cluster)`.
PLANS: dict[str, Case] = {
    "no Python": Case("for for for", "mine.py:1 cannot be imported: SyntaxError"),
    "brackets too deep": Case(f"f = {_DEEP}", "mine.py:1 cannot be imported: SyntaxError: too many nested"),
    "no UTF-8": Case(b"f = '\xff\xfe'", "cannot be imported: SyntaxError"),
    "nothing": Case("", "unknown function 'f'. Known: none."),
    "a type": Case("f = dict\n", "f is <class 'dict'>, without a readable signature"),
    "a built-in": Case("f = max\n", "f is <built-in function max>"),
    "a name nearly right": Case(plan("pass"), "unknown function 'ff'; did you mean 'f'?", "ff"),
    "no name": Case(plan("pass"), "names no function; write", ""),
    "a key twice": Case(plan("pass", "def f(graph, cluster, n: int):"), "'n' is given twice, 1 and 2", "f:n=1,n=2"),
    "another name": Case("def g(graph, cluster):\n    pass\n", "Known: g."),
    "a name of two words": Case("def f(graph, cluster):\n    pass\n", "unknown function 'f g'", "f g"),
    "no argument": Case(plan("pass", "def f():"), "f() takes 0 positional arguments, but a plan is given 2"),
    "a keyword without default": Case(plan("pass", "def f(graph, cluster, *, n):"), "needs a value for n"),
    "a key without a value": Case(plan("pass"), "the key 'n' has no value", "f:n="),
    "a key of another type": Case(plan("pass", "def f(graph, cluster, n: int):"), "n is 'many'", "f:n=many"),
    "a key beyond numbers": Case(plan("pass", "def f(graph, cluster, n: int):"), "but", "f:n=" + "9" * 5000),
    "a generator": Case(plan("yield"), "f is a generator or async"),
    "an async generator": Case(plan("yield", "async def f(graph, cluster):"), "f is a generator or async"),
    "recursion": Case(plan("return f(graph, cluster)"), "(in f) failed: RecursionError"),
    "sys.exit with text": Case(plan("raise SystemExit('a\\nb')"), "it ends the process with sys.exit"),
    "sys.exit at the top": Case("raise SystemExit\n", "it ends the process with sys.exit(None)."),
    "an exception of many lines": Case(plan("raise ValueError('one\\ntwo\\nthree')"), "failed: ValueError: one."),
    "an endless exception": Case(plan("raise ValueError('x' * 10**6)"), "failed: ValueError: xxx"),
    "an exception that cannot be told": Case(
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\n\n\n" + plan("raise Odd"), "failed"),
    "a group of exceptions": Case(plan("raise ExceptionGroup('all', [ValueError()])"), "failed: "),
    "an assertion": Case(plan("assert not graph"), "mine.py:4 (in f) failed: AssertionError."),
    "no such module": Case("import no_such_module_at_all\n", "cannot be imported: ModuleNotFoundError"),
    "itself": Case("import mine\nimport mine.more\n", "cannot be imported: ModuleNotFoundError"),
    "a graph of its own": Case(plan("graph.ops[0].name = 'x'"), "failed: "),
}  # fmt: skip


_MODEL = """import torch
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        {forward}


def f({keys}):
    {body}
"""
_LOSS = "return super().forward(x).square().mean()"


def model(body: str = "return Net(4, 4), (torch.ones(8, 4),)", forward: str = _LOSS, keys: str = "") -> str:
    return _MODEL.format(body=body, forward=forward, keys=keys)


# Models: `f()` gives a module and its arguments.
MODELS: dict[str, Case] = {
    "nothing returned": Case(model("pass"), "returned a NoneType"),
    "a module alone": Case(model("return Net(4, 4)"), "returned a Net"),
    "no module": Case(model("return 3, ()"), "returned an int as module"),
    "a tensor as arguments": Case(model("return Net(4, 4), torch.ones(8, 4)"), "returned a Tensor as args"),
    "a tuple of four": Case(model("return 1, 2, 3, 4"), "returned a tuple of 4"),
    "keywords that are no names": Case(model("return Net(4, 4), (), {1: torch.ones(8, 4)}"), "keyword"),
    "an argument too many": Case(model("return Net(4, 4), (torch.ones(8, 4), 1)"), "argument"),
    "arguments of another shape": Case(model("return Net(4, 4), (torch.ones(8, 5),)"), "must have same reduction dim"),
    "text as an argument": Case(model("return Net(4, 4), ('x',)"), "str"),
    "needs a key": Case(model(keys="n"), "needs a value for n"),
    "a generator": Case(model("yield Net(4, 4), ()"), "f is a generator or async"),
    "recursion": Case(model("return f()"), "(in f) failed: RecursionError"),
    "raises": Case(model("return {}['weights']"), "mine.py:11 (in f) failed: KeyError: 'weights'."),
    "forward raises": Case(model(forward="raise ValueError('no')"), "ValueError: no"),
    "forward ends the process": Case(model(forward="raise SystemExit(4)"), "SystemExit: 4"),
    "forward recurses": Case(model(forward="return self(x)"), "RecursionError"),
    "forward gives nothing": Case(model(forward="return None"), "loss"),
    "a loss without gradient": Case(model(forward="return x.mean()"), "the loss depends on none of the 2 parameters"),
    "depends on values": Case(model(forward="return self.weight.mean() if x.sum() > 0 else x"), "mine.py:7 takes"),
    "lazy parameters": Case(model("return nn.LazyLinear(4), (torch.ones(8, 4),)"), "no shape yet; call the module"),
}  # fmt: skip

_LAB = "name: lab\npreset: v100\nservers: 1\ndevices_per_server: 1\n"
_BILLION = "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


# Clusters in YAML.
CLUSTERS: dict[str, Case] = {
    "nothing": Case("", "must be a mapping with the keys name, preset"),
    "a list": Case("[1, 2]", "must be a mapping"),
    "no YAML": Case("name: [", "is not YAML"),
    "no UTF-8": Case(b"name: \xff\xfe\x00", "is no text in UTF-8"),
    "a zero byte": Case("name: a\0b\n", "is not YAML"),
    "two documents": Case(f"{_LAB}---\n{_LAB}", "is not YAML"),
    "lists too deep": Case("a: " + "[" * 2000, "nested too deep"),
    "a billion laughs": Case(f"a: &a [1]\n{_BILLION}", "unknown key 'a'"),
    "a list in itself": Case("name: &a [*a]\n", "name is [[...]]"),
    "a merge of itself": Case("<<: &a {<<: *a}\n", "the key 'preset' is missing"),
    "a key twice": Case(_LAB + "servers: 2\n", "'servers' is given twice"),
    "a list as a key": Case("[1]: 2\n", "unhashable key"),
    "Python objects": Case("name: !!python/object/apply:os.system ['touch owned']\n", "is not YAML"),
    "a binary": Case(_LAB.replace("lab", "!!binary 'aGk='"), "name is"),
    "servers beyond numbers": Case(_LAB.replace("servers: 1", f"servers: 1{'0' * 60}"), "at most 1000000 fit"),
    "servers of 5,000 digits": Case(_LAB.replace("servers: 1", f"servers: {'9' * 5000}"), "4300 digits"),
    "a bandwidth with a unit": Case(_LAB + "links: {intra: {bandwidth: 130 GB/s}}\n", "is '130 GB/s'"),
    "memory with a unit": Case(_LAB + "device: {memory: 16GB}\n", "device.memory is '16GB'"),
}  # fmt: skip


MLP = "mlp:layers=1,hidden=4,inputs=4,classes=4,batch=4"


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Return the one line with which a command refuses its arguments."""
    before = contents(folder)
    capsys.readouterr()
    code, (out, err) = run(*arguments), capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    assert len(err) < 1500
    assert contents(folder) == before
    return err


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.parent.name != "__pycache__")
    return {str(file): file.read_bytes() for file in files}


def written(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
def test_a_plan(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "mine.py", case.text)
    given = "--plan", f"{file}:{case.function}", "--cluster", "local:1", "--out", str(tmp_path / "out")
    assert case.told in refused(capsys, tmp_path, "compile", MLP, *given)


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_a_model(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "mine.py", case.text)
    given = "--plan", "single", "--cluster", "local:1", "--out", str(tmp_path / "out")
    assert case.told in refused(capsys, tmp_path, "compile", f"{file}:{case.function}", *given)


@pytest.mark.parametrize("case", CLUSTERS.values(), ids=CLUSTERS)
def test_a_cluster(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "lab.yaml", case.text)
    given = "--plan", "single", "--cluster", str(file), "--out", str(tmp_path / "out")
    told = refused(capsys, tmp_path, "compile", MLP, *given)
    assert case.told in told
    assert str(file) in told or "cluster 'lab'" in told
