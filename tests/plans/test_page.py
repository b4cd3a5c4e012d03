"""docs/plans.md: its examples are run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import superscaler as ss

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()


def test_the_examples_give_what_the_page_says() -> None:
    text = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    example = doctest.DocTestParser().get_doctest(text, {}, "plans.md", None, 0)
    assert len(example.examples) > 20
    words: list[str] = []
    assert doctest.DocTestRunner().run(example, out=words.append).failed == 0, "".join(words)


def test_what_the_page_names_is_there() -> None:
    named = set(re.findall(r"\bss\.(\w+)", PAGE)) | set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    assert len(named) > 20
    assert all(hasattr(ss, name) for name in named)
