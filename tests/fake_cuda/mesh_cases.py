"""One rank of a pipeline over processes whose stages are on fake GPUs; run by test_mesh.py.

`mesh_cases.py OPERATORS RANK SIZE STORE BACKEND CASE WORD...`: joins SIZE ranks by the file
STORE, and prints what the case returns. BACKEND: ``gloo``, or ``nccl`` for fake_nccl.py. Marks in the log
tell steps from the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_fast import GPipe
from gpipe_fast.distributed import ranks
from tests.distributed import cases, sharded_cases, tensor_cases
from tests.fake_cuda.fake_devices import load, mark
from tests.fake_cuda.fake_nccl import FakeNccl
from tests.internals import inject_failure, remove_faults
from tests.reference import unequal

SIZE = 2


def pipeline(
    name: str, chunks: int, devices: object, num_stages: int = SIZE, **options: object
) -> tuple[GPipe, Tensor]:
    """Returns a pipeline over the ranks, and a mini-batch on its first device."""
    warnings.simplefilter("ignore")
    make, batch, balances = cases.MODELS[name]
    balance, mesh = balances[num_stages - 2], dist.group.WORLD
    pipe = GPipe(make(), balance, chunks=chunks, mesh=mesh, devices=devices, timeout=30.0, **options)
    return pipe, batch(8 if chunks == 4 else 9).to(pipe.devices[0])


def whole_step(pipe: GPipe, x: Tensor, target: Tensor) -> None:
    pipe.step(x, target=target, loss_fn=cases.loss_of, normalizer=len(x))


def same_bits(names: str, schedules: str, device: str, chunks: str = "3", num_stages: str = "2") -> int:
    """As for the ranks on the CPU."""
    settings = names.split("/"), schedules.split("/"), [int(chunks)], ["except_last"], int(num_stages)
    return cases.same_bits(*settings, device=device)


def steps(name: str, schedule: str, device: str) -> str:
    """Runs three steps, of which the last two are marked; the caller overwrites what they have read."""
    pipe, x = pipeline(name, 4, device, schedule=schedule)
    target = torch.zeros(8, 2, device=x.device)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a fill is work on the stream that allocates
    mark("plan")
    for number in range(3):
        if number:
            mark("begin")
        whole_step(pipe, x, target)
        if number:
            mark("end")
        x.copy_(x.flip(0))
        with torch.no_grad():
            for parameter in pipe.parameters():
                if not parameter.is_meta:
                    parameter.mul_(0.5)
                    parameter.grad = None
    return str(pipe.devices[0])


def failing(action: str, num_stages: str = "2") -> str:
    """An action fails on its rank: returns the error. The step works before and afterwards."""
    pipe, x = pipeline("batch norm", 3, "cuda", int(num_stages))
    expected = cases.here(cases.step(pipe, x))
    groups = [*FakeNccl.groups]
    if dist.get_rank() == int(action[0]) % SIZE:
        inject_failure(pipe, action)
    error = cases._error_of(lambda: cases.step(pipe, x))
    remove_faults(pipe)
    assert all(group.is_aborted for group in groups)
    assert unequal(cases.here(cases.step(pipe, x)), expected) == []
    assert len(FakeNccl.groups) == 2 * len(groups)
    assert not any(group.is_aborted for group in FakeNccl.groups[len(groups) :])
    return error.replace("\n", " ")


def divided(dim: str, name: str, stages: int, schedule: str, device: str = "cuda") -> GPipe:
    """Returns a pipeline whose layers are divided along 'tp' or 'fsdp'."""
    with torch.device(device):
        if dim == "fsdp":
            return sharded_cases.made(name, stages, schedule=schedule, timeout=30.0)
        mesh = tensor_cases.mesh_of(stages, device)
        layers = tensor_cases.MODELS[name](mesh["tp"])
    return GPipe(layers, (3, 3), mesh=mesh, chunks=4, schedule=schedule, timeout=30.0)


def divided_step(pipe: GPipe, x: Tensor, y: Tensor) -> list[Tensor]:
    """Returns the loss and this rank's gradients."""
    loss = pipe.step(x, target=y, loss_fn=tensor_cases.loss_of, normalizer=len(x))
    found = [tensor_cases.local(p.grad) for p in pipe.parameters() if p.grad is not None]
    pipe.zero_grad()
    return [loss, *found]


def divided_numbers(dim: str, names: str, stages: str, schedules: str) -> str:
    """Compares with plain loops; returns what differs."""
    each = [
        tensor_cases.Case(name, int(stages), (3, 3), schedule, "except_last", 4, 8)
        for name in names.split("/")
        for schedule in schedules.split("/")
    ]
    if dim == "fsdp":
        return str(sharded_cases.same_numbers(each, device="cuda"))
    return str(tensor_cases.same_bits(each, device="cuda"))


def divided_like_on_cpus(dim: str, name: str, stages: str, schedules: str) -> str:
    """Compares steps with those of ranks on the CPU; returns how many tensors were compared."""
    warnings.simplefilter("ignore")
    count = 0
    for schedule in schedules.split("/"):
        with mock.patch.object(ranks, "uses_nccl", return_value=False):
            on_cpu = divided(dim, name, int(stages), schedule, "cpu")
        pipe = divided(dim, name, int(stages), schedule)
        with torch.no_grad():
            for own, other in zip(pipe.parameters(), on_cpu.parameters(), strict=True):
                if not own.is_meta:
                    tensor_cases.local(own).copy_(tensor_cases.local(other))
        for step in range(3):
            x, y = tensor_cases.batch(8, step), tensor_cases.batch(8, step + 7)
            found, expected = divided_step(pipe, x.cuda(), y.cuda()), divided_step(on_cpu, x, y)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
                count += 1
    return str(count > 0)


def divided_steps(dim: str, name: str, stages: str, schedule: str) -> None:
    """As `steps`."""
    warnings.simplefilter("ignore")
    pipe = divided(dim, name, int(stages), schedule)
    x, y = tensor_cases.batch(8).cuda(), tensor_cases.batch(8, 2).cuda()
    torch.utils.deterministic.fill_uninitialized_memory = False
    for number in range(3):
        mark("begin" if number else "plan")
        divided_step(pipe, x, y)
        mark("end")
        x.copy_(x.flip(0))
        with torch.no_grad():
            for parameter in pipe.parameters():
                if not parameter.is_meta:
                    tensor_cases.local(parameter).mul_(0.5)


def divided_failing(dim: str, stages: str, action: str, rank: str) -> str:
    """As `failing`; the action fails on one rank."""
    warnings.simplefilter("ignore")
    pipe = divided(dim, "llama", int(stages), "1f1b")
    x, y = tensor_cases.batch(8).cuda(), tensor_cases.batch(8, 2).cuda()
    expected, groups = divided_step(pipe, x, y), [*FakeNccl.groups]
    if dist.get_rank() == int(rank):
        inject_failure(pipe, action)
    error = cases._error_of(lambda: divided_step(pipe, x, y))
    remove_faults(pipe)
    assert all(group.is_aborted for group in groups)
    assert all(map(torch.equal, divided_step(pipe, x, y), expected))
    assert len(FakeNccl.groups) == 2 * len(groups)
    return error.replace("\n", " ")


def losing_the_device(number: str) -> str:
    """An operation fails the first rank's GPU, as an illegal access does: returns the error."""
    pipe, x = pipeline("skips", 3, "cuda")
    target = torch.zeros(9, 2, device="cuda")
    whole_step(pipe, x, target)
    if dist.get_rank() == 0:
        ctypes.CDLL(None).fake_cuda_plant(b"sticky", int(number))
        mark("begin")
    error = cases._error_of(lambda: whole_step(pipe, x, target))
    gc.collect()
    return error.replace("\n", " ")


def mixed() -> str:
    """One rank has a GPU, and the other has none: returns the error."""
    pipe, x = pipeline("batch norm", 3, ["cpu", "cuda"])
    return cases._error_of(lambda: pipe(x)).replace("\n", " ")


def main() -> None:
    operators, rank, size, store, backend, case, *words = sys.argv[1:]
    load(operators)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(size)),
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    with contextlib.ExitStack() as stack:
        if backend == "nccl":
            stack.enter_context(mock.patch.object(ranks, "uses_nccl", return_value=True))
            stack.enter_context(mock.patch.object(ranks, "nccl_group", FakeNccl))
        print(globals()[case](*words))
        assert bool(FakeNccl.groups) == (backend == "nccl")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
