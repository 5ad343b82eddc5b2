"""What the ranks of the tests of sharded parameters run: stages along 'pp', rows along 'fsdp'."""

from __future__ import annotations

import copy
import functools
import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gpipe_fast import GPipe, shard
from gpipe_fast.container import runner_of
from gpipe_fast.distributed import ranks
from tests.distributed import tensor_cases
from tests.distributed.cases import TIMEOUT, _error_of
from tests.distributed.checkpoint_cases import FLAT
from tests.distributed.tensor_cases import MODELS, Case, batch, gpt, loss_of, own_optimizer, square_of, whole


def sharded(layers: nn.Sequential, stages: int, balance: tuple[int, ...], **options: Any) -> GPipe:
    shape = stages, dist.get_world_size() // stages
    device = next(layers.parameters()).device.type.replace("meta", "cpu")
    mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "fsdp"))
    options = {"chunks": 4, "schedule": "1f1b", "timeout": TIMEOUT} | options
    return GPipe(shard(layers, mesh["fsdp"]), balance, mesh=mesh, **options)


def made(name: str, stages: int, balance: tuple[int, ...] = (3, 3), **options: Any) -> GPipe:
    return sharded(MODELS[name](), stages, balance, **options)


def shares(pipe: GPipe, *tensors: Tensor) -> list[list[Tensor]]:
    """Returns the samples of each replica, the own ones first."""
    processes = runner_of(pipe).processes
    each = [
        list(parts) for parts in zip(*(t.tensor_split(processes.num_replicas) for t in tensors), strict=True)
    ]
    return [each[processes.replica], *each]


def plain_gradients(
    layers: nn.Sequential, x: Tensor, y: Tensor, pipe: GPipe, count: float, loss: Any = loss_of
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a plain loop over micro-batches, and the gradients, of one replica."""
    parts = zip(x.chunk(pipe.chunks), y.chunk(pipe.chunks), strict=True)  # type: ignore[arg-type]
    losses = [loss(layers(a), b) / count for a, b in parts]
    total = functools.reduce(torch.add, losses)
    for each in [total] if pipe.schedule == "gpipe" else losses:
        each.backward()
    found = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
    layers.zero_grad()
    return total.detach(), found


def added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: functools.reduce(torch.add, [part[name] for part in parts]) for name in parts[0]}


def differences(pipe: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    """Returns the gradients that differ in a bit; of sums of gloo over three and more, in rounding."""
    found = []
    for name, parameter in pipe.named_parameters():
        if parameter.is_meta:
            continue
        if parameter.grad is None or name not in expected:
            found += [name] if (parameter.grad is None) == (name in expected) else []
            continue
        assert type(parameter.grad) is type(parameter.detach())
        gradient = whole(parameter.grad)
        few = runner_of(pipe).processes.num_replicas == 2  # type: ignore[arg-type]
        same = torch.equal if few or isinstance(parameter, DTensor) else torch.allclose
        if not same(gradient, expected[name]):
            found.append(f"{name} differs by {(gradient - expected[name]).abs().max()}")
    return found


def generated(seeds: list[int]) -> list[str]:
    return same_numbers([Case.of_seed(seed, dist.get_world_size()) for seed in seeds])


def same_numbers(cases: list[Case], device: str = "cpu") -> list[str]:
    """Compares steps and backwards with the plain loops of all replicas, added up."""
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        options: dict[str, Any] = {
            "chunks": case.chunks,
            "checkpoint": case.checkpoint,
            "schedule": case.schedule,
        }
        with torch.device(device):
            pipe, single = made(case.model, case.stages, case.balance, **options), MODELS[case.model]()
        for step in range(2):
            number = case.samples * dist.get_world_size() // case.stages
            inputs = batch(number, step).to(device), batch(number, step + 7).to(device)
            (x, y), *every = shares(pipe, *inputs)
            loss = pipe.step(x, target=y, loss_fn=loss_of, normalizer=len(x))
            losses, gradients = zip(
                *(plain_gradients(single, a, b, pipe, number) for a, b in every), strict=True
            )
            assert torch.equal(loss, functools.reduce(torch.add, losses))
            found += [f"{case}, step {step}: {each}" for each in differences(pipe, added(list(gradients)))]
            pipe.zero_grad()
            pipe.schedule = single.schedule = "gpipe"  # type: ignore[assignment]
            average(pipe, x, y)
            gradients = [plain_gradients(single, a, b, pipe, len(a) * len(every))[1] for a, b in every]
            expected = added([{k: v.clone() for k, v in each.items()} for each in gradients])
            for name, parameter in pipe.named_parameters():
                if not parameter.is_meta:
                    torch.testing.assert_close(whole(parameter.grad), expected[name], msg=f"{case}: {name}")  # type: ignore[arg-type]
            pipe.schedule = case.schedule
            pipe.zero_grad()
    return found


def average(pipe: GPipe, x: Tensor, y: Tensor) -> None:
    """Runs the backward of a loss of this replica's samples, which averages gradients."""
    output = pipe(x)
    if runner_of(pipe).processes.has_last_stage:
        output = loss_of(output, y) / len(x)
    output.backward()


class Mixed(nn.Module):
    """Parameters of few and odd numbers of rows, without dimensions, frozen, tied, and of five dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.one = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(1, 4))
        self.scale, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(4), False)
        self.low, self.tied = nn.Parameter(torch.randn(7, 5).bfloat16()), self.odd
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.mask, self.count = (
            nn.Parameter(t, False) for t in (torch.tensor([True, False]), torch.arange(5))
        )
        self.cube, self.unused = nn.Parameter(torch.randn(3, 2, 2)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.frozen + self.one) @ self.odd.T * self.scale
        x = x * self.phase.abs().sum() / 4 + self.mask.sum() * self.count.sum()
        x = x @ self.low.float().T @ torch.ones(7, 4)
        return x + torch.tanh(x @ self.tied.T).mean() + self.cube.flatten()[:4]


def mixed(checkpoint: Any) -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layers = nn.Sequential(Mixed(), Mixed(), Mixed(), nn.Linear(4, 2))
    torch.manual_seed(0)
    single = nn.Sequential(Mixed(), Mixed(), Mixed(), nn.Linear(4, 2))
    pipe, found = sharded(layers, 1, (2, 2), checkpoint=checkpoint, chunks=2, schedule="gpipe"), []
    assert isinstance(pipe[0].odd, DTensor)
    assert pipe[0].tied is pipe[0].odd
    assert type(pipe[0].scale) is nn.Parameter
    for step in range(2):
        (x, y), *every = shares(pipe, torch.randn(8, 4), torch.randn(8, 2))
        pipe.step(x, target=y, loss_fn=square_of, normalizer=len(x))
        gradients = [plain_gradients(single, a, b, pipe, 8, square_of)[1] for a, b in every]
        found += [f"step {step}: {each}" for each in differences(pipe, added(gradients))]
        with torch.no_grad():  # in place: the next step gathers them again
            for own, other in zip(pipe.parameters(), single.parameters(), strict=True):
                if own.dtype not in (torch.bool, torch.int64):
                    own.mul_(0.5), other.mul_(0.5)
        pipe.zero_grad()
    return found


def beside_tensor_parallelism() -> float:
    """Returns the largest difference from the plain loops if blocks are divided along 'tp'."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    layers, single = gpt(mesh["tp"]), gpt()
    others = [each for each in layers if not any(isinstance(p, DTensor) for p in each.parameters())]
    assert len([shard(each, mesh["fsdp"]) for each in others]) == 2
    pipe = GPipe(layers, [6], mesh=mesh, chunks=2, timeout=TIMEOUT)
    (x, y), *every = shares(pipe, batch(8), batch(8, 2))
    pipe.step(x, target=y, loss_fn=loss_of, normalizer=len(x))
    expected = added([plain_gradients(single, a, b, pipe, 8)[1] for a, b in every])
    found = {name: whole(p.grad) for name, p in pipe.named_parameters()}  # type: ignore[arg-type]
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


def counted(stages: int, balance: tuple[int, ...], checkpoint: Any, chunks: int) -> tuple[int, int, int]:
    """Returns the collectives of a step, of which some gather, and of an evaluation, as gloo counts them."""
    warnings.simplefilter("ignore")
    pipe, x, y = made("gpt", stages, balance, checkpoint=checkpoint, chunks=chunks), batch(8), batch(8, 2)

    def number() -> int:
        group = runner_of(pipe).processes._replica_group  # type: ignore[attr-defined]
        found: int = group._get_sequence_number_for_group()
        return found

    def step() -> None:
        pipe.step(x, target=y, loss_fn=loss_of, normalizer=8)

    step()
    before = number()
    group = runner_of(pipe).processes._replica_group  # type: ignore[attr-defined]
    with mock.patch.object(ranks, "gather_rows", wraps=ranks.gather_rows) as gather:
        step()
    after = number()
    pipe.evaluate(x, target=y, loss_fn=loss_of, normalizer=8)
    assert runner_of(pipe).processes._replica_group is group  # type: ignore[attr-defined]
    return after - before, gather.call_count, number() - after


def train(
    pipe: GPipe, optimizer: torch.optim.Optimizer, steps: range, single: nn.Sequential | None = None
) -> list[float]:
    """Trains with clipping, and compares with one process; returns the losses."""
    other = None if single is None else own_optimizer(single)
    losses = []
    for step in steps:
        x, y = batch(8, step), batch(8, step + 50)
        (a, b), *_ = shares(pipe, x, y)
        optimizer.zero_grad()
        options: dict[str, Any] = {"optimizer": optimizer, "max_norm": 0.5}
        losses.append(pipe.step(a, target=b, loss_fn=loss_of, normalizer=len(a), **options).item())
        if single is not None and other is not None:
            other.zero_grad()
            expected = loss_of(single(x), y) / 8
            expected.backward()
            nn.utils.clip_grad_norm_(single.parameters(), 0.5)
            other.step()
            assert abs(losses[-1] - expected.item()) < 1e-3
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=FLAT), strict=True))


def made_along(dim: str, name: str, stages: int, *balance: tuple[int, ...]) -> GPipe:
    """Returns a model whose parameters are divided along 'fsdp' or 'tp'."""
    return (made if dim == "fsdp" else tensor_cases.made)(name, stages, *balance)


def trained(dim: str, name: str, stages: int, folder: Path) -> tuple[list[float], list[float]]:
    """Trains as one process does, saves, and goes on; returns the losses and those after the save."""
    warnings.simplefilter("ignore")
    single, pipe = MODELS[name](), made_along(dim, name, stages)
    optimizer = own_optimizer(pipe)
    losses, named = train(pipe, optimizer, range(10), single), dict(single.named_parameters())
    assert pipe.state_dict().keys() <= single.state_dict().keys()
    for key, parameter in pipe.named_parameters():
        if not parameter.is_meta:
            torch.testing.assert_close(whole(parameter.detach()), named[key].detach(), rtol=1e-3, atol=1e-4)
    (x, y), *_ = shares(pipe, batch(8, 70), batch(8, 71))
    loss = pipe.evaluate(x, target=y, loss_fn=loss_of, normalizer=len(x))
    expected = loss_of(single(batch(8, 70)), batch(8, 71)).detach() / 8
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    dcp.save(state_of(pipe, optimizer), checkpoint_id=folder)
    return losses, train(pipe, optimizer, range(10, 13))


def loaded(dim: str, name: str, stages: int, folder: Path) -> list[float]:
    """Loads what another number of processes has saved; returns the losses of the steps that follow.

    A single process loads a plain model.
    """
    warnings.simplefilter("ignore")
    alone, single = dist.get_world_size() == 1, MODELS[name]()
    pipe = (
        GPipe(single, [3, 3], chunks=4, schedule="1f1b") if alone else made_along(dim, name, stages, (2, 4))
    )
    model = single if alone else pipe
    optimizer = own_optimizer(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    found = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **found, options=FLAT)
    return train(pipe, optimizer, range(10, 13))


def loaded_whole() -> list[float]:
    """Loads the weights of a plain model, on the meta device and not; returns the differences of a call."""
    warnings.simplefilter("ignore")
    plain, found, x = MODELS["gpt"](), [], batch(8)
    with torch.device("meta"):
        empty = MODELS["gpt"]()
    for layers in empty, MODELS["gpt"]():
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.add_(1)
        pipe = sharded(layers, 1, (3, 3))
        pipe.load_weights(plain.state_dict())
        found.append(float((pipe(x) - plain(x)).abs().max()))
    return found


def failing(how: str, stages: int, place: str) -> str:
    """Returns the error of a step in which the last rank fails before it gathers, or in an action."""
    warnings.simplefilter("ignore")
    pipe = made("llama", stages, timeout=10.0)

    def step() -> float:
        (x, y), *_ = shares(pipe, batch(8), batch(8, 2))
        loss: float = pipe.step(x, target=y, loss_fn=loss_of, normalizer=len(x)).item()
        pipe.zero_grad()
        return loss

    def fail(*args: Any) -> None:
        if how == "ValueError":
            raise ValueError("injected")
        os.kill(os.getpid(), getattr(signal, how))

    first = step()
    native, found = runner_of(pipe).pipeline, ranks.gather_rows
    if dist.get_rank() == dist.get_world_size() - 1:
        if place == "gather":
            found = fail  # type: ignore[assignment]
        else:
            native.inject_faults(faults=[(place, 0, how)])
    with mock.patch.object(ranks, "gather_rows", found):
        error = _error_of(step)
    native.inject_faults()
    assert all(parameter.grad is None for parameter in pipe.parameters())
    if how == "ValueError":
        dist.barrier()
        assert step() == first
    return error


def changed() -> str:
    """Returns the error of a backward before which a parameter was changed."""
    warnings.simplefilter("ignore")
    pipe = made("gpt", 1)
    output = pipe(batch(8))
    with torch.no_grad():
        next(pipe.parameters()).mul_(2)
    return _error_of(lambda: output.sum().backward())


def stage_without_parameters(dim: str) -> list[str]:
    """Returns the gradients that differ if one of the stages of each process has no parameters."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    single, mesh = copy.deepcopy(layers), init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", dim))
    pipe = GPipe(shard(layers, mesh[dim]) if dim == "fsdp" else layers, [1, 1, 1], mesh=mesh, chunks=2)
    (x, y), *every = shares(pipe, torch.randn(8, 4), torch.randn(8, 4))
    pipe.step(x, target=y, loss_fn=square_of, normalizer=len(x))
    return differences(pipe, added([plain_gradients(single, a, b, pipe, 8, square_of)[1] for a, b in every]))


def inference() -> float:
    """Returns the difference of a call without autograd, before the first one with it."""
    warnings.simplefilter("ignore")
    pipe, x = made("gpt", 1), batch(8)
    with torch.inference_mode():
        return float((pipe(x) - MODELS["gpt"]()(x)).abs().max())


def memory() -> tuple[int, int, int]:
    """Returns the bytes that the report counts for parameters, of the rows here, and of whole ones."""
    pipe, plain = made("gpt", 1, (6,)), MODELS["gpt"]()
    own = sum(p.to_local().nbytes for p in pipe.parameters())  # type: ignore[operator]
    found = pipe.memory(batch(8), optimizer=torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9))
    assert sum(found.optimizer) == own
    assert found.stages[0] is not None
    return found.stages[0].parameters, own, sum(p.nbytes for p in plain.parameters())


def several() -> tuple[str, float, tuple[int, int, int]]:
    return changed(), inference(), memory()
