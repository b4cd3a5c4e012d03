"""Trials of a registered operator on small random operands: it must run, and its notation must be true."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superscaler.errors import InputError, brief, named
from superscaler.frontend.base.samples import KINDS, NORMAL, TRIED, Kind, varied
from superscaler.frontend.base.trace import reads
from superscaler.frontend.infer import signature
from superscaler.frontend.users.proof import Failure, NoGradientError, ops_of, prove, record
from superscaler.ops.notation import Dim, operand_dims, untils
from superscaler.specs.registered import Registered

Sizes = Mapping[str, int]
Example = Mapping[str, Any] | Callable[[Sizes], Mapping[str, Any]]
Arguments = tuple[list[Any], dict[str, Any]]

# Sizes of letters: distinct, so that swapped dims are found. Each letter has the others in turn: an operator may go
# another way for 1, for powers of 2, or above a threshold.
_SIZES, _OTHERS = (4, 3, 5, 6, 2), (1, 7, 8, 16, 32, 64, 131, 256)
# Largest size tried for one letter; largest product of all.
_MOST = 1 << 16
# Plans cut a size of a call in so many parts.
_PARTS = (1, 2, 4, 8)
_MISSING = object()


class CannotRun(InputError):
    """The operator raises on the drawn operands."""


@dataclass(frozen=True, slots=True)
class Trial:
    """An operator with its rule, and the user's facts about its operands; see `register`."""

    overload: OpOverload
    rule: Registered
    sizes: Sizes
    example: Example
    device: torch.device

    def check(self) -> None:
        """Raise InputError unless the operator in parts equals the whole one: on all kinds, operands and sizes."""
        for extra in (1, 2):
            self._check(self._draw(extra))
        optional = [p.name for p in self.overload._schema.arguments if str(p.type) == "Optional[Tensor]"]
        absent = [set(names) for k in range(1, len(optional) + 1) for names in combinations(optional, k)]
        letters = dict.fromkeys(word for dims in self._dims(1) for dim in dims for word in dim or ())
        fixed = {"1", *self.sizes, *untils(self.rule.notation)}
        sizes = [{word: size} for word in letters if word not in fixed for size in _OTHERS]
        others = [self._draw(0), *(self._draw(1, names) for names in absent)]
        for given in others:
            self._try(given)
        for kind in KINDS[1:]:
            self._try(self._draw(1, kind=kind), kind)
        for known in sizes:
            self._try(self._draw(1, known=known))
        if same := self._constants():
            self._check_varied(same)

    def _constants(self) -> dict[str, Tensor]:
        """Return the tensors of the example that have one value everywhere: they may hide what others show."""
        args, kwargs = self._draw(1)
        given = {**dict(zip((p.name for p in self.overload._schema.arguments), args, strict=False)), **kwargs}
        known = self._example(
            {word: 2 for dims in self._dims(1) for dim in dims for word in dim or ()} | {**self.sizes}
        )
        tensors = {name: given[name] for name in known if isinstance(given.get(name), Tensor)}
        return {name: x for name, x in tensors.items() if x.numel() > 1 and bool((x == x.flatten()[0]).all())}

    def _check_varied(self, same: Mapping[str, Tensor]) -> None:
        """Try other values of tensors that the example gives as constants, integers below each size. Raises InputError
        if the operator takes none.
        """
        sizes = sorted({n for x in _tensors(self._draw(1)) for n in x.shape} | {2}, reverse=True)
        has_run = False
        for bound in sizes:
            with suppress(CannotRun):
                self._check(self._draw(1, vary=dict.fromkeys(same, bound)), TRIED)
                has_run = True
        if has_run:
            return
        name, x = next(iter(same.items()))
        raise InputError(
            f"{self.rule.place}: the example of '{name}' for {self.overload} is {x.flatten()[0].item()} everywhere, "
            "which shows nothing of what the operator does with other values, and drawn ones fail; give an example of "
            "several values, or check=False."
        )

    def check_call(self, values: Mapping[str, Any], sizes: Sizes) -> None:
        """Raise InputError unless the operator in parts equals the whole operator with the arguments of a call.

        `values`: the arguments that are no tensors. `sizes`: the sizes of letters in the call, tried one at a time.
        """
        called = replace(self, example=lambda known: {**self._example(known), **values})
        with torch.enable_grad():
            try:
                called._check(called._draw(1))
            except CannotRun:
                # The value of an argument may be a size. If the sizes of the call are small, all of them are used.
                if prod(sizes.values()) <= _MOST:
                    called._try(called._draw(1, known=sizes))
            for word, other in untils(self.rule.notation).items():
                if (size := sizes.get(word, 1)) != (end := sizes.get(other, 1)):
                    called._try(called._draw(1, known={word: 3 + 2 * (size > end), other: 3 + 2 * (end > size)}))
            for word, size in sizes.items():
                own = {min(size // parts, _MOST) for parts in _PARTS} - {0, *_OTHERS, *_SIZES}
                for part in sorted(own) if word not in self.sizes else ():
                    called._try(called._draw(1, known={word: part}))
            called._try(called._draw(1, known=_together(sizes)))

    def _try(self, given: Arguments, kind: Kind = TRIED) -> None:
        # An operator may reject operands without dims, or a missing operand; a model cannot run it on these either.
        with suppress(CannotRun):
            self._check(given, kind)

    def _dims(self, extra: int) -> list[list[Dim]]:
        return operand_dims(self.rule.notation, extra)

    def _example(self, known: Sizes) -> Mapping[str, Any]:
        if not callable(self.example):
            return self.example
        try:
            found = self.example(known)
        except TypeError as error:
            raise InputError(f"{self.rule.place}: example is called with sizes by letter: {brief(error)}.") from None
        if not isinstance(found, Mapping):
            raise InputError(f"{self.rule.place}: example returns {named(found)}; give arguments by name.")
        return found

    def _sized(self, extra: int, known: Sizes = MappingProxyType({})) -> tuple[Sizes, list[list[int]]]:
        """Return the sizes of all letters, and the shapes of the operands; see `_draw`."""
        following, known = cycle(_SIZES[extra:] + _SIZES[:extra]), {**known, **self.sizes}
        alike = untils(self.rule.notation)
        shapes = []
        for dims in self._dims(extra):
            for letter in (letter for dim in dims for letter in dim or ()):
                other = known.get(alike.get(letter, letter)) or (1 if letter == "1" else next(following))
                known.setdefault(letter, other)
                known.setdefault(alike.get(letter, letter), other)
            shapes.append([next(following) if dim is None else prod(known[letter] for letter in dim) for dim in dims])
        return known, shapes

    def _draw(
        self,
        extra: int,
        absent: Collection[str] = (),
        kind: Kind = NORMAL,
        known: Sizes = MappingProxyType({}),
        vary: Mapping[str, int] = MappingProxyType({}),
    ) -> Arguments:
        """Return arguments; `..` is `extra` dims, the `absent` operands are None, letters have the `known` sizes. Those
        in `vary` are drawn in the place of the example; integers are below the number.
        """
        known, shapes = self._sized(extra, known)
        random = torch.Generator().manual_seed(extra)
        operands = iter([kind.draw(shape, random).to(self.device) for shape in shapes])
        given = self._example(known)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self.overload._schema.arguments:
            drawn = _value(parameter, operands)
            value = None if parameter.name in absent else given.get(parameter.name, drawn)
            if value is _MISSING:
                raise InputError(
                    f"{self.rule.place}: {self.overload} cannot be checked without its '{parameter.name}' "
                    f"({parameter.type}); give example={{'{parameter.name}': VALUE}}, or check=False."
                )
            if isinstance(value, Tensor) and parameter.name in vary:
                value = varied(value, vary[parameter.name], random)
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(kind.dtype)
            if parameter.kwarg_only:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _check(self, given: Arguments, kind: Kind = NORMAL) -> None:
        self._check_repeats(given, kind)
        trace, values = record(self.overload, *given)
        ops, tensors = ops_of(trace)
        (node,) = trace.calls()

        def run(box: Any, pieces: Sequence[Tensor], shapes: Any) -> list[Tensor]:
            del box, shapes
            local = dict(zip(reads(node), (piece.to(self.device) for piece in pieces), strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), local.__getitem__)
            return [result.cpu() for result in _results(self.overload(*args, **kwargs))]

        operands = [values[x.name].cpu() for x in reads(node)]
        try:
            failure = prove(ops[0], tensors, operands, run, kind)
        except NoGradientError as error:
            message = f"cannot be differentiated: {_line(error)} A custom_op needs register_autograd before ss.register"
            raise self._error(CannotRun, message, given) from error
        if failure and failure.is_raised and kind is not NORMAL:
            raise self._error(CannotRun, failure.difference, given)
        if failure:
            on = "" if kind.name == NORMAL.name else f" of {kind.name} numbers"
            message = f"is not what its notation says: {_difference(failure, node)}{on}"
            hint = self._hint(given) if kind.dtype == torch.float64 else "Mark a letter ^ where it must be whole"
            raise self._error(InputError, f"{message}. {hint}", given)

    def _hint(self, given: Arguments) -> str:
        with _Precision() as seen:
            self.overload(*given[0], **given[1])
        if not seen.lower:
            return "Mark a letter ^ where it must be whole"
        return (
            f"It computes in {', '.join(sorted(seen.lower))} inside, also on float64 operands; where only the last "
            "digits differ, write x.to(torch.promote_types(x.dtype, torch.float32)) instead of x.float()"
        )

    def _check_repeats(self, given: Arguments, kind: Kind) -> None:
        """Raise InputError unless the operator runs, without nan, twice equally, and does not change its operands."""
        operands = _tensors(given)
        before = [x.clone() for x in operands]
        try:
            first, second = (_results(self.overload(*given[0], **given[1])) for _ in range(2))
        except Exception as error:
            # The user's operator may raise any exception.
            message = f"fails as {self.overload._schema}: {_line(error)} Give sizes={{...}} or example={{...}}"
            raise self._error(CannotRun, message, given) from error
        for is_wrong, message in (
            (not _equal(before, operands), "changes its operands; return new tensors"),
            (
                kind is NORMAL and any(x.isnan().any() for x in first),
                "gives nan; give operands that it is made for by example={...}",
            ),
            (not _equal(first, second), "gives two results for the same operands; take out random numbers and state"),
        ):
            if is_wrong:
                raise self._error(InputError, message, given)

    def _error(self, kind: type[InputError], message: str, given: Arguments) -> InputError:
        shapes = ", ".join(str(tuple(x.shape)) for x in _tensors(given))
        return kind(
            f"{self.rule.place}: {self.overload}, registered as '{self.rule.notation}', {message} "
            f"(checked on shapes {shapes}; check=False registers it unchecked)."
        )


class _Precision(TorchDispatchMode):
    """A mode that records the floating dtypes of results other than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.lower: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.is_floating_point()]
        self.lower |= {str(x.dtype).removeprefix("torch.") for x in tensors} - {"float64"}
        return found


def _together(sizes: Sizes) -> Sizes:
    """Return sizes of letters, the largest ones halved until all together are few enough elements."""
    found = dict(sizes)
    while prod(found.values()) > _MOST and (largest := max(found, key=lambda word: found[word])):
        found[largest] = max(found[largest] // 2, 1)
    return found


def _value(parameter: Any, operands: Iterator[Tensor]) -> Any:
    """Return the value of a parameter that is not in the example."""
    kind = str(parameter.type)
    if "List[" in kind and "Tensor" in kind:
        return list(operands)
    if "Tensor" in kind:
        return next(operands)
    return parameter.default_value if parameter.has_default_value() else _MISSING


def _difference(failure: Failure, node: Node) -> str:
    """Return the text of a failure, in the letters of the notation."""
    letters = list(signature(node)[0].marks)
    cuts = " and ".join(f"{letters[i]} is cut in {' + '.join(map(str, sizes))}" for i, sizes in failure.cut.items())
    return f"{f'when {cuts}, ' if cuts else ''}{failure.tensor} {failure.difference}".rstrip(".")


def _tensors(given: Arguments) -> list[Tensor]:
    return [x for x in tree_leaves(given) if isinstance(x, Tensor)]


def _results(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def _equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) and a.dtype == b.dtype for a, b in pairs)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".") + "."
