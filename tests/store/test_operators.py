"""A rank imports the files that register the operators of its plan, or says which import it needs."""

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


def source(namespace: str, head: str = "", factor: object = 2) -> str:
    return head + SOURCE.format(namespace=namespace, factor=factor)


def home(file: Path, text: str, module: str = "") -> dict[str, str]:
    """Write a file; return its entry in plan.json."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return {"module": module, "file": str(file), "sha256": digest(text)}


def call(namespace: str) -> float:
    return float(getattr(torch.ops, namespace).op(torch.ones(())))


def test_a_module_of_a_package_is_imported_by_its_name_with_what_it_imports(tmp_path: Path) -> None:
    path, package = list(sys.path), tmp_path / "runtime_test_package"
    text = source("runtime_test_module", "from .helper import NUMBER\nimport runtime_test_beside\n", "NUMBER")
    at = home(package / "ops.py", text, "runtime_test_package.ops")
    (package / "helper.py").write_text("NUMBER = 5\n")
    (tmp_path / "runtime_test_beside.py").touch()
    import_operators({"runtime_test_module.op.default": at}, tmp_path / "plan")
    assert call("runtime_test_module") == 5
    assert path == sys.path
    assert sys.modules["runtime_test_package.ops"].__file__ == str(package / "ops.py")


def test_what_is_there_is_not_imported_again(tmp_path: Path) -> None:
    at = home(tmp_path / "b.py", source("runtime_test_twice"))
    import_operators({"runtime_test_twice.op.default": at}, tmp_path)
    assert call("runtime_test_twice") == 2
    again = home(tmp_path / "b.py", "raise AssertionError\n")
    import_operators({"runtime_test_twice.op.default": again}, tmp_path)


@pytest.mark.parametrize("module", ["runtime_test_moved.ops", ""])
def test_a_file_that_was_moved_is_found_by_its_name(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, with its folder on PYTHONPATH."""
    name = f"runtime_test_{'module' if module else 'file'}_moved"
    file = tmp_path / "there" / (module.replace(".", "/") or name)
    at = home(file.with_suffix(".py"), source(name), module) | {"file": f"/nowhere/{file.name}.py"}
    target = f"{name}.op.default"
    with pytest.raises(
        InputError, match=rf"calls {target}, which .*/nowhere/{file.name}.py registers, but .*PYTHONPATH"
    ):
        import_operators({target: at}, tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "there")
    with pytest.raises(InputError, match=rf"{target} is registered by .*/there/.* as it was when"):
        import_operators({target: at | {"sha256": "0" * 64}}, tmp_path)
    import_operators({target: at}, tmp_path)
    assert call(name) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n", "c.py does not register it; register it at the top level of that file"),
        ("x = 1 / 0\n", r"c.py:1 .*cannot be imported: ZeroDivisionError"),
        ("import torch_nowhere\n", "c.py.* cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit\n", "c.py.* it ends the process with sys.exit"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        import_operators({"runtime_test_missing.op.default": home(tmp_path / "c.py", text)}, tmp_path)


def test_an_operator_without_a_home_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"runtime_test_missing\.op\.default, which nothing here defines"):
        import_operators({"runtime_test_missing.op.default": None}, tmp_path)


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


def test_a_plan_names_what_registers_its_operators(project: Path) -> None:
    plan = json.loads((project / "plan" / "plan.json").read_text())
    files = {
        "ss_model.shifted.default": ("", "model.py"),
        "ss_scale.scaled.default": ("kernels.scale", "kernels/scale.py"),
    }
    assert plan["operators"] == {
        target: {"module": module, "file": str(project / name), "sha256": digest(PROJECT[name])}
        for target, (module, name) in files.items()
    }
    assert not [path for path in (project / "plan").iterdir() if path.is_dir()]
    superscaler("validate", str(project / "plan"))


def test_a_plan_runs_elsewhere_with_its_files_as_they_were(project: Path, tmp_path: Path) -> None:
    expected = loss(project / "plan")
    assert float(expected) != 0
    plan, moved = tmp_path / "elsewhere", tmp_path / "moved"
    shutil.copytree(project / "plan", plan)
    # Other files of those names can be imported, too.
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "scale.py").write_text("raise AssertionError\n")
    assert loss(plan, PYTHONPATH=on_path(tmp_path)) == expected
    shutil.copytree(project, moved)
    scale = project / "kernels" / "scale.py"
    try:
        scale.write_text(PROJECT["kernels/scale.py"].replace("x *", "x /"))
        told = loss(plan)
        assert f"ss_scale.scaled.default is registered by {scale}:5, which is not {scale} as it was when" in told
        for name in PROJECT:
            (project / name).unlink()
        told = loss(plan)
        assert (
            f"{plan} calls ss_model.shifted.default, which {project}/model.py registers, but that file is not" in told
        )
        assert loss(plan, PYTHONPATH=on_path(moved)) == expected
    finally:
        for name, text in PROJECT.items():
            (project / name).write_text(text)


def on_path(folder: Path) -> str:
    return os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(folder)))


def test_compiling_again_where_the_files_were_moved_names_their_new_place(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "moved")
    given = f"{tmp_path}/moved/model.py:build", "--plan", "single", "--cluster", "local:1", "--no-cache", "--out"
    superscaler("compile", *given, str(tmp_path / "moved" / "plan"))
    plans = [json.loads((folder / "plan" / "plan.json").read_text()) for folder in (project, tmp_path / "moved")]
    assert plans[1]["operators"]["ss_model.shifted.default"]["file"] == f"{tmp_path}/moved/model.py"
    assert plans[0]["manifest"]["operators"] == plans[1]["manifest"]["operators"]


def test_an_operator_that_another_file_registers_is_refused(project: Path, tmp_path: Path) -> None:
    head = "import sys\nfrom superscaler.specs.user_file import load_file\nfrom pathlib import Path\n"
    head += f"sys.path.insert(0, {str(project)!r})\nload_file(Path({str(tmp_path / 'model.py')!r}))\n"
    (tmp_path / "model.py").write_text(PROJECT["model.py"])
    assert loss(project / "plan", head) == loss(project / "plan")
    (tmp_path / "model.py").write_text(PROJECT["model.py"].replace("x + FACTOR", "x - FACTOR"))
    told = loss(project / "plan", head)
    assert f"ss_model.shifted.default is registered by {tmp_path}/model.py:8, which is not {project}/model.py" in told


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    head = "from pathlib import Path\nfrom superscaler.specs.user_file import load_file\n"
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "ops.py").write_text(
            f"import superscaler as ss\n\n@ss.register('b.. -> b..')\ndef times{number}(x):\n    return {number} * x\n"
        )
        head += f"times{number} = load_file(Path({str(tmp_path)!r}, '{number}', 'ops.py')).times{number}\n"
    end = f'ss.compile(graph, "single", "local:1").save({str(tmp_path / "plan")!r})'
    compiled(head, "times1(times2(super().forward(x)))", end)
    assert float(loss(tmp_path / "plan")) != 0
