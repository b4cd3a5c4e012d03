"""The kinds of time of a device: the one table of their words, signs and colours, for text, pictures and pages."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """The kinds of work, of communication and, from BUBBLE on, of idle time. A row has the fields in this order.

    words     what is said of an event
    sign      its character in a drawing and, of the kinds up to WEIGHTS, its letter in a schedule
    color     of pictures and pages: the palette of Okabe and Ito, which differs for all kinds of colour vision
    dark      the colour on a dark page, "" where it is the same
    legend    fewer words, for the legend of a drawing; "" where they are the same
    """

    words: str
    sign: str
    color: str
    dark: str
    legend: str

    def __new__(cls, words: str, sign: str, color: str, dark: str = "", legend: str = "") -> Kind:
        """Return the next kind, with the fields of its row."""
        made = int.__new__(cls, len(cls.__members__))
        made._value_ = len(cls.__members__)
        made.words, made.sign, made.color = words, sign, color
        made.dark, made.legend = dark or color, legend or words
        return made

    FORWARD = "forward", "F", "#56b4e9"
    AGAIN = "forward, recomputed", "R", "#a9d8f3", "#35708f"
    BACKWARD = "backward", "B", "#0072b2"
    WEIGHTS = "backward, gradients of weights", "W", "#00456b", "#2f7fb0", "gradients of weights"
    UPDATE = "optimizer", "U", "#cc79a7"
    OTHER = "slices, sums and copies", "o", "#8d939c", "#767d88"
    LAUNCH = "start of communication", "c", "#b9bec6", "#565c66"
    TRANSFER = "communication", "t", "#009e73"
    COPY = "copy to or from the host", "h", "#7a6fb0"
    BUBBLE = "waits for work of other devices", ".", "#f0a981", "#8a4318", "waits for other devices"
    EXPOSED = "waits for data on their way", "~", "#f6d36b", "#9a7a1c"
    COPYING = "waits for a copy to or from the host", "^", "#e6e6a2", "#6d6a2c", "waits for a copy"
    END = "done, waits for the end of the step", " ", "#e3e6ea", "#2c3037", "done"

    @property
    def is_wait(self) -> bool:
        """Whether a device is idle."""
        return self >= Kind.BUBBLE

    @property
    def is_dark(self) -> bool:
        """Whether text on its colour is white."""
        return self in (Kind.BACKWARD, Kind.WEIGHTS, Kind.TRANSFER, Kind.COPY)

    @property
    def css(self) -> str:
        """The name of its colour in a page."""
        return f"--{self.name.lower()}"


# The kinds by number.
KINDS = tuple(Kind)


def style() -> str:
    """Return the colours of a page as CSS."""
    light, dark = ("".join(f" {kind.css}: {getattr(kind, tone)};" for kind in Kind) for tone in ("color", "dark"))
    return f':root {{{light} }}\n:root[data-theme="dark"] {{{dark} }}\n'
