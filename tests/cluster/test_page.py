"""docs/clusters.md: its examples are run, and its table of presets is the code's."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from superscaler.cluster import LINKS, Cluster, Link

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_python_and_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(blocks("yaml")[0])
    example = doctest.DocTestParser().get_doctest("\n".join(blocks("python")), {}, "clusters.md", None, 0)
    assert len(example.examples) > 5
    words: list[str] = []
    assert doctest.DocTestRunner().run(example, out=words.append).failed == 0, "".join(words)
    lab = Cluster.parse("lab.yaml")
    assert lab.links.network == Link(5e-6, 24e9)
    assert Cluster.parse(str(lab)) == lab


@pytest.mark.dist
def test_commands(tmp_path: Path) -> None:
    lines = blocks("sh")[0].splitlines()
    assert len(lines) == 2
    for line in lines:
        command = [sys.executable, "-m", *line.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
    assert Cluster.parse(str(tmp_path / "cluster.yaml")).is_local


def test_the_table_of_presets() -> None:
    for name, links in LINKS.items():
        cells = re.search(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE)
        assert cells is not None
        *told, nics = cells[1].split(" | ")
        for link, cell in zip((links.device, links.pair, links.intra, links.network, links.host), told, strict=True):
            assert [float(x) for x in cell.split(", ")] == pytest.approx([link.alpha * 1e6, link.bandwidth / 1e9])
        assert nics == ("1 a device" if links.nics is None else f"{links.nics} a server")
