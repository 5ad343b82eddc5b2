"""Measurements of a copy of one layer: the sizes counted, and the state that must not change."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_fast.balance.profile import LayerMeasurement, LayerOutput, LayerSizes, first_microbatch
from gpipe_fast.layers.skip import Namespace, pop, skip_scope, skippable, stash
from gpipe_fast.layers.structure import CallArguments, replicate

CPU = torch.device("cpu")
FLOAT, LONG = 4, 8


def sample_input(value: Any, chunks: int = 1) -> LayerOutput:
    return first_microbatch(value, chunks, CPU)


def measure(layer: nn.Module, value: Any) -> tuple[LayerSizes, LayerMeasurement]:
    measurement = LayerMeasurement(layer, sample_input(value), CPU)
    return measurement.sizes(), measurement


def test_the_sizes_of_a_linear_layer_are_counted() -> None:
    sizes, measurement = measure(nn.Linear(6, 8), torch.randn(5, 6, requires_grad=True))
    assert sizes == LayerSizes(
        flops=2 * 5 * 6 * 8,
        parameter_bytes=(6 * 8 + 8) * FLOAT,
        activation_bytes=5 * 6 * FLOAT,  # the input, saved for the weight's gradient
        boundary_bytes=5 * 8 * FLOAT,
    )
    assert [tuple(x.shape) for x in measurement.output_of_run.tensors] == [(5, 8)]


@pytest.mark.parametrize("inplace", [False, True])
def test_an_activation_counts_once_in_place_or_not(inplace: bool) -> None:
    sizes, _ = measure(nn.ReLU(inplace), torch.randn(5, 6, requires_grad=True))
    assert sizes == LayerSizes(0, 0, 5 * 6 * FLOAT, 5 * 6 * FLOAT)


def test_a_tensor_that_is_saved_twice_counts_once() -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x * x.view(-1).view_as(x)

    sizes, _ = measure(Cube(), torch.randn(5, 6, requires_grad=True))
    assert sizes.activation_bytes == 2 * 5 * 6 * FLOAT  # x and x * x


def test_saved_parameters_and_buffers_do_not_count_as_activations() -> None:
    sizes, _ = measure(nn.BatchNorm1d(6), torch.randn(5, 6))
    # The input, and the mean and deviation of the micro-batch.
    assert sizes.activation_bytes == (5 * 6 + 6 + 6) * FLOAT
    assert sizes.parameter_bytes == 2 * 6 * FLOAT


def test_shared_parameters_count_once() -> None:
    layer = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    cast(nn.Linear, layer[1]).weight = cast(nn.Linear, layer[0]).weight
    assert measure(layer, torch.randn(5, 6))[0].parameter_bytes == 6 * 6 * FLOAT


def test_integer_inputs_are_counted() -> None:
    sizes, measurement = measure(nn.Embedding(11, 6), torch.randint(11, (5, 3)))
    assert sizes == LayerSizes(0, 11 * 6 * FLOAT, 5 * 3 * LONG, 5 * 3 * 6 * FLOAT)
    assert measurement.output_of_run.tensors[0].requires_grad


def test_a_layer_without_gradients_has_no_backward_time() -> None:
    sizes, measurement = measure(nn.Flatten(), torch.randn(5, 2, 3))
    assert sizes == LayerSizes(0, 0, 0, 5 * 6 * FLOAT)
    assert not measurement.output_of_run.tensors[0].requires_grad
    assert measurement.times(0.0)[0].backward == 0.0


def test_checkpointed_activations_are_not_counted() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 6))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    sizes, measurement = measure(Checkpointed(), torch.randn(5, 6, requires_grad=True))
    assert sizes.activation_bytes <= 5 * 6 * FLOAT
    assert len(measurement.times(0.0)) == 1


@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_in_place_layer_does_not_change_its_input(layer: nn.Module, requires_grad: bool) -> None:
    x = torch.randn(5, 6, requires_grad=requires_grad)
    before = x.detach().clone()
    _, measurement = measure(layer, x)
    assert len(measurement.times(0.2)) > 1
    assert torch.equal(x, before)
    assert x.grad is None
    assert measurement.output_of_run.tensors[0].requires_grad == requires_grad


def test_measuring_leaves_the_layer_unchanged() -> None:
    layer = nn.BatchNorm1d(6).eval()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    _, measurement = measure(layer, torch.randn(5, 6) + 3)
    measurement.times(0.0)
    assert not layer.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters())


class Swap(nn.Module):
    """Takes and returns a dict of tensors and a string."""

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        assert value["name"] == "kept"
        return {"a": value["b"] * 2, "b": value["a"], "name": "kept"}


def test_layers_with_nested_inputs_and_outputs_are_measured() -> None:
    value = {"a": torch.randn(5, 6, requires_grad=True), "b": torch.randint(9, (5,)), "name": "kept"}
    sizes, measurement = measure(Swap(), value)
    assert sizes.boundary_bytes == 5 * 6 * FLOAT + 5 * LONG
    assert [x.requires_grad for x in measurement.output_of_run.tensors] == [False, True]
    next_measurement = LayerMeasurement(Swap(), measurement.output_of_run, CPU)
    assert len(next_measurement.times(0.0)) == 1
    assert (
        next_measurement.output_of_run.structure.build(next_measurement.output_of_run.tensors)["name"]
        == "kept"
    )


def test_a_tensor_that_is_returned_twice_crosses_the_boundary_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    sizes, measurement = measure(Twice(), torch.randn(5, 6, requires_grad=True))
    assert sizes.boundary_bytes == 5 * 6 * FLOAT
    a, b = measurement.output_of_run.structure.build(measurement.output_of_run.tensors)
    assert a is b


def test_a_layer_with_several_arguments_is_measured() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            return x + y

    x, y = torch.randn(5, 6), torch.randn(5, 6)
    _, measurement = measure(Adds(), CallArguments((x,), {"y": y}))
    assert torch.equal(measurement.output_of_run.tensors[0], x + y)


def test_the_first_microbatch_is_the_largest() -> None:
    value = (torch.arange(10).view(5, 2), replicate(torch.arange(3)))
    output_of_run = sample_input(value, chunks=2)
    assert [x.tolist() for x in output_of_run.tensors] == [[[0, 1], [2, 3], [4, 5]], [0, 1, 2]]


@skippable(stash=["skip", "none"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", x * 2)
        yield stash("none", None)
        return x[:, :1]


@skippable(pop=["skip", "none"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Generator[pop, Any, Tensor]:
        skip: Tensor = yield pop("skip")
        assert (yield pop("none")) is None
        return x + skip.relu_()  # relu_ writes to the skip tensor


def test_skip_tensors_count_at_every_boundary_that_they_cross() -> None:
    one, two = Namespace(), Namespace()
    layers = [Stash().isolate(one), Stash().isolate(two), nn.Tanh(), Pop().isolate(two), Pop().isolate(one)]
    output_of_run = sample_input(torch.randn(5, 6, requires_grad=True))
    boundaries: list[int] = []
    for layer in layers:
        measurement = LayerMeasurement(layer, output_of_run, CPU)
        boundaries.append(measurement.sizes().boundary_bytes)
        assert len(measurement.times(0.0)) == 1
        output_of_run = measurement.output_of_run
    assert boundaries == [each * 5 * FLOAT for each in (1 + 6, 1 + 6 + 1, 1 + 6 + 1, 1 + 6, 6)]
    assert not output_of_run.unpopped_skips
    assert output_of_run.tensors[0].requires_grad


def test_measuring_neither_reads_nor_changes_the_callers_stashed_tensors() -> None:
    stashing = Stash()
    with skip_scope({}) as held:
        stashing(torch.randn(5, 6))
        before = dict(held)
        measure(Stash(), torch.randn(5, 6))
        assert held == before
        with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
            measure(Pop(), torch.randn(5, 6))


@pytest.mark.parametrize("chunks", [0, -1])
def test_numbers_of_chunks_below_one_are_refused(chunks: int) -> None:
    with pytest.raises(ValueError, match=f"^number of chunks must be positive integer, got {chunks}$"):
        sample_input(torch.randn(5, 6), chunks)


def test_samples_without_tensors_or_on_the_meta_device_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^expected Tensor, but got tuple; the sample"):
        sample_input((1, None))
    with pytest.raises(TypeError, match=r"^expected Tensor, but got set"):
        sample_input({1})
    with pytest.raises(ValueError, match=r"^the sample is on the meta device; pass one with data$"):
        sample_input(torch.randn(5, 6, device="meta"))
