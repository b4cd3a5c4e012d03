"""Step time of our plans against their peers, interleaved in one run: median of the ratios ours / peer.

    python benchmarks/step_time.py [--steps 12] [--only single,data_parallel] [--mbit 1000]

About a minute a plan with 8 steps on two quiet cores: `--steps 7 --only single,data_parallel,tensor_parallel,
sequence_parallel,pipeline_1f1b,interleaved,zbv,zero3,zero1` takes some 9 minutes.

GPT-2 (Hugging Face) with 4 layers, hidden 512, sequence 256, vocabulary 8192, batch 8, dropout 0; float32;
2 processes x 1 thread on gloo (`single`: 1 x 1). LAYERS, VOCABULARY and DROPOUT in the environment are read. Both
sides run eagerly, with fused AdamW and F.gelu (GPT-2's own gelu is eight operators, which a plan would run as one).
Peers:

single             the plain module
recompute          the module with its blocks in activation checkpoints
data_parallel      torch DDP, its gradients in buckets (gradient_as_bucket_view); `hierarchical`: with 4 processes
tensor_parallel    DTensor `parallelize_module` (`sequence_parallel` too; both sides a llama of the same size, because
                   DTensor has no style for GPT-2's Conv1D)
pipeline_1f1b      `torch.distributed.pipelining` with 8 microbatches and the same cut between the stages (`gpipe`,
                   `interleaved` and `zbv` too, two stages a process for the last two; embeddings untied on both sides,
                   because the peer cannot tie weights of two stages)
balanced           the same 1F1B, ours with stages balanced by FLOPs, the peer's with as many layers each
zero3              `torch.distributed.fsdp.fully_shard`, a group of parameters a block, its blocks in activation
                   checkpoints: both gather weights twice and compute blocks twice
zero3_keep         the same without checkpoints, which keeps the activations and gathers weights twice
zero1              `zero`, and fully_shard(reshard_after_forward=False): weights are gathered once

Below a pipeline is the share of a step in which the main thread of each device waited, for other devices and not for a
core, beside what the formula of the schedule says of equal stages; with VOCABULARY=512 they are nearly equal.

With --mbit half of the processes are on another server (see two_servers.py), behind a link of so many Mbit/s.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import two_servers
from torch import Tensor, nn

HIDDEN, HEADS, SEQUENCE, BATCH, MICROBATCHES = 512, 8, 256, 8, 8
LAYERS, VOCABULARY = int(os.environ.get("LAYERS", "4")), int(os.environ.get("VOCABULARY", "8192"))
DROPOUT = float(os.environ.get("DROPOUT", "0"))
PLANS = {
    "single": (1, "single"),
    "recompute": (1, "recompute"),
    "data_parallel": (2, "data_parallel"),
    "tensor_parallel": (2, "tensor_parallel"),
    "sequence_parallel": (2, "sequence_parallel"),
    **{name: (2, f"{name}:microbatches={MICROBATCHES}") for name in ("pipeline_1f1b", "gpipe", "interleaved", "zbv")},
    "balanced": (2, f"pipeline_1f1b:microbatches={MICROBATCHES}"),
    "zero3": (2, "zero:stage=3"),
    "zero3_keep": (2, "zero:stage=3,keep=1000"),
    "zero1": (2, "zero"),
    "hierarchical": (4, "data_parallel"),
}
# What waits for the network, where there is one.
NETWORKED = ("data_parallel", "sequence_parallel", "zero3", "zero1", "hierarchical")
# Whether the peer's blocks are in checkpoints, and whether it frees weights after the forward.
SHARDED = {"zero3": (True, True), "zero3_keep": (False, True), "zero1": (False, False)}
# The schedules of the pipelines: torch's name, how many stages each process has, and how long it is idle for each
# process after the first, where its work for a microbatch takes 1.
PEERS = {
    "pipeline_1f1b": ("Schedule1F1B", 1, 1.0), "balanced": ("Schedule1F1B", 1, 1.0), "gpipe": ("ScheduleGPipe", 1, 1.0),
    "interleaved": ("ScheduleInterleaved1F1B", 2, 1 / 2), "zbv": ("ScheduleZBVZeroBubble", 2, 1 / 6),
}  # fmt: skip
# Seconds of a step, ours and the peer's, and for how many of each the main thread was busy.
Times = tuple[float, ...]


def gpt2(tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, n_positions=SEQUENCE, vocab_size=VOCABULARY, resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT, attn_pdrop=DROPOUT, use_cache=False, tie_word_embeddings=tied, bos_token_id=0,
        eos_token_id=0, activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=SEQUENCE, vocab_size=VOCABULARY, use_cache=False,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **dict.fromkeys(PLANS, gpt2), "tensor_parallel": llama, "sequence_parallel": llama,
    **dict.fromkeys(PEERS, functools.partial(gpt2, tied=False)),
}  # fmt: skip
# Per stage its first block, the one after its last, and whether it has the head.
Cuts = list[tuple[int, int, bool]]
EVEN: Cuts = [(0, LAYERS // 2, False), (LAYERS // 2, LAYERS, True)]


def batch_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (BATCH, SEQUENCE)
    return {n: torch.randint(0, VOCABULARY, shape, generator=generator) for n in ("input_ids", "labels")}


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    # A fused update takes tensors of one kind: a model that DTensor cut has both.
    kinds: dict[type, list[Tensor]] = {}
    for parameter in module.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": some} for some in kinds.values()], lr=1e-4, fused=True)


def local_step(
    module: nn.Module, share: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[dict[str, Tensor]], Any]:
    optimizer = optimizer_of(module)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = module(**{k: share(v) for k, v in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def peer_single(rank: int, cuts: Cuts) -> Callable[[dict[str, Tensor]], Any]:
    return local_step(gpt2())


def in_checkpoints(blocks: nn.ModuleList) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False)


def peer_recompute(rank: int, cuts: Cuts) -> Callable[[dict[str, Tensor]], Any]:
    module: Any = gpt2()
    in_checkpoints(module.transformer.h)
    return local_step(module)


def peer_data_parallel(rank: int, cuts: Cuts) -> Callable[[dict[str, Tensor]], Any]:
    from torch.nn.parallel import DistributedDataParallel

    # GPT-2 has no buffers to broadcast.
    return local_step(DistributedDataParallel(gpt2(), gradient_as_bucket_view=True), own_share)


def own_share(x: Tensor) -> Tensor:
    import torch.distributed as dist

    return x.chunk(dist.get_world_size())[dist.get_rank()]


peer_hierarchical = peer_data_parallel


def peer_sharded(name: str, rank: int, cuts: Cuts) -> Callable[[dict[str, Tensor]], Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    is_again, is_freed = SHARDED[name]
    module: Any = gpt2()
    mesh, blocks = init_device_mesh("cpu", (2,)), module.transformer.h
    if is_again:
        in_checkpoints(blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=is_freed)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return local_step(module, own_share)


def peer_tensor_parallel(rank: int, cuts: Cuts) -> Callable[[dict[str, Tensor]], Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = llama()
    styles: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        styles[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        styles[f"model.layers.*.{name}"] = RowwiseParallel()
    return local_step(parallelize_module(module, init_device_mesh("cpu", (2,)), styles))


def peer_sequence_parallel(rank: int, cuts: Cuts) -> Callable[[dict[str, Tensor]], Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    module, whole, part = llama(), Replicate(), Shard(1)
    layer: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": part}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "self_attn.o_proj": RowwiseParallel(output_layouts=part),
        "mlp.down_proj": RowwiseParallel(output_layouts=part),
    }
    styles = {f"model.layers.*.{name}": style for name, style in layer.items()} | {
        # Positions come from the length of what the embedding gives: it is cut behind it.
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "model.layers.0": PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(part,), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    return local_step(parallelize_module(module, init_device_mesh("cpu", (2,)), styles))


class Stage(nn.Module):
    """A contiguous part of GPT-2: blocks first to last, the embeddings before or the head after them."""

    def __init__(self, model: Any, first: int, last: int, has_head: bool) -> None:
        super().__init__()
        self.wte = model.transformer.wte if first == 0 else None
        self.wpe = model.transformer.wpe if first == 0 else None
        self.blocks = nn.ModuleList(model.transformer.h[first:last])
        self.ln_f = model.transformer.ln_f if has_head else None
        self.head = model.lm_head if has_head else None

    def forward(self, x: Tensor) -> Tensor:
        if self.wte is not None and self.wpe is not None:
            x = self.wte(x) + self.wpe(torch.arange(SEQUENCE))
        for block in self.blocks:
            made = block(x)
            x = made[0] if isinstance(made, tuple) else made
        return self.head(self.ln_f(x)) if self.head is not None and self.ln_f is not None else x


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), shifted.reshape(-1))


def peer_pipeline(name: str, rank: int, cuts: Cuts) -> Callable[[dict[str, Tensor]], Any]:
    from torch.distributed import pipelining

    rule, chunks, _ = PEERS[name]
    own = [rank] if chunks == 1 else [rank, 3 - rank] if name == "zbv" else [rank, rank + 2]
    model = gpt2(tied=False)
    modules = nn.ModuleList(Stage(model, *cuts[number]) for number in own)
    pairs = zip(modules, own, strict=True)
    stages = [pipelining.PipelineStage(m, number, 2 * chunks, torch.device("cpu")) for m, number in pairs]
    schedule = getattr(pipelining, rule, None) or getattr(pipelining.schedules, rule)
    made = schedule(stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=next_token_loss)
    optimizer, is_last = optimizer_of(modules), 2 * chunks - 1 in own

    def step(batch: dict[str, Tensor]) -> None:
        given = (batch["input_ids"],) if 0 in own else ()
        made.step(*given, **({"target": batch["labels"], "losses": []} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def busy() -> float:
    """Return for how many seconds this thread ran, or (where Linux tells) would have, if a core had been free."""
    file = Path("/proc/thread-self/schedstat")
    return sum(map(int, file.read_text().split()[:2])) / 1e9 if file.exists() else time.thread_time()


def worker(name: str, directory: str, steps: int, cuts: Cuts) -> None:
    """Time ours and the peer's steps in turn on one rank, and write these times."""
    import torch.distributed as dist

    import superscaler as ss

    torch.set_num_threads(1)
    ours = ss.load(directory)
    several = peer_pipeline if name in PEERS else peer_sharded if name in SHARDED else None
    make = globals()[f"peer_{name}"] if several is None else functools.partial(several, name)
    peer = make(ours.rank, cuts)
    lines = []
    for number in range(steps + 2):
        batch, seconds = batch_at(number), {}
        for step in (ours, peer) if number % 2 else (peer, ours):
            if ours.world > 1:
                dist.barrier()
            start, started = time.perf_counter(), busy()
            step(batch)
            ran = busy() - started
            if ours.world > 1:
                dist.barrier()
            seconds[step] = time.perf_counter() - start, ran
        (whole, ran), (peer_whole, peer_ran) = seconds[ours], seconds[peer]
        lines.append(f"{whole} {peer_whole} {ran} {peer_ran}")
    Path(directory, f"times{ours.rank}.txt").write_text("\n".join(lines[2:]))
    ours.close()


@functools.cache
def captured(make: Callable[[], nn.Module]) -> Any:
    """Return the graph of a model: compiling leaves it as it is."""
    import superscaler as ss

    module = make()
    return ss.capture(module, kwargs=batch_at(0), optimizer=optimizer_of(module))


def measure(name: str, steps: int, mbit: float, other: Sequence[str]) -> list[list[Times]]:
    """Return the times of each step by rank; half of the ranks are on the server that `other` enters."""
    import superscaler as ss
    from superscaler.launch.launch import launch
    from superscaler.plans import resolve

    world, spec = PLANS[name]
    graph = captured(MODELS[name])
    plan = ss.compile(graph, resolve(spec), two_servers.cluster(world // 2, mbit) if other else ss.Cluster.local(world))
    print(plan.summary(), file=sys.stderr)
    cuts = [] if name not in PEERS else EVEN if name == "balanced" else list(cuts_of(graph, 2 * PEERS[name][1]))
    with tempfile.TemporaryDirectory() as folder:
        plan.save(folder)
        options = ["--worker", name, "--plan", folder, "--steps", str(steps), "--cuts", json.dumps(cuts)]
        if not other:
            launch(Path(__file__), options, world)
        elif failed := two_servers.run([sys.executable, __file__, *options], world, other):
            sys.exit(failed)
        texts = [Path(folder, f"times{rank}.txt").read_text() for rank in range(world)]
    return [[tuple(map(float, line.split())) for line in text.splitlines()] for text in texts]


def cuts_of(graph: Any, count: int) -> Iterator[tuple[int, int, bool]]:
    """Yield what each of our stages has of the model."""
    from superscaler.plans.lib.stages import stages

    last = {block.ops[-1].name for block in graph.blocks}
    first = 0
    for ops in stages(graph, count):
        after = first + sum(op.name in last for op in ops)
        yield first, after, any(op.module == "lm_head" for op in ops)
        first = after


def row(name: str, times: Sequence[Times]) -> str:
    """Return the medians of our and the peer's seconds, and of their ratios, with the range of these."""
    ratios = sorted(ours / peer for ours, peer, *_ in times)
    ours, peer, *_ = map(statistics.median, zip(*times, strict=True))
    spread = f"{ratios[0]:.2f} - {ratios[-1]:.2f}"
    return f"{name} {ours:8.3f} {peer:8.3f} {statistics.median(ratios):10.3f} {spread:>15}"


def idle(ranks: Sequence[Sequence[Times]], each: float) -> str:
    """Return the medians of the share of a step in which each device is idle, and what the formula says of it."""
    ours, peer = (
        " ".join(f"{statistics.median(1 - line[n + 2] / line[n] for line in times):.3f}" for times in ranks)
        for n in range(2)
    )
    bubble = each * (len(ranks) - 1)
    return f"{'':18} idle by device: ours {ours}, peer {peer}; by formula {bubble / (MICROBATCHES + bubble):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only")
    parser.add_argument("--mbit", type=float, default=0.0)
    parser.add_argument("--worker")
    parser.add_argument("--plan")
    parser.add_argument("--cuts", default="[]")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.plan, options.steps, json.loads(options.cuts))
        return
    with ExitStack() as stack:
        other: list[str] = []
        if options.mbit:
            try:
                two_servers.enter_namespace()
                other = stack.enter_context(two_servers.other_server(options.mbit))
            except two_servers.NotPermitted as reason:
                print(f"not measured: two servers need network namespaces and a slow link; {reason}.")
                return
        where = f"{options.mbit:g} Mbit/s between two servers; " if other else ""
        print(f"torch {torch.__version__}; {where}seconds a step (median of {options.steps}), median of the ratios")
        print(f"{'plan':18} {'ours':>8} {'peer':>8} {'ours/peer':>10} {'range':>15}")
        for name in options.only.split(",") if options.only else NETWORKED if other else PLANS:
            ranks = measure(name, options.steps, options.mbit, other)
            print(row(f"{name:18}", ranks[0]), flush=True)
            if name in PEERS:
                print(idle(ranks, PEERS[name][2]), flush=True)


if __name__ == "__main__":
    main()
