"""The options of the optimizer's parameter groups, the learning rate among them, while a plan trains."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any

import torch

from superscaler.errors import InputError
from superscaler.runtime.executor import Rank
from superscaler.runtime.optimizer import for_schedules
from superscaler.specs.options import CHOSEN, SCHEDULED


class ParameterGroups:
    """The parameter groups of the user's optimizer, also those without a weight on this rank: all ranks must agree
    whether they are equal. `chosen`: the optimizer in plan.json.
    """

    def __init__(self, chosen: Mapping[str, Any], rank: Rank) -> None:
        self._name, self._rank = chosen["name"], rank
        self._options = [{**group, "lr": float(group["lr"])} for group in chosen["groups"]]

    def options(self) -> list[dict[str, Any]]:
        """Return the options of each group, as they are now."""
        self.follow()
        return [dict(group) for group in self._options]

    def rates(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.options()]

    @property
    def lr(self) -> float | tuple[float, ...]:
        """The learning rate; if the groups differ, one for each."""
        rates = self.rates()
        return rates[0] if len(set(rates)) == 1 else tuple(rates)

    @lr.setter
    def lr(self, value: float | Sequence[float]) -> None:
        now = self.rates()
        given: Sequence[Any] = value if isinstance(value, Sequence) else [value] * len(now)
        if given is not value and len(set(now)) > 1:
            raise InputError(
                f"the {len(now)} parameter groups have the learning rates {', '.join(map(str, now))}, which {value} "
                "would make equal; assign one for each group, as step.lr = [rate * 0.5 for rate in step.lr]."
            )
        if len(given) != len(now):
            raise InputError(
                f"{len(given)} learning rates were assigned, but the optimizer has {len(now)} parameter groups; "
                "assign one for each group."
            )
        if not all(isinstance(rate, Real) and 0 <= float(rate) < math.inf for rate in given):
            raise InputError(f"step.lr cannot be {value!r}; a learning rate is a finite number of 0 or more.")
        self.set({"lr": rate} for rate in given)

    @cached_property
    def scheduled(self) -> torch.optim.Optimizer:
        """An optimizer for schedules, whose groups have the options that steps take."""
        return for_schedules(self._name, self.options())

    def set(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Set options of each group."""
        given = list(groups)
        shown = self.scheduled.param_groups if "scheduled" in vars(self) else []
        for number, own in (*enumerate(self._options), *enumerate(shown), *self.here().items()):
            known = {*own, *SCHEDULED}.difference(CHOSEN)
            own |= {key: x for key, x in given[number].items() if key in known}
            own["lr"] = float(own["lr"])

    def follow(self) -> None:
        """Take the options that schedules have set."""
        if "scheduled" in vars(self):
            self.set(self.scheduled.param_groups)

    def here(self) -> dict[int, dict[str, Any]]:
        """Return the groups that have a weight on this rank by number, as its optimizer keeps them."""
        numbers = sorted({w["group"] for w in self._rank.tables["weights"] if w["trained"]})
        optimizer = self._rank.updates.optimizer
        return dict(zip(numbers, optimizer.param_groups if optimizer else [], strict=True))
