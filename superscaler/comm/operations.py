"""Started operations of `torch.distributed`: their buffers, their results, and the sends that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from superscaler.comm.communicator import Handle, Later, PeerLost
from superscaler.errors import RuntimeFailure


class Operation:
    """An operation that holds its buffers. The handle of a message is set when its batch starts."""

    def __init__(self, what: str, *buffers: Any, work: Any = None) -> None:
        self.what, self.buffers, self.work = what, buffers, work

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            fail(self.what, error)

    def giving(self, finish: Callable[[], Tensor]) -> Handle:
        """Return a handle that waits, and then makes the result from the buffers."""

        def get() -> Tensor:
            self.wait()
            return finish()

        return Later(get)


class Exchange(Later):
    """The handle of an operation whose result may be made before it is read, so that nothing holds its chunks."""

    def __init__(self, operation: Operation, finish: Callable[[], Tensor]) -> None:
        super().__init__(operation.giving(finish).wait)
        # The work holds the chunks, too.
        self._work = operation.work

    def wait(self) -> Tensor:
        result = super().wait()
        self._work = None
        return result

    def finish_if_ended(self) -> None:
        if self._work is not None and self._work.is_completed():
            self.wait()


def fail(what: str, error: RuntimeError) -> NoReturn:
    """Raise an error of torch.distributed, as PeerLost if it blames another rank; gloo says so only in its text."""
    # The sentences of gloo after the first one are guesses.
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
    if isinstance(error, dist.DistError) or "gloo/transport" in reason or "onnection" in reason:
        raise PeerLost(f"{what} failed, because another rank ended or does not answer: {reason}") from error
    raise RuntimeFailure(f"{what} failed: {reason}") from error


class Sends:
    """The started sends; a buffer is freed when its send ends. A thread waits for gloo's handles; NCCL's can be polled.

    An error of a send is raised at the next send, or at the next `flush`.
    """

    def __init__(self, *, can_poll: bool) -> None:
        self._can_poll = can_poll
        self._queue: Queue[Operation | None] = Queue()
        self._polled: list[Operation] = []
        self._thread: Thread | None = None
        self._error: RuntimeFailure | None = None

    @property
    def pending(self) -> int:
        return self._queue.unfinished_tasks + len(self._polled)

    def add(self, operation: Operation) -> None:
        self._raise()
        if self._can_poll:
            # What is captured in a CUDA graph has not run, and cannot be asked.
            is_captured = torch.cuda.is_current_stream_capturing()
            self._polled = [*(o for o in self._polled if is_captured or not o.work.is_completed()), operation]
            return
        if self._thread is None:
            self._thread = Thread(target=self._drain, name="sends", daemon=True)
            self._thread.start()
        self._queue.put(operation)

    def flush(self) -> None:
        self._queue.join()
        for operation in self._polled:
            operation.wait()
        self._polled.clear()
        self._raise()

    def close(self) -> None:
        self.flush()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _drain(self) -> None:
        while (operation := self._queue.get()) is not None:
            try:
                operation.wait()
            except RuntimeFailure as error:
                self._error = self._error or error
            finally:
                # Freed before the next wait, so that a sent buffer is not held meanwhile.
                del operation
                self._queue.task_done()
        self._queue.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
