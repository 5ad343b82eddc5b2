"""Inputs, checkpoint modes and errors of a call that torchgpipe's users rely on, on both libraries."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torchgpipe.libraries import (
    OURS,
    Library,
    RecordingLinear,
    both_libraries,
    ignore_python_warning,
    numbered_samples,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), ignore_python_warning]

every_mode = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def recording_pipeline(library: Library, **options: Any) -> tuple[Any, list[RecordingLinear]]:
    """Returns a pipeline of three stages that record their calls, and its layers."""
    torch.manual_seed(0)
    layers = [RecordingLinear(library) for _ in range(3)]
    return library.make(nn.Sequential(*layers), [1, 1, 1], **options), layers


@both_libraries
@pytest.mark.parametrize(
    ("batch", "chunks", "sizes"),
    [
        *((8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (5, 4, [2, 2, 1])),
        *((2, 4, [1, 1]), (1, 1, [1]), (0, 2, [0, 0])),
    ],
)
def test_a_mini_batch_is_split_like_torch_chunk(
    batch: int, chunks: int, sizes: list[int], library: Library
) -> None:
    pipe, layers = recording_pipeline(library, chunks=chunks)
    x = numbered_samples(batch)
    output = pipe(x)
    assert [layer.sizes for layer in layers] == [sizes] * 3
    torch.testing.assert_close(output, nn.Sequential(*layers)(x))


@both_libraries
@pytest.mark.parametrize(("input", "name"), [(3, "int"), ("x", "str"), (None, "NoneType"), ({1}, "set")])
def test_an_input_that_is_not_a_tensor_is_rejected(input: object, name: str, library: Library) -> None:
    for module, balance in ((small_model(), [2, 2]), (nn.Sequential(), [])):
        with pytest.raises(TypeError) as raised:
            library.make(module, balance)(input)
        assert str(raised.value).startswith(f"expected Tensor, but got {name}")


@both_libraries
@every_mode
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_mini_batch_runs_forward_and_backward(
    training: bool, checkpoint: str, library: Library
) -> None:
    """Like the plain loop: no rows, zero gradients, and batch norm statistics of an empty batch."""
    plain = small_model().train(training)
    for options in ({"backend": "auto"}, {"backend": "eager"}) if library is OURS else ({},):
        module = small_model().train(training)
        pipe = library.make(module, [2, 2], chunks=4, checkpoint=checkpoint, **options).train(training)
        x = numbered_samples(0).requires_grad_()
        output = pipe(x)
        output.sum().backward()
        assert output.shape == (0, 4)
        assert x.grad is not None
        assert x.grad.shape == (0, 6)
        assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
        if library is OURS:
            reference = copy.deepcopy(plain)
            for part in numbered_samples(0).chunk(4):
                reference(part)
            torch.testing.assert_close(
                dict(module.named_buffers()), dict(reference.named_buffers()), rtol=0, atol=0, equal_nan=True
            )


@both_libraries
@pytest.mark.parametrize(
    ("checkpoint", "phases"),
    [("always", "CCCCRRRR"), ("except_last", "CCCFRRR"), ("never", "FFFF")],
)
def test_the_checkpoint_mode_decides_which_micro_batches_recompute(
    checkpoint: str, phases: str, library: Library
) -> None:
    """The last micro-batch is recomputed first; eval mode recomputes none."""
    pipe, layers = recording_pipeline(library, chunks=4, checkpoint=checkpoint)
    pipe(numbered_samples()).sum().backward()
    assert [layer.phases for layer in layers] == [phases] * 3
    order = [first for phase, _, first in layers[0].calls if phase == "R"]
    assert order == sorted(order, reverse=True)
    for layer in layers:
        layer.calls.clear()
    pipe.eval()(numbered_samples()).sum().backward()
    assert [layer.phases for layer in layers] == ["FFFF"] * 3


class MeetsOtherStage(nn.Module):
    """Waits at one micro-batch until the layer of the other stage has reached its own."""

    def __init__(self, barrier: threading.Barrier, sample: float) -> None:
        super().__init__()
        self.barrier, self.sample = barrier, sample

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) == self.sample:
            self.barrier.wait()
        return x * 2


def test_stages_on_the_cpu_run_at_the_same_time() -> None:
    """Stage 0 runs micro-batch 1 while stage 1 runs micro-batch 0; in torchgpipe they take turns."""
    barrier = threading.Barrier(2, timeout=60)
    stages = nn.Sequential(MeetsOtherStage(barrier, 2.0), MeetsOtherStage(barrier, 0.0))
    x = numbered_samples()
    assert torch.equal(OURS.make(stages, [1, 1], chunks=4)(x), x * 4)
