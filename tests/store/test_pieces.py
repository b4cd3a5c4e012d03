"""The file of a rank is a safetensors file, hashed as it is written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from safetensors.torch import load_file

from superscaler.store.tensor_file import NAMES, write_tensors


def set_event() -> Event:
    event = Event()
    event.set()
    return event


def test_the_library_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 4), (5, 7)]
    tensors = {f"{d}{s}": (torch.rand(s) * 9).to(d) for d in (getattr(torch, n) for n in NAMES) for s in shapes}
    found = write_tensors(tmp_path / "file", tensors, set_event())
    assert found == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    stored = load_file(tmp_path / "file")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_what_has_no_name_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^a is of torch\.complex64, which no safetensors file holds$"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(2, dtype=torch.complex64)}, set_event())
    assert not (tmp_path / "file").exists()


def test_who_is_waited_for_does_not_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superscaler.store.tensor_file._REST", 10**9)
    hurry = Event()
    thread = Thread(target=write_tensors, args=(tmp_path / "file", {"a": torch.zeros(1 << 22)}, hurry), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    hurry.set()
    thread.join(60)
    assert load_file(tmp_path / "file")["a"].shape == (1 << 22,)
