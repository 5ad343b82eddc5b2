"""What the ranks of the tests of replicas run: stages along 'pp', their replicas along 'dp_replicate'."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from tests.contracts.contract_1_same_bits.test_grad_dtype import Cast
from tests.distributed import cases
from tests.distributed.cases import MODELS, TIMEOUT, _check, _error_of, loss_of
from tests.models import mlp
from tests.reference import SEED, Result, loop_step, pipeline_step, restored

# The batch sizes of the replicas, and the seeds of their dropout.
BATCHES, SEEDS = (9, 6, 8), (SEED, SEED + 1, SEED + 2)


def piped(make: Callable[[], nn.Sequential], balance: list[int], **options: Any) -> GPipe:
    """Returns the pipeline over all processes, with as many replicas as there are."""
    warnings.simplefilter("ignore")
    shape = dist.get_world_size() // len(balance), len(balance)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "pp"))
    return GPipe(make(), balance, mesh=mesh, **{"timeout": TIMEOUT, "chunks": 3, **options})


def alone(make: Callable[[], nn.Sequential], balance: list[int], **options: Any) -> GPipe:
    found = GPipe(make(), balance, devices=["cpu"] * len(balance), chunks=3, **options)
    found.threads_per_stage = 1
    return found


def place_of(pipe: GPipe) -> tuple[int, int]:
    """Returns the replica of this process, and the number of replicas."""
    processes = runner_of(pipe).processes
    return processes.replica, processes.num_replicas


def batch_of(name: str, replica: int) -> Tensor:
    """Returns the samples of a replica, which are not those of other replicas."""
    before = sum(BATCHES[:replica])
    return MODELS[name][1](before + BATCHES[replica])[before:]


def step(pipe: GPipe, x: Tensor, normalizer: int, seed: int = SEED) -> Result:
    """Returns the losses of a step and of an evaluation, and what the step left behind."""
    result = cases.step(pipe, x, normalizer, seed)
    target = torch.zeros(len(x), 2)
    with restored(pipe):
        evaluated = pipe.evaluate(x, target=target, loss_fn=loss_of, normalizer=normalizer)
    return result | {"evaluated": evaluated}


def added(parts: list[Result], own: int, divisor: int = 1) -> Result:
    """Returns the gradients and losses of all replicas, added up in their order; the rest of one."""
    return parts[own] | {
        name: functools.reduce(torch.add, [part[name] / divisor for part in parts])  # type: ignore[operator]
        for name, first in parts[0].items()
        if first is not None and (name in ("loss", "evaluated") or name.startswith("gradient of"))
    }


def same_sums(names: list[str], schedules: list[str]) -> int:
    """Compares steps and backwards over replicas with those of one process, added up, bit for bit."""
    number = 0
    for name in names:
        make, _, balances = MODELS[name]
        ours, single = piped(make, balances[0]), alone(make, balances[0])
        own, count = place_of(ours)
        batches = [batch_of(name, replica) for replica in range(count)]
        total = sum(map(len, batches))
        for schedule in schedules:
            ours.schedule = single.schedule = schedule
            parts = [step(single, x, total, seed) for x, seed in zip(batches, SEEDS, strict=False)]
            found = step(ours, batches[own], len(batches[own]), SEEDS[own])
            _check(found, added(parts, own), ours, f"step, {name}, {schedule}, replica {own}")
            number += 1
        # The plain loop adds up gradients of tied parameters in another order.
        parts = [pipeline_step(single, x) if name == "ties" else loop_step(make(), x, 3) for x in batches]
        found = pipeline_step(ours, batches[own])
        _check(found, added(parts, own, count), ours, f"backward, {name}, replica {own}")
    return number


def wide() -> nn.Sequential:
    """Returns a model whose first stage has gradients of two dtypes, and of 25 MB of one of them in a bucket.

    A parameter lies transposed in memory.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 1500), nn.Linear(1500, 2200), nn.Linear(2200, 2200))
    layers[0].weight = nn.Parameter(torch.randn(8, 1500).T)
    return nn.Sequential(layers, nn.Linear(2200, 6), Cast(torch.float64), nn.Linear(6, 4).double())


def several_buckets() -> int:
    """Compares a step of a model whose first stage needs three buckets."""
    ours, single = piped(wide, [3, 1]), alone(wide, [3, 1])
    own, _ = place_of(ours)
    batches = [torch.randn(9 - 3 * r, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    parts = [step(single, x, 15) for x in batches]
    _check(step(ours, batches[own], len(batches[own])), added(parts, own), ours, f"replica {own}")
    assert ours[3].weight.is_meta or ours[3].weight.grad is None
    return 1


def half() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()


def rounded_once() -> bool:
    """Compares float32 sums of bfloat16 gradients over micro-batches and replicas.

    Returns whether a rounding before the sum over replicas would show.
    """
    ours = piped(half, [1, 2], grad_dtype=torch.float32, schedule="1f1b")
    own, _ = place_of(ours)
    single = alone(half, [1, 2])
    single.chunks = 1
    batches = [batch_of("dropout", replica)[:6].bfloat16() for replica in range(2)]
    target = torch.zeros(6, 2)

    def gradients(pipe: GPipe, x: Tensor, normalizer: int) -> list[Tensor]:
        with restored(pipe):
            pipe.step(x, target=target[: len(x)], loss_fn=loss_of, normalizer=normalizer)
            return [p.grad for p in pipe.parameters() if p.grad is not None]

    each = [[gradients(single, part, 12) for part in x.chunk(3)] for x in batches]  # by replica, micro-batch
    sums = [
        [functools.reduce(torch.add, (g.float() for g in parts)) for parts in zip(*of_replica, strict=True)]
        for of_replica in each
    ]
    expected = [(a + b).bfloat16() for a, b in zip(*sums, strict=True)]
    twice = [a.bfloat16() + b.bfloat16() for a, b in zip(*sums, strict=True)]
    here = [i for i, p in enumerate(ours.parameters()) if not p.is_meta]
    found = gradients(ours, batches[own], 6)
    assert all(torch.equal(g, expected[i]) for g, i in zip(found, here, strict=True))
    return any(not torch.equal(expected[i], twice[i]) for i in here)


def counted() -> list[float]:
    """Compares means over targets that count with the mean over the samples of all replicas in one process.

    In the first step, nothing counts in one replica; in the third, nothing in any.
    """
    ours, single = piped(mlp, [2, 3]), alone(mlp, [2, 3])
    own, count = place_of(ours)
    inputs = [batch_of("dropout", replica) for replica in range(count)]
    found = []
    for counting in ((0,), (0, 1), ()):
        targets = [
            torch.arange(len(x)) % 5 - 1 if r in counting else torch.full((len(x),), -1)
            for r, x in enumerate(inputs)
        ]
        loss_fn = functools.partial(F.cross_entropy, ignore_index=-1)
        with restored(single):
            whole = single.step(torch.cat(inputs), target=torch.cat(targets), loss_fn=loss_fn)
            expected = {name: p.grad for name, p in single.named_parameters()}
        # Only the last stage reads the elements.
        target = torch.full_like(targets[own], -1) if ours[4].weight.is_meta else targets[own]
        with restored(ours):
            loss = ours.step(inputs[own], target=target, loss_fn=loss_fn)
            for name, p in ours.named_parameters():
                if not p.is_meta:
                    torch.testing.assert_close(p.grad, expected[name], equal_nan=True)
        torch.testing.assert_close(loss, whole, equal_nan=True)
        found.append(loss.item())
    sums = functools.partial(F.cross_entropy, reduction="sum")
    targets = [torch.arange(len(x)) % 4 for x in inputs]
    of_each = [single.step(x, target=y, loss_fn=sums) for x, y in zip(inputs, targets, strict=True)]
    assert torch.equal(ours.step(inputs[own], target=targets[own], loss_fn=sums), of_each[0] + of_each[1])
    return found


def differing() -> list[str]:
    """The second replica differs from the first: returns the errors."""
    make, _, balances = MODELS["batch norm"]
    pipe = piped(make, balances[0])
    odd = place_of(pipe)[0] == 1
    x = batch_of("batch norm", int(odd))
    step(pipe, x, len(x))
    errors = [_error_of(lambda: pipe(x) if odd else step(pipe, x, len(x)))]

    def other() -> nn.Sequential:
        layers = make()
        with torch.no_grad():
            layers[1].bias[3] += odd
        return layers

    errors.append(_error_of(lambda: step(piped(other, balances[0]), x, len(x))))
    step(pipe, x, len(x))
    return errors


def averaged() -> int:
    """Trains replicas with seeds of their own; compares what they have afterwards."""
    make, _, balances = MODELS["batch norm"]
    pipe = piped(make, balances[0])
    own, _ = place_of(pipe)
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if not p.is_meta])
    for number in range(3):
        torch.manual_seed(10 * number + own)
        x = batch_of("batch norm", own) + number
        optimizer.zero_grad()
        pipe.step(x, target=torch.ones(len(x), 2), loss_fn=loss_of, normalizer=len(x), optimizer=optimizer)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {n: t for n, t in pipe.state_dict().items() if not t.is_meta})
    mine, others = found[dist.get_rank()], found[dist.get_rank() - 2]
    parameters = {name for name, _ in pipe.named_parameters()}
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, others[name]) == (name in parameters or "num_batches" in name), name
    return len(mine)
