"""The training loop of one rank, which the `run.py` of a plan directory calls under torchrun."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.optim.lr_scheduler import LRScheduler

from superscaler.errors import InputError, a
from superscaler.launch.process import run_rank
from superscaler.replaced import own_numbers
from superscaler.runtime.load import load
from superscaler.runtime.metrics import Known
from superscaler.runtime.profile import Profile
from superscaler.runtime.shapes.forms import Form
from superscaler.runtime.step import Step
from superscaler.specs.user_file import from_file, is_function
from superscaler.store.plan_head import MODEL_FILE
from superscaler.train import resume
from superscaler.train.data import Batch, TextBatches, drawn_among, synthetic_batch
from superscaler.train.feed import feed, fitting
from superscaler.train.log import Reporter, logs_of
from superscaler.train.options import RankOptions, check_options, check_profile, parse
from superscaler.train.schedule import advance, schedule_of


def main(argv: Sequence[str] | None = None, *, load: Callable[..., Step] = load) -> None:
    """Train the plan in the directory of the options (default: where this program is), as this whole process."""
    given, options = parse(argv)
    directory = given or Path(sys.argv[0]).resolve().parent
    run_rank(lambda: train_rank(options, directory, load), log=options.launched)


def train_rank(options: RankOptions, directory: Path, load: Callable[..., Step]) -> None:
    """Train on this rank; rank 0 reports."""
    check_options(options)
    check_profile(options)
    times = [time.time()]
    folder = resume.saving_folder(options.save, options.resume)
    with ExitStack() as stack:
        asked = stack.enter_context(resume.stop_requests(options.launched)) if folder else None
        step = _loaded(directory, options, load)
        if folder is not None:
            options = resume.continued(step, options, folder)
        resume.check_saving(options, folder)
        start, seed = resume.start_of(step, options)
        check_profile(options, start)
        batches, evaluate = choose_batches(step, options.data, seed), evaluation_of(step, options.eval)
        schedule = _schedule(step, options, start)
        saves = resume.Saves(step, options, folder, seed, asked) if folder and asked else None
        profile = Profile(step, options.profile, options.run) if options.profile and options.run else None
        reporter = None
        times.append(time.time())
        if step.rank == 0:
            reporter = Reporter(options.steps, logs_of(options, start, folder))
            stack.callback(reporter.close)
        turns = _turns(step, start, options.steps)
        for number in turns:
            several = [batches(turn) for turn in range(number, number + turns.step)]
            given = several if step.iterations > 1 else several[0]
            with nullcontext() if profile is None else profile.of_step():
                loss = step(given, clip=options.clip, check_finite=options.check_finite)
            if reporter is not None:
                values = loss.reshape(-1).tolist()
                resume.report_times(times, options.launched)
                found = step.metrics()
                for turn, value in enumerate(values, number):
                    reporter.add(turn, value, found, step.lr)
            advance(schedule, turns.step)
            done = number + turns.step
            if saves is not None:
                saves.after(done, _is_due(done, turns.step, options.save_every, options.steps))
            if evaluate is not None and _is_due(done, turns.step, options.eval_every, options.steps):
                means = evaluate()
                if reporter is not None:
                    reporter.evaluated(done, means)
            if saves is not None and saves.stopped:
                break
        if saves is not None:
            saves.finish()
    # Not closed after an error: closing waits for the other ranks.
    step.close()
    if saves is not None and step.rank == 0:
        saves.report(start)


def _loaded(directory: Path, options: RankOptions, load: Callable[..., Step]) -> Step:
    step = load(directory, torch_compile=options.torch_compile, cuda_graph=options.cuda_graph)
    if not step.trains:
        raise InputError(f"{directory} trains nothing (inference); run it as step = ss.load(...); step(batch).")
    if options.launched is not None:
        known = Known(options.flops, options.peak_flops, options.peak_bytes)
        base = step.form
        step.known = lambda form: known if form is base else _at_a_shape(known, form)
    if options.ema is not None:
        step.ema = options.ema
    if step.watch is not None:
        step.watch.log = options.launched
    return step


def _at_a_shape(known: Known, form: Form) -> Known:
    """Return the facts about a step of another shape, whose memory is that of the largest."""
    # Most steps have one shape: ranks start without the simulator.
    from superscaler.ir.text.model import parse_model
    from superscaler.simulate.segments import model_flops

    assert form.directory is not None
    flops = model_flops(parse_model((form.directory / MODEL_FILE).read_text()))
    return replace(known, flops=sum(flops.values()) / form.plan["world"])


def _schedule(step: Step, options: RankOptions, start: int) -> LRScheduler | None:
    """Return the schedule of the options at the first step; it follows from the plan's rates and the step's number."""
    if options.schedule is None and not options.warmup:
        return None
    rates = [group["lr"] for group in step.plan["optimizer"]["groups"]]
    step.groups.set([{"lr": rate, "initial_lr": rate} for rate in rates])
    found = schedule_of(step.optimizer, options.schedule, options.warmup, options.steps)
    advance(found, start)
    return found


def _is_due(done: int, several: int, every: int | None, steps: int) -> bool:
    """Return whether a periodic action is due after so many steps; `several` of them run together."""
    return done == steps or (every is not None and done % every < min(several, every))


def evaluation_of(step: Step, spec: Path | None) -> Callable[[], dict[str, float]] | None:
    """Return the evaluator of the batches of `FILE.py:function`, which returns batches, or (batches, metrics)."""
    if spec is None:
        return None
    make = from_file(str(spec), "evaluation", may_yield=True, is_new=False)

    # A resumed run does not repeat it: later batches draw what they would without it.
    @own_numbers()
    def evaluate() -> dict[str, float]:
        made = make()
        batches, metrics = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(batches, Iterable):
            kind = a(type(batches).__name__)
            raise InputError(f"--eval {spec} returned {kind} as batches; return an iterable, or (batches, metrics).")
        say: Callable[[str], None] = resume.say if step.rank == 0 else lambda _: None
        own = step.evaluating
        with step.averaged():
            # Metrics are of all rows.
            return step.evaluate(fitting(batches, own.choice, say, fills=not metrics), metrics)

    return evaluate


def _turns(step: Step, start: int, steps: int) -> range:
    """Return the first step of each group of steps that run together."""
    if left := (steps - start) % step.iterations:
        raise InputError(
            f"--steps {steps} leaves {steps - start} to train from step {start} on, but this plan runs "
            f"{step.iterations} at once; give --steps {steps - left + step.iterations}."
        )
    return range(start, steps, step.iterations)


def choose_batches(step: Step, data: Path | None, seed: int) -> Callable[[int], Batch]:
    """Return a function from step number to batch: text for models that read token ids, random tensors for others."""
    if data is not None and is_function(data):
        return feed(step, data, seed, resume.say)
    # Of a plan with several shapes each step draws one.
    inputs = step.choice.inputs
    ids = step.inputs.get("input_ids")
    is_text = ids is not None and len(ids[0]) == 2 and set(step.inputs) <= {"input_ids", "labels"}
    if is_text and all(len({tuple(shape) for shape, _ in one.values()}) == 1 for one in inputs):
        bound = step.bounds.get("input_ids", 256)
        sizes = [tuple(one["input_ids"][0]) for one in inputs]
        return drawn_among([TextBatches(data, rows, length, bound, seed).at for rows, length in sizes], seed)
    names = ", ".join(step.inputs)
    if data is not None:
        raise InputError(
            f"--data is text for models that read input_ids and labels of one shape, but this one reads {names}; "
            "give FILE.py:function for others."
        )
    if step.rank == 0:
        resume.say(f"data: random tensors for {names}, the same at each run with seed {seed}")
    return drawn_among([partial(synthetic_batch, one, seed=seed, bounds=step.bounds) for one in inputs], seed)
