"""The start of a rank. The `run.py` of a plan directory calls it before the import of torch, which takes seconds."""

from collections.abc import Sequence

from superscaler.interrupt import begin_rank


def main(argv: Sequence[str]) -> None:
    """Train the plan in the directory that the options name, as this whole process."""
    begin_rank()
    from superscaler.train.loop import main

    main(argv)
