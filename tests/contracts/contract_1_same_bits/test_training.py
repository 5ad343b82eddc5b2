"""Training utilities around a pipeline give the same bits as around the plain micro-batch loop."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS, STEPS = 4, 3


class Backend:
    """The backend of the pipelines that `make_both` constructs."""

    current = "aten"


@pytest.fixture(autouse=True, params=["aten", pytest.param("eager", marks=pytest.mark.extended)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Backend, "current", request.param)
    return str(request.param)


class PlainLoop(nn.Sequential):
    """The plain loop over micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        plain = nn.Sequential(*self)
        with keyed_rng(plain):
            return torch.cat([plain(part) for part in x.chunk(CHUNKS)])


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
    model = nn.Sequential(*copy.deepcopy(list(plain)))
    balance = [2, len(model) - 2]
    return plain, GPipe(model, balance, chunks=CHUNKS, checkpoint=checkpoint, backend=Backend.current)


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def differences(ours: nn.Module, plain: nn.Module) -> list[str]:
    """Returns the names of parameters, gradients and buffers that are not bitwise equal."""
    found = []
    pairs = zip(ours.named_parameters(), plain.named_parameters(), strict=True)
    for (name, a), (_, b) in pairs:
        if not torch.equal(a, b):
            found.append(name)
        if (a.grad is None) != (b.grad is None) or (a.grad is not None and not torch.equal(a.grad, b.grad)):
            found.append(f"gradient of {name}")
    for (name, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        if not torch.equal(a, b):
            found.append(name)
    return found


def check_equal_training(train: Callable[[nn.Module], object], models: tuple[nn.Module, nn.Module]) -> None:
    """Trains both models, and asserts that the returned values and the models' tensors are equal."""
    results = []
    for model in models:
        torch.manual_seed(7)
        results.append(train(model))
    assert str(results[0]) == str(results[1])
    assert differences(models[1], models[0]) == []


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_schedulers_and_clipping_equal_the_plain_loop(name: str, checkpoint: str) -> None:
    def train(model: nn.Module) -> list[float]:
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        norms = []
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            schedule.step()
        return norms

    check_equal_training(train, make_both(checkpoint=checkpoint))


def test_lbfgs_which_calls_the_model_inside_its_step_equals_the_plain_loop() -> None:
    def train(model: nn.Module) -> float:
        optimizer, (x, y) = torch.optim.LBFGS(model.parameters(), max_iter=4), batch(0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return float(optimizer.step(closure))  # type: ignore[arg-type]

    check_equal_training(train, make_both())


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_copies_are_independent_of_the_original(checkpoint: str) -> None:
    """Copies by deepcopy, pickle and torch.save, each between a forward and its backward."""

    def save_and_load(model: GPipe) -> GPipe:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert isinstance(loaded, GPipe)
        return loaded

    plain, pipe = make_both(checkpoint=checkpoint)
    x, y = batch(0)
    for copy_model in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load):
        torch.manual_seed(7)
        loss = F.cross_entropy(pipe(x), y)
        other = copy_model(pipe)
        loss.backward()
        assert (other.balance, other.chunks, other.checkpoint) == ([2, 4], CHUNKS, checkpoint)
        assert list(other.state_dict()) == list(pipe.state_dict())
        assert differences(other.eval(), pipe) != []  # gradients are not copied
        other.train()
        for model in (other, reference := copy.deepcopy(plain)):
            model.zero_grad()
        reference.load_state_dict(other.state_dict())
        check_equal_training(lambda model: F.cross_entropy(model(x), y).backward(), (reference, other))
        pipe.zero_grad()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_changing_the_dtype_after_a_step_equals_the_plain_loop(dtype: torch.dtype) -> None:
    plain, pipe = make_both()

    def train(model: nn.Module) -> None:
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        model.zero_grad()
        model.to(dtype)
        x, y = batch(1)
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()

    check_equal_training(train, (plain, pipe))
    assert {p.dtype for p in pipe.parameters()} == {dtype}
    assert {p.dtype for p in copy.deepcopy(pipe).half().parameters()} == {torch.float16}


def test_module_hooks_equal_the_plain_loop() -> None:
    def train(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        handles = [
            model.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
            model.register_forward_hook(lambda m, args, output: output + 1),
            model.register_full_backward_pre_hook(lambda m, grad: (grad[0] * 3,)),
            model.register_full_backward_hook(
                lambda m, grad_in, grad_out: seen.append(grad_in[0].norm().item())
            ),
        ]
        x, y = batch(0)
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        seen.append(x.grad.norm().item())  # type: ignore[union-attr]
        for handle in handles:
            handle.remove()
        F.cross_entropy(model(x), y).backward()
        return seen

    check_equal_training(train, make_both())


def run_gradient_descent(model: nn.Module, after_step: Callable[[], object] = lambda: None) -> None:
    """Runs a few steps of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after_step()


class SymmetricWeight(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).t()


def parametrized_layers() -> list[nn.Module]:
    new_layers = layers()
    parametrize.register_parametrization(new_layers[3], "weight", SymmetricWeight())
    parametrizations.weight_norm(new_layers[0])
    parametrizations.orthogonal(new_layers[5], orthogonal_map="householder")
    return new_layers


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_parametrizations_equal_the_plain_loop(checkpoint: str) -> None:
    check_equal_training(run_gradient_descent, make_both(parametrized_layers, checkpoint))


def test_an_averaged_model_equals_the_plain_loop() -> None:
    """AveragedModel copies the pipeline, averages its weights, and is evaluated."""

    def train(model: nn.Module) -> Any:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        run_gradient_descent(model, lambda: average.update_parameters(model))
        with torch.no_grad():
            return average.eval()(batch(9)[0]).tolist()

    check_equal_training(train, make_both())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_from_a_data_loader_equals_the_plain_loop(num_workers: int) -> None:
    """The last mini-batch is smaller than the others."""
    data = TensorDataset(*batch(0, size=22))

    def train(model: nn.Module) -> list[int]:
        optimizer, sizes = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            for x, y in DataLoader(data, 8, shuffle=True, num_workers=num_workers):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                sizes.append(len(x))
        return sizes

    check_equal_training(train, make_both())


def _train_replica(rank: int, folder: str, checkpoint: str, backend: str) -> None:
    """Trains one of two processes on its half of every mini-batch."""
    Backend.current = backend
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    _, pipe = make_both(_layers_without_dropout_and_batch_norm, checkpoint)
    model = DistributedDataParallel(pipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step, size=16)
        own_half = slice(8 * rank, 8 * rank + 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x[own_half]), y[own_half]).backward()
        optimizer.step()
    torch.save(
        {"state": pipe.state_dict(), "gradients": [p.grad for p in pipe.parameters()]}, f"{folder}/{rank}"
    )
    dist.destroy_process_group()


def _layers_without_dropout_and_batch_norm() -> list[nn.Module]:
    return [layer for layer in layers() if not isinstance(layer, (nn.Dropout, nn.BatchNorm1d))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_distributed_data_parallel_equals_one_process(
    checkpoint: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of two gloo processes equal one process's on the whole batch, up to the order of sums."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_train_replica, (str(tmp_path), checkpoint, backend), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    plain = PlainLoop(*_layers_without_dropout_and_batch_norm())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step, size=16)
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for a, b, p in zip(first["gradients"], second["gradients"], plain.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, p.grad)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(first["state"][name], value)


def test_the_comparison_detects_different_inputs() -> None:
    plain, pipe = make_both()
    with pytest.raises(AssertionError):
        check_equal_training(
            lambda model: model(batch(0)[0] * (1 + isinstance(model, GPipe))).sum().backward(), (plain, pipe)
        )
