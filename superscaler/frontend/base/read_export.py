"""The reading of an exported program into a trace, and what an exported graph must not have."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from superscaler.errors import CaptureError, a
from superscaler.frontend.base.checkpoints import mark_of
from superscaler.frontend.base.trace import Trace, filled, source_of
from superscaler.ir.model import TensorKind


def read(exported: ExportedProgram, canonical: Mapping[str, str], kept: Sequence[str] = ()) -> Trace:
    """Return the graph of a program. `canonical`: kept names of parameters; `kept`: names of outputs but the loss."""
    _refuse_mutation(exported)
    trace = Trace(deepcopy(exported.graph))
    _read_leaves(trace, exported, canonical)
    for node in trace.calls():
        _read_call(trace, node)
    outs = exported.graph_signature.output_specs
    trace.kept = list(kept)
    trace.writes = [str(spec.target) for spec in outs if spec.kind is OutputKind.BUFFER_MUTATION]
    return trace


def _read_leaves(trace: Trace, exported: ExportedProgram, canonical: Mapping[str, str]) -> None:
    known: dict[str, Node] = {}
    leaves = trace.graph.find_nodes(op="placeholder")
    for spec, node in zip(exported.graph_signature.input_specs, leaves, strict=True):
        # A copied graph renames nodes that have the name of a Python builtin, as an input `float`.
        target, is_input = spec.target or spec.arg.name, spec.kind is InputKind.USER_INPUT
        name = canonical.get(target, target)
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        if name in known and is_input:
            where = "".join(f"{source_of(reader)} reads " for reader in list(node.users)[:1])
            raise CaptureError(
                f"{where}the input {name}, which has the name of {a(known[name].meta['kind'])} of the model; "
                "rename one of them."
            )
        if name in known:
            trace.replace(node, known[name])
            continue
        known[name] = filled(node, name, {"kind": _KINDS[spec.kind]}, node.meta["val"])
        stored = exported.state_dict.get(target, exported.constants.get(target))
        node.meta["is_state"] = spec.kind is InputKind.BUFFER and bool(spec.persistent)
        if not is_input and isinstance(stored, Tensor) and not stored.is_meta:
            node.meta["value"] = stored.detach()
    trace.taken.update(known)


def _read_call(trace: Trace, node: Node) -> None:
    _refuse_unknown(node)
    value, parts = node.meta.get("val"), list(node.users)
    if "_assert" in str(node.target) or value is None:
        trace.graph.erase_node(node)
        return
    meta = {"module": _module(node), "source": source_of(node), "region": mark_of(node)}
    results = trace.name_call(node, node.name, meta, value)
    for part in parts if isinstance(value, list | tuple) else ():
        part.replace_all_uses_with(results[part.args[1]])  # type: ignore[index]
        trace.graph.erase_node(part)


def _refuse_unknown(node: Node) -> None:
    value = node.meta.get("val")
    values = [v for v in (value if isinstance(value, list | tuple) else [value]) if v is not None]
    where, runs = source_of(node) or "the model", f"runs {node.target}"
    if not isinstance(node.target, torch._ops.OpOverload):
        raise CaptureError(
            f"{where} {runs}, which chooses at run time what is computed; compute both branches and select with "
            "torch.where, and write loops in Python."
        )
    if not all(isinstance(v, Tensor) for v in values):
        raise CaptureError(
            f"{where} {runs}, which takes a Python number out of a tensor; keep it a tensor (without .item(), "
            ".tolist() or float(), and with table[k[None]] in place of table[k]), or take it out of the model."
        )
    if any(isinstance(size, torch.SymInt) for v in values for size in v.shape):
        name = node.target.overloadpacket.__name__
        raise CaptureError(
            f"{where} {_PICKING.get(name, runs)}, whose result has as many elements as the data says; keep a fixed "
            "shape: use torch.where(mask, x, 0), give a mean its weights, as (x * mask).sum() / mask.sum(), and "
            "cross_entropy labels of -100."
        )
    if any(v.layout is not torch.strided for v in values):
        raise CaptureError(f"{where} {runs}, whose result is sparse; use dense tensors.")


# Operators whose results have as many elements as the data says -> what the user's line does.
_PICKING = {
    "index": "picks elements by a mask or by the result of torch.nonzero, as x[mask] does",
    "masked_select": "picks elements by a mask (torch.masked_select)",
    "nonzero": "asks where elements are not 0 (torch.nonzero, torch.where(mask), or x[mask])",
    "_unique2": "asks for the different elements (torch.unique)",
}
_KINDS: dict[InputKind, TensorKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def _refuse_mutation(exported: ExportedProgram) -> None:
    signature = exported.graph_signature
    changed = {**signature.user_inputs_to_mutate, **getattr(signature, "parameters_to_mutate", {})}
    if changed:
        node = next(node for node in exported.graph.nodes if node.name in changed)
        where = next(filter(None, map(source_of, (node, *node.all_input_nodes))), "the model")
        raise CaptureError(
            f"{where} changes {len(changed)} parameters or inputs in place: {', '.join(changed.values())}; "
            "change a clone of an input, and leave parameters to the optimizer."
        )


def _module(node: Node) -> str:
    """Return the path of the innermost module, without the suffix `@n` of repeated calls."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]).split("@")[0] if stack else ""
