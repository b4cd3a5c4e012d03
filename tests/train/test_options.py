"""Options of a run: declared once, read from words and from the launcher's file."""

from __future__ import annotations

from pathlib import Path

from superscaler.train.options import RankOptions, RunOptions, options_of, parse

# A value of each type that is no default.
VALUES = {int: 7, float: 0.25, str: "stop", bool: True, Path: Path("/a b/c:x=1")}


def test_every_option_is_read_from_words_and_from_the_file_of_the_launcher(tmp_path: Path) -> None:
    given = {name: VALUES[kind] for name, kind, *_ in options_of(RankOptions)}
    words = [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    assert len(given) == 21
    assert parse(["plan", *words]) == (Path("plan"), RankOptions(**given))
    all_given = RankOptions(**given, named="gpt2", flops=2.5e18, peak_flops=1e14, launched=tmp_path)
    all_given.write(tmp_path)
    assert parse(["--launched", str(tmp_path)]) == (None, all_given)


def test_options_that_are_left_out_are_the_same_in_words_and_in_the_file(tmp_path: Path) -> None:
    assert parse([]) == (None, RankOptions())
    RankOptions(data=Path("text")).write(tmp_path)
    # Ranks may have another folder.
    assert RankOptions.read(tmp_path) == RankOptions(data=Path("text").resolve())
    assert vars(RunOptions()).items() <= vars(RankOptions()).items()
