"""Run the notebook docs/session.ipynb and write its outputs into it: python docs/notebook.py

Cells run one after the other in one namespace; lines with `!` are commands. No notebook server is needed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("session.ipynb")
# The commands of the environment of this Python.
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def run(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells, run in a folder. An error of a cell is raised."""
    space: dict[str, Any] = {"_command": _command}
    codes = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    with chdir(folder):
        for number, cell in enumerate(codes, 1):
            text = _output("".join(cell["source"]), space)
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": number, "outputs": [stream] if text else []}
    return notebook


def _output(source: str, space: dict[str, Any]) -> str:
    """Return what a cell prints, and the value of its last expression."""
    lines = (re.sub(r"^!(.*)$", lambda found: f"_command({found[1]!r})", line) for line in source.split("\n"))
    body = ast.parse("\n".join(lines)).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    out = StringIO()
    with redirect_stdout(out):
        exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), space)
        value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), space) if last is not None else None
        if value is not None:
            print(repr(value))
    return out.getvalue()


def _command(text: str) -> None:
    environment = {**os.environ, "PATH": _PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(text, shell=True, capture_output=True, text=True, env=environment, timeout=300)
    print(done.stdout, done.stderr, sep="", end="")
    if done.returncode:
        raise SystemExit(f"{text}: {done.stdout}{done.stderr}")


def page(notebook: dict[str, Any]) -> str:
    """Return the notebook as Markdown."""
    found = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        found.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        shown = "".join(line for out in cell.get("outputs", []) for line in out["text"])
        found += [f"```text\n{shown}```"] if shown else []
    return "\n\n".join(found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = run(json.loads(NOTEBOOK.read_text()), Path(folder))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
