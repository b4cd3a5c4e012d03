"""Instructions: what readers ask of them are facts, and few files look at their classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from superscaler.ir import program as p
from superscaler.ir.instructions.facts import Facts
from superscaler.ir.names import Task, Value

PACKAGE = Path(__file__).parents[2] / "superscaler"
CLASSES = {kind.__name__ for kind in p.KINDS}
# Files that look at classes of instructions: those in which each class has a meaning of its own.
LIMIT = 12


def _uses(tree: ast.Module) -> Iterator[str]:
    """Yield the classes that a file names, but to make one, to import it, or in a type."""
    plain: set[ast.AST] = set()
    for node in ast.walk(tree):
        types = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        types += [node.slice] if isinstance(node, ast.Subscript) else []
        plain |= {part for one in types if one is not None for part in ast.walk(one)}
        plain |= {node.func} if isinstance(node, ast.Call) else set()
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {a.name for node in imported if str(node.module).startswith("superscaler.ir.") for a in node.names}
    for node in ast.walk(tree):
        if node not in plain and isinstance(node, ast.Name) and node.id in CLASSES & names:
            yield node.id
        elif node not in plain and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "p":
            yield from {node.attr} & CLASSES


def test_few_files_look_at_the_classes_of_instructions() -> None:
    """Others ask for facts, so that a class is added in few places (docs/contributing.md)."""
    files = (file for file in PACKAGE.rglob("*.py") if file.name not in ("program.py", "kinds.py"))
    texts = {str(file.relative_to(PACKAGE)): file.read_text() for file in files}
    word = re.compile(rf"\b({'|'.join(CLASSES)})\b")
    named = {file: text for file, text in texts.items() if word.search(text)}
    found = sorted(file for file, text in named.items() if any(_uses(ast.parse(text))))
    assert len(found) <= LIMIT, found


def test_a_class_is_seen_where_it_is_tested_matched_or_a_key() -> None:
    head = "from superscaler.ir.program import Forward, Send\nfrom superscaler.ir import program as p\n"
    for code in ("isinstance(i, Forward)", "type(i) is Send", "{Send: 1}", "kinds = (Send, p.Recv)"):
        assert list(_uses(ast.parse(head + code))), code
    assert list(_uses(ast.parse(head + "match i:\n    case p.Wait(): pass")))
    for code in ("x: Forward = Forward(1)", "def f(i: Send) -> p.Recv: ...", "dict[int, Forward]()"):
        assert not list(_uses(ast.parse(head + code))), code


def test_facts_are_those_of_the_fields() -> None:
    """A fact of the name of a field is that field; others are as the classes say."""
    x, work, task = Value("x"), Value("x", is_handle=True), Task(3)
    way = p.CollectiveArg((4, 2), 0, -1, (4, 2), (8, 2))
    made = {
        "gather": p.Collective("all_gather", (work,), (x,), (0, 1), (way,), "float32", 32),
        "send": p.Send(x, 3, 7, 64, 5),
        "recv": p.Recv(work, 3, 7, (4, 2), "float64", 5),
        "copy": p.Copy(work, x, False, 64),
        "offload": p.Offload(task),
        "fetch": p.Fetch(task),
        "forward": p.Forward(task, 2, (), (x,), (x,)),
        "weight half": p.Backward(task, (), (), "weight"),
        "update": p.Update((x,), (x,), is_early=True),
        "free": p.Free((x,)),
    }
    facts = {name: {f: getattr(i, f) for f in _changed(i)} for name, i in made.items()}
    assert facts == {
        "gather": {
            "meets": p.Meets.GROUP, "kind": "all_gather", "group": (0, 1), "bytes": 32, "sizes": (32,),
            "agreed": ("all_gather", "float32", 32), "handles": (work,), "sent": "float32",
        },
        "send": {
            "meets": p.Meets.PEER, "kind": "send", "peer": 3, "message": 7, "point": 5, "bytes": 64, "sizes": (64,),
            "is_send": True,
        },
        "recv": {
            "meets": p.Meets.PEER, "kind": "send", "peer": 3, "message": 7, "point": 5, "bytes": 64, "sizes": (64,),
            "handles": (work,),
        },
        "copy": {"meets": p.Meets.HOST, "kind": "to_device", "bytes": 64, "sizes": (64,), "handles": (work,)},
        "offload": {"meets": p.Meets.HOST, "kind": "to_host", "to_host": True, "task": task},
        "fetch": {"meets": p.Meets.HOST, "kind": "to_device", "task": task, "needs_tape": True},
        "forward": {"task": task, "function": 2, "runs_segment": True},
        "weight half": {"task": task, "half": "weight", "runs_segment": True, "is_mirror": True, "needs_tape": True},
        "update": {"updates": True, "weights": (x,), "is_early": True, "outlives": True},
        "free": {"is_between": True, "frees": True},
    }  # fmt: skip


def _changed(i: p.Instruction) -> Iterator[str]:
    """Yield the facts of an instruction that are not those of any other."""
    other = Facts()
    yield from (name for name in dir(Facts) if not name.startswith("_") and getattr(i, name) != getattr(other, name))
