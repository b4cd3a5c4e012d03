"""A rank imports the copies of what registers the operators of its plan, or says what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from superscaler.errors import InputError
from superscaler.store.folder import digest
from superscaler.store.operators import import_operators

pytestmark = pytest.mark.dist
SOURCE = """
import torch

library = torch.library.Library("{namespace}", "FRAGMENT")
library.define("op(Tensor x) -> Tensor")
library.impl("op", lambda x: x * {factor}, "CompositeImplicitAutograd")
"""


def source(namespace: str, head: str = "", factor: object = 2) -> bytes:
    return (head + SOURCE.format(namespace=namespace, factor=factor)).encode()


def home(file: str, data: bytes = b"", module: str = "") -> dict[str, str]:
    return {"module": module, "file": file, "sha256": digest(data)}


def call(namespace: str) -> float:
    return float(getattr(torch.ops, namespace).op(torch.ones(())))


def test_a_module_of_a_package_is_imported_by_its_name_with_what_it_imports(tmp_path: Path) -> None:
    path, hooks = list(sys.path), list(sys.meta_path)
    sources = {
        "operators/runtime_test_package/__init__.py": b"",
        "operators/runtime_test_package/ops.py": source(
            "runtime_test_module", "from .helper import NUMBER\nimport runtime_test_beside\n", "NUMBER"
        ),
        "operators/runtime_test_package/helper.py": b"NUMBER = 5\n",
        "operators/runtime_test_beside.py": b"",
        "operators/runtime_test_space/later.py": b"",
    }
    at = home("operators/runtime_test_package/ops.py", module="runtime_test_package.ops")
    import_operators({"runtime_test_module.op.default": at}, sources, tmp_path)
    assert call("runtime_test_module") == 5
    assert (path, hooks) == (sys.path, sys.meta_path)
    # What no import at the top names, a function may import when it is called.
    assert "runtime_test_space.later" in sys.modules


def test_what_is_there_is_not_imported_again(tmp_path: Path) -> None:
    name, at = "operators/1/b.py", home("operators/1/b.py")
    import_operators({"runtime_test_twice.op.default": at}, {name: source("runtime_test_twice")}, tmp_path)
    assert call("runtime_test_twice") == 2
    import_operators({"runtime_test_twice.op.default": at}, {name: b"raise AssertionError\n"}, tmp_path)


def test_another_module_of_the_same_name_is_not_taken_for_the_copy(tmp_path: Path) -> None:
    at = home("operators/json/ops.py", module="json.ops")
    with pytest.raises(InputError, match=r"json/__init__.py cannot be imported: json is loaded from .* already"):
        import_operators({"runtime_test_json.op.default": at}, {"operators/json/__init__.py": b""}, tmp_path)


@pytest.mark.parametrize(
    ("at", "text", "told"),
    [
        (None, "", "runtime_test_missing.op.default, which nothing here defines"),
        (home("", module="nowhere.ops"), "", "nowhere.* cannot be imported: ModuleNotFoundError"),
        (home("operators/1/c.py"), "x = 1\n", "c.py does not register it; register it at the top level of that file"),
        (home("operators/1/c.py"), "x = 1 / 0\n", r"c.py cannot be imported: ZeroDivisionError|c.py:1"),
        (home("operators/1/c.py"), "import torch_nowhere\n", "c.py.* cannot be imported: ModuleNotFoundError"),
        (home("operators/1/c.py"), "raise SystemExit\n", "c.py.* it ends the process with sys.exit"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, at: dict[str, str] | None, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        import_operators({"runtime_test_missing.op.default": at}, {"operators/1/c.py": text.encode()}, tmp_path)


def compiled(head: str, call: str, end: str) -> str:
    """Return what a process of its own prints that compiles a model which calls operators defined in `head`."""
    program = f"""
import sys, torch, superscaler as ss
{head}
class Model(torch.nn.Linear):
    def forward(self, x):
        return {call}.mean()

model = Model(4, 4)
graph = ss.capture(model, (torch.ones(2, 4),), optimizer=torch.optim.SGD(model.parameters()))
plan = ss.compile(graph, "data_parallel", "local:2")
{end}
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_a_plan_with_an_operator_of_no_file_is_not_saved(tmp_path: Path) -> None:
    head = '@ss.register("b.. -> b..")\ndef twice(x):\n    return x * 2\n'
    end = 'assert plan.verify()["equal"]\nassert "twice" in plan.explain()\n'
    end += f"try:\n    plan.save({str(tmp_path / 'plan')!r})\nexcept ss.PlanError as error:\n    print(error)\n"
    assert "ss_main.twice.default was registered outside of any file" in compiled(
        head, "twice(super().forward(x))", end
    )
    assert not (tmp_path / "plan").exists()


# A project of a user: a file that is run by its path, beside it a module and a package with the operators.
PROJECT = {
    "model.py": """
import torch
from kernels.scale import scaled
import superscaler as ss
from helper import FACTOR


@ss.register("b.. -> b..")
def shifted(x):
    return x + FACTOR


class Net(torch.nn.Linear):
    def forward(self, x):
        return scaled(shifted(super().forward(x))).mean()


def build():
    torch.manual_seed(0)
    return Net(4, 4), (torch.ones(2, 4),)
""",
    "helper.py": "FACTOR = 1.0\n",
    "unused.py": "raise AssertionError\n",
    "kernels/__init__.py": "",
    "kernels/scale.py": """
import superscaler as ss


@ss.register("b.. -> b..")
def scaled(x):
    from . import numbers
    return x * numbers.SCALE
""",
    "kernels/numbers.py": "SCALE = 3.0\n",
}
LOSS = """
import sys, superscaler as ss, torch
step = ss.load(sys.argv[1])
print(float(step({"x": torch.ones(2, 4)})))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the project and the plan that was compiled of it."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    given = f"{folder}/model.py:build", "--plan", "single", "--cluster", "local:1", "--no-cache", "--out"
    superscaler("compile", *given, str(folder / "plan"))
    return folder


def superscaler(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "superscaler", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)


def loss(plan: Path, head: str = "", **environment: str) -> str:
    """Return what a process of its own prints, its loss or why it ends."""
    given = [sys.executable, "-c", head + LOSS, str(plan)]
    done = subprocess.run(
        given, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_a_plan_has_copies_of_what_registers_its_operators_and_of_what_that_imports(project: Path) -> None:
    plan = json.loads((project / "plan" / "plan.json").read_text())
    names = {"1/model.py", "helper.py", "kernels/__init__.py", "kernels/scale.py", "kernels/numbers.py"}
    assert {name for name in plan["manifest"]["files"] if name.startswith("operators")} == {
        f"operators/{n}" for n in names
    }
    assert {k: v["file"] for k, v in plan["operators"].items()} == {
        "ss_model.shifted.default": "operators/1/model.py", "ss_scale.scaled.default": "operators/kernels/scale.py"
    }  # fmt: skip
    superscaler("validate", str(project / "plan"))


def test_a_plan_runs_without_the_files_and_as_they_were(project: Path, tmp_path: Path) -> None:
    expected = loss(project / "plan")
    assert float(expected) != 0
    plan = tmp_path / "elsewhere"
    shutil.copytree(project / "plan", plan)
    for name in PROJECT:
        file = project / name
        file.write_text("raise AssertionError\n")
    try:
        # Also where other files of those names can be imported.
        shutil.copytree(project / "kernels", tmp_path / "kernels")
        assert loss(plan, PYTHONPATH=os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(tmp_path)))) == expected
        assert not list(plan.rglob("__pycache__"))
    finally:
        for name, text in PROJECT.items():
            (project / name).write_text(text)


def test_a_module_that_is_not_the_copy_is_refused(project: Path, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("FACTOR = 2.0\n")
    told = loss(project / "plan", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport helper\n")
    assert f"helper is loaded from {tmp_path}/helper.py already, which is another one" in told


def test_an_operator_that_another_file_registers_is_refused(project: Path, tmp_path: Path) -> None:
    head = "import sys\nfrom superscaler.specs.user_file import load_file\nfrom pathlib import Path\n"
    head += f"sys.path.insert(0, {str(project)!r})\nload_file(Path({str(tmp_path / 'model.py')!r}))\n"
    (tmp_path / "model.py").write_text(PROJECT["model.py"])
    assert loss(project / "plan", head) == loss(project / "plan")
    (tmp_path / "model.py").write_text(PROJECT["model.py"].replace("x + FACTOR", "x - FACTOR"))
    told = loss(project / "plan", head)
    assert f"ss_model.shifted.default is registered by {tmp_path}/model.py:8, which is not the copy in" in told


def test_files_of_one_name_are_copied_apart(tmp_path: Path) -> None:
    head = "from pathlib import Path\nfrom superscaler.specs.user_file import load_file\n"
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "ops.py").write_text(
            f"import superscaler as ss\n\n@ss.register('b.. -> b..')\ndef times{number}(x):\n    return {number} * x\n"
        )
        head += f"times{number} = load_file(Path({str(tmp_path)!r}, '{number}', 'ops.py')).times{number}\n"
    end = f'ss.compile(graph, "single", "local:1").save({str(tmp_path / "plan")!r})'
    compiled(head, "times1(times2(super().forward(x)))", end)
    assert len(list((tmp_path / "plan" / "operators").rglob("ops.py"))) == 2
    assert float(loss(tmp_path / "plan")) != 0
