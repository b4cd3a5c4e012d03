"""Staging of plan directories: a new plan replaces an older one when it is whole, file by file.

Until then it is in a folder aside. While its files are moved, the directory holds neither plan, which its hashes show;
an interrupted move is finished by the next writer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from superscaler.store.files import PLAN_FILE, sync
from superscaler.store.plan import NEW, listed


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Give a folder to write a whole plan into, plan.json last; its files then take the places of those of the older
    plan. After an error the older plan is as it was.
    """
    recover(directory)
    folder = directory / NEW
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    recover(directory)


def sync_all(folder: Path) -> None:
    """Wait until a folder and all that is in it are on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def recover(directory: Path) -> None:
    """Move a whole plan that is aside into its place; remove an unfinished one. May be repeated from any point."""
    folder = directory / NEW
    if (folder / PLAN_FILE).is_file():
        _move(folder, directory)
    if folder.exists():
        shutil.rmtree(folder)


def _move(folder: Path, directory: Path) -> None:
    names = listed(folder)
    older = listed(directory) if (directory / PLAN_FILE).is_file() else frozenset[str]()
    for name in sorted(names - {PLAN_FILE}):
        if (folder / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, directory / name)
    for name in older - names:
        (directory / name).unlink(missing_ok=True)
        for parent in Path(name).parents[:-1]:
            # Folders with other files stay.
            with suppress(OSError):
                (directory / parent).rmdir()
    for place in {(directory / name).parent for name in names}:
        sync(place)
    # Last: this file shows that the plan is whole.
    os.replace(folder / PLAN_FILE, directory / PLAN_FILE)
    sync(directory)
