"""Documents are true: their code runs, commands print what is shown, links lead somewhere.

The commands of superscaler in a console block run where the block before left off; `...` in what it shows is anything.
An HTML comment above a block says what is done with it: `slow` runs it with `-m slow`, `not run: why` leaves it out.
"""

from __future__ import annotations

import doctest
import inspect
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import superscaler as ss
from superscaler import models, plans
from superscaler.emit.statements import Statements
from tests.helpers.commands import run
from tests.helpers.graphs import graph_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page.name: page.read_text() for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Their own tests run them, as they need other files or real processes.
ELSEWHERE = {"ops.md", "bugs.md", "plans.md", "clusters.md", "emitted.md"}


class Block(NamedTuple):
    language: str
    text: str
    note: str


def blocks(page: str, *languages: str) -> list[Block]:
    found = re.findall(r"(?:^ *<!-- (.*?) -->\n)?^ *```(\w*)\n(.*?)^ *```$", PAGES[page], re.DOTALL | re.MULTILINE)
    return [Block(language, text, note) for note, language, text in found if language in languages]


def commands(block: Block) -> list[tuple[list[str], str]]:
    """Return the commands of a console block, and what it shows below each."""
    pieces = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)[1:]
    return [
        (shlex.split(line.partition(" > ")[0]), shown) for line, shown in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def rows(language: str) -> list[Any]:
    """Return the pages with blocks that always run, and those with slow ones, which run them all."""
    notes = {
        page: {b.note == "slow" for b in blocks(page, language) if not b.note.startswith("not run")} for page in PAGES
    }
    named = [(page, is_slow) for page, found in notes.items() if page not in ELSEWHERE for is_slow in sorted(found)]
    return [pytest.param(*row, marks=[pytest.mark.slow] * row[1], id=row[0] + " slow" * row[1]) for row in named]


def chosen(page: str, language: str, is_slow: bool) -> list[Block]:
    return [b for b in blocks(page, language) if not b.note.startswith("not run") and (b.note != "slow" or is_slow)]


@pytest.mark.dist
@pytest.mark.parametrize(("page", "is_slow"), rows("console"))
def test_commands_print_what_is_shown(
    page: str, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in chosen(page, "console", is_slow):
        for (program, *arguments), shown in commands(block):
            if program != "superscaler":
                continue
            capfd.readouterr()
            run(*arguments)
            said = "".join(capfd.readouterr())
            if shown:
                checker = doctest.OutputChecker()
                assert checker.check_output(shown, said, FLAGS), f"superscaler {' '.join(arguments)}\n{said}"


@pytest.mark.parametrize(("page", "is_slow"), rows("python"))
def test_python_runs(page: str, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(chosen(page, "python", is_slow)):
        if block.text.startswith(">>> "):
            example = doctest.DocTestParser().get_doctest(block.text, names, page, None, 0)
            words: list[str] = []
            assert doctest.DocTestRunner().run(example, out=words.append, clear_globs=False).failed == 0, "".join(words)
            names.update(example.globs)
        else:
            exec(compile(block.text, f"{page}, block {number}", "exec"), names)


EMITTED = re.findall(r"<!-- emitted (\S+) (\S+) -->\n```python\n(.*?)```", PAGES["emitted.md"], re.DOTALL)


@pytest.mark.parametrize(
    ("model", "plan", "shown"),
    [EMITTED[0], pytest.param(*EMITTED[1], marks=pytest.mark.slow)],
    ids=["pipeline", "layers"],
)
def test_the_code_of_the_page_is_emitted(model: str, plan: str, shown: str) -> None:
    files = ss.compile(graph_of(model), plan, "local:2").compiled.emitted.files
    assert files["program_0.py"] == shown


def test_the_page_has_every_word_of_a_collective() -> None:
    """A word follows the name of a collective in the text of an f-string, as `, rounded="`."""
    code = inspect.getsource(Statements._collective)
    words = set(re.findall(r", (\w+)=(?=\"|\{|True)", code))
    assert words == {"largest", "ways", "wire", "rounded"}
    assert all(f"| `{word}=" in PAGES["emitted.md"] for word in words)


def anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", PAGES[page], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_their_titles(page: str) -> None:
    folder = ROOT if page == "README.md" else DOCS
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", PAGES[page]):
        file, _, anchor = target.partition("#")
        path = folder / file if file else folder / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.name), target


def test_every_plan_and_model_of_the_library_is_in_its_page() -> None:
    for page, known in (("choose.md", plans.names()), ("models.md", models.names())):
        assert [name for name in known if f"`{name}" not in PAGES[page]] == []
