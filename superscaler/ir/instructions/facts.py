"""Facts of instructions, as which readers see them: what they start, wait for and run."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from superscaler.ir.layout import Provenance
from superscaler.ir.names import Task, Value


class Meets(Enum):
    """The other ends of what an instruction starts."""

    NOBODY = "it starts nothing"
    GROUP = "the devices of its group"
    PEER = "another device, at the other end of a message"
    HOST = "the memory of its host"
    ALL = "all devices"


class Facts:
    """The facts that readers ask of any instruction, so that they need not know its class.

    Of the transfer that it starts:
      meets, kind      its other ends, and the kind by which clusters price it
      group, root      the devices of a collective, and the place of the only one that gets a result, else -1
      peer, message    the other end of a message, and its number; `is_send`: its direction
      point            messages with one point (in the order of all devices) start together; else -1
      to_host          the direction of a copy
      bytes, sizes     the bytes that this device gives to it, or gets; those of each tensor
      sent             the dtype in which a collective sends, else ""
      rounded          the dtype to which it rounds what it moves, "" for none
      agreed           what all its ends must have equal, beside its key
      notes            its reasons
      handles          of its results, None for one that other devices get; if it `is_wait`, it waits for them

    Of its work:
      task             the part of a segment that it runs, or whose tape it moves
      function         the number of the function that it runs, else -1
      runs_segment     it runs a part of a segment, or its mirror (`is_mirror`), or a `half` of that
      needs_tape       it waits until the tape of its task has been copied
      whole            the value, or its handle, whose part is the result as it is
      grows            the sum that it adds to in place
      updates          it runs the optimizer on `weights`, after all that was sent or copied; `is_early`: not the last
      is_between       messages that start together may have it between them
      frees            it runs nothing: names end
      outlives         it gives what outlives the step: new weights, outputs, the loss
    """

    __slots__ = ()
    meets: ClassVar[Meets] = Meets.NOBODY
    is_send: ClassVar[bool] = False
    is_wait: ClassVar[bool] = False
    runs_segment: ClassVar[bool] = False
    is_mirror: ClassVar[bool] = False
    needs_tape: ClassVar[bool] = False
    updates: ClassVar[bool] = False
    is_between: ClassVar[bool] = False
    frees: ClassVar[bool] = False
    outlives: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return ""

    @property
    def group(self) -> tuple[int, ...]:
        return ()

    @property
    def root(self) -> int:
        return -1

    @property
    def peer(self) -> int:
        return -1

    @property
    def message(self) -> int:
        return -1

    @property
    def point(self) -> int:
        return -1

    @property
    def to_host(self) -> bool:
        return False

    @property
    def bytes(self) -> int:
        return 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.bytes,)

    @property
    def sent(self) -> str:
        return ""

    @property
    def rounded(self) -> str:
        return ""

    @property
    def agreed(self) -> tuple[object, ...]:
        return ()

    @property
    def notes(self) -> tuple[Provenance, ...]:
        return ()

    @property
    def handles(self) -> tuple[Value | None, ...]:
        return ()

    @property
    def task(self) -> Task | None:
        return None

    @property
    def function(self) -> int:
        return -1

    @property
    def half(self) -> str:
        return ""

    @property
    def whole(self) -> Value | None:
        return None

    @property
    def grows(self) -> Value | None:
        return None

    @property
    def weights(self) -> tuple[Value, ...]:
        return ()

    @property
    def is_early(self) -> bool:
        return False
