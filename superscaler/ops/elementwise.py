"""Operators on elements beside torch's pointwise ones, and operators that draw or count elements."""

from collections.abc import Callable

from superscaler.ops.call import Local, Site
from superscaler.ops.row import (
    call,
    each,
    elementwise,
    first,
    method,
    of_result,
    plain,
    row,
    to_shape,
    together,
)


def _infix(symbol: str) -> Callable[[Local], str]:
    return lambda x: plain(x) if x.op.kwargs else f" {symbol} ".join(x.literal(a) for a in x.op.args[:2])


def _to_copy(x: Local) -> str:
    """Return the source of a cast; a cast to the same dtype copies, as it would else be a view."""
    is_cast = x.tensors[x.op.inputs[0].tensor].dtype != x.tensors[x.op.outputs[0].tensor].dtype
    return f"{x.names[0]}.to({x.dtype})" if is_cast else f"{x.names[0]}.clone()"


def _histogram(site: Site) -> str | None:
    """Sum the counts of parts, if the ends of the bins are given."""
    low, high = site.argument(2, "min", 0), site.argument(3, "max", 0)
    return "d..+ -> _" if low < high else None


ROWS = {
    **row("add.Tensor", text=_infix("+"), linear=together(2)),
    **row("sub.Tensor", text=_infix("-"), linear=together(2)),
    **row("mul.Tensor", text=_infix("*"), linear=each),
    **row("div.Tensor", text=_infix("/"), linear=first),
    **row("neg", text=call("torch.neg"), linear=first),
    **row("clone", text=method("clone"), linear=first),
    **row("pow.Tensor_Scalar", text=call("torch.pow")),
    **row("tanh rsqrt exp log sigmoid cos sin abs sqrt relu",
          text=lambda x: f"torch.{x.op.target.split('.')[1]}({x.arguments})"),
    **row("silu", text=call("F.silu")),
    **row("gelu", text=call("F.gelu")),
    **row("_to_copy", elementwise, text=_to_copy,
          linear=lambda op: first(op) if "float" in str(dict(op.kwargs).get("dtype")) else ()),
    **row("detach", elementwise, text=method("detach"), is_view=True, stops=True),
    **row("expand", elementwise, text=to_shape("expand"), linear=first, is_view=True),
    **row("_prelu_kernel hardswish log_sigmoid fill.Scalar fill.Tensor rsub.Tensor rsub.Scalar isclose", elementwise),
    **row("__and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar", elementwise),
    **row("relu6 floor_divide floor_divide.Scalar masked_fill.Tensor", elementwise),
    **row("where.ScalarOther where.ScalarSelf where.Scalar", elementwise),
    **row("bucketize.Tensor", "d.., n^ -> d.."),
    **row("ss.identity", text=lambda x: x.names[0], is_view=True),
    **row("ss.dropout", elementwise, random=of_result, rate=1,
          text=lambda x: f"functional.dropout({x.arguments}, {x.random})"),
    **row("ss.uniform ss.normal", " -> d..", random=of_result,
          text=lambda x: f"functional.{x.op.target.removeprefix('ss.')}({x.random}, {x.dtype})"),
    **row("ss.histc", _histogram, text=call("functional.histc")),
}  # fmt: skip
