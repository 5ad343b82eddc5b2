"""Inputs, checkpoint modes and errors of a call that torchgpipe's users rely on, on both libraries."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.torchgpipe.libraries import (
    OURS,
    FunctionLayer,
    Library,
    RecordingLinear,
    both_libraries,
    gradients,
    ignore_python_warning,
    numbered_samples,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), ignore_python_warning]

every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
every_backend = pytest.mark.parametrize("backend", ["auto", "eager"])


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
def test_each_tensor_of_a_tuple_is_split_and_concatenated(library: Library) -> None:
    swap = nn.Sequential(
        FunctionLayer(lambda pair: (pair[1] * 2, pair[0])), FunctionLayer(lambda pair: (*pair, pair[0]))
    )
    x, y = numbered_samples(7), numbered_samples(7, 3)
    output = library.make(swap, [1, 1], chunks=4)((x, y))
    assert type(output) is tuple
    assert all(map(torch.equal, output, (y * 2, x, y * 2)))


@both_libraries
def test_the_input_may_be_passed_by_keyword(library: Library) -> None:
    """`input` is the name in nn.Sequential; the first layer's own name does not matter."""
    module, x = nn.Sequential(FunctionLayer(lambda x: x * 2), nn.Linear(6, 2)), numbered_samples()
    torch.testing.assert_close(library.make(module, [1, 1], chunks=2)(input=x), module(input=x))


@both_libraries
@pytest.mark.parametrize(("input", "name"), [(3, "int"), ("x", "str"), (None, "NoneType"), ({1}, "set")])
def test_an_input_that_is_not_a_tensor_is_rejected(input: object, name: str, library: Library) -> None:
    for module, balance in ((small_model(), [2, 2]), (nn.Sequential(), [])):
        with pytest.raises(TypeError) as raised:
            library.make(module, balance)(input)
        assert str(raised.value).startswith(f"expected Tensor, but got {name}")


@both_libraries
def test_an_empty_sequential_returns_its_input(library: Library) -> None:
    pipe, x = library.make(nn.Sequential(), [], chunks=4), numbered_samples()
    assert pipe(x) is x
    pair = (x, x)
    assert pipe(pair) is pair
    assert (len(pipe), list(pipe), len(pipe.partitions), pipe.devices) == (0, [], 0, [])


@both_libraries
@every_mode
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_mini_batch_runs_forward_and_backward(
    training: bool, checkpoint: str, library: Library
) -> None:
    """Like the plain loop: no rows, zero gradients, and batch norm statistics of an empty batch."""
    module, plain = small_model().train(training), small_model().train(training)
    pipe = library.make(module, [2, 2], chunks=4, checkpoint=checkpoint).train(training)
    results = []
    for forward in (pipe, lambda x: torch.cat([plain(part) for part in x.chunk(4)])):
        x = numbered_samples(0).requires_grad_()
        output = forward(x)
        output.sum().backward()
        results.append([output, x.grad])
    (ours, x_grad), (expected, _) = results
    assert ours.shape == expected.shape == (0, 4)
    assert x_grad is not None
    assert x_grad.shape == (0, 6)
    for actual, expected_value in zip(gradients(module), gradients(plain), strict=True):
        assert actual is not None
        assert torch.equal(actual, expected_value)
    if library is OURS:
        for actual, expected_value in zip(module.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(actual, expected_value, rtol=0, atol=0, equal_nan=True)


@every_backend
@every_mode
def test_an_empty_mini_batch_has_zero_gradients_on_every_backend(checkpoint: str, backend: str) -> None:
    pipe = GPipe(small_model(), [2, 2], chunks=4, checkpoint=checkpoint, backend=backend)
    x = numbered_samples(0).requires_grad_()
    for _ in range(2):
        pipe.zero_grad()
        pipe(x).sum().backward()
        assert all(g is not None and not g.any() for g in gradients(pipe))


class RandomRecorder(nn.Module):
    """Records the random numbers that it draws, by (is recompute, first number of the micro-batch)."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library, self.linear = library, nn.Linear(6, 6)
        self.drawn: dict[tuple[bool, float], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        draw = torch.rand(3)
        self.drawn[bool(self.library.package.is_recomputing()), float(x.detach()[0, 0])] = draw
        y: Tensor = self.linear(x)
        return y


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


@both_libraries
def test_a_recompute_draws_the_same_random_numbers_as_its_forward(library: Library) -> None:
    drawing = RandomRecorder(library)
    pipe = library.make(
        nn.Sequential(nn.Identity(), drawing, nn.Dropout()), [1, 2], chunks=4, checkpoint="always"
    )
    pipe(numbered_samples()).sum().backward()
    draws = [drawing.drawn[False, first] for first in (0.0, 2.0, 4.0, 6.0)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 4
    assert all(
        torch.equal(drawing.drawn[True, first], draw)
        for first, draw in zip((0.0, 2.0, 4.0, 6.0), draws, strict=True)
    )


class InjectedError(Exception):
    pass


def inject_errors(layers: list[RecordingLinear], *faults: tuple[int, str, float]) -> list[InjectedError]:
    """Makes stages raise, and returns their errors.

    Args:
        layers: the layer of each stage.
        *faults: for each error the stage, the phases, and the index of the micro-batch's first sample.
    """
    errors = []
    for stage, phases, sample in faults:
        error = InjectedError(f"stage {stage}, sample {sample}")
        layers[stage].error_for = lambda phase, first, p=phases, s=sample, e=error: (  # type: ignore[misc]
            e if phase in p and first == s else None
        )
        errors.append(error)
    return errors


def check_step_after_error(pipe: Any, layers: list[RecordingLinear]) -> None:
    """Checks that a step after an error equals the plain model's step."""
    for layer in layers:
        layer.error_for = lambda phase, first: None
    results = []
    for model in (pipe, nn.Sequential(*layers)):
        pipe.zero_grad()
        output = model(numbered_samples())
        output.square().sum().backward()
        results.append([output, *gradients(pipe)])
    torch.testing.assert_close(*results)


@pytest.mark.sampled(3)
@both_libraries
@every_mode
def test_a_call_raises_the_exception_of_a_stage(checkpoint: str, library: Library) -> None:
    pipe, layers = recording_pipeline(library, chunks=4, checkpoint=checkpoint)
    for stage in range(3):
        for sample in (0.0, 4.0, 6.0):
            (error,) = inject_errors(layers, (stage, "FC", sample))
            with pytest.raises(InjectedError) as raised:
                pipe(numbered_samples())
            assert raised.value is error
            check_step_after_error(pipe, layers)


@pytest.mark.sampled(4)
@both_libraries
@pytest.mark.parametrize(
    ("faults", "first"),
    [
        ([(0, "FC", 4.0), (1, "FC", 0.0)], 1),
        ([(0, "FC", 2.0), (1, "FC", 0.0)], 0),
        ([(0, "FC", 6.0), (1, "FC", 4.0), (2, "FC", 0.0)], 2),
        ([(0, "FC", 4.0), (1, "FC", 2.0), (2, "FC", 0.0)], 0),
    ],
    ids=["0F2 and 1F0", "0F1 and 1F0", "0F3, 1F2 and 2F0", "0F2, 1F1 and 2F0"],
)
def test_of_several_exceptions_the_first_in_schedule_order_is_raised(
    faults: list[tuple[int, str, float]], first: int, library: Library
) -> None:
    """An action's clock tick is stage + micro-batch; within a tick the lower stage comes first."""
    pipe, layers = recording_pipeline(library, chunks=4)
    for _ in range(5):
        errors = inject_errors(layers, *faults)
        with pytest.raises(InjectedError) as raised:
            pipe(numbered_samples())
        assert raised.value is errors[first]
    check_step_after_error(pipe, layers)


@pytest.mark.sampled(3)
@both_libraries
@pytest.mark.parametrize("stage", range(3))
def test_the_backward_raises_the_exception_of_a_recompute(stage: int, library: Library) -> None:
    pipe, layers = recording_pipeline(library, chunks=4, checkpoint="always")
    for sample in (0.0, 4.0, 6.0):
        (error,) = inject_errors(layers, (stage, "R", sample))
        output = pipe(numbered_samples())
        with pytest.raises(InjectedError) as raised:
            output.sum().backward()
        assert raised.value is error
        check_step_after_error(pipe, layers)


@both_libraries
def test_concurrent_calls_from_several_threads_do_not_interfere(library: Library) -> None:
    """One call fails; the others are unaffected."""
    pipe, layers = recording_pipeline(library, chunks=4, checkpoint="never")
    (error,) = inject_errors(layers, (1, "F", 100.0))
    inputs = [numbered_samples() + 10 * index for index in range(3)]
    bad = numbered_samples()
    bad[4:6, 0] = 100.0
    start = threading.Barrier(4)

    def step(model: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        output = model(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), x)]

    def call(x: Tensor) -> list[list[Tensor] | InjectedError]:
        start.wait()
        actual: list[list[Tensor] | InjectedError] = []
        for _ in range(10):
            try:
                actual.append(step(pipe, x))
            except InjectedError as raised_error:
                actual.append(raised_error)
        return actual

    with ThreadPoolExecutor(4) as pool:
        *good, failed = pool.map(call, [*inputs, bad])
    assert all(raised_error is error for raised_error in failed)
    for results, x in zip(good, inputs, strict=True):
        expected = step(nn.Sequential(*layers), x)
        for result in results:
            torch.testing.assert_close(result, expected)


def test_gpipe_fast_accepts_inputs_that_torchgpipe_rejects() -> None:
    """Inputs may contain lists, dicts and numbers."""
    layer = FunctionLayer(lambda value: value["x"][0] * value["n"])
    x = numbered_samples()
    assert torch.equal(GPipe(nn.Sequential(layer), [1], chunks=2)({"x": [x], "n": 2}), x * 2)
