"""Files that users, editors, disks and other programs make: plans, models and clusters that cannot be read.

Tables of text by what is wrong with it; each is refused with one line that has the words beside it.
"""

from __future__ import annotations

from typing import NamedTuple


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
    "tabs and blanks": Case("def f(graph, cluster):\n\tpass\n        pass\n", "cannot be imported: TabError"),
    "an unclosed bracket": Case("f = (", "mine.py:1 cannot be imported: SyntaxError: '(' was never closed."),
    "brackets too deep": Case(f"f = {_DEEP}", "mine.py:1 cannot be imported: SyntaxError: too many nested"),
    "no UTF-8": Case(b"f = '\xff\xfe'", "cannot be imported: SyntaxError"),
    "UTF-16": Case("f = 1".encode("utf-16"), "cannot be imported: SyntaxError"),
    "an unknown coding": Case(b"# coding: klingon\n", "cannot be imported: SyntaxError: "),
    "nothing": Case("", "unknown function 'f'. Known: none."),
    "a number": Case("f = 3\n", "unknown function 'f'"),
    "a module": Case("import json as f\n", "unknown function 'f'"),
    "a type": Case("f = dict\n", "f is <class 'dict'>, whose arguments nobody knows"),
    "a built-in": Case("f = max\n", "f is <built-in function max>"),
    "another name": Case("def g(graph, cluster):\n    pass\n", "Known: g."),
    "a name of two words": Case("def f(graph, cluster):\n    pass\n", "unknown function 'f g'", "f g"),
    "no argument": Case(plan("pass", "def f():"), "f() takes 0 positional arguments, but a plan is given 2"),
    "one argument": Case(plan("pass", "def f(graph):"), "takes 1 positional arguments"),
    "three arguments": Case(plan("pass", "def f(graph, cluster, more):"), "needs a value for more"),
    "a keyword without default": Case(plan("pass", "def f(graph, cluster, *, n):"), "needs a value for n"),
    "keywords only": Case(plan("pass", "def f(*, graph, cluster):"), "takes 0 positional arguments"),
    "a key without a value": Case(plan("pass"), "the key 'n' has no value", "f:n="),
    "a key without a name": Case(plan("pass"), "unknown key ''", "f:=1"),
    "a key of another type": Case(plan("pass", "def f(graph, cluster, n: int):"), "n is 'many'", "f:n=many"),
    "a key beyond numbers": Case(plan("pass", "def f(graph, cluster, n: int):"), "but", "f:n=" + "9" * 5000),
    "a generator": Case(plan("yield"), "f is a generator or async"),
    "async": Case(plan("pass", "async def f(graph, cluster):"), "f is a generator or async"),
    "an async generator": Case(plan("yield", "async def f(graph, cluster):"), "f is a generator or async"),
    "a class without arguments": Case("class f:\n    pass\n", "f"),
    "recursion": Case(plan("return f(graph, cluster)"), "(in f) failed: RecursionError"),
    "recursion at the top": Case("def f():\n    f()\n\n\nf()\n", "cannot be imported: RecursionError"),
    "sys.exit": Case(plan("raise SystemExit(0)"), "it ends the process with sys.exit(0)."),
    "sys.exit with text": Case(plan("raise SystemExit('a\\nb')"), "it ends the process with sys.exit"),
    "sys.exit at the top": Case("raise SystemExit\n", "it ends the process with sys.exit(None)."),
    "an exception of many lines": Case(plan("raise ValueError('one\\ntwo\\nthree')"), "failed: ValueError: one."),
    "an endless exception": Case(plan("raise ValueError('x' * 10**6)"), "failed: ValueError: xxx"),
    "an exception without text": Case(plan("raise ValueError"), "failed: ValueError."),
    "an exception that cannot be told": Case(
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\n\n\n" + plan("raise Odd"), "failed"),
    "an exception of no kind": Case("class Odd(BaseException):\n    pass\n\n\n" + plan("raise Odd"), "failed: "),
    "a group of exceptions": Case(plan("raise ExceptionGroup('all', [ValueError()])"), "failed: "),
    "an assertion": Case(plan("assert not graph"), "mine.py:4 (in f) failed: AssertionError."),
    "no such module": Case("import no_such_module_at_all\n", "cannot be imported: ModuleNotFoundError"),
    "itself": Case("import mine\nimport mine.more\n", "cannot be imported: ModuleNotFoundError"),
    "a plan that raises another's error": Case(plan("ss.op_trans(graph, graph.ops[0], 'batch')"), "needs an algorithm"),
    "a device that is not there": Case(plan("ss.op_assign(graph, graph.ops, 7)"), "device 7"),
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
    "no Python": Case("class\n", "mine.py:1 cannot be imported: SyntaxError"),
    "nothing": Case("", "unknown function 'f'. Known: none."),
    "nothing returned": Case(model("pass"), "returned a NoneType"),
    "a module alone": Case(model("return Net(4, 4)"), "returned a Net"),
    "a class": Case(model("return Net, (torch.ones(8, 4),)"), "returned a type as module"),
    "no module": Case(model("return 3, ()"), "returned a int as module"),
    "a tensor as arguments": Case(model("return Net(4, 4), torch.ones(8, 4)"), "returned a Tensor as args"),
    "a tuple of four": Case(model("return 1, 2, 3, 4"), "returned a tuple of 4"),
    "a list of keywords": Case(model("return Net(4, 4), (), ['x']"), "returned a list as kwargs"),
    "keywords that are no names": Case(model("return Net(4, 4), (), {1: torch.ones(8, 4)}"), "keyword"),
    "an argument too many": Case(model("return Net(4, 4), (torch.ones(8, 4), 1)"), "argument"),
    "no argument": Case(model("return Net(4, 4), ()"), "argument"),
    "arguments of another shape": Case(model("return Net(4, 4), (torch.ones(8, 5),)"), "must have same reduction dim"),
    "text as an argument": Case(model("return Net(4, 4), ('x',)"), "str"),
    "needs a key": Case(model(keys="n"), "needs a value for n"),
    "a generator": Case(model("yield Net(4, 4), ()"), "f is a generator or async"),
    "async": Case(model("pass").replace("def f(", "async def f("), "f is a generator or async"),
    "recursion": Case(model("return f()"), "(in f) failed: RecursionError"),
    "sys.exit": Case(model("raise SystemExit(1)"), "it ends the process with sys.exit(1)"),
    "raises": Case(model("return {}['weights']"), "failed: KeyError: 'weights'."),
    "forward raises": Case(model(forward="raise ValueError('no')"), "ValueError: no"),
    "forward ends the process": Case(model(forward="raise SystemExit(4)"), "SystemExit: 4"),
    "forward recurses": Case(model(forward="return self(x)"), "RecursionError"),
    "forward gives nothing": Case(model(forward="return None"), "loss"),
    "forward gives a number": Case(model(forward="return 3.0"), "loss"),
    "forward gives text": Case(model(forward="return 'loss'"), "loss"),
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
    "a number": Case("3", "must be a mapping"),
    "text": Case("lab", "must be a mapping"),
    "no YAML": Case("name: [", "is not YAML"),
    "tabs": Case("\tname: lab", "is not YAML"),
    "an unclosed text": Case("name: 'lab", "is not YAML"),
    "no UTF-8": Case(b"name: \xff\xfe\x00", "cannot be read"),
    "a zero byte": Case("name: a\0b\n", "is not YAML"),
    "two documents": Case(f"{_LAB}---\n{_LAB}", "is not YAML"),
    "lists too deep": Case("a: " + "[" * 5000 + "]" * 5000, "nested too deep"),
    "mappings too deep": Case("a: " + "{b: " * 3000 + "1" + "}" * 3000, "nested too deep"),
    "a billion laughs": Case(f"a: &a [1]\n{_BILLION}", "unknown key 'a'"),
    "a list in itself": Case("name: &a [*a]\n", "name is [[...]]"),
    "an unknown anchor": Case("name: *lab\n", "is not YAML"),
    "a merge of itself": Case("<<: &a {<<: *a}\n", "the key 'name' is missing"),
    "a key twice": Case(_LAB + "servers: 2\n", "'servers' is given twice"),
    "a key twice inside": Case(_LAB + "device: {memory: 1, memory: 2}\n", "'memory' is given twice"),
    "a list as a key": Case("[1]: 2\n", "unhashable key"),
    "a mapping as a key": Case("{a: 1}: 2\n", "unhashable key"),
    "a number as a key": Case(_LAB + "1: 2\n", "unknown key '1'"),
    "Python objects": Case("name: !!python/object/apply:os.system ['touch owned']\n", "is not YAML"),
    "a binary": Case(_LAB.replace("lab", "!!binary 'aGk='"), "name is"),
    "a date": Case(_LAB.replace("lab", "2024-01-01"), "name is"),
    "a key missing": Case("name: lab\npreset: v100\nservers: 1\n", "the key 'devices_per_server' is missing"),
    "an unknown key": Case(_LAB + "server: 2\n", "unknown key 'server'; did you mean 'servers'?"),
    "an unknown key of links": Case(_LAB + "links: {nvlink: {}}\n", "unknown key 'nvlink'"),
    "an unknown preset": Case(_LAB.replace("v100", "v900"), "v900"),
    "servers of text": Case(_LAB.replace("servers: 1", "servers: one"), "servers is 'one'"),
    "half a server": Case(_LAB.replace("servers: 1", "servers: 0.5"), "servers is 0.5"),
    "a true server": Case(_LAB.replace("servers: 1", "servers: true"), "servers is True"),
    "no servers": Case(_LAB.replace("servers: 1", "servers: 0"), "servers is 0"),
    "servers below zero": Case(_LAB.replace("servers: 1", "servers: -4"), "servers is -4"),
    "servers beyond numbers": Case(_LAB.replace("servers: 1", f"servers: 1{'0' * 60}"), "at most 1000000 fit"),
    "servers of 5,000 digits": Case(_LAB.replace("servers: 1", f"servers: {'9' * 5000}"), "4300 digits"),
    "a thousand million devices": Case(_LAB.replace("servers: 1", "servers: 1000000000"), "1000000000"),
    "a nan of bandwidth": Case(_LAB + "links: {intra: {bandwidth: .nan}}\n", "links.intra.bandwidth is nan"),
    "an endless bandwidth": Case(_LAB + "links: {intra: {bandwidth: .inf}}\n", "links.intra.bandwidth is inf"),
    "a bandwidth below zero": Case(_LAB + "links: {intra: {bandwidth: -1e9}}\n", "links.intra.bandwidth is"),
    "no bandwidth": Case(_LAB + "links: {intra: {bandwidth: 0}}\n", "links.intra.bandwidth is 0"),
    "a bandwidth with a unit": Case(_LAB + "links: {intra: {bandwidth: 130 GB/s}}\n", "is '130 GB/s'"),
    "an alpha with a unit": Case(_LAB + "links: {intra: {alpha: 2us}}\n", "links.intra.alpha is '2us'"),
    "an alpha below zero": Case(_LAB + "links: {network: {alpha: -1}}\n", "links.network.alpha is -1"),
    "a link of text": Case(_LAB + "links: {intra: fast}\n", "links.intra is 'fast'"),
    "links of a list": Case(_LAB + "links: [1]\n", "links is [1]"),
    "half a NIC": Case(_LAB + "links: {nics: 1.5}\n", "links.nics is 1.5"),
    "no NICs": Case(_LAB + "links: {nics: 0}\n", "links.nics is 0"),
    "memory with a unit": Case(_LAB + "device: {memory: 16GB}\n", "device.memory is '16GB'"),
    "a nan of memory": Case(_LAB + "device: {memory: .nan}\n", "device.memory is nan"),
    "memory below zero": Case(_LAB + "device: {memory: -16}\n", "device.memory is -16"),
    "flops of a number": Case(_LAB + "device: {flops: 1e12}\n", "device.flops is"),
    "flops of a number as dtype": Case(_LAB + "device: {flops: {16: 1e12}}\n", "device.flops"),
    "a local device without memory": Case(
        _LAB.replace("v100", "local") + "device: {flops: {float32: 1e12}}\n", "add device.memory"),
}  # fmt: skip
