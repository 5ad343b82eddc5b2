"""Training utilities around a pipeline give the same bits as around the plain micro-batch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
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

CHUNKS, STEPS = 4, 3


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)),
        *(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)),
    ]


def make_both(
    make: Callable[[], list[nn.Module]] = layers, checkpoint: str = "except_last"
) -> tuple[PlainLoop, GPipe]:
    plain = PlainLoop(*make())
    plain.chunks = CHUNKS
    model = nn.Sequential(*copy.deepcopy(list(plain)))
    return plain, GPipe(model, [2, len(model) - 2], chunks=CHUNKS, checkpoint=checkpoint)


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def state_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Returns parameters, gradients and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach() for name, t in named} | {f"gradient of {name}": t.grad for name, t in named}


def check_equal_training(train: Callable[[nn.Module], object], models: tuple[nn.Module, nn.Module]) -> None:
    """Trains both models, and asserts that the returned values and the models' tensors are equal."""
    results = []
    for model in models:
        torch.manual_seed(7)
        results.append(train(model))
    assert str(results[0]) == str(results[1])
    assert unequal(state_of(models[1]), state_of(models[0])) == []


def test_autocast_with_a_grad_scaler_equals_the_plain_loop() -> None:
    """The scaler detects an overflow, skips that step and continues."""

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
        for step in range(5):
            x, y = batch(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss * (1e38 if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert len(set(scales)) > 1
        return scales

    check_equal_training(train, make_both())


def run_gradient_descent(
    model: nn.Module, after_step: Callable[[], object] = lambda: None, rows: slice = slice(8), size: int = 8
) -> None:
    """Runs a few steps of gradient descent on these rows of the mini-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step, size)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        after_step()


def _train_replica(rank: int, folder: str, checkpoint: str) -> None:
    """Trains one of two processes on its half of every mini-batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    _, pipe = make_both(_layers_without_dropout_and_batch_norm, checkpoint)
    run_gradient_descent(DistributedDataParallel(pipe), rows=slice(8 * rank, 8 * rank + 8), size=16)
    torch.save(state_of(pipe), f"{folder}/{rank}")
    dist.destroy_process_group()


def _layers_without_dropout_and_batch_norm() -> list[nn.Module]:
    return [layer for layer in layers() if not isinstance(layer, (nn.Dropout, nn.BatchNorm1d))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_distributed_data_parallel_equals_one_process(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of two gloo processes equal one process's on the whole batch, up to the order of sums."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_train_replica, (str(tmp_path), checkpoint), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    plain, _ = make_both(_layers_without_dropout_and_batch_norm)
    run_gradient_descent(plain, rows=slice(16), size=16)
    assert unequal(first, second) == []
    torch.testing.assert_close(first, state_of(plain))
