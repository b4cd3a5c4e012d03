"""Users' own operators: one op of the graph, a notation that is executed before it is believed, clear refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import CaptureError, InputError
from superscaler.frontend.capture import capture
from superscaler.frontend.users.check_notation import Trial
from superscaler.frontend.users.register import _DEFINED
from superscaler.specs.registered import REGISTERED
from superscaler.specs.user_file import load_file
from tests.frontend import own
from tests.frontend.test_cuts import check_cuts

BATCH = (torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8),)


def test_a_registered_function_is_one_op_with_the_indices_of_its_notation() -> None:
    captured = capture(own.Block(), BATCH)
    ops = {op.target: op for op in captured.model.ops}
    norm = ops["ss_own.rms_norm.default"]
    assert norm.args[2] == 1e-5
    assert norm.flops == 0
    assert norm.source.endswith(f"own.py:{own.Block.forward.__code__.co_firstlineno + 1}")
    assert [(i.size, i.mark) for i in norm.indices] == [(4, "spatial"), (6, "spatial"), (8, "frozen")]
    assert len(ops["ss_own.scale_and_size.default"].outputs) == 2
    assert "superscaler_tests.gate.default" in ops
    assert not captured.model.unsupported
    assert check_cuts(captured) >= 12


@pytest.mark.parametrize(
    "name", ["ss_own.rms_norm", "superscaler_tests.gate", "ss_own.scale_and_size", "ss_own.project"]
)
def test_operators_as_users_write_them_are_what_their_notation_says(name: str) -> None:
    namespace, _, operator = name.partition(".")
    overload = getattr(getattr(torch.ops, namespace), operator).default
    Trial(overload, REGISTERED[str(overload)], {}, {}, torch.device("cpu")).check()


def test_a_registered_function_runs_as_it_is_written() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    before = own.RmsNorm.backwards
    result = own.rms_norm(x=x, weight=weight)
    result.sum().backward()
    assert own.RmsNorm.backwards == before + 1
    torch.testing.assert_close(result, own.RmsNorm.apply(x, weight, 1e-6), rtol=0, atol=0)
    assert own.rms_norm.__doc__ == "Scale by the root of the mean square."


def named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function


softmax = named("softmax", lambda x: x.softmax(-1))
running_sum = named("running_sum", lambda x: x.cumsum(0).sum(1))
clipped_sum = named("clipped_sum", lambda x: x.sum(1).clamp(-1e3, 1e3))
twice = named("twice", lambda x: x * 2)
half_precision = named("half_precision", lambda x, w: (x.float() * w.float()).to(x.dtype))
noise = named("noise", lambda x: x + torch.randn_like(x))
in_place = named("in_place", lambda x: x.mul_(2))
logarithm = named("logarithm", lambda x: x.log())
lookup = named("lookup", lambda ids, weight: weight[ids])
rotate = named("rotate", lambda x, angle: (x.unflatten(-1, (-1, angle.shape[-1])) * angle).flatten(-2))
attended = named("attended", lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
running_unless_masked = named("running_unless_masked", lambda x, mask=None: x.cumsum(0) if mask is None else x * mask)


def wrong_gradient(x, w):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, grad):
            return grad, grad.mean(0)

    return Wrong.apply(x, w)


def scaled(x, n: int):
    return x * n


def norm_of_groups(x, groups: int):
    return nn.functional.group_norm(x, groups)


def attended_so_far(q, k, v):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
    return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def shifted(x, mask=None, bias=None):
    x = x if mask is None else x * mask
    return x if bias is None else x + bias


def detached(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy())


@pytest.mark.parametrize(
    ("notation", "op", "options", "told"),
    [
        ("b s -> b", softmax, {}, r"the notation has no meaning: s is not in every result.*\n  b s -> b\n    \^$"),
        ("b s -> b s", softmax, {}, r"when s is cut in 3 \+ 2, result 0 is 0\.\d+ at \[0, 0\], of the whole op 0\.\d+"),
        ("b s+ -> b", running_sum, {}, r"when b is cut in 2 \+ 1, result 0 is .* Mark a letter \^"),
        ("b k+ -> b", clipped_sum, {}, r"when k is cut in 3 \+ 2, result 0 is .* of large numbers\. Mark"),
        ("b s -> b s", running_sum, {}, "result 0 has 1 dims, .*, and the notation 'b s'"),
        ("b h, h -> b h", wrong_gradient, {}, r"when b is cut in 2 \+ 1, gradient of operand 1 is"),
        ("b h, h -> b h", half_precision, {}, r"It computes in float32 inside.*write x\.to\(torch\.promote_types"),
        ("b, b -> b", twice, {}, r"has 2 operands, and ss_test_register.twice.default takes 1: ss"),
        ("b -> b, b", twice, {}, r"fails as ss_test_register::twice\(Tensor x\) -> \(Tensor, Tensor\): "),
        ("b s, b s -> b s", running_unless_masked, {}, r"when b is cut.*\(checked on shapes \(3, 5\); check"),
        ("b l e^, b s<=l e^, b s v -> b l v", attended, {}, r"when l is cut in \d \+ \d, result 0 is"),
        ("b -> b", noise, {}, "gives two results for the same operands"),
        ("b -> b", in_place, {}, "changes its operands"),
        ("b -> b", logarithm, {}, r"gives nan.*example="),
        ("b -> b", scaled, {}, r"cannot be checked without its 'n' \(int\); give example=\{'n': VALUE\}"),
        (
            "i, v^ h -> i h",
            lookup,
            {},
            r"fails as .*: tensors used as indices must.* on shapes \(3,\), \(5, 6\)",
        ),
        ("b (g c^) -> b (g c)", norm_of_groups, {"sizes": {"g": 2}, "example": {"groups": 2}}, "when g is cut in 1"),
        ("b -> b", nn.ReLU(), {}, r"ReLU\(\) is neither a function with a name nor a torch operator"),
        ("b -> b", lambda x: x, {}, "is neither a function with a name"),
        ("b, b -> b", torch.ops.aten.mul, {}, r"aten.mul has \d+ overloads; register one: aten.mul.Tensor"),
        ("b -> b", torch.ops.aten.relu_.default, {}, "changes its operands; register an op that returns new tensors"),
        ("b -> b", torch.library.custom_op("superscaler_tests::detached", detached, mutates_args=()), {}, "autograd"),
    ],
)
def test_what_cannot_be_believed_is_refused(notation: str, op: object, options: dict, told: str) -> None:
    before = dict(REGISTERED)
    with pytest.raises(InputError, match=told) as error:
        ss.register(notation, op, **options)
    assert "test_register.py:" in str(error.value)
    assert before == REGISTERED


@pytest.mark.parametrize(
    ("notation", "op", "options"),
    [
        ("b s^ -> b s", softmax, {}),
        ("b^ s+ -> b", running_sum, {}),
        ("b.. -> b..", twice, {}),
        ("b, b -> b", torch.ops.aten.mul.Tensor, {}),
        ("b -> b", logarithm, {"example": lambda size: {"x": torch.rand(size["b"], dtype=torch.float64)}}),
        ("b -> b", scaled, {"example": {"n": 3}}),
        ("i, v^ h -> i h", lookup, {"example": lambda size: {"ids": torch.randint(size["v"], (size["i"],))}}),
        ("b (g^ c^) -> b (g c)", norm_of_groups, {"sizes": {"g": 2}, "example": {"groups": 2}}),
        ("b (h d), d -> b (h d)", rotate, {}),
        ("b s, s, b s -> b s", shifted, {}),
        ("b l e^, b s<=l e^, b s v -> b l v", attended_so_far, {}),
        ("b -> b", noise, {"check": False}),
    ],
)
def test_what_is_true_is_registered(notation: str, op: object, options: dict) -> None:
    before = dict(REGISTERED)
    try:
        ss.register(notation, op, **options)
        assert any(rule.notation == notation for target, rule in REGISTERED.items() if before.get(target) != rule)
    finally:
        REGISTERED.clear()
        REGISTERED.update(before)


class Calls(nn.Module):
    """Calls a function on its input and its weight."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight).square().mean()


def mixed_where(condition, x):
    """Return x, in which all rows are read where a condition holds: no `b` is an index of it then."""
    return x - x.mean(0) if bool(condition) else x * 1.0


class Averaged(torch.autograd.Function):
    """Its gradient is that of all rows together in some dtype or batch."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g.mean(0, keepdim=True).expand_as(g) if g.dtype == torch.float32 or len(g) > 100 else g


# Each is what its notation says on a few random numbers of some sizes.
WRONG = {
    "where a value is 0": lambda x: torch.where((x == 0).any(0, keepdim=True), x - x.sum(0, keepdim=True), x),
    "where all are whole": lambda x: mixed_where((x == x.round()).all(), x),
    "of equal numbers": lambda x: x * (x.unique().numel() == x.numel()),
    "of large numbers": lambda x: mixed_where(x.abs().max() > 1e3, x),
    "of huge numbers": lambda x: mixed_where(x.abs().max() > 1e7, x),
    "of tiny numbers": lambda x: mixed_where(x.abs().max() < 1e-6, x),
    "at size 1": lambda x: mixed_where(x.shape[1] == 1, x),
    "above a size": lambda x: mixed_where(x.shape[0] > 16, x),
    "at size 7": lambda x: mixed_where(x.shape[0] == 7, x),
    "at size 8": lambda x: mixed_where(x.shape[0] == 8, x),
    "at multiples of 16": lambda x: mixed_where(x.shape[1] % 16 == 0, x),
    "above a size of what is whole": lambda x: mixed_where(x.shape[1] > 150, x),
    "above a large size": lambda x: mixed_where(x.shape[0] > 128, x),
    "at odd sizes": lambda x: mixed_where(x.shape[0] % 2, x),
    "in float32": lambda x: mixed_where(x.dtype == torch.float32, x),
    "backward": Averaged.apply,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_of_some_numbers_and_sizes_only_is_refused(wrong: str) -> None:
    def rows(x):
        return WRONG[wrong](x)

    with pytest.raises(InputError, match="is not what its notation says: when b is cut in"):
        ss.register("b h^ -> b h", rows)


def cumulated(x, mask):
    return (x * mask).cumsum(0)


def looked_up(ids, weight):
    """Looks rows up by the sum of the ids before, if any is not 0."""
    return weight[ids.cumsum(0) % len(weight)]


def filled(x, mask):
    return x.masked_fill(mask.flip(0), 0.0)


@pytest.mark.parametrize(
    ("notation", "op", "example"),
    [
        ("i, v^ h -> i h", looked_up, lambda size: {"ids": torch.zeros(size["i"], dtype=torch.long)}),
        ("b, b -> b", filled, lambda size: {"mask": torch.zeros(size["b"], dtype=torch.bool)}),
        ("b, b -> b", filled, lambda size: {"mask": torch.ones(size["b"], dtype=torch.bool)}),
        ("b, b -> b", cumulated, lambda size: dict.fromkeys(("x", "mask"), torch.zeros(size["b"]))),
    ],
)
def test_examples_of_one_value_hide_nothing(notation: str, op: Any, example: Any) -> None:
    with pytest.raises(InputError, match=r"is not what its notation says: when \w is cut in"):
        ss.register(notation, op, example=example)


def picky(ids, weight):
    if bool(ids.any()):
        raise ValueError("ids must be 0")
    return weight[ids]


def test_an_example_of_one_value_is_refused_where_others_fail() -> None:
    example = {"example": lambda size: {"ids": torch.zeros(size["i"], dtype=torch.long)}}
    with pytest.raises(
        InputError, match=r"the example of 'ids' for \S+ is 0 everywhere, which shows nothing .* several va"
    ):
        ss.register("i, v^ h -> i h", picky, **example)
    assert ss.register("i, v^ h -> i h", lookup_rows, **example)


def lookup_rows(ids, weight):
    return weight[ids]


def at_twelve(x):
    return mixed_where(len(x) == 12, x)


def when_large(x):
    return mixed_where(x.shape[0] > 90 and x.shape[1] > 90, x)


@pytest.mark.parametrize(
    ("op", "shape", "is_right"),
    [
        (at_twelve, (12, 8), False),
        (at_twelve, (48, 8), False),
        (at_twelve, (10, 8), True),
        (when_large, (96, 96), False),
    ],
)
def test_sizes_of_a_call_and_of_its_parts_are_checked(op: Any, shape: tuple[int, int], is_right: bool) -> None:
    """What no sample of the registration reached."""
    called = ss.register("b h -> b h", op)
    module = Calls(lambda x, w: called(x) * w, shape[1])
    if is_right:
        assert capture(module, (torch.randn(shape),)).model.ops
    else:
        with pytest.raises(CaptureError, match="when b is cut in"):
            capture(module, (torch.randn(shape),))


def rolled(x, steps: int = 0):
    return x.roll(steps, 0)


def averaged_above(x, most: int):
    return mixed_where(len(x) > most, x)


def test_a_call_is_checked_with_its_own_values_and_sizes() -> None:
    roll = ss.register("b h -> b h", rolled)
    assert capture(Calls(lambda x, w: roll(x) * w, 8), (torch.randn(2, 8),)).model.ops
    with pytest.raises(CaptureError, match=r"test_register.py:\d+ calls it with \{'steps': 1\}: .* when b is cut in"):
        capture(Calls(lambda x, w: roll(x, 1) * w, 8), (torch.randn(2, 8),))
    average = ss.register("b h -> b h", averaged_above, example={"most": 400})
    module = Calls(lambda x, w: average(x, 400) * w, 8)
    assert capture(module, (torch.randn(400, 8),)).model.ops
    with pytest.raises(CaptureError, match="when b is cut in 201"):
        capture(module, (torch.randn(401, 8),))


def test_a_call_that_the_notation_does_not_fit_is_an_error_of_capture() -> None:
    @ss.register("b h, h -> b h")
    def product(x, weight):
        return x * weight

    for shape, weight, told in (
        ((2, 3, 8), (8,), r"operand 0 has 3 dims, \(2, 3, 8\), and the notation 'b h'"),
        ((2, 8), (1,), r"h is 8 in operand 0 and 1 in operand 1, \(1,\).*expanded before the call"),
    ):
        with pytest.raises(CaptureError, match=told) as error:
            capture(Calls(product, *weight), (torch.randn(shape),))
        line = Calls.forward.__code__.co_firstlineno + 1
        assert f"test_register.py:{line} calls ss_test_register.product.default" in str(error.value)
    assert capture(Calls(product, 8), (torch.randn(2, 8),)).model.ops


def test_operands_that_a_call_leaves_out_are_not_mistaken_for_others() -> None:
    add = ss.register("b s, s^, b s -> b s")(shifted)
    module = Calls(lambda x, w: add(x, None, w), 3, 3)
    op = capture(module, (torch.randn(3, 3),)).model.ops[0]
    assert op.inputs[1].slots == op.inputs[0].slots == (0, 1)
    assert [i.mark for i in op.indices] == ["spatial", "frozen"]


def test_a_captured_graph_keeps_an_operator_that_is_registered_again() -> None:
    """As by a forward that registers whenever it runs. torch would call what is there no more."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ss.register("b h -> b h", twice, check=False)(x).sum()

    captured = ss.capture(Model(), (torch.ones(4, 4),), optimizer=None).captured
    before = _DEFINED["ss_test_register.twice.default"][1]
    assert Model()(torch.ones(4, 4)) == 32
    assert _DEFINED["ss_test_register.twice.default"][1] is before
    assert captured.exported.module()(torch.ones(4, 4)) == (32,)


def test_registering_again_replaces_and_another_file_does_not(tmp_path: Path) -> None:
    text = "import superscaler as ss\n\n@ss.register('b -> b')\ndef again(x):\n    return x * {}\n"
    first, second = tmp_path / "one" / "fresh.py", tmp_path / "two" / "fresh.py"
    for file in (first, second):
        file.parent.mkdir()
        file.write_text(text.format(2))
    assert load_file(first).again(torch.ones(1)) == 2
    first.write_text(text.format(" 3"))
    assert load_file(first).again(torch.ones(1)) == 3
    with pytest.raises(InputError, match=re.escape(f"the name again is taken by {first}:3")):
        load_file(second)


def test_the_message_in_the_documentation(tmp_path: Path) -> None:
    file = tmp_path / "ops.py"
    file.write_text(
        "import superscaler as ss\n\n\n@ss.register('b s -> b s')\ndef softmax(x):\n    return x.softmax(-1)\n"
    )
    with pytest.raises(InputError) as error:
        load_file(file)
    page = " ".join((Path(__file__).parents[2] / "docs" / "ops.md").read_text().split())
    assert str(error.value).removeprefix(f"{tmp_path}/") in page
