"""CUDA graphs: what a step starts on its streams is captured, and started again by one call of the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from superscaler.errors import InputError, RuntimeFailure, brief
from superscaler.runtime.replayable.refusals import LEAVE_OUT

T = TypeVar("T")


class CudaGraphs:
    """Records on a stream of its own, which waits for the present one, and this for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def warm(self, run: Callable[[], T]) -> T:
        """Run it on the stream of the graph."""
        present = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            found = run()
        present.wait_stream(self._stream)
        return found

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture it. Other threads, as those of NCCL and of autograd, may call CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                found = run()
        except RuntimeError as error:
            # The first error is that of the call that cannot be captured; ending the capture raises another.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            raise RuntimeFailure(
                f"this step cannot be captured as a CUDA graph: {brief(first)}; {LEAVE_OUT}."
            ) from error
        return found, graph.replay


def check_device(device: torch.device) -> None:
    """Raise InputError where ranks do not run on GPUs."""
    if device.type != "cuda":
        raise InputError(
            f"cuda_graph replays a step on GPUs with NCCL, but the ranks run on {device.type} (gloo); {LEAVE_OUT}."
        )


def prepare_nccl() -> None:
    """Choose what NCCL does in graphs, before it connects: memory that may be mapped anew cannot be registered with it
    (pytorch#158029).
    """
    options = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in options.lower():
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
