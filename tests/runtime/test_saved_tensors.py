"""Copies between a device and its host."""

from __future__ import annotations

import pytest
import torch

from superscaler.runtime.saved_tensors import Copies


def test_on_a_cpu_a_copy_is_apart_from_what_it_is_of() -> None:
    copies, x = Copies(torch.device("cpu")), torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    work = copies.start(x, to_host=True)
    with torch.no_grad():
        x.zero_()
    copies.flush()
    assert torch.equal(work.wait(), torch.arange(6.0).reshape(2, 3).T)
    assert not work.wait().requires_grad


@pytest.mark.gpu
def test_on_a_gpu_copies_are_pinned_and_in_time() -> None:
    device = torch.device("cuda", 0)
    copies = Copies(device)
    for size in (1 << 20, 1 << 24):
        x = torch.rand(size, device=device)
        expected = (x * 3).sum()
        there = copies.start(x * 3, to_host=True).wait()
        assert there.is_pinned()
        assert there.device.type == "cpu"
        work = copies.start(there, to_host=False)
        back = work.wait()
        assert back.device == device
        assert torch.equal(back.sum(), expected)
    copies.flush()
