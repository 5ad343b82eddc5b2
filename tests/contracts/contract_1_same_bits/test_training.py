"""DistributedDataParallel around a pipeline trains as one process does on the whole mini-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.contracts.contract_1_same_bits.equality import PlainLoop
from tests.reference import unequal

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS, STEPS, BATCH = 4, 3, 16


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)]


def state_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Returns parameters and gradients."""
    named = [*model.named_parameters()]
    return {name: t.detach() for name, t in named} | {f"gradient of {name}": t.grad for name, t in named}


def run_gradient_descent(model: nn.Module, rows: slice) -> None:
    """Runs a few steps of gradient descent on these rows of the mini-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 6, generator=generator)
        y = torch.randint(3, (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def _train_replica(rank: int, folder: str, checkpoint: str) -> None:
    """Trains one of two processes on its half of every mini-batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    pipe = GPipe(nn.Sequential(*layers()), [2, 2], chunks=CHUNKS, checkpoint=checkpoint)
    run_gradient_descent(DistributedDataParallel(pipe), slice(8 * rank, 8 * rank + 8))
    torch.save(state_of(pipe), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_distributed_data_parallel_equals_one_process(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of two gloo processes equal one process's on the whole batch, up to the order of sums."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_train_replica, (str(tmp_path), checkpoint), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    plain = PlainLoop(*layers())
    plain.chunks = CHUNKS
    run_gradient_descent(plain, slice(BATCH))
    assert unequal(first, second) == []
    torch.testing.assert_close(first, state_of(plain))
