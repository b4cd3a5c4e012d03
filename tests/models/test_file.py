"""Models from a user's own file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from superscaler.errors import InputError
from superscaler.models import build

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from widths import WIDTH


@dataclass
class Config:
    width: int


class Net(torch.nn.Module):
    def __init__(self, width: int, scale: float, bias: bool) -> None:
        super().__init__()
        self.scale = scale
        self.linear = torch.nn.Linear(width, width, bias=bias)

    def forward(self, x, y=0.0):
        return (self.linear(x) * self.scale + y).mean()


def net(width: int = WIDTH, scale: float = 1.0, bias: bool = True, name: str | None = "a"):
    return Net(Config(width).width, scale, bias), (torch.ones(2, width),), {"y": len(name or "")}


def pair(width: int):
    return Net(width, 1.0, True), (torch.ones(2, width),)


def any_key(**options):
    module = Net(2, 1.0, True)
    module.options = options
    return module, (torch.ones(2, 2),)


def wrong():
    return Net(2, 1.0, True)


def not_a_module():
    return "module", ()


def one_argument():
    return Net(2, 1.0, True), torch.ones(2, 2)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "widths.py").write_text("WIDTH = 4\n")
    path = tmp_path / "user_net.py"
    path.write_text(SOURCE)
    return path


def test_a_function_gives_the_model_and_reads_its_folder(source: Path) -> None:
    path = list(sys.path)
    built = build(f"{source}:net:width=6,scale=0.5,bias=false,name=abc")
    assert sys.path == path
    linear = built.module.linear
    assert (linear.weight.shape, linear.bias, built.module.scale) == ((6, 6), None, 0.5)
    assert (built.kwargs, built.make_batch) == ({"y": 3}, None)
    assert built.module(*built.args, **built.kwargs).shape == ()
    first, second = (torch.manual_seed(0) and build(f"{source}:net").module.linear.weight for _ in range(2))
    assert torch.equal(first, second)


def test_defaults_and_two_results_are_enough_and_keys_without_types_are_read_by_their_looks(source: Path) -> None:
    assert build(f"{source}:net").module.linear.weight.shape == (4, 4)
    assert build(f"{source}:pair:width=3").kwargs == {}
    assert build(f"{source}:net:name=none").kwargs == {"y": 0}
    built = build(f"{source}:any_key:a=1,b=0.5,c=true,d=text")
    assert built.module.options == {"a": 1, "b": 0.5, "c": True, "d": "text"}


def test_a_file_without_a_function_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("import torch\n")
    with pytest.raises(InputError, match=r"empty\.py' names no function; the file has none, so write one\.$"):
        build(f"{tmp_path}/empty.py")


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("", "names no function; write"),
        (":nett", "unknown function 'nett'; did you mean 'net'?"),
        (":net:widht=3", "unknown key 'widht'; did you mean 'width'?"),
        (":net:width=x", "width is 'x', but it must be a whole number"),
        (":pair", "needs a value for width; add width=VALUE"),
        (":wrong", "returned a Net; return (module, args) or (module, args, kwargs)"),
        (":wrong:a=1", "unknown key 'a'; the function takes no keys"),
        (":not_a_module", "returned a str as module"),
        (":one_argument", "returned a Tensor as args"),
    ],
)
def test_bad_functions_are_told_what_is_wrong(source: Path, rest: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build(f"{source}{rest}")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape("there is no model file nowhere.py")):
        build("nowhere.py:f")
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    with pytest.raises(InputError, match=r"broken\.py:1 cannot be imported: SyntaxError"):
        build(f"{broken}:f")
    broken.write_text("import there_is_no_such_module\n")
    with pytest.raises(InputError, match="No module named 'there_is_no_such_module'"):
        build(f"{broken}:f")
