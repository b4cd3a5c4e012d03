"""Models as text, one line a tensor and one an op, and back: for reviews, golden files and caches."""

import ast
import json
import re
from dataclasses import MISSING, fields
from typing import Any

from superscaler.errors import InputError
from superscaler.ir.model import Factor, Model, Op, Operand, Optimizer, PTensor
from superscaler.ir.op import MARKS, Asked, Index, Ref

_MARK_OF = {shown: mark for mark, shown in MARKS.items() if shown}
_ASKED = tuple(f.name for f in fields(Asked))
# The fields of an op that are printed where they are not as by default, those of `asked` in its place.
_DEFAULTS = {
    f.name: f.default
    for own in fields(Op)
    for f in (fields(Asked) if own.name == "asked" else (own,))
    if f.default is not MISSING and f.name != "of"
}


def print_model(model: Model) -> str:
    """Return the model as text.

    tensor h float32 (8, 32, 64) activation grad [batch=8 | input_ids.1=32 | wte.1=64]
    op linear = aten.linear.default(%0, %1) h[0 1 2], w[3 2] -> y[0 1 3] {batch=8 s=32 hidden+=64 mlp=256} {...}
    """
    head: dict[str, Any] = {
        "inputs": list(model.inputs),
        "loss": model.loss,
        "optimizer": [model.optimizer.name, [dict(g) for g in model.optimizer.groups], dict(model.optimizer.scaler)],
        "aliases": dict(model.aliases),
        "unsupported": dict(model.unsupported),
        "segments": dict(model.segments),
        "factors": {f.name: f.size for f in model.factors.values()},
    }
    head |= {"precision": model.optimizer.precision} if model.optimizer.precision else {}
    head |= {"result": model.result} if model.result else {}
    head |= {"iterations": model.iterations} if model.iterations > 1 else {}
    head |= {"shorter": dict(model.shorter)} if model.shorter else {}
    head |= {"whole": True} if model.is_whole else {}
    lines = [f"model {json.dumps(head)}"]
    lines += [print_tensor(tensor) for tensor in model.tensors.values()]
    lines += [print_op(op) for op in model.ops]
    return "\n".join(lines) + "\n"


def print_tensor(t: PTensor) -> str:
    sizes = iter(t.extents)
    dims = " | ".join(" ".join(f"{name}={next(sizes)}" for name in dim) for dim in t.slots)
    dtype = f"{t.dtype}/{t.trained_as}" if t.trained_as else t.dtype
    origin = f" = {t.origin}" if t.origin else ""
    role = "largest" if t.largest else "grad" if t.requires_grad else "-"
    return f"tensor {t.name}{origin} {dtype} {t.shape} {t.kind} {role} [{dims}]"


def print_op(op: Op) -> str:
    call = ", ".join([_argument(a) for a in op.args] + [f"{k}={_argument(v)}" for k, v in op.kwargs])
    indices = " ".join(f"{i.factor}{MARKS[i.mark]}={i.size}{_follows(i)}" for i in op.indices)
    rest = {name: own for name, default in _DEFAULTS.items() if (own := getattr(op, name)) != default}
    sides = " -> ".join(", ".join(map(_operand, side)) for side in (op.inputs, op.outputs))
    return f"op {op.name} = {op.target}({call}) : {sides} {{{indices}}} {json.dumps(rest)}"


def _follows(index: Index) -> str:
    return "@" + "/".join(map(str, index.follows)) if index.follows else ""


def _argument(value: Any) -> str:
    if isinstance(value, Ref):
        return f"Ref({value.operand})"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    return f"float({str(value)!r})" if isinstance(value, float) and value - value != 0 else repr(value)


def _operand(operand: Operand) -> str:
    return f"{operand.tensor}[{' '.join('.' if i is None else str(i) for i in operand.slots)}]"


def parse_model(text: str) -> Model:
    """Read the text of `print_model`. Raises InputError with the line that cannot be read."""
    head: dict[str, Any] = {}
    tensors: dict[str, PTensor] = {}
    ops: list[Op] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.startswith("model "):
                head = json.loads(line[6:])
            elif line.startswith("tensor "):
                tensor = parse_tensor(line)
                tensors[tensor.name] = tensor
            elif line.startswith("op "):
                ops.append(parse_op(line))
            elif line.strip():
                raise ValueError("it starts with none of the words model, tensor and op")
        except (ValueError, KeyError, SyntaxError) as error:
            raise InputError(f"line {number} of the model, {line[:120]!r}, cannot be read: {error}.") from None
    if not head:
        raise InputError("the text of a model starts with a line 'model {...}'.")
    name, groups, scaler = head["optimizer"]
    factors = {k: Factor(k, size) for k, size in head["factors"].items()}
    options = tuple(tuple((k, _frozen(v)) for k, v in g.items()) for g in groups)
    optimizer = Optimizer(name, options, tuple(scaler.items()), head.get("precision", ""))
    segments = {name: tuple(segment) for name, segment in head["segments"].items()}
    rest = optimizer, head["aliases"], head["unsupported"], segments, head.get("result", ""), head.get("iterations", 1)
    filled = head.get("shorter", {}), head.get("whole", False)
    return Model(tensors, tuple(ops), factors, tuple(head["inputs"]), head["loss"], *rest, *filled)


_TENSOR = re.compile(r"^tensor (\S+)(?: = (\S+))? (\w+)/?(\w*) (\(.*?\)) (\w+) (grad|largest|-) \[(.*)\]$")
_OP = re.compile(r"^op (\S+) = ([\w.]+)\((.*)\) : (.*?) -> (.*?) \{(.*?)\} (\{.*\})$")


def parse_tensor(line: str) -> PTensor:
    found = _TENSOR.match(line)
    if found is None:
        raise ValueError("not a tensor")
    name, origin, dtype, trained_as, shape, kind, role, dims = found.groups()
    slots = [[s.rpartition("=") for s in dim.split()] for dim in dims.split("|")] if ast.literal_eval(shape) else []
    names = tuple(tuple(s[0] for s in dim) for dim in slots)
    extents = tuple(int(s[2]) for dim in slots for s in dim)
    given = name, ast.literal_eval(shape), dtype, kind, names, extents, role == "grad", trained_as, origin or ""
    return PTensor(*given, role == "largest")  # type: ignore[arg-type]


def parse_op(line: str) -> Op:
    found = _OP.match(line)
    if found is None:
        raise ValueError("not an op")
    name, target, call, inputs, outputs, indices, rest = found.groups()
    args, kwargs = _parse_call(call)
    made = []
    for text in indices.split():
        factor, _, size = text.rpartition("=")
        size, _, follows = size.partition("@")
        first: Any = tuple(map(int, follows.split("/"))) if follows else None
        made.append(Index(int(size), factor.rstrip("+^"), _MARK_OF.get(factor[-1], "spatial"), first))
    sides = [tuple(_parse_operand(o) for o in side.split(", ") if o) for side in (inputs, outputs)]
    options = {key: _frozen(value) for key, value in json.loads(rest).items()}
    asked = Asked(**{key: options.pop(key) for key in _ASKED if key in options})
    return Op(name, target, args, kwargs, sides[0], sides[1], tuple(made), asked=asked, **options)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _parse_operand(text: str) -> Operand:
    tensor, _, slots = text.rstrip("]").partition("[")
    return Operand(tensor, tuple(None if s == "." else int(s) for s in slots.split()))


def _parse_call(text: str) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return tuple(map(_value, call.args)), tuple((k.arg or "", _value(k.value)) for k in call.keywords)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        inner = ast.literal_eval(node.args[0])
        return Ref(inner) if node.func.id == "Ref" else float(inner)
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(e) for e in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)
