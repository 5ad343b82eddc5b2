"""What the ranks of the tests of tensor parallelism run: stages along 'pp', parameters along 'tp'."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gpipe_fast import GPipe
from gpipe_fast._extension import ActiveRuns
from gpipe_fast.container import runner_of
from gpipe_fast.lower.checkpoint import checkpoint_policy
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.steps import Call, Step
from gpipe_fast.reports.recording import stage_sizes
from gpipe_fast.schedule import Action, Kind, Schedule
from gpipe_fast.trace.collectives import group_position
from tests.distributed.cases import TIMEOUT, _error_of
from tests.unit.csrc.test_no_interpreter import while_gil_is_held

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 24, 8
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved")
CHECKPOINTS: tuple[Any, ...] = ("always", "except_last", "never", 0.5)


class Attention(nn.Module):
    """Causal attention by as many heads as this process has."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        q, k, v = (f(x).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(WIDTH), Attention(True), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.second = RMSNorm(), Attention(False), RMSNorm()
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


COLUMNS = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
GATHERED = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
GPT_PLAN = COLUMNS | {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
# Sequence parallelism: blocks pass on a share of each sequence.
LLAMA_PLAN = COLUMNS | {
    "first": SequenceParallel(),
    "attention": GATHERED,
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "second": SequenceParallel(),
    "feed_forward": GATHERED,
    "feed_forward.gate": ColwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
}
EMBEDDING_PLAN = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
HEAD_PLAN = {
    "norm": SequenceParallel(),
    "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def gpt(mesh: DeviceMesh | None = None, num_blocks: int = 4) -> nn.Sequential:
    """Returns a GPT, of which blocks are parallel over a mesh, and the first and last layer are not."""
    torch.manual_seed(0)
    blocks = [GPTBlock() for _ in range(num_blocks)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    layers = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, head)
    if mesh is not None:
        for block in blocks:
            parallelize_module(block, mesh, GPT_PLAN)
    return layers


def llama(mesh: DeviceMesh | None = None, num_blocks: int = 4) -> nn.Sequential:
    """Returns a Llama, of which all layers are parallel over a mesh."""
    torch.manual_seed(0)
    blocks, embedding = [LlamaBlock() for _ in range(num_blocks)], nn.Embedding(VOCABULARY, WIDTH)
    layers = nn.Sequential(nn.Sequential(embedding), *blocks, Head())
    if mesh is not None:
        for layer in layers:
            plan = LLAMA_PLAN if isinstance(layer, LlamaBlock) else HEAD_PLAN
            parallelize_module(layer, mesh, EMBEDDING_PLAN if layer is layers[0] else plan)
    return layers


MODELS: dict[str, Callable[..., nn.Sequential]] = {"gpt": gpt, "llama": llama}


def batch(samples: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=generator, device="cpu")


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def mesh_of(stages: int, device: str = "cpu") -> DeviceMesh:
    """Returns a mesh with so many processes along 'pp', and all others along 'tp'."""
    shape = stages, dist.get_world_size() // stages
    return init_device_mesh(device, shape, mesh_dim_names=("pp", "tp"))


def plain_step(layers: nn.Sequential, x: Tensor, y: Tensor, chunks: int, schedule: str) -> Tensor:
    """Returns the loss of the plain loop over micro-batches, with backwards in the order of a schedule."""
    parts = list(zip(x.chunk(chunks), y.chunk(chunks), strict=True))
    losses = [loss_of(layers(c), d) / len(x) for c, d in parts]
    total = functools.reduce(torch.add, losses)
    for loss in [total] if schedule == "gpipe" else losses:
        loss.backward()
    return total.detach()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(ours: nn.Module, plain: nn.Module, single: nn.Module) -> Iterator[str]:
    """Yields what differs: in a bit from the plain loop, more than rounding from one process."""
    named = zip(plain.named_parameters(), single.parameters(), strict=True)
    own = dict(ours.named_parameters())
    for (name, b), c in named:
        a = own[name]
        if a.is_meta:
            continue
        assert a.grad is not None
        assert b.grad is not None
        assert c.grad is not None
        placements = [getattr(each, "placements", None) for each in (a.grad, b.grad)]
        if type(a.grad) is not type(b.grad) or placements[0] != placements[1]:
            yield f"{name} is {placements[0]} in place of {placements[1]}"
        elif not torch.equal(local(a.grad), local(b.grad)):
            yield f"{name} differs by {(local(a.grad) - local(b.grad)).abs().max()}"
        if not torch.allclose(whole(a.grad), c.grad, rtol=1e-4, atol=1e-6):
            yield f"{name} differs from one process by {(whole(a.grad) - c.grad).abs().max()}"


class Case(NamedTuple):
    """One comparison."""

    model: str
    stages: int  # processes along 'pp'
    balance: tuple[int, ...]
    schedule: str
    checkpoint: Any
    chunks: int
    samples: int

    @classmethod
    def of_seed(cls, seed: int, size: int) -> Case:
        """Returns a random case for so many processes."""
        draw = random.Random(seed)
        stages = draw.choice([n for n in (1, 2) if size // n > 1])
        schedule = draw.choice(SCHEDULES)
        number = stages * draw.choice([1, 2]) if schedule != "interleaved" else 2 * stages
        cuts = sorted(draw.sample(range(1, 6), number - 1))
        balance = tuple(b - a for a, b in itertools.pairwise([0, *cuts, 6]))
        chunks = draw.choice([1, 4, 7]) if schedule != "interleaved" else draw.choice([2, 4, 8])
        samples = chunks * draw.randint(1, 2) + draw.choice([0, 0, 1])
        samples = max(samples, chunks)
        if len(torch.empty(samples).chunk(chunks)) < chunks:
            samples = chunks
        checkpoint = draw.choice(CHECKPOINTS)
        return cls(draw.choice([*MODELS]), stages, balance, schedule, checkpoint, chunks, samples)


def same_bits(cases: list[Case], sizes: tuple[int, ...] = (), device: str = "cpu") -> list[str]:
    """Returns what differs from the plain loop and from one process, in steps of some numbers of samples."""
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        mesh, make = mesh_of(case.stages, device), MODELS[case.model]
        with torch.device(device):
            # Not mesh["tp"] of a mesh of one dimension, whose groups are those of the whole.
            ours, plain, single = make(mesh["tp"]), make(mesh["tp"]), make()
        pipe = GPipe(
            ours,
            case.balance,
            mesh=mesh,
            chunks=case.chunks,
            checkpoint=case.checkpoint,
            schedule=case.schedule,
            timeout=TIMEOUT,
        )
        for step, samples in enumerate(sizes or (case.samples,) * 2):
            x, y = batch(samples, step).to(device), batch(samples, step + 7).to(device)
            loss = pipe.step(x, target=y, loss_fn=loss_of, normalizer=len(x))
            expected = plain_step(plain, x, y, case.chunks, case.schedule)
            alone = plain_step(single, x, y, case.chunks, case.schedule)
            if not torch.equal(loss, expected):
                found.append(f"{case}: loss {loss} in place of {expected}")
            torch.testing.assert_close(loss, alone)
            found += [f"{case}, step {step}: {each}" for each in compare(pipe, plain, single)]
            if found:
                return found
            for model in (pipe, plain, single):
                model.zero_grad()
    return found


def generated(seeds: list[int]) -> list[str]:
    return same_bits([Case.of_seed(seed, dist.get_world_size()) for seed in seeds])


def changing(name: str) -> list[str]:
    """Compares steps of so many numbers of samples that programs are derived from templates."""
    case = Case(name, 1, (3, 3), "1f1b", "except_last", 4, 0)
    return same_bits([case], (8, 12, 7, 20, 16, 5, 31))


class Normed(nn.Module):
    """A norm of a share of each sequence, whose result the next product gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Redistributed(nn.Module):
    """Products of shares of each sequence with a whole weight, and of all of it with a divided one."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.divided = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.whole, DTensor):
            return x + torch.tanh(x @ self.whole) @ self.divided
        given = DTensor.from_local(x, self.whole.device_mesh, [Replicate()], run_check=False)
        found = torch.tanh(given.redistribute(placements=[Shard(1)]) @ self.whole).redistribute(
            placements=[Replicate()]
        )
        return x + (found @ self.divided).full_tensor()


def redistributed(mesh: DeviceMesh | None = None) -> nn.Sequential:
    """Returns layers that redistribute DTensors between operators, and keep them from one to the next."""
    torch.manual_seed(0)
    layers = nn.Sequential(Normed(), Redistributed(), Normed(), Redistributed())
    if mesh is None:
        return layers
    up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    sequence = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    plan = {"norm": SequenceParallel(), "up": up, "down": RowwiseParallel()}
    for layer in layers:
        if isinstance(layer, Normed):
            parallelize_module(layer.norm, mesh, sequence)
            parallelize_module(layer, mesh, plan)
        else:
            layer.whole = nn.Parameter(distribute_tensor(layer.whole.detach(), mesh, [Replicate()]))  # type: ignore[arg-type]
            layer.divided = nn.Parameter(distribute_tensor(layer.divided.detach(), mesh, [Shard(0)]))  # type: ignore[arg-type]
    return layers


def redistributing(length: int) -> list[str]:
    """Compares steps of layers that redistribute DTensors with the plain loop and with one process.

    PyTorch knows placements from the first trace, with a mesh equal to the second, but another object.
    """
    warnings.simplefilter("ignore")
    found = []
    for mesh in (mesh_of(1), mesh_of(1)):
        ours, plain, single = redistributed(mesh["tp"]), redistributed(mesh["tp"]), redistributed()
        pipe = GPipe(ours, [2, 2], mesh=mesh, chunks=2, schedule="1f1b", timeout=TIMEOUT)
        x, y = torch.randn(2, 4, length, WIDTH).unbind()
        pipe.step(x, target=y, loss_fn=square_of, normalizer=len(x))
        for layers in plain, single:
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (square_of(layers(a), b) / len(x)).backward()
        found += compare(pipe, plain, single)
    return found


def square_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def made(name: str, stages: int, balance: tuple[int, ...] = (3, 3), **options: Any) -> GPipe:
    mesh = mesh_of(stages)
    options = {"chunks": 4, "schedule": "1f1b", "timeout": TIMEOUT} | options
    return GPipe(MODELS[name](mesh["tp"]), balance, mesh=mesh, **options)


def own_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if not p.is_meta], lr=0.01, eps=1e-3)


def counted_bytes(name: str) -> list[tuple[int, int]]:
    """Returns the predicted and the stored bytes of each stage's parameters and gradients, and of moments."""
    warnings.simplefilter("ignore")
    pipe = made(name, 1)
    call: dict[str, Any] = {"target": batch(8, 2), "loss_fn": loss_of, "normalizer": 8}
    report = pipe.memory(batch(8), optimizer=torch.optim.AdamW, **call)
    optimizer = own_optimizer(pipe)
    pipe.step(batch(8), optimizer=optimizer, **call)
    states = [[*optimizer.state[p].values()] for p in pipe.parameters()]
    found = [(sum(report.optimizer), sum(local(x).nbytes for each in states for x in each))]
    sizes = stage_sizes(runner_of(pipe).stages)
    for stage, needed, recorded in zip(pipe.partitions, report.stages, sizes, strict=True):
        assert needed is not None
        parameters = [*stage.parameters()]
        found.append((needed.parameters, sum(local(p).nbytes for p in parameters)))
        gradients = sum(local(p.grad).nbytes for p in parameters if p.grad is not None)
        found += [(needed.gradients, gradients), (recorded.gradients, gradients)]
    return found


def collectives(pipe: GPipe) -> dict[int, int]:
    """Returns how many collectives each stage of this process has run, as gloo counts them."""
    found: dict[int, int] = {}
    for stage, _, group in runner_of(pipe).processes._collectives.values():  # type: ignore[attr-defined]
        number = group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
        found[stage] = found.get(stage, 0) + number
    return found


def is_collective_step(step: Step) -> bool:
    return isinstance(step, Call) and group_position(step.op) is not None


def in_program(program: ProgramIR) -> int:
    return sum(map(is_collective_step, program.steps))


def counted(name: str, checkpoint: Any) -> list[tuple[int, int, int, int]]:
    """Returns, for each stage, the collectives of a step as gloo counts them, and as its programs have them.

    And those of a forward and of a backward without recompute, for one micro-batch.
    """
    warnings.simplefilter("ignore")
    pipe = made(name, 1, checkpoint=checkpoint)
    found, of_gloo = [], []
    for _ in range(2):
        pipe.step(batch(8), target=batch(8, 2), loss_fn=loss_of, normalizer=8)
        of_gloo.append(collectives(pipe))
    ((longer, *_),) = runner_of(pipe).with_losses.values()
    plan, policy = longer.planner.latest, checkpoint_policy(checkpoint, 2, training=True)
    for index in range(2):
        first, last = plan.compiled[0][index].traced, plan.compiled[-1][index].traced
        stages = [first, first, first, last]
        saved = policy.saved_fractions(index, 4)
        each = [stage.lower(fraction) for stage, fraction in zip(stages, saved, strict=True)]
        total = sum(in_program(program.written()) for own in each for program in own.all_programs())
        forward, backward = (in_program(p.written()) for p in stages[0].lower(1.0).all_programs())
        found.append((of_gloo[1][index] - of_gloo[0][index], total, forward, backward))
    return found


def without_gil() -> bool:
    """Runs steps while another thread holds the GIL, on all ranks; returns whether all actions ended before.

    The GIL is held for longer in each attempt.
    """
    warnings.simplefilter("ignore")
    pipe, x, y = made("llama", 1), batch(8), batch(8, 2)
    processes, calls = runner_of(pipe).processes, []

    def step() -> None:
        pipe.step(x, target=y, loss_fn=loss_of, normalizer=8)

    class Recorder:
        def step(self, *args: Any) -> Any:
            calls.append(args)
            return native.step(*args)

    step()
    native = runner_of(pipe).pipeline
    ((longer, *_),) = runner_of(pipe).with_losses.values()
    begin = processes.begin
    with (
        mock.patch.object(longer, "pipeline", Recorder()),
        mock.patch.object(processes, "begin", lambda _, *args: calls.append(args) or begin(native, *args)),
    ):
        step()
    agreed, own = calls
    for seconds in (0.5, 1.0, 2.0, 4.0):
        with pipe.recording() as recording:
            begin(native, *agreed)
            times = while_gil_is_held(lambda: native.step(*own), seconds)
        events = recording.latest.values()
        ok = times[0] < min(e.begin for e in events) and max(e.end for e in events) < times[1]
        everywhere = torch.tensor(float(ok))
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if everywhere:
            return True
    return False


class Fault(NamedTuple):
    """What happens to one rank in an action, after some steps of its program.

    Attributes:
        rank: the rank.
        place: the action.
        count: the number of steps; or, if ``inside``, which of the collectives has started and is waited for.
        inside: whether it happens in the wait for a collective.
        how: a signal, or 'ValueError'.
    """

    rank: int
    place: str
    count: int
    inside: bool
    how: str

    @classmethod
    def of_seed(cls, seed: int, stages: int, size: int) -> Fault:
        draw = random.Random(seed)
        rank = draw.randrange(size)
        stage = draw.randrange(2) if stages == 1 else rank // (size // stages)
        kind = draw.choice(["F", "R", "B" if stage == 0 else draw.choice("IW")])
        place = f"{stage}{kind}{draw.randrange(3)}"
        how = ("SIGKILL", "SIGSTOP", "ValueError")[seed // 2 % 3]
        return cls(rank, place, draw.randrange(30), seed // 6 % 2 == 0, how)

    def checks(self, program: ProgramIR, parts: tuple[int, int]) -> int:
        """Returns how often the action looks for a cancellation before the fault: before each step, and once
        a collective has started.
        """
        begin = {"F": 0, "R": 0, "B": parts[0], "I": parts[0], "W": parts[1]}[self.place[1]]
        end = {"R": parts[0], "I": parts[1]}.get(self.place[1])
        is_first = self.place.endswith("0")
        skipped = ActiveRuns.LATER if is_first else ActiveRuns.FIRST
        found = []
        for step in program.steps[begin:end]:
            if getattr(step, "when", None) is not skipped:
                found += [False, True] if is_collective_step(step) else [False]
        waits = [i for i, is_wait in enumerate(found) if is_wait]
        return waits[self.count % len(waits)] if self.inside and waits else self.count


def failing(fault: Fault, stages: int, timeout: float) -> tuple[str, bool, float]:
    """Returns the error of a step with a fault, whether the next step has the loss of the first one, and the
    seconds until the error.
    """
    warnings.simplefilter("ignore")
    pipe = made("llama", stages, timeout=timeout, checkpoint="always")

    def step() -> float:
        loss = pipe.step(batch(8), target=batch(8, 2), loss_fn=loss_of, normalizer=8).item()
        pipe.zero_grad()
        return loss

    first, error, native = step(), "", runner_of(pipe).pipeline
    if dist.get_rank() == fault.rank:
        ((longer, *_),) = runner_of(pipe).with_losses.values()
        lowered = longer.planner.latest.compiled[0][int(fault.place[0])].traced.lower(0.0)
        program = lowered.forward if fault.place[1] == "F" else lowered.backward
        assert program is not None
        native.inject_faults(faults=[(fault.place, fault.checks(program, program.parts), fault.how)])
    begin = time.monotonic()
    try:
        step()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - begin
    native.inject_faults()
    assert all(parameter.grad is None for parameter in pipe.parameters())
    return error, fault.how == "ValueError" and step() == first, seconds


def delayed(stages: int, schedule: str, seeds: int) -> list[int]:
    """Returns the seeds with which steps differ whose actions are delayed by other times on each rank."""
    warnings.simplefilter("ignore")
    balance = (2, 1, 1, 2) if stages == 2 else (3, 3)
    pipe, found = made("llama", stages, balance, schedule=schedule, checkpoint=0.5), []

    def step() -> list[Tensor]:
        pipe.zero_grad()
        loss = pipe.step(batch(8), target=batch(8, 2), loss_fn=loss_of, normalizer=8)
        return [loss, *(local(p.grad) for p in pipe.parameters() if p.grad is not None)]

    expected = step()
    for seed in range(seeds):
        runner_of(pipe).pipeline.inject_faults(seed * 7 + dist.get_rank(), max_delay_us=3000)
        if not all(map(torch.equal, step(), expected)):
            found.append(seed)
    return found


class Ordered(nn.Module):
    """Two sums over processes, of different shapes, which a rank may compute in another order."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "order":
            b = self.second(torch.stack([x, x])).sum(0)
            return x + self.first(x) + b
        a = self.first(x)
        if self.how == "more":
            a = self.first(a)
        return x + a + self.second(torch.stack([x, x])).sum(0)


def in_phases(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns a schedule of all forwards, and then all backwards in the same order."""
    kinds, numbers = (Kind.F, Kind.B), range(num_microbatches)
    return Schedule.of([[Action(s, kind, m) for kind in kinds for m in numbers] for s in range(num_stages)])


# In what a rank may differ from the others along 'tp': what its layers do, arguments of GPipe, and others.
DIFFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("", {}),
    "order": ("order", {}),
    "more": ("more", {}),
    "schedule": ("", {"schedule": "gpipe"}),
    "actions": ("", {"schedule": in_phases}),
    "chunks": ("", {"chunks": 2}),
    "checkpoint": ("", {"checkpoint": "never"}),
    "balance": ("", {"balance": [1, 3]}),
    "samples": ("", {"samples": 12}),
    "seed": ("dropout", {"seed": 1}),
    "method": ("", {"method": "call"}),
    "no_grad": ("calls", {"method": "no_grad"}),
}


def disagreeing(odd: int, stages: int) -> dict[str, tuple[str, bool, float]]:
    """One rank differs from the others in one thing after the other: returns errors, whether a gradient has
    changed, and seconds.
    """
    warnings.simplefilter("ignore")
    mesh, found = mesh_of(stages), {}
    for name, (how, options) in DIFFERENCES.items():
        given = options if dist.get_rank() == odd else {}
        torch.manual_seed(0)
        layers: list[nn.Module] = [Ordered(how if given is options else "") for _ in range(4)]
        for layer in layers:
            row = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(layer, mesh["tp"], {"first": row, "second": row})
        if how == "dropout":
            layers[3] = nn.Dropout(0.5)
        given = {"balance": [2, 2], "schedule": "1f1b", "chunks": 4, "checkpoint": "always"} | given
        samples, seed, method = (
            given.pop("samples", 8),
            given.pop("seed", 0),
            given.pop("method", "call" if how == "calls" else "step"),
        )
        pipe, x = (
            GPipe(nn.Sequential(*layers), mesh=mesh, timeout=6 * TIMEOUT, **given),
            torch.ones(samples, WIDTH),
        )
        torch.manual_seed(seed)
        begin = time.monotonic()
        with torch.set_grad_enabled(method != "no_grad"):
            if method == "step":
                error = _error_of(functools.partial(pipe.step, x, target=x, loss_fn=square_of, normalizer=1))
            else:
                error = _error_of(functools.partial(pipe, x))
        is_changed = any(p.grad is not None for p in pipe.parameters())
        found[name] = error, is_changed, time.monotonic() - begin
    return found


def replicated(name: str) -> None:
    """Compares two replicas of two shards with one process that has the samples of both.

    In a Llama, the gradient of the embedding, whose rows are divided, is a sum over processes along 'tp'.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    single, replica = MODELS[name](), mesh.get_local_rank("dp_replicate")
    x, y = batch(12), batch(12, 2)
    plain_step(single, x, y, 3, "gpipe")
    pipe = GPipe(MODELS[name](mesh["tp"]), [6], chunks=3, schedule="1f1b", mesh=mesh, timeout=TIMEOUT)
    own = slice(0, 7) if replica == 0 else slice(7, 12)
    pipe.step(x[own], target=y[own], loss_fn=functools.partial(mean_of, count=12))
    for a, (key, b) in zip(pipe.parameters(), single.named_parameters(), strict=True):
        torch.testing.assert_close(whole(a.grad), b.grad, rtol=1e-4, atol=1e-5, msg=key)  # type: ignore[arg-type]


def mean_of(output: Tensor, target: Tensor, count: int) -> Tensor:
    return loss_of(output, target) / count


def refused() -> list[str]:
    """Returns the errors of uses that are not supported, all of them raised before any work."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, found = torch.ones(4, 8), []

    def attempt(use: Callable[[], object]) -> None:
        found.append(_error_of(use))

    def parallel(layer: nn.Module, style: Any) -> nn.Module:
        return parallelize_module(layer, mesh, style)

    torch.manual_seed(0)
    wide = ColwiseParallel(use_local_output=False)
    layers = nn.Sequential(parallel(nn.Linear(8, 8), wide), nn.Tanh())
    attempt(lambda: GPipe(layers, [1, 1], mesh=mesh, timeout=TIMEOUT)(x))
    attempt(lambda: GPipe(nn.Sequential(parallel(nn.Linear(8, 8), ColwiseParallel())), [1]))
    attempt(lambda: GPipe(nn.Sequential(nn.Linear(8, 8)), [1], mesh=mesh))
    torch.manual_seed(dist.get_rank())  # plain parameters differ
    layers = nn.Sequential(
        parallel(nn.Linear(8, 8), RowwiseParallel(input_layouts=Replicate())), nn.Linear(8, 8)
    )
    attempt(lambda: GPipe(layers, [1, 1], mesh=mesh, timeout=TIMEOUT)(x))
    attempt(lambda: made("llama", 1)(batch(8)[:, :7]))  # which would end the processes of the plain layers
    pipe = made("gpt", 1)
    output = pipe(batch(8))
    with torch.no_grad():
        next(p for p in pipe.parameters() if isinstance(p, DTensor)).mul_(2)
    attempt(lambda: output.sum().backward())
    found.append(str([name for name, p in pipe.named_parameters() if p.grad is not None]))
    return found


def constructed(number: int) -> list[tuple[int, int]]:
    """Makes pipelines one after the other; returns the numbers of open files and threads after each."""
    warnings.simplefilter("ignore")
    mesh, found = mesh_of(1), []
    for _ in range(number):
        pipe = GPipe(gpt(mesh["tp"], 1), [1, 2], mesh=mesh, chunks=2, schedule="1f1b", timeout=TIMEOUT)
        pipe.step(batch(4), target=batch(4, 2), loss_fn=loss_of, normalizer=8)
        del pipe
        gc.collect()
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return found
