"""The state of a step in a user's module and optimizer, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superscaler.runtime.step import Step
from superscaler.store.pieces import Ranges, elements, index_of, located, owners, sizes
from superscaler.store.restore import set_states
from superscaler.store.save import snapshot
from superscaler.store.tensors import named


def put(
    step: Step, module: nn.Module, optimizer: torch.optim.Optimizer, is_put: Callable[[Mapping[str, Any]], bool]
) -> None:
    """Write the weights of a step, and the optimizer's states, into the user's own on each rank; all ranks call this.

    `module`: with the names of the capture. `is_put`: of the entry of a weight of this rank.
    """
    tensors, entries = snapshot(step, [pair for pair in owners(step.plan)[step.rank] if is_put(pair[0])], {})
    theirs = by_name(module)
    for source, (found, forms) in enumerate(_from_all(entries, tensors)):
        pieces = {key: _sent(step, tensors.get(key), source, *form) for key, form in forms.items()}
        for name, entry in found.items():
            if (mine := theirs.get(name)) is None:
                # An older version of a weight, or a constant of the capture.
                continue
            numbers = ({} if entry["steps"] is None else {"step": entry["steps"]}) | entry.get("numbers", {})
            states = optimizer.state[mine] if numbers or entry["states"] else {}
            states |= {key: torch.tensor(x, dtype=torch.float32) for key, x in numbers.items()}
            for piece in entry["pieces"]:
                write(mine.data, piece["ranges"], pieces[piece["key"]])
                for state in entry["states"]:
                    value = pieces[f"{piece['key']}/{state}"]
                    whole = states.setdefault(state, torch.zeros_like(mine, dtype=value.dtype))
                    write(whole, piece["ranges"], value)


def take(step: Step, module: nn.Module, optimizer: torch.optim.Optimizer, has_weights: bool = False) -> None:
    """Set the states of a step's optimizer to its pieces of the user's, and its weights to the module's if they
    differ.
    """
    theirs, states = by_name(module), dict[str, dict[str, Any]]()
    # Weights that this plan does not read may be trained by another one.
    step.fixed |= {name: theirs[name].detach().cpu().clone() for name in step.fixed if name in theirs}
    for entry in step.state.tables["weights"]:
        weight, (name, ranges) = step.state.weights[entry["name"]], located_in(step, entry)
        if name not in theirs:
            continue
        whole = theirs[name]
        if not has_weights:
            weight.data.copy_(part(whole.detach(), ranges).reshape(weight.shape))
        if entry["trained"]:
            kept = {key: x for key, x in optimizer.state.get(whole, {}).items() if isinstance(x, Tensor)}
            states[entry["name"]] = {
                key: part(x, ranges).reshape(weight.shape) if x.shape == whole.shape and key != "step" else x
                for key, x in kept.items()
            }
    set_states(step, states)


def located_in(step: Step, entry: Mapping[str, Any]) -> tuple[str, Ranges]:
    """Return the user's tensor of a weight, and the weight's piece of it; an older version of a weight has no name."""
    return located(step.plan, entry) if entry["tensor"] in step.plan["tensors"] else ("", [])


def by_name(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by all their names."""
    return {name: tensor for names, tensor in named(module) for name in names}


def _from_all(entries: dict[str, Any], tensors: dict[str, Tensor]) -> list[Any]:
    """Return, for each rank, the entries of its pieces, and the shape and dtype of each of their tensors."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (entries, {key: (tuple(x.shape), x.dtype) for key, x in tensors.items()}))
    return found


def _sent(step: Step, x: Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of a rank on the CPU of all ranks."""
    communicator = step.state.communicator
    given = x.to(communicator.device) if x is not None and step.rank == source else None
    ranks = tuple(range(step.world))
    return communicator.broadcast(given, source, ranks, shape, dtype).wait().cpu()


def write(whole: Tensor, ranges: Ranges, piece: Tensor) -> None:
    """Set a piece of a tensor."""
    whole[index_of(map(elements, ranges))] = piece.reshape(sizes(ranges)).to(whole)


def part(whole: Tensor, ranges: Ranges) -> Tensor:
    """Return a copy of a piece of a tensor."""
    return whole[index_of(map(elements, ranges))]
