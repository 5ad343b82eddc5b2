"""What the ranks of the tests run."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.distributed import ranks
from gpipe_fast.runtime.compile import Compiler
from tests.contracts.contract_1_same_bits.test_skip_connections import make_model as skipping
from tests.contracts.contract_1_same_bits.test_values import TensorToPair
from tests.models import batch_normed, features, gpt, noisy, tokens
from tests.quantized import WIDTH, blocks, packed
from tests.reference import SEED, Result, loop_step, pipeline_step, restored, unequal

# Seconds after which a test that waits in vain fails.
TIMEOUT = 20.0
# Seconds after which ranks notice that another one has stopped; longer than a first step on a busy machine.
LOST = 10.0
# Seconds that ranks wait for one that compiles, in the tests in which that takes longer.
SHORT = 4.0


class PairToPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return self.norm(self.a(x) + y), torch.tanh(self.b(y))


class PairToTensor(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * 2 + pair[1]


def tuples() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        TensorToPair(integers=False), PairToPair(), PairToPair(), PairToTensor(), nn.Linear(6, 4)
    )


def wide_features(batch: int) -> Tensor:
    return torch.randn(batch, 8, generator=torch.Generator().manual_seed(1))


class Decoder(nn.Module):
    """A linear layer with the weight of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def tied() -> nn.Sequential:
    """Returns a model with a parameter of its first, its last and another layer."""
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 11)
    middle = nn.Sequential(nn.Linear(11, 11), Decoder(embedding.weight))
    return nn.Sequential(embedding, nn.Tanh(), middle, nn.GELU(), Decoder(embedding.weight))


def tied_neighbours() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    layers[3].weight = layers[2].weight
    return layers


def quantized() -> nn.Sequential:
    """Adapters beside frozen weights with scales; processes trace stages of others, too."""
    return blocks(packed)


def embeddings(batch: int) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(SEED))


# Name: model, batch, balances of two, three and four stages.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[int], Tensor], list[list[int]]]] = {
    "batch norm": (batch_normed, features, [[2, 3], [1, 2, 2], [1, 1, 1, 2]]),
    "gpt": (gpt, tokens, [[2, 3], [2, 2, 1], [1, 1, 2, 1]]),
    "dropout": (noisy, features, [[3, 3], [2, 2, 2], [2, 1, 1, 2]]),
    "tuples": (tuples, features, [[2, 3], [1, 2, 2], [1, 1, 1, 2]]),
    "ties": (tied, tokens, [[2, 3], [2, 2, 1], [1, 1, 2, 1]]),
    "tied neighbours": (tied_neighbours, wide_features, [[3, 1], [1, 2, 1], [1, 1, 1, 1]]),
    "skips": (skipping, wide_features, [[2, 6], [2, 3, 3], [2, 2, 2, 2]]),
    "quantized": (quantized, embeddings, [[2, 2], [1, 2, 1], [1, 1, 1, 1]]),
}


def same_bits(
    names: list[str],
    schedules: list[str],
    chunks: list[int],
    checkpoints: list[str],
    num_stages: int = 0,
    samples: int = 12,
    device: str = "cpu",
) -> int:
    """Compares pipelines over all ranks with the plain loop, and with pipelines in one process.

    By default each rank has one stage, and micro-batches have one size, so that each stage is traced once.
    """
    warnings.simplefilter("ignore")
    number = 0
    for name in names:
        make, batch, balances = MODELS[name]
        balance, x = balances[(num_stages or dist.get_world_size()) - 2], batch(samples).to(device)
        exact: dict[str, Any] = {"fuse": False, "capture": False}
        ours = GPipe(make(), balance, mesh=dist.group.WORLD, devices=device, timeout=TIMEOUT, **exact)
        alone = GPipe(make(), balance, devices=[device] * len(balance), **exact)
        alone.threads_per_stage = 1
        for schedule, count, checkpoint in itertools.product(schedules, chunks, checkpoints):
            for pipe in (ours, alone):
                pipe.schedule, pipe.chunks, pipe.checkpoint = schedule, count, checkpoint
            what = f"{name}, {schedule}, chunks={count}, {checkpoint}"
            # The plain loop adds up gradients of tied parameters in another order.
            expected = pipeline_step(alone, x) if "tie" in name else loop_step(make().to(device), x, count)
            _check(pipeline_step(ours, x), expected, ours, f"backward, {what}")
            _check(step(ours, x), step(alone, x), ours, f"step, {what}")
            _check(evaluate(ours, x), evaluate(alone, x), ours, f"evaluate, {what}")
            number += 1
    return number


def same_bits_on_gpus(devices: list[str], models: list[str], schedules: list[str]) -> int:
    """As `same_bits`, with a GPU for each rank, which may be the same."""
    device = devices[dist.get_rank()]
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    return same_bits(models, schedules, [3], ["except_last"], device=device)


def _check(found: Result, expected: Result, pipe: Any, what: str) -> None:
    """Compares what this rank has."""
    own = runner_of(getattr(pipe, "pipeline", pipe)).processes
    rank, last = own.index, own.size - 1
    elsewhere = [n for n, t in (*pipe.named_parameters(), *pipe.named_buffers()) if t.is_meta]
    absent = {f"{kind} {name}" for kind in ("gradient of", "buffer") for name in elsewhere}
    absent |= {name for name in expected if name.startswith("output")} if rank < last else set()
    absent |= {"input gradient"} if rank > 0 else set()
    found = {name: value for name, value in found.items() if name not in absent}
    assert expected.keys() - found.keys() <= absent
    expected = {name: expected[name] for name in found}
    assert unequal(found, expected) == [], f"rank {rank}, {what}"


def loss_of(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float().flatten(1)[:, :2], target, reduction="sum")


def step(pipe: GPipe, x: Tensor, normalizer: int = 0, seed: int = SEED) -> Result:
    """Returns the losses of a step and what it left behind; the model is left as it was."""
    torch.manual_seed(seed)
    target = torch.linspace(0, 1, 2 * len(x), device=x.device).view(len(x), 2)
    losses: list[Tensor] = []
    with restored(pipe):
        loss = pipe.step(x, target=target, loss_fn=loss_of, normalizer=normalizer or len(x), losses=losses)
        result: Result = {"loss": loss} | {f"loss {m}": each for m, each in enumerate(losses)}
        result |= {f"gradient of {n}": p.grad for n, p in pipe.named_parameters()}
        return result | {f"buffer {n}": b.clone() for n, b in pipe.named_buffers()}


def evaluate(pipe: GPipe, x: Tensor) -> Result:
    """Evaluates a loss, and the outputs without gradients."""
    pipe.eval()
    target = torch.zeros(len(x), 2, device=x.device)
    loss = pipe.evaluate(x, target=target, loss_fn=loss_of, normalizer=len(x))
    with torch.no_grad():
        output = pipe(x)
    pipe.train()
    return {"loss": loss, "output": output}


def here(result: Result) -> Result:
    """Returns what this rank has of a result."""
    return {name: t for name, t in result.items() if t is None or not t.is_meta}


def _pipe(num_stages: int = 0, **options: Any) -> GPipe:
    """Returns a pipeline over all processes, with as many replicas as there are for these stages."""
    warnings.simplefilter("ignore")
    make, _, balances = MODELS["batch norm"]
    num_stages = num_stages or dist.get_world_size()
    shape = dist.get_world_size() // num_stages, num_stages
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "pp"))
    settings: dict[str, Any] = {"chunks": 3, "timeout": TIMEOUT} | options
    return GPipe(make(), balances[num_stages - 2], mesh=mesh, **settings)


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing(num_stages: int, failing_rank: int, action: str) -> list[str]:
    """An action fails on one rank, which is slower than others: returns errors of a step and a backward.

    Later calls work.
    """
    pipe, x = _pipe(num_stages), features(9)
    expected = step(pipe, x)
    if dist.get_rank() == failing_rank:
        runner_of(pipe).pipeline.inject_faults(1, max_delay_us=50_000, faults=[(action, 0, "ValueError")])
    begin = time.monotonic()
    error, is_changed = changed(pipe, x)
    assert not is_changed
    errors = [error, _error_of(lambda: pipe(x).sum().backward())]
    assert time.monotonic() - begin < TIMEOUT / 2
    assert all(p.grad is None for p in pipe.parameters())
    runner_of(pipe).pipeline.inject_faults()
    pipe.load_state_dict(MODELS["batch norm"][0]().state_dict())  # the forward has written buffers
    for each in (pipe, _pipe(num_stages)):
        _check(step(each, x), expected, each, "after failures")
    return errors


def differing() -> tuple[list[str], list[str]]:
    """Rank 1 calls the pipeline otherwise than rank 0: returns errors, and which tensors have memory."""
    odd, x = dist.get_rank() == 1, features(9)
    errors = []
    pipe = _pipe()
    if odd:
        pipe.chunks = 2
    errors.append(_error_of(lambda: step(pipe, x)))
    pipe.chunks = 3
    errors.append(_error_of(lambda: step(pipe, x[:6] if odd else x)))
    step(pipe, x)
    pipe.train(not odd)
    errors.append(_error_of(lambda: step(pipe, x)))
    pipe.train()
    # Both have been run before, so that neither is planned now.
    evaluate(pipe, x)
    errors.append(_error_of(lambda: evaluate(pipe, x) if odd else step(pipe, x)))
    pipe.train()
    errors.append(_error_of(lambda: pipe(x.double()[:, None] if odd else x)))
    errors.append(_error_of(lambda: pipe("no tensor" if odd else x)))
    step(pipe, x)
    tensors = (*pipe.named_parameters(), *pipe.named_buffers())
    return errors, [name for name, tensor in tensors if not tensor.is_meta]


class Bent(nn.Linear):
    """Two kinds of it have the same form, and compute something else."""

    def __init__(self, slope: float, by_code: bool) -> None:
        super().__init__(6, 6)
        self.slope, self.by_code = slope, by_code

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.sin(y) if self.by_code else nn.functional.leaky_relu(y, self.slope)


def disagreeing(odd_rank: int) -> dict[str, tuple[str, bool]]:
    """One rank differs from the others in one thing after the other: returns errors, and what changed."""
    warnings.simplefilter("ignore")
    is_odd, x = dist.get_rank() == odd_rank, features(9)
    target = torch.zeros(9, 2)

    def run(
        layers: list[nn.Module], seed: int = 0, chunks: int = 3, samples: int = 9, **options: Any
    ) -> tuple[str, bool]:
        torch.manual_seed(0)
        dropout = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6))  # each rank has something to update
        ends = [nn.Linear(6, 6), dropout, nn.Linear(6, 6)]
        sequential = nn.Sequential(*layers, *ends, nn.Linear(6, 2))
        size = dist.get_world_size()
        pipe = GPipe(
            sequential,
            [len(sequential) + 1 - size, *[1] * (size - 1)],
            mesh=dist.group.WORLD,
            chunks=chunks,
            timeout=TIMEOUT,
        )
        own = [p for p in pipe.parameters() if not p.is_meta]
        before = [p.detach().clone() for p in own]
        optimizer = options.pop("optimizer", torch.optim.SGD)
        torch.manual_seed(seed)
        error = _error_of(
            lambda: pipe.step(
                x[:samples],
                target=target[:samples],
                loss_fn=loss_of,
                normalizer=9,
                optimizer=None if optimizer is None else optimizer(own, lr=1.0),
                **options,
            )
        )
        is_changed = any(
            p.grad is not None or not torch.equal(p, b) for p, b in zip(own, before, strict=True)
        )
        return error, is_changed

    def other(**options: Any) -> dict[str, Any]:
        return options if is_odd else {}

    return {
        "nothing": run([Bent(0.1, False)]),
        "the optimizer": run([Bent(0.1, False)], **other(optimizer=None)),
        "max_norm": run([Bent(0.1, False)], **other(max_norm=1.0)),
        "the scaler": run([Bent(0.1, False)], **other(scaler=torch.amp.GradScaler("cpu"))),
        "the seed": run([Bent(0.1, False)], **other(seed=1)),
        "chunks": run([Bent(0.1, False)], **other(chunks=9)),
        "the input": run([Bent(0.1, False)], **other(samples=6)),
        "an attribute": run([Bent(0.2 if is_odd else 0.1, False)]),
        "code": run([Bent(0.1, is_odd)]),
    }


def tied_to_others() -> str:
    """Every rank makes its layers with another seed: returns the error of the first step."""
    warnings.simplefilter("ignore")
    torch.manual_seed(dist.get_rank())
    embedding = nn.Embedding(11, 11)
    layers = nn.Sequential(embedding, nn.Tanh(), Decoder(embedding.weight))
    pipe = GPipe(layers, [2, 1], mesh=dist.group.WORLD, chunks=3, timeout=TIMEOUT)
    torch.manual_seed(0)
    return _error_of(lambda: pipe.step(tokens(6), target=torch.zeros(6), loss_fn=mean_of, normalizer=6))


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() + target.sum()


def losing_a_rank(how: str, num_stages: int, rank: int) -> str:
    """A rank ends or stops in its second step: returns the error of the others; nothing changes on them."""
    pipe, x = _pipe(num_stages, timeout=LOST), features(9)
    step(pipe, x)
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    begin = time.monotonic()
    error, is_changed = changed(pipe, x)
    assert not is_changed
    assert time.monotonic() - begin < 10 * LOST
    return error


# What makes a plan new: the number of samples, that of micro-batches, the mode, or an attribute of a layer.
NEW_PLANS: dict[str, Callable[[GPipe], object]] = {
    "first": lambda pipe: None,
    "chunks": lambda pipe: setattr(pipe, "chunks", 2),
    "attribute": lambda pipe: [setattr(each, "eps", 0.25) for each in pipe if hasattr(each, "eps")],
    "checkpoint": lambda pipe: setattr(pipe, "checkpoint", "always"),
    "schedule": lambda pipe: setattr(pipe, "schedule", "1f1b"),
}


def compiling_longer(slow_rank: int, changes: list[str], dies: bool = False) -> list[str]:
    """One rank compiles each new plan for longer than the timeout, or dies meanwhile: returns the errors.

    Other ranks get the bits of a pipeline that compiles as fast as they do. Known plans wait for nobody.
    """
    pipe, x, errors = _pipe(timeout=SHORT), features(9), []
    quick = _pipe()
    if changes[0] != "first":
        step(pipe, x)
    compile_stages = Compiler.compile

    def compile_slowly(*args: Any) -> Any:
        end = time.monotonic() + 2.5 * SHORT
        while time.monotonic() < end:
            time.sleep(0.1)
        if dies:
            os._exit(1)
        return compile_stages(*args)

    for change in changes:
        for each in (pipe, quick):
            NEW_PLANS[change](each)
        is_slow = dist.get_rank() == slow_rank
        with mock.patch.object(Compiler, "compile", compile_slowly) if is_slow else contextlib.nullcontext():
            errors.append(_error_of(lambda: step(pipe, x)))
        if not errors[-1]:
            assert unequal(here(step(pipe, x)), here(step(quick, x))) == []
            with mock.patch.object(ranks.Ranks, "_wait_until_ready", side_effect=AssertionError):
                step(pipe, x)
    return errors


def changed(pipe: GPipe, x: Tensor) -> tuple[str, bool]:
    """Returns the error of a step with an optimizer, and whether anything has changed."""
    optimizer = torch.optim.SGD([p for p in pipe.parameters() if not p.is_meta], lr=1.0)
    target = torch.ones(len(x), 2)
    before = {name: t.clone() for name, t in pipe.state_dict().items() if not t.is_meta}
    error = _error_of(lambda: pipe.step(x, target=target, loss_fn=loss_of, normalizer=1, optimizer=optimizer))
    after = pipe.state_dict()
    is_changed = any(p.grad is not None for p in pipe.parameters())
    return error, is_changed or any(not torch.equal(t, after[name]) for name, t in before.items())


def failing_outside(place: str) -> None:
    """An error that nobody catches ends the last rank: before the first call, or before its backward."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    pipe, x = _pipe(timeout=300.0), features(9)
    if is_last and place == "before a call":
        raise ValueError("no data")
    output = pipe(x)
    if is_last:
        raise ValueError("no loss")
    output.backward()


def going_on() -> list[str]:
    """The last rank leaves out a backward, then mixes up two: returns the errors; all go on afterwards."""
    pipe, x = _pipe(), features(9)
    output = pipe(x)
    if dist.get_rank() == dist.get_world_size() - 1:
        errors = [_error_of(lambda: pipe(x))]
    else:
        errors = [_error_of(output.backward)]
    first, second = pipe(x), pipe(x)
    in_order = (first, second) if dist.get_rank() == 0 else (second, first)
    errors.append(_error_of(lambda: [each.sum().backward() for each in in_order]))
    assert all(p.grad is None for p in pipe.parameters())
    step(pipe, x)
    return errors


def failing_to_update() -> str:
    """The optimizer fails on rank 1, after a step has succeeded: returns the first error."""
    pipe, x = _pipe(), features(9)
    optimizer = torch.optim.SGD([p for p in pipe.parameters() if not p.is_meta], lr=0.1)
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)

    def update() -> None:
        pipe.step(x, target=x[:, :4], loss_fn=nn.functional.mse_loss, optimizer=optimizer)

    return _error_of(update) or _error_of(update)


def unused_output() -> list[str]:
    """A loss uses one of two outputs: returns the error, and that of a mini-batch in flight meanwhile.

    A loss of both outputs works afterwards.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), TensorToPair())
    pipe = GPipe(layers, [1] * dist.get_world_size(), chunks=2, mesh=dist.group.WORLD, timeout=TIMEOUT)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    output, other = pipe(features(8)), pipe(features(8))
    errors = [_error_of(lambda: (output[0] if is_last else output).sum().backward())]
    errors.append(_error_of(lambda: (other[0] if is_last else other).sum().backward()))
    assert all(p.grad is None for p in pipe.parameters())
    output = pipe(features(8))
    (output[0] + output[1].T.sum() if is_last else output).sum().backward()
    assert all((p.grad is None) == p.is_meta for p in pipe.parameters())
    return errors


def with_delays(seeds: int) -> int:
    """Compares steps with those in one process, also if every action of every rank is delayed at random."""
    warnings.simplefilter("ignore")
    make, batch, balances = MODELS["ties"]
    x, balance = batch(9), balances[dist.get_world_size() - 2]
    options: dict[str, Any] = {"chunks": 3, "schedule": "1f1b"}
    ours = GPipe(make(), balance, mesh=dist.group.WORLD, timeout=TIMEOUT, **options)
    alone = GPipe(make(), balance, devices=["cpu"] * len(balance), **options)
    alone.threads_per_stage = 1
    expected = step(alone, x)
    _check(step(ours, x), expected, ours, "without delays")
    for seed in range(seeds):
        runner_of(ours).pipeline.inject_faults(seed * 7 + dist.get_rank(), max_delay_us=3000)
        _check(step(ours, x), expected, ours, f"seed {seed}")
    return seeds


def losing_the_store() -> str:
    """Rank 0, whose process has the store, stops after a step: returns the error of the others."""
    pipe, x = _pipe(timeout=LOST), features(9)
    step(pipe, x)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"stepped/{dist.get_rank()}", "")
    if dist.get_rank() == 0:
        store.wait([f"stepped/{rank}" for rank in range(dist.get_world_size())])
        os.kill(os.getpid(), signal.SIGSTOP)
    return _error_of(lambda: step(pipe, x))
