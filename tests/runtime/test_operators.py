"""A rank imports what registers the operators of its plan, or says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from superscaler.errors import InputError
from superscaler.runtime.operators import import_operators

SOURCE = """
import torch

library = torch.library.Library("{namespace}", "FRAGMENT")
library.define("op(Tensor x) -> Tensor")
library.impl("op", lambda x: x * 2, "CompositeImplicitAutograd")
"""


def source(folder: Path, namespace: str, name: str = "ops.py", head: str = "") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / name
    file.write_text(head + SOURCE.format(namespace=namespace))
    return file


def call(namespace: str) -> float:
    return float(getattr(torch.ops, namespace).op(torch.ones(())))


def test_a_file_is_run_from_its_place_or_from_beside_the_plan(tmp_path: Path) -> None:
    file = source(tmp_path / "code", "runtime_test_file")
    import_operators({"runtime_test_file.op.default": ("", str(file))}, tmp_path / "plan")
    assert call("runtime_test_file") == 2
    source(tmp_path / "plan", "runtime_test_beside", "beside.py")
    import_operators({"runtime_test_beside.op.default": ("", "/nowhere/beside.py")}, tmp_path / "plan")
    assert call("runtime_test_beside") == 2


def test_a_module_of_a_package_is_imported_by_its_name_from_its_root(tmp_path: Path) -> None:
    package = tmp_path / "runtime_test_package"
    file = source(package, "runtime_test_module", head="from .helper import NUMBER\n")
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("NUMBER = 1\n")
    path = list(sys.path)
    import_operators({"runtime_test_module.op.default": ("runtime_test_package.ops", str(file))}, tmp_path / "plan")
    assert call("runtime_test_module") == 2
    assert sys.path == path
    assert "runtime_test_package.ops" in sys.modules


def test_what_is_there_is_not_imported_again(tmp_path: Path) -> None:
    file = source(tmp_path, "runtime_test_twice")
    homes = {"runtime_test_twice.op.default": ("", str(file))}
    import_operators(homes, tmp_path)
    file.write_text("raise AssertionError\n")
    import_operators(homes, tmp_path)


@pytest.mark.parametrize(
    ("home", "text", "told"),
    [
        (None, "", "runtime_test_missing.op.default, which nothing here defines"),
        (
            ("", "/nowhere/ops.py"),
            "",
            "/nowhere/ops.py, which registers it, cannot be found; copy the file there or into",
        ),
        (("nowhere.ops", "/nowhere/ops.py"), "", "cannot be found"),
        (("", "mine.py"), "x = 1\n", "mine.py does not register it; register it at the top level of that file"),
        (("", "mine.py"), "x = 1 / 0\n", r"mine.py:1 \(in <module>\) cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, home: tuple[str, str] | None, text: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=told):
        import_operators({"runtime_test_missing.op.default": home}, tmp_path)


def test_a_plan_with_an_operator_of_no_file_is_not_saved(tmp_path: Path) -> None:
    program = f"""
import torch, superscaler as ss

@ss.register("b.. -> b..")
def twice(x):
    return x * 2

class Model(torch.nn.Linear):
    def forward(self, x):
        return twice(super().forward(x)).mean()

model = Model(4, 4)
graph = ss.capture(model, (torch.ones(2, 4),), optimizer=torch.optim.SGD(model.parameters()))
plan = ss.compile(graph, "data_parallel", "local:2")
assert plan.verify()["equal"]
try:
    plan.save({str(tmp_path / "plan")!r})
except ss.PlanError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert "ss_main.twice.default was registered outside of any file" in done.stdout
    assert not (tmp_path / "plan").exists()
