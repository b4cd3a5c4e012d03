"""Batches depend on the seed and the step only, and bad files are one clear message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from superscaler.errors import InputError
from superscaler.train.data import TextBatches, library_text, synthetic_batch


def test_text_batches_are_pieces_of_the_text_and_repeat(tmp_path: Path) -> None:
    text = bytes(range(256)) * 3
    (tmp_path / "text").write_bytes(text)
    batches = TextBatches(tmp_path / "text", 4, 16, 256, seed=1)
    again = TextBatches(tmp_path / "text", 4, 16, 256, seed=1)
    for step in range(3):
        batch = batches.at(step)
        ids = batch["input_ids"]
        assert ids.dtype == torch.int64
        assert ids.shape == (4, 16)
        assert torch.equal(ids, batch["labels"])
        assert ids.data_ptr() != batch["labels"].data_ptr()
        assert torch.equal(ids, again.at(step)["input_ids"])
        assert all(bytes(row.tolist()) in text for row in ids)
    assert not torch.equal(batches.at(0)["input_ids"], batches.at(1)["input_ids"])
    assert not torch.equal(batches.at(0)["input_ids"], TextBatches(tmp_path / "text", 4, 16, 256, 2).at(0)["input_ids"])


def test_a_text_of_exactly_one_sequence_will_do(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"0123456789")
    ids = TextBatches(tmp_path / "text", 2, 10, 256, 0).at(0)["input_ids"]
    assert ids.tolist() == [list(b"0123456789")] * 2


def test_the_default_text_is_source_code() -> None:
    text = library_text(100_000)
    assert len(text) == 100_000
    assert text == library_text(200_000)[:100_000]
    assert b"import " in text
    assert int(TextBatches(None, 2, 64, 512, 0).at(0)["input_ids"].max()) < 256


@pytest.mark.parametrize(
    ("content", "vocabulary", "seed", "message"),
    [
        (None, 256, 0, "does not exist"),
        ("a folder", 256, 0, "is not a file"),
        (b"", 256, 0, "has 0 bytes, but one sequence needs 16"),
        (b"short", 256, 0, "has 5 bytes, but one sequence needs 16"),
        (b"x" * 99, 255, 0, "needs a vocabulary of 256, but the model's is 255"),
        (b"x" * 99, 256, -1, "the seed is -1"),
    ],
)
def test_bad_data_is_refused(
    tmp_path: Path, content: bytes | str | None, vocabulary: int, seed: int, message: str
) -> None:
    path = tmp_path / "text"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(InputError, match=message):
        TextBatches(path, 2, 16, vocabulary, seed)


def test_synthetic_batches_have_the_inputs_shapes_dtypes_and_bounds() -> None:
    inputs = {
        "x": ((64, 8), "float32"),
        "labels": ((64,), "torch.int64"),
        "mask": ((64,), "bool"),
        "s": ((), "float64"),
    }
    batch = synthetic_batch(inputs, 3, 0, {"labels": 10})
    found = [(tuple(t.shape), t.dtype) for t in (batch[name] for name in inputs)]
    assert found == [((64, 8), torch.float32), ((64,), torch.int64), ((64,), torch.bool), ((), torch.float64)]
    assert 5 < int(batch["labels"].max()) < 10
    assert abs(float(batch["x"].std()) - 1) < 0.2
    again, other = synthetic_batch(inputs, 3, 0, {"labels": 10}), synthetic_batch(inputs, 4, 0, {})
    assert all(torch.equal(batch[n], again[n]) for n in batch)
    assert not torch.equal(batch["x"], other["x"])
    assert set(other["labels"].tolist()) == {0, 1}
    with pytest.raises(InputError, match="'float33' is not a dtype"):
        synthetic_batch({"x": ((1,), "float33")}, 0, 0, {})
