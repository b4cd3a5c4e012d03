"""Bugs of one line put into the package, one at a time, and which tests find them.

    python benchmarks/mutations.py [NUMBER or WORD ...] [--record] [--check] [--most SECONDS]

Each row of the table replaces a text that occurs exactly once in `superscaler/` and names the test files that must
fail. Every bug is made in a temporary copy of the tree, where only these files run. Prints a line for each, and exits
with 1 if a bug is not found. A word stands for the rows that change a file with the word in its path. `--record` puts
each line, with its day, in the place of the one that `benchmarks/results/mutations.txt` has of the bug. A text that is
missing or occurs twice, a bug that is no Python, a test file that does not exist, and tests that fail without any bug
are errors, so that the table cannot rot in silence; `--check` looks for all but the last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.txt"


class Mutation(NamedTuple):
    """What is wrong, the text and the text in its place, and the test files, fast ones first."""

    bug: str
    old: str
    new: str
    tests: str


MUTATIONS: Sequence[Mutation] = [Mutation(*row) for row in (
    # The graph and the program.
    ("a common box reaches to the larger end", "(max(p, q), min(r, s))", "(max(p, q), max(r, s))",
     "schedule/test_transfers plans/test_equal"),
    ("a collective is counted on all links, not all but one", "lambda p: 2 * (p - 1),", "lambda p: 2 * p,",
     "plans/test_traffic report/test_explain"),
    ("a collective begins with a member that has not come", "if len(posts) <= post.count:",
     "if len(posts) < post.count:",
     "certify/test_interpret faults/test_single"),
    ("the receiver of a message is its sender", "return Message(rank, i.peer, i.message) if i.is_send else",
     "return Message(rank, i.peer, i.message) if i.message >= 0 else", "ir/test_meetings certify/test_interpret"),
    ("all collectives of a group are one", "turns[i.group] += 1", "turns[i.group] += 0", "ir/test_meetings"),
    ("devices are in their groups in the order of their numbers",
     "return Ends(distinct, group.reshape(-1), np.argmax(groups == devices[:, None], axis=1))",
     "return Ends(distinct, group.reshape(-1), np.argsort(np.argsort(devices)) % groups.shape[1])",
     "ir/test_meetings certify/test_interpret"),
    ("weights change while a collective reads them", "if not flight.memory.isdisjoint(content.memory):",
     "if flight.memory == {0}:", "certify/test_storage certify/test_holes faults/test_faults"),
    ("a loop runs once less", "found.append(Span(here, lag, (ends[lag] - here) // lag + 1))",
     "found.append(Span(here, lag, (ends[lag] - here) // lag))", "materialize/test_loops plans/test_schedules"),
    ("members wait for a gradient that is made of their own", "_require(made.isdisjoint(given))", "_require(True)",
     "materialize/test_joined"),
    ("groups along a part of an axis are found once code is written",
     "check_steps(self._by_ends[key][0], self.options.fold)", "pass", "certify/test_rounds"),
    ("a body is an exception", "if not likes.issuperset(", "if likes.isdisjoint(", "materialize/test_loops"),
    ("programs of all microbatches are not certified when they are compiled",
     "_certified(program) if certified else {}", "{'conservation': 0.0}",
     "materialize/test_loops"),
    ("values that are never freed are not counted", "if was <= 0 and after[name] not in",
     "if was < 0 and after[name] not in", "materialize/test_loops"),
    ("works of all microbatches are in any order", "(first[1][one] >= second[0][other]).any()", "False",
     "materialize/test_loops"),
    ("a verdict goes on to other programs", "self.checked is not None and self.checked[0] is self.program",
     "self.checked is not None", "materialize/test_loops"),
    ("turns of a loop have gaps in other places", "return is_sized and [key is None", "return is_sized or [key is None",
     "ir/test_turns"),
    ("values that only later rounds read are not compared", "return goes_on and self._status(", "return self._status(",
     "certify/test_rounds"),
    ("a round that is left out adds nothing to sums", "moved = np.arange(1, count + 1)[:, None] * steps",
     "moved = np.arange(1, count)[:, None] * steps", "certify/test_rounds"),
    ("turns of a later iteration are an order", "return replace(self, before=self.before.later(iteration), after=",
     "return Order(where=self.where, before=self.before.later(iteration), after=", "integration/test_unroll"),
    ("an iteration updates its own weights", "else (k + 1) % count", "else k % count", "integration/test_unroll"),
    ("updates take gradients in other microbatches", "not {count} <= found <= {1, count}", "not found <= {1, 2, 4}",
     "integration/test_updates"),
    ("chunks of other sizes than the queries' are seen as theirs", "and counts[0] != counts[1]", "and not counts",
     "transform/test_ring"),
    ("kernels read operands as if their rows were dense", "return x if x.stride(-1) == 1 else x.contiguous()",
     "return x", "transform/test_ring"),
    ("the dim of values is cut, which a log-sum-exp lacks", 'mark="frozen") if is_lacking',
     'mark="spatial") if is_lacking', "transform/test_ring"),
    ("attention and what reads it have one segment, blocks another", "producer.has_mirror or not is_graded", "True",
     "transform/test_ring"),
    ("copies that blocks make again are in no region around them", "self.copies or op.region or not op.is_copy",
     "self.copies or not op.is_copy", "transform/test_ring"),
    ("a nested cut is numbered by columns", "cell * width + k", "cell + k * width",
     "transform/test_cut transform/test_place property/test_random_plans"),
    ("data of all places move along an axis", "found[places[:, axis] > 0] &= other",
     "found[places[:, axis] >= 0] &= other", "property/test_spmd emit/test_steps"),
    # Seconds of kernels.
    ("a wave of tiles is not counted", "waves = ceil(batch * ceil(m / rows)", "waves = int(batch * ceil(m / rows)",
     "simulate/test_rates"),
    ("attention computes keys that are masked", "min(keys, (keys + tile) / 2) if kernel.causal else keys", "keys",
     "simulate/test_rates"),
    ("a kernel starts before its host", "max(host, late) + own", "late + own", "simulate/test_rates"),
    ("a host waits for its device", "run.host = run.host + self.launch", "run.host = run.clock",
     "simulate/test_clock"),
    ("all of a collective is hidden", "hidden = sooner(self.limit, seconds * (1 - self.last))", "hidden = seconds",
     "simulate/test_overlap"),
    ("a fitted speed is below zero", "if min(factors) >= 0:", "if factors:", "cluster/test_seconds"),
    # Rules of operators.
    ("a mean is not divided", """reduction="sum") / {x.full_size()}'""", """reduction="sum")'""", "ops/test_rules"),
    ("distances are summed in parts", '"b.. m k^, b.. n k -> b.. m n"', '"b.. m k+, b.. n k -> b.. m n"',
     "ops/test_rules"),
    ("largest elements are summed",
     'dim prod.dim_int var.correction var.dim std.dim", _reduction(1))',
     'dim prod.dim_int var.correction var.dim std.dim", _reduction(1, "+"))', "ops/test_rules"),
    ("padding is of the dim beside", "len(site.ins[0]) - 1 - k // 2",
     "len(site.ins[0]) - 2 - k // 2", "ops/test_rules"),
    ("the larger of two spans is split off", "if x.size < y.size:", "if x.size > y.size:",
     "ops/test_spans ops/test_rules"),
    ("a part of queries is not placed", "torch.arange(keys, device=like.device) <= queries",
     "torch.arange(keys, device=like.device) < queries", "runtime/test_functional ops/test_rules"),
    ("a step of concatenation is cut", 'f"(t^ {names[dim]})"', 'f"(t {names[dim]})"', "ops/test_spans"),
    ("a sum from zero on is not linear", "isinstance(a, Ref | tuple) or a == 0", "isinstance(a, Ref | tuple)",
     "integration/test_traps"),
    # Algorithms of op_trans.
    ("an uneven cut lacks its last part", "bounds = [k * size // self.parts for k in range(self.parts + 1)]",
     "bounds = [k * size // self.parts for k in range(self.parts)]", "transform/test_cut plans/test_equal"),
    ("old weights take the newest", "for of in (age, age - 1)", "for of in (age, 0)",
     "integration/test_stale transform/test_rewrite"),
    ("arguments of a decomposed loss are swapped", "steps.loss(picked, largest, total)",
     "steps.loss(total, largest, picked)", "transform/test_losses"),
    ("capacity forgets how many experts are chosen", "ceil(capacity * chosen * size / count)",
     "ceil(capacity * size / count)", "transform/test_experts"),
    ("a ring ends a step late", "is_last = step == self.parts - 1", "is_last = step == self.parts",
     "transform/test_ring"),
    ("a place beyond a mesh is taken", "if place.max() >= size:", "if place.max() > size:", "transform/test_place"),
    ("a routed gradient skips a reader", "if index is not None:\n            own", "if index:\n            own",
     "transform/test_cut verbs/test_verbs"),
    # The schedule.
    ("boxes that touch overlap", "common = np.maximum(produced.lo[rows], required.lo[row]) < np.minimum(",
     "common = np.maximum(produced.lo[rows], required.lo[row]) <= np.minimum(",
     "schedule/test_transfers integration/test_routes property/test_random_sprograms"),
    ("a weight elsewhere counts as at rest where it is read",
     "is_one and np.array_equal(self.produced.device[[s for (s,) in self.sources]], self.required.device)", "is_one",
     "schedule/test_transfers"),
    ("boxes before a neighbourhood are compared", "np.repeat(first - (np.cumsum(size) - size), size)",
     "np.repeat(0 * first - (np.cumsum(size) - size), size)", "schedule/test_joins"),
    ("work with two sources is ready twice", "least[reader] -= not met[at]", "least[reader] -= 1",
     "property/test_verdicts"),
    ("segments forget what joins them", "levels[producer.name] + (not joins))", "levels[producer.name])",
     "integration/test_segments schedule/test_transfers"),
    ("weights come a segment later", "before = bisect_left(own, at) - 1 - ahead",
     "before = bisect_left(own, at) - ahead",
     "integration/test_recompute"),
    ("replicas are not sent apart", "(_send_separately, _split, _read_others)", "(_split, _read_others)",
     "schedule/test_relaxations"),
    ("pieces of a gradient end early", "bounds = [extents[slot] * k // count for k in range(count + 1)]",
     "bounds = [extents[slot] * k // (count + 1) for k in range(count + 1)]", "plans/test_bytescheduler"),
    # Code of devices.
    ("a reduce_scatter goes to the wrong slot", "before.slot, after.slot, before.sizes",
     "before.slot, after.slot - 1, before.sizes", "materialize/test_collectives plans/test_equal"),
    ("tiles with a gap are gathered", "follows = all(a[1] == b[0] for", "follows = all(a[1] <= b[0] for",
     "materialize/test_collectives materialize/test_lowering"),
    ("slices of a reduction overlap", "lo + (hi - lo) * (at + 1) // n", "lo + (hi - lo) * (at + 2) // n",
     "materialize/test_pricing"),
    ("every slice counts in norms", "op.is_update, row in counted,", "op.is_update, True,",
     "integration/test_optimizers faults/test_single"),
    ("any number of sums are in flight", "or len(flying) > FLYING)", "or len(flying) > 9 * FLYING)",
     "materialize/test_actions"),
    ("sums of one backward wait for each other", "begun < self._works_so_far and (", "(", "materialize/test_actions"),
    ("a full bucket is closed early", "if weight(one) > room:",
     "if weight(one) >= room:", "materialize/test_buckets"),
    ("all of a group keep an addend", 'kept += group if step.kind == "chunk" else group[:1]', "kept += group",
     "materialize/test_lowering"),
    ("the last of equal prices is not taken", "if price <= min(prices) * NEARLY][-1]",
     "if price <= min(prices) * NEARLY][0]", "materialize/test_pricing materialize/test_lowering"),
    ("a last update is before a message", "if last is None or not last.updates:", "if last is None:",
     "integration/test_updates"),
    ("last updates do not meet", "i.updates and not i.is_early]",
     "i.updates and i.is_early]",
     "integration/test_updates"),
    ("what has ended of a tape is moved", "Fetch(i.task) for i in reversed(forwards[tape]) if last[i.task] >= number",
     "Fetch(i.task) for i in reversed(forwards[tape])", "property/test_random_sprograms"),
    ("recomputed blocks wait for the last reader of a result alone", '(is_entry, 0 if is_entry else position)',
     "(False, position)", "integration/test_recompute"),
    ("a loop shifts its first repetition", "later = missing if n > like else 0", "later = missing if n < like else 0",
     "materialize/test_loops"),
    ("gradients of halves travel as those before them", 'wire = options.wire(transfer, "reduce_scatter", trained=True)',
     'wire = ""', "plans/test_traffic"),
    ("a gather rounds a weight that is read in float32", "not (i.wide or content.is_gradient) and i.dtype in own",
     "True", "plans/test_gather_halves"),
    ("gradients of what is read as a half stay halves", " and (n in function.wide or n not in function.grads)", "",
     "plans/test_gather_halves"),
    ("what is gathered in halves is given in float32", "getattr(torch, rounded) if rounded else tensors[0].dtype",
     "tensors[0].dtype", "plans/test_gather_halves"),
    ("addends of a microbatch go to any", "min(own) if len(own) == 1 else (turn[n] if own else n) % parts", "n % parts",
     "plans/test_products"),
    ("places of an update are compared as they were named", "or _parts(graph, op) == _parts(graph, before)\n", "\n",
     "integration/test_unroll"),
    # Emitted code.
    ("what is no bias is added by a product", "(product.shape[-1:], product.trained.dtype)",
     "(bias.shape, bias.trained.dtype)", "emit/test_steps"),
    ("an all_to_all takes what it gives", "(way.scatter_slot, way.gather_slot) if",
     "(way.gather_slot, way.scatter_slot) if", "emit/test_execute"),
    ("an addition changes its operand", 'sign = "+=" if i.in_place else', 'sign = "+=" if i.out else',
     "emit/test_steps plans/test_equal"),
    ("an early update ends the step", 'early = ", early=True" * i.is_early', 'early = ""',
     "integration/test_updates integration/test_stale"),
    ("code that moves unevenly is a loop", "return loop if tuple(loop) == code else None", "return loop",
     "ir/test_moves"),
    ("numbers move along the first axis only", "first + sum(map(mul, steps, place))", "first + steps[0] * place[0]",
     "ir/test_moves"),
    ("an emitted loop lacks its last turn", "range({first}, {first + period * loop.count}",
     "range({first}, {first + period * (loop.count - 1)}", "emit/test_execute"),
    ("a list that is filled takes the name of what ends in the row", "at - 0.5 * (v in self.lists.filled)", "at",
     "translation/test_translation"),
    ("sums of layers are made in each microbatch", "not in self.layers or run.count > 1:", "not in self.layers:",
     "translation/test_translation"),
    ("values that code holds too long are not seen", "if self.late and not", "if not self.late and not",
     "translation/test_translation"),
    ("calls of a segment are not compared", "if wanted.terms[number] != term:", "if wanted.terms[number] is None:",
     "translation/test_translation"),
    ("entries of later microbatches are not compared", "zip(numbers[some].tolist(), turns[some].tolist(), strict=True)",
     "zip(asked.numbers[:1], asked.turns[:1], strict=True)", "translation/test_translation"),
    ("one of the entries that move evenly decides for all", "np.array([0, 1, len(numbers) - 1])", "np.array([0])",
     "translation/test_translation"),
    ("a loop over layers lacks its last turn", "self.count - (not self.tail)", "self.count - 1", "emit/test_execute"),
    ("a family has the name of a value of a microbatch", "self._whole | {_bare(v) for v in values}", "set(self._whole)",
     "emit/test_names"),
    ("a value is sent in its own shape", "is_cut = source is not None and way.view != way.local and",
     "is_cut = source is None and way.view != way.local and", "emit/test_steps plans/test_equal"),
    # The runtime.
    ("small gradients are clipped", "(limit / (norm + 1e-6)).clamp(max=1.0)", "(limit / (norm + 1e-6))",
     "integration/test_equality"),
    ("a replay has the first learning rate", "                rate.fill_(group[", "                group.get(group[",
     "runtime/test_replay"),
    ("a replay has the first random numbers", "Draws(rank.seed, rank.steps, entries", "Draws(rank.seed, 0, entries",
     "runtime/test_replay"),
    ("a replay goes on with replaced states", "and not _same(self._recorded.state, state)", "and False",
     "runtime/test_replay"),
    ("a norm is read in a recorded step", "if self.is_recorded or norm.is_cuda", "if norm.is_cuda",
     "runtime/test_replay"),
    ("gradients of one memory are scaled twice", "name not in shared and gradient", "gradient",
     "runtime/test_scaling runtime/test_scaler"),
    ("only gradients of one start share memory", "sum((size - 1) * stride", "sum(0 * stride", "runtime/test_scaling"),
    ("ranks are not compared", "return self._calls <= FIRST or", "return self._calls < 0 or", "comm/test_alike"),
    ("the gradient of the loss is the scale itself", "self.dtype, copy=True)", "self.dtype)", "runtime/test_scaler"),
    ("a GPU updates as a CPU does", "works.on_gpu and is_listed", "not works.on_gpu and is_listed",
     "simulate/test_predict"),
    ("two ranks do not sum their losses", "self.all_reduce(x, tuple(range(self.world)), planned=False)",
     "self.all_reduce(x, tuple(range(self.world)) if self.world > 2 else (self.rank,), planned=False)",
     "integration/test_equality plans/test_equal"),
    ("a later iteration draws what the first drew", 'step = self.step + int(entry.get("ahead", 0))', "step = self.step",
     "integration/test_unroll"),
    ("dropout keeps what it should drop", "x * (random.ge_(p)", "x * (random.lt_(p)",
     "runtime/test_functional ops/test_rules"),
    ("a tape that came back goes as it came", "        self.arrive()\n        stays", "        stays",
     "materialize/test_offload"),
    ("padding gets all of the gradient", "found.detach(), found)", "found, found.detach())",
     "ops/test_rules runtime/test_functional"),
    ("uneven slices have the size of the first", "work.wait().narrow(dim, 0, sizes[group.index(self.rank)])",
     "work.wait().narrow(dim, 0, sizes[0])", "comm/test_communicator"),
    ("a broadcast comes from the first of a group", "_copy(parts()[group.index(source)])", "_copy(parts()[0])",
     "comm/test_communicator"),
    ("the gradient is multiplied by the loss scale", "self.scale.double().reciprocal()", "self.scale.double()",
     "runtime/test_scaler"),
    ("a gradient is rounded before its copy takes it", "torch.promote_types(x.dtype, w.grad_dtype or x.dtype)",
     "torch.promote_types(w.dtype, w.dtype)", "integration/test_mixed_precision"),
    ("a copy forgets its last digits", "w.detach().float() if copy is None else copy",
     "w.detach().float() if True else copy", "integration/test_mixed_precision"),
    ("copies outlive the weights they were made of", 'states.pop("copy", None)', 'states.get("copy", None)',
     "integration/test_mixed_precision"),
    ("a piece that a checkpoint lacks is not missed", "if elements and not covers(", "if not elements and covers(",
     "store/test_hostile"),
    ("pieces of a packed weight lie side by side", "found = [(k * unit + a, k * unit + b)", "found = [(k + a, k + b)",
     "train/test_checkpoint"),
    ("the last evaluation may raise before the checkpoint is on disk", "if done == self._options.steps:", "if False:",
     "cli/test_checkpoint"),
    ("one checkpoint too many is removed", "max(0, len(others) + 1 - keep)", "max(0, len(others) + 2 - keep)",
     "train/test_checkpoint"),
    ("a message is sent to the rank itself", "if peer == self.rank or not 0 <= peer < self.world:",
     "if not 0 <= peer < self.world:", "comm/test_communicator"),
    ("a rank that works is taken for a silent one", "and now - spot.since > self._limit(spot):",
     "and now - spot.since < self._limit(spot):", "launch/test_watch"),
    ("what both halves need is made once", "if first or times[n] > 1 or", "if first or times[n] > 2 or",
     "runtime/test_split_backward integration/test_split_backward"),
    # Verification.
    ("an error that is not small makes a plan equal", "return not self.first and all(map(math.isfinite",
     "return all(map(math.isfinite", "faults/test_faults plans/test_equal"),
    ("a weight is read once it is updated", "if content.changed is not None:", "if content.changed is i:",
     "certify/test_holes certify/test_storage faults/test_single"),
    ("what something else holds is changed in place", "if into.held is not None:",
     "if into is name:", "certify/test_storage certify/test_holes faults/test_faults"),
    ("a sum of gradients that something holds is added to", "self._check_free(name, into)", "pass",
     "certify/test_storage"),
    ("a handle can be waited for again", "run.handles.pop(i.work)", "run.handles.get(i.work)",
     "certify/test_storage"),
    ("a sum of gradients that ended starts again", "if name in run.gone or name in run.handles:",
     "if name in run.handles:", "certify/test_storage"),
    ("the first gradient of a sum is not copied", "is_wide else g.dtype, copy=True)",
     "is_wide else g.dtype, copy=False)", "runtime/test_executor"),
    ("a gather takes ranges in any order", 'must_equal(content.box, expected, f"{kind_of',
     'must_equal(box, box, f"{kind_of',
     "faults/test_faults faults/test_edited faults/test_single"),
    ("a compiled backward replaces its sum", "(add, pair) for pair in zip(sums, terms, strict=True)]",
     "(add, pair) for pair in zip(terms, terms, strict=True)]", "runtime/test_compiled"),
    ("each step is compiled again", "        if key not in self._made:", "        if True:", "runtime/test_compiled"),
    ("eager draws the others", "u < (x if p is None else p)", "u > (x if p is None else p)", "verify/test_eager"),
    ("layers with two names keep the weights of verify", "untouched(self.call.module),\n                default,",
     "default,", "verify/test_eager"),
    ("floats of integers are float32 in plans in float64", "default_dtype(torch.float64):\n            results =",
     "default_dtype(torch.float32):\n            results =", "verify/test_eager"),
    ("numbers in the dtype of a tensor are in float64", "if is_fill or not any(", "if not any(", "verify/test_eager"),
    # Capture.
    ("the running variance is biased", "(1.0, count / max(count - 1, 1))", "(1.0, 1.0)",
     "frontend/test_decompositions integration/test_buffers"),
    ("momentum goes to the old statistics", "old * (1.0 - momentum) + part", "old * momentum + part",
     "frontend/test_decompositions integration/test_buffers"),
    ("weights of ignored labels are counted", ".long()).where(counted, 0.0).sum()", ".long()).sum()",
     "integration/test_reduced_losses"),
    ("a mean over weighted labels is over their count", "ignore_index, wide, weight)", "ignore_index, wide)",
     "integration/test_reduced_losses"),
    ("a number that is taken from a loss is added", "alpha=-number * alpha", "alpha=number * alpha",
     "integration/test_reduced_losses"),
    ("stacks of losses wait for all microbatches", "if is_few else ()", "if not op.outputs[0].slots else ()",
     "integration/test_reduced_losses"),
    ("a loss of sequences is not over their labels",
     "label_lengths.clamp_min(1), losses", "label_lengths * 0 + 1, losses",
     "integration/test_reduced_losses"),
    ("a factor of a product is lost", "else product(x, y) * alpha", "else product(x, y)",
     "frontend/test_decompositions frontend/test_cuts"),
    ("a strided slice begins one later", "picked[0], picked[0] + 1)", "picked[-1], picked[-1] + 1)",
     "frontend/test_decompositions"),
    ("all parameters are in the first group", "groups[names[id(parameter)]] = number",
     "groups[names[id(parameter)]] = 0",
     "integration/test_optimizers frontend/test_capture"),
    ("changes in place are taken for values", "return target._schema.is_mutable or", "return False or",
     "frontend/test_composites"),
    ("statistics that no schema shows are not updated", 'name.endswith(("batch_norm", "instance_norm"))',
     'name.endswith("instance_norm")', "frontend/test_composites"),
    ("views of what is changed are not", "(_shares(target) and self._is_functional(node))",
     "(target._schema.is_mutable and self._is_functional(node))", "frontend/test_composites"),
    ("names of one memory are apart", "if memory in self.begun:", "if memory in ():", "frontend/test_composites"),
    ("a parameter is changed as a buffer is", "if spec.kind != InputKind.BUFFER]", "if False]",
     "frontend/test_composites"),
    ("the shape of a buffer changes", 'if any(_form(x) != _form(node.meta["val"])',
     'if any(_form(x) == node.meta["val"]', "frontend/test_composites"),
    ("a copy of another shape is its source", "if new.target is _COPY and", "if new.target is _COPY or",
     "frontend/test_composites"),
    ("attention lies in memory as with gradients", "is_attention = node.target is _ATTENTION", "is_attention = False",
     "frontend/test_composites"),
    ("casts of autocast are lost", "return bool(self.regions) and torch", "return False and torch",
     "frontend/test_composites"),
    ("operators under autocast are decomposed", "torch._C._AutoDispatchBelowAutograd() if is_kept",
     "nullcontext() if is_kept", "frontend/test_composites"),
    ("a region of autocast is never left", "while self.regions:", "while self.regions == 0:",
     "frontend/test_composites"),
    ("what is moved in memory is not seen", "value.stride() != self._node", "value.stride() is self._node",
     "frontend/test_composites"),
    ("recomputed readers of a weight are uncut", "grid if grid.is_touched else self.grids.get(",
     "grid if True else self.grids.get(", "plans/test_memory"),
    ("buffers of a model without data have no values", "buffers and not buffers[leaf.name].is_meta",
     "buffers and buffers[leaf.name].is_meta", "frontend/test_constants materialize/test_loops"),
    ("a constant is one row where no reader broadcasts it", "!= shape_of(node):\n            return\n    for",
     "== ():\n            return\n    for", "frontend/test_constants"),
    ("positions of a whole batch have a slice in each microbatch", "row.shape != shape_of(leaf):\n            looked",
     "not row.shape:\n            looked", "frontend/test_constants"),
    ("memory that is shared is not seen", "return a < d and c < b", "return a < d and c > b", "frontend/test_effects"),
    # Packed documents.
    ("a mask of each head is that of all", "if heads != 1 or 1 in square:", "if 1 in square:",
     "frontend/test_documents"),
    ("any places are the order of a document", "not all(_is_order(same[0], pair) for pair in orders)", "False",
     "frontend/test_documents"),
    ("the mask of a triangle is of all keys", "is_causal |= is_lower", "is_causal |= False", "frontend/test_documents"),
    ("rows of one packing are one row", "numbers[0], numbers[-1] + 1", "numbers[0], numbers[0] + 1",
     "runtime/test_documents"),
    ("a part of queries in documents is the first", "start, end, at - low - place.first_key)", "start, end, 0)",
     "runtime/test_documents"),
    ("a document in pieces has the keys of its last one", "if part.is_more else found", "if False else found",
     "runtime/test_documents"),
    ("documents are computed in the square", "return found if needed <= max(", "return None if needed <= max(",
     "runtime/test_documents"),
    ("a device of a ring has more chunks than others", "room[place] -= 1", "room[place] -= 0",
     "integration/test_documents"),
    ("kernels of another packing are taken", ", given_packing(), is_static()", "", "simulate/test_predict"),
    # Simulation.
    ("a transfer starts with its first end", "np.maximum.reduceat(times[self.order]",
     "np.minimum.reduceat(times[self.order]", "simulate/test_clock"),
    ("a transfer does not wait for its stream", "return self.time if self.before is None or",
     "return self.time if self.at >= 0 or", "simulate/test_clock"),
    ("chunks behind dims of size 1 are copied", "prod(self.view[: max(slot, 0)]) == 1", "slot <= 0",
     "simulate/test_kernels"),
    ("chunks are joined as they lie along any dim", "prod(x.shape[:dim]) == 1", "True", "comm/test_communicator"),
    ("devices do not share cores", "min(1.0, self.count / len(server.left))", "1.0", "simulate/test_clock"),
    ("bounds do not know that cores are shared", "return seconds / self.cores if self.cores else 0.0", "return 0.0",
     "planner/test_estimate"),
    ("a stage of two directions is on one device", "return 2 if self.schedule == \"chimera\" else 1", "return 1",
     "planner/test_estimate"),
    ("a transfer that is under way is not slowed", "other.set_end()", "transfer.set_end()", "simulate/test_clock"),
    ("a transfer that has ended keeps its share", "self._progress(transfer, np.full(len(transfer.delays), now))",
     "pass", "simulate/test_clock"),
    ("work beside two transfers is slowed twice", "seen = later(seen, start + both)", "seen = run.clock",
     "simulate/test_clock"),
    ("updates do not wait for sends", "found, run.unflushed = run.unflushed, []", "found, run.unflushed = [], []",
     "simulate/test_clock"),
    ("waits for others count as transfers", "met = before if post.is_copy else sooner(later(post.met, before), end)",
     "met = before", "simulate/test_clock simulate/test_pipelines"),
    ("transfers on other routes leave a port free", "all(other.until <= first for other in route.near)",
     "route.until <= first", "simulate/test_clock"),
    ("a loop ends before it repeats", "if is_second and all(map(_repeats, walks, states, self.states)):",
     "if is_second:", "ir/test_machine simulate/test_repeats"),
    ("repetitions of codes that ran unevenly are a round",
     "is_next = [(lap, at + lap.length) for lap, at in before] == self.ends and",
     "is_next = [lap for lap, _ in before] == [lap for lap, _ in self.ends] and", "ir/test_machine"),
    ("code that must wait goes on", "while self.at < self.limit and self.domain.step(self.at, self.code[self.at]):",
     "while self.at < self.limit and self.domain.step(self.at, self.code[self.at]) in (True, False):",
     "ir/test_machine"),
    ("a device ends a collective that leaves it out", "self.there[meeting] or self.device not in members:",
     "self.there[meeting]:", "ir/test_meetings"),
    ("a repetition that is left out runs", "walk.at += turns * lap.length", "walk.at += (turns - 1) * lap.length",
     "ir/test_machine simulate/test_repeats"),
    ("what began before a loop repeats", "s is t or abs(b - a) == self.pace.length", "True", "simulate/test_repeats"),
    ("repetitions keep other tapes", "return pace if is_same else None", "return pace", "simulate/test_repeats"),
    ("repetitions move equal bytes", "all(map(_is_known, run.first, run.second))", "True", "simulate/test_clock"),
    ("ports of a transfer alone stay free", "self._write()\n        route = transfer.route", "route = transfer.route",
     "simulate/test_clock"),
    # Plans, clusters, training.
    ("1F1B warms up once more", "devices - d - 1, numbers, numbers)", "devices - d, numbers, numbers)",
     "plans/test_schedules"),
    ("a ring has a step more", "((n - 1 - far) * links.intra.alpha", "((n - far) * links.intra.alpha",
     "cluster/test_seconds"),
    ("help loads what reads plans", "Directory = Annotated[Path,",
     "import superscaler.report.schema\nDirectory = Annotated[Path,", "cli/test_main"),
    ("memory is used up to the last byte only", "k + unit.tape + unit.most <= limit",
     "k + unit.tape + unit.most < limit",
     "plans/test_checkpoint_chain"),
    ("the last piece of a text is never read", "len(self._text) - self.sequence + 1, self.batch)",
     "len(self._text) - self.sequence, self.batch)", "train/test_data"),
    ("a division by a trained tensor is a sum", "any(len(group) == len(self.inputs) for group in self.linear)",
     "len(self.linear) == 1", "integration/test_recompute"),
    ("ZeRO-1 gathers again for what is recomputed", " and weight not in self.graph.policy.gathered_once", "",
     "plans/test_traffic"),
    ("a copy of a weight is gathered once for all", "weight = self.model.origin(tensor) if self.is_copy(tensor)",
     "weight = tensor if self.is_copy(tensor)", "plans/test_traffic"),
    ("places of a cut are among all of the axis", "sizes.get(axis.name, 1) // count, 1)", "sizes.get(axis.name, 1), 1)",
     "transform/test_place"),
    ("an iteration reads slices of the weights before it", "            self.code.changed(rank, goes_on)\n", "",
     "integration/test_unroll"),
    ("an update moves all its weights to the host", "weights + buffers != gradients + values, False",
     "weights + buffers != gradients + values, is_there", "integration/test_unroll"),
    ("a copy to the host stays on the device", "is_wrong, is_there = is_there == i.to_host, i.to_host",
     "is_wrong, is_there = is_there == i.to_host, False", "certify/test_storage certify/test_rounds"),
    ("kept weights are regathered in silence", "    check_regathers(attempt.flow, schedule.segments)\n", "",
     "integration/test_regather"),
    ("gradients live until all are in their sums", "        del found\n", "", "plans/test_memory"),
    ("a result that others read is left out", "is_unread &= self.unread.issuperset(o.tensor for o in op.outputs)",
     "is_unread &= bool(op.origin)", "integration/test_recompute"),
    ("a schedule's momentum is not saved", 'more |= {"options": kept} if any(kept) else {}', "",
     "train/test_schedule"),
    ("what a schedule set last is not saved", '"""Take the options that schedules have set."""\n',
     '"""Take the options that schedules have set."""\n        return\n', "train/test_schedule"),
    ("frozen weights are trained", "if p.requires_grad else -1 for p in self._module", "for p in self._module",
     "integrations/test_integrations"),
    ("a resume reads the states of the plan's options", "{**group, **changed,", "{**group,", "train/test_schedule"),
    ("a rank that holds Python's lock is silent", "runs = is_here and _runs(last[\"pid\"])", "runs = False",
     "launch/test_watch"),
    ("a watch is in the store's code at Python's end", "        atexit.register(self.close)\n", "",
     "launch/test_watch"),
    ("steps that are trained again are there twice", "(beyond if step >= start else kept)", "kept", "train/test_loop"),
    ("what is linear in a loss rounds once", "if func in (*_ADDS, *_SCALES) and", "if func is None and",
     "verify/test_trained"),
    ("scripted modules are exported", "if isinstance(part, torch.jit.ScriptModule):",
     "if isinstance(part, torch.jit.CompilationUnit):", "frontend/test_refusals"),
    ("strides of a transposed tensor are captured", "if not x.is_contiguous() or last", "if last",
     "frontend/test_refusals"),
    ("of two results of one name one is lost", "            if path in tensors:", "            if False:",
     "frontend/test_refusals"),
    ("an example that an operator refuses is raised", "except (IndexError, RuntimeError) as error:\n        raise Cap",
     "except IndexError as error:\n        raise Cap", "frontend/test_agreement"),
    ("a buffer of two names is a line's fault", "    if not where and (twins", "    if where and (twins",
     "frontend/test_refusals"),
    ("a Split of no factor makes copies", "if hasattr(algorithm, \"factor\") and not factors:", "if False:",
     "transform/test_cut"),
    ("slopes that are not drawn are the lower ones", "_ATEN.leaky_relu(x, (lower + upper) / 2)",
     "_ATEN.leaky_relu(x, lower)", "frontend/test_decompositions"),
    ("weights that one rank reads are not put", "            if any(reads):", "            if all(reads):",
     "integrations/test_integrations"),
    ("samples draw by the rank that reads them", "            set_seed(number)\n", "            pass\n",
     "train/test_feed"),
    ("Adagrad begins with sums of zero", "for key in CONSTRUCTED if key in groups[0]",
     "for key in ()", "verify/test_eager train/test_schedule"),
    ("all parameters have the learning rate of the first group", "_options(type(optimizer), {**g, **more})",
     "_options(type(optimizer), {**g, **more, 'lr': optimizer.param_groups[0]['lr']})", "verify/test_eager"),
    ("the time to start short kernels counts as speed", "if s.seconds > _FLOORS * floor]", "]", "measure/test_profile"),
    ("a measured GPU has the waves of its preset", "replace(like, units=units, floor=floor, issue=issue)",
     "replace(like, floor=floor, issue=issue)", "measure/test_profile cli/test_doctor"),
    ("a changed file of an operator is taken for the one of the plan", "if digest(source) != home[\"sha256\"]:",
     "if not source:", "store/test_operators"),
    ("a module of an operator is searched behind others of its name", "first_on_path(root) if root else", "",
     "store/test_operators"),
    ("functions of emitted code have no source", "        linecache.cache[prefix + name] = len(text),",
     "        _ = len(text),", "runtime/test_compiled"),
    ("messages that start together may arrive in any order", "yield at, i, (key, count[way]), frozenset(",
     "yield at, i, (key,), frozenset(", "faults/test_single"),
    ("the source of a broadcast may have another shape",
     "check_shape(self.model, content, way.shape)\n            check_view", "check_view", "faults/test_single"),
    ("parts of a loss are in no order", "product(numbers, range(parts - 1))", "product(numbers, range(0))",
     "plans/test_chunked_loss"),
    ("a loss in parts mixes the microbatches of others", "@along_axis(recomputes=True, last=True)",
     "@along_axis(recomputes=True)", "plans/test_chunked_loss"),
    ("a limit on a stage is one on all", "self.stage is None or self.stage % stages == stage", "True",
     "planner/test_constraints"),
    ("labels that early segments read run late", "sent = {n for _, made, readers in read if",
     "sent = {0 for _, made, readers in read if", "plans/test_memory"),
    ("a device waits for its host in each microbatch", "seconds, host = max(end - _idle(found, ends[0]), 0.0)",
     "seconds, host = max(end, 0.0)", "planner/test_estimate"),
    ("limits are of the stage before", "np.where(allowed(k, stages), own.max(axis=2), inf)",
     "np.where(allowed(k - 1, stages), own.max(axis=2), inf)", "planner/test_constraints planner/test_stages"),
    ("a last stage without blocks is nowhere", "found[-1, -1] = has_rest and stage == stages - 1 and self.ends[1]",
     "found[-1, -1] = False", "planner/test_stages"),
    ("a V is balanced without its head", "before + (0.0 if device else self.rest) <=", "before <=",
     "planner/test_stages"),
    ("a stage without blocks has the last block", "firsts = [*at, at[-1] + 1]", "firsts = [*at, at[-1]]",
     "plans/test_pipeline"),
    ("one stage satisfies a constraint for all", "all(any(is_so(x, v)", "any(any(is_so(x, v)",
     "planner/test_constraints"),
    ("a stage keeps as many microbatches as the first one", "[cost] * self.pp, stage)", "[cost] * self.pp, 0)",
     "planner/test_own"),
    ("messages between other cuts come from one device", "-(-(place[k] + 1) * one[k] // other[k])",
     "place[k] * one[k] // other[k] + 1", "planner/test_own"),
    ("all stages are cut as each one", "place is None or place_of(graph, op) == place", "True",
     "plans/test_own_stages"),
    ("costs of other kernels are taken from the disk", "self.cluster.kind, self.system]", "self.cluster.kind]",
     "planner/test_menu"),
    ("a group has a part of the work of a smaller one", "return group and group.least(_LEAST_OF_GROUPS * tp / use.tp)",
     "return group and group.least(2 * _LEAST_OF_GROUPS * tp / use.tp)", "planner/test_menu"),
    ("least seconds have all bubbles of 1F1B", "idle = 0.0 if c.schedule in (\"interlaced\", \"chimera\") else",
     "idle = 1.0 if c.schedule in (\"interlaced\", \"chimera\") else", "planner/test_own"),
    ("devices of a V begin at once", "wait + end for wait, end in zip(waits, busy, strict=True))",
     "end for wait, end in zip(waits, busy, strict=True))", "planner/test_estimate"),
    ("stages are moved without their updates", "or (0.0,) * self.devices",
     "and (0.0,) * self.devices", "planner/test_stages"),
    ("norms in halves are those of a GPU", "\"bmm\", \"addmm\",", "\"bmm\", \"native_layer_norm\", \"addmm\",",
     "simulate/test_made"),
    ("stages that fit have the errors of none", "room = self.room * e.peak / self.errors.corrected(e).peak",
     "room = self.room", "planner/test_own"),
    ("a V of other blocks has the estimated works", "pace=_pace(estimator, e.choice, whole)", "pace=1.0",
     "planner/test_own"),
    ("a device ends with the halves of the most gradients", "longest = max(+ready, key=",
     "longest = min(+ready, key=", "planner/test_orders"),
    ("plans near the shortest step keep their first turns", "found | {plan: min(found[plan], seconds)",
     "found | {plan: found[plan]", "planner/test_resumed"),
    ("least costs of a use at hand are those of others", "self._known.get(use, lower)", "lower", "planner/test_menu"),
)]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="numbers from 1, or words in the paths of files (default: all rows)")
    parser.add_argument("--record", action="store_true", help="write the lines to the file of results")
    parser.add_argument("--check", action="store_true", help="only look whether every text and test file is there")
    parser.add_argument("--most", type=int, default=600, help="seconds that the tests of a bug may take")
    given = parser.parse_args()
    places = check()
    if given.check:
        print(f"{len(MUTATIONS)} mutations, each in one place.")
        return 0
    # Forks need not import it, and torch with it: half of the time of a row.
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="superscaler-mutations-") as folder:
        tree = copied(Path(folder))
        found = []
        for number in chosen(given.rows, places):
            line = report(tree, number, places[number - 1], given.most)
            print(line, flush=True)
            found.append("NOT FOUND" not in line[:20])
            if given.record:
                record(number, line)
    print(f"{sum(found)} of {len(found)} found.")
    return not all(found)


def chosen(rows: Sequence[str], places: Sequence[Path]) -> list[int]:
    """Return the numbers of rows that are named by number, or by a word in the path of the file that they change."""
    asked = {int(row) for row in rows if row.isdigit()}
    words = [row for row in rows if not row.isdigit()]
    own = [str(place.relative_to(ROOT)) for place in places]
    return [n for n, path in enumerate(own, 1) if not rows or n in asked or any(word in path for word in words)]


def record(number: int, line: str) -> None:
    """Put a line in the place of the one that the file of results has of the bug, in the order of the table."""
    head, *lines = RESULTS.read_text().split("\n\n", 1)
    kept = {bug_of(old): old for old in "".join(lines).splitlines()} | {MUTATIONS[number - 1].bug: line}
    known = [f"{n:3}{kept[m.bug][3:]}" for n, m in enumerate(MUTATIONS, 1) if m.bug in kept]
    RESULTS.write_text(f"{head}\n\n" + "".join(f"{text}\n" for text in known))


def bug_of(line: str) -> str:
    """Return the bug of a line of results: what is behind its day, up to the test."""
    return line.split(" s  ", 1)[1].partition(": tests/")[0].rstrip(": ")


def check() -> list[Path]:
    """Return the file of each text. Raises SystemExit for what `--check` looks for."""
    files = {file: file.read_text() for file in sorted((ROOT / "superscaler").rglob("*.py"))}
    places = []
    for number, mutation in enumerate(MUTATIONS, 1):
        found = [file for file, text in files.items() for _ in range(text.count(mutation.old))]
        if len(found) != 1:
            raise SystemExit(f"mutation {number} ({mutation.bug}): {mutation.old!r} is there {len(found)} times.")
        if missing := [name for name in paths(mutation) if not (ROOT / name).is_file()]:
            raise SystemExit(f"mutation {number} ({mutation.bug}): there is no {missing[0]}; mend the table.")
        try:
            compile(files[found[0]].replace(mutation.old, mutation.new), str(found[0]), "exec")
        except SyntaxError as error:
            raise SystemExit(f"mutation {number} ({mutation.bug}) is no Python: {error}") from None
        places += found
    return places


def paths(mutation: Mutation) -> list[str]:
    return [f"tests/{name}.py" for name in mutation.tests.split()]


def copied(folder: Path) -> Path:
    """Return a copy of what tests need of the tree."""
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in ("superscaler", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def report(tree: Path, number: int, place: Path, most: int) -> str:
    """Return a line on whether tests find a mutation. They pass without it, or this is an error."""
    mutation = MUTATIONS[number - 1]
    file = tree / place.relative_to(ROOT)
    text = file.read_text()
    before = sum(os.times()[:4])
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        test = next((test for name in paths(mutation) if (test := failed(tree, name, most))), "")
    finally:
        file.write_text(text)
    if test and failed(tree, test, most):
        raise SystemExit(f"mutation {number} ({mutation.bug}): {test} fails without it, too.")
    seconds = sum(os.times()[:4]) - before
    found = f"{'found' if test else 'NOT FOUND':9}  {date.today()}  {seconds:5.0f} s  {mutation.bug}: {test}"
    return f"{number:3}  {found}".rstrip(": ")


def failed(tree: Path, name: str, most: int) -> str:
    """Return the first test of a file that fails, or an empty string."""
    with tempfile.TemporaryFile("w+") as said:
        fork = os.fork()
        if not fork:
            run(tree, name, said.fileno())
        ended, deadline = 0, time.monotonic() + most
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, status = os.waitpid(fork, os.WNOHANG)
        if not ended:
            os.killpg(fork, signal.SIGKILL)
            os.waitpid(fork, 0)
            return f"{name} (does not end)"
        if status == 0:
            return ""
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0].split(" ", 1)[1] if lines else f"{name} (exit code {status >> 8})"


def run(tree: Path, name: str, output: int) -> NoReturn:
    """Run a test file in this fork, which has imported what is not ours."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(output, number)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(tree))
        sys.dont_write_bytecode = True
        # Of anyio, which transformers imported.
        ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", *ignored, name])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # What the process that forked cleans up at its end is its own.
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
