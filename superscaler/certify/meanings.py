"""What the certificate takes each kind of collective to do.

This says once more what the rows of `superscaler/collectives.py` say, and is not made from them: so the certificate
finds a mistake there.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a kind of collective does, in this order: values of members are added, cut, and joined along a slot.

    `to_one`: only the member at the root gets the result. `from_one`: only the first member gives a value. `rounds`:
    the values that it may round, gradients that it adds or joins, or weights that it joins.
    """

    adds: bool = False
    cuts: bool = False
    joins: bool = False
    to_one: bool = False
    from_one: bool = False
    rounds: tuple[str, ...] = ()


MEANINGS: Mapping[str, Meaning] = {
    "all_reduce": Meaning(adds=True),
    "reduce": Meaning(adds=True, to_one=True),
    "reduce_scatter": Meaning(adds=True, cuts=True, rounds=("gradient",)),
    "all_gather": Meaning(joins=True, rounds=("gradient", "weight")),
    "rd_gather": Meaning(joins=True, to_one=True),
    "all_to_all": Meaning(cuts=True, joins=True),
    "broadcast": Meaning(from_one=True),
}
