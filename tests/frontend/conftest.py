"""Captured models that several tests read."""

from __future__ import annotations

import pytest
import torch

from superscaler.frontend.base.captured import Captured
from superscaler.frontend.capture import capture
from tests.frontend.examples import gpt2, llama, tokens


@pytest.fixture(scope="session")
def gpt2_captured() -> Captured:
    torch.manual_seed(0)
    return capture(gpt2(), (), tokens())


@pytest.fixture(scope="session")
def llama_captured() -> Captured:
    torch.manual_seed(0)
    return capture(llama(), (), tokens())
