"""`superscaler checkpoint`: the contents of a checkpoint, and its import and export."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from superscaler.cli.options.command import command
from superscaler.cli.options.declare import HELP, path
from superscaler.cli.printing import Printer
from superscaler.errors import InputError, some

app = typer.Typer(
    help="Look into a checkpoint, or exchange it with other programs.", no_args_is_help=True, context_settings=HELP
)

Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of them: its last.")]
Out = Annotated[Path, path("--out", "DIR", "Folder to write; it must be empty or not there.", "folder")]


@command
def inspect(printer: Printer, checkpoint: Checkpoint) -> None:
    """Print the contents of a checkpoint, after a check of its shards."""
    from superscaler.store.convert import inspect as look

    printer.result = found = look(checkpoint)
    printer.show(_contents(found))


def _contents(found: Any) -> str:
    tensors, shards, trained = found["tensors"], found["shards"], found["training"] or {}
    optimizer = found["optimizer"]
    states = sorted({state for tensor in tensors.values() for state in tensor["states"]})
    count = f"{len(shards)} shard{'s' * (len(shards) > 1)}"
    lines = [
        f"{found['path']}: step {found['step']}, {len(tensors)} tensors in {count} of "
        f"{sum(shard['bytes'] for shard in shards.values()):,} bytes, all as they were saved",
        f"model {trained.get('model') or 'not recorded'}; saved by {found['world'] or 'no'} devices",
        f"optimizer {optimizer['name']}, lr {', '.join(map(str, optimizer['lr']))}; {' '.join(states) or 'no state'}"
        if optimizer
        else "weights only",
    ]
    for name, tensor in tensors.items():
        lines.append(f"  {name} {tensor['dtype']} {list(tensor['shape'])}, pieces: {tensor['pieces']}")
    return "\n".join([*lines, *(f"  {alias} is {kept}" for alias, kept in found["aliases"].items())])


@command
def export_(
    printer: Printer,
    checkpoint: Checkpoint,
    out: Out,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The trained model; default: the model of the library in the checkpoint."),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averages of weights that --ema of train made.")] = False,
    form: Annotated[
        str, typer.Option("--format", help="safetensors (as Hugging Face's), or distributed.")
    ] = "safetensors",
) -> None:
    """Write model.safetensors by the model's own names, and its config.json if it is Hugging Face's."""
    from superscaler.models import build
    from superscaler.store.convert import export
    from superscaler.store.tensors import WHOLE_FILE

    def trained() -> Any:
        # Weights need memory, also if they were captured without.
        return build((model or _trained(checkpoint)).replace("device=meta", "device=cpu")).module

    files = export(checkpoint, out, form, trained, ema)
    printer.show(f"{out}: {', '.join(files)}", *(_tied(checkpoint) if files == [WHOLE_FILE] else ()))
    printer.result = {"out": str(out), "files": files}


def _tied(checkpoint: Path) -> Iterator[str]:
    """Yield a line for each tied weight, which an exported file has under one of its names only."""
    from superscaler.store.tensors import open_checkpoint

    for alias, kept in open_checkpoint(checkpoint).head["aliases"].items():
        yield f"{alias} is left out, as it is {kept}: load it with module.load_state_dict(..., strict=False)"


def _trained(checkpoint: Path) -> str:
    """Return the spec of the library's model that a checkpoint was trained with. Raises InputError for a model of a
    user's file, which is run only if `--model` names it.
    """
    from superscaler.store.tensors import open_checkpoint

    name, is_named = open_checkpoint(checkpoint).model
    if not is_named:
        known = f" {name}; a file of yours is run only where you name it" if name else " MODEL"
        raise InputError(f"{checkpoint}: name the model to export with --model{known}.")
    return name


@command
def import_(
    printer: Printer,
    source: Annotated[
        Path, typer.Argument(metavar="PATH", help="A safetensors file, or a folder of them, or of distributed ones.")
    ],
    out: Out,
    trust: Annotated[
        bool, typer.Option("--trust", help="Read torch.distributed.checkpoint, whose pickle can run any code.")
    ] = False,
) -> None:
    """Write weights of another program as a checkpoint, for --resume and --weights."""
    from superscaler.store.convert import import_weights

    made, found = import_weights(source, out, trust)
    states = sorted({state for own in found.states.values() for state in own})
    optimizer = f", with the optimizer's {', '.join(states)} of {len(found.states)}" if states else ""
    left_out = [f"left out, as no tensor of the model: {some(found.left_out)}"] if found.left_out else []
    printer.show(f"imported as {made}: {len(found.tensors)} tensors{optimizer}", *left_out)
    counts = {"tensors": len(found.tensors), "states": states, "left_out": list(found.left_out)}
    printer.result = {"checkpoint": str(made), **counts}


app.command("inspect")(inspect)
app.command("export")(export_)
app.command("import")(import_)
