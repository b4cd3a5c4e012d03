"""Which values of a program are on the device and which on its host: only copies go from one to the other."""

from __future__ import annotations

from superscaler.errors import ScheduleError
from superscaler.ir.interpret import describe
from superscaler.ir.program import ONE, Copy, Device, Forward, Load, Program, Update, Value, reads, writes

# These work in either memory, as the forwards of copies do.
_ANYWHERE = frozenset({"Slice", "Combine", "Accumulate", "Wait", "Copy"})


def on_host(program: Program, device: Device) -> set[Value]:
    """Return the values that are on the host of a device. Raises ScheduleError at the first instruction that reads what
    is on the other side.
    """
    found, hosted = set[Value](), {weight.name for weight in device.weights if weight.host}
    for at, i in enumerate(device.instructions):
        places = {value in found for value in reads(i) if value != ONE}
        is_there = True in places
        is_free = type(i).__name__ in _ANYWHERE or (
            isinstance(i, Forward) and all(op.is_copy for op in program.functions[i.function].ops)
        )
        if isinstance(i, Update):
            pairs = zip((*i.weights, *i.buffers), (*i.gradients, *i.values), strict=True)
            is_wrong = any((weight in found) != (value in found) for weight, value in pairs)
        else:
            is_wrong = len(places) > 1 or (is_there and not is_free) or (isinstance(i, Copy) and i.to_host == is_there)
        if is_wrong:
            why = "reads what is in the other memory, of the host or of the device, than it works in."
            raise ScheduleError(f"device {device.rank}, instruction {at}: {describe(program, i)} {why}")
        if isinstance(i, Load | Copy):
            is_there = i.out in hosted if isinstance(i, Load) else i.to_host
        found.update(writes(i) if is_there else ())
    return found
