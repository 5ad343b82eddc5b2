"""One layer's copy: what is counted, and that nothing else notices."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_fast.balance.visit import Handed, Sizes, Visit, first_microbatch
from gpipe_fast.layers.skip import Namespace, carrying, pop, skippable, stash
from gpipe_fast.layers.structure import Call, replicate

CPU = torch.device("cpu")
FLOAT, LONG = 4, 8


def arrived(value: Any, chunks: int = 1) -> Handed:
    return first_microbatch(value, chunks, CPU)


def visit(layer: nn.Module, value: Any) -> tuple[Sizes, Visit]:
    visited = Visit(layer, arrived(value), CPU)
    return visited.sizes(), visited


def test_counts_a_linear_layer() -> None:
    sizes, visited = visit(nn.Linear(6, 8), torch.randn(5, 6, requires_grad=True))
    assert sizes == Sizes(
        flops=2 * 5 * 6 * 8,
        parameter_bytes=(6 * 8 + 8) * FLOAT,
        activation_bytes=5 * 6 * FLOAT,  # its input, for the gradient of the weight
        boundary_bytes=5 * 8 * FLOAT,
    )
    assert [tuple(x.shape) for x in visited.handed.tensors] == [(5, 8)]


@pytest.mark.parametrize("inplace", [False, True])
def test_counts_an_activation_once_in_place_or_not(inplace: bool) -> None:
    sizes, _ = visit(nn.ReLU(inplace), torch.randn(5, 6, requires_grad=True))
    assert sizes == Sizes(0, 0, 5 * 6 * FLOAT, 5 * 6 * FLOAT)


def test_counts_what_is_saved_twice_once() -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x * x.view(-1).view_as(x)

    sizes, _ = visit(Cube(), torch.randn(5, 6, requires_grad=True))
    assert sizes.activation_bytes == 2 * 5 * 6 * FLOAT  # x and x * x


def test_leaves_out_parameters_and_buffers_that_are_saved() -> None:
    sizes, _ = visit(nn.BatchNorm1d(6), torch.randn(5, 6))
    # The input, and the mean and deviation of the micro-batch.
    assert sizes.activation_bytes == (5 * 6 + 6 + 6) * FLOAT
    assert sizes.parameter_bytes == 2 * 6 * FLOAT


def test_counts_shared_parameters_once() -> None:
    layer = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    cast(nn.Linear, layer[1]).weight = cast(nn.Linear, layer[0]).weight
    assert visit(layer, torch.randn(5, 6))[0].parameter_bytes == 6 * 6 * FLOAT


def test_counts_integers() -> None:
    sizes, visited = visit(nn.Embedding(11, 6), torch.randint(11, (5, 3)))
    assert sizes == Sizes(0, 11 * 6 * FLOAT, 5 * 3 * LONG, 5 * 3 * 6 * FLOAT)
    assert visited.handed.tensors[0].requires_grad


def test_a_layer_that_nothing_flows_back_through() -> None:
    sizes, visited = visit(nn.Flatten(), torch.randn(5, 2, 3))
    assert sizes == Sizes(0, 0, 0, 5 * 6 * FLOAT)
    assert not visited.handed.tensors[0].requires_grad
    assert visited.times(0.0)[0].backward == 0.0


def test_what_a_layer_checkpoints_is_not_saved() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 6))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    sizes, visited = visit(Checkpointed(), torch.randn(5, 6, requires_grad=True))
    assert sizes.activation_bytes <= 5 * 6 * FLOAT
    assert len(visited.times(0.0)) == 1


@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_arrives_stays_though_layers_write_to_it(layer: nn.Module, requires_grad: bool) -> None:
    x = torch.randn(5, 6, requires_grad=requires_grad)
    before = x.detach().clone()
    _, visited = visit(layer, x)
    assert len(visited.times(0.2)) > 1
    assert torch.equal(x, before)
    assert x.grad is None
    assert visited.handed.tensors[0].requires_grad == requires_grad


def test_the_layer_itself_stays() -> None:
    layer = nn.BatchNorm1d(6).eval()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    _, visited = visit(layer, torch.randn(5, 6) + 3)
    visited.times(0.0)
    assert not layer.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters())


class Swap(nn.Module):
    """Takes and gives dicts, with something beside tensors."""

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        assert value["name"] == "kept"
        return {"a": value["b"] * 2, "b": value["a"], "name": "kept"}


def test_nested_values() -> None:
    value = {"a": torch.randn(5, 6, requires_grad=True), "b": torch.randint(9, (5,)), "name": "kept"}
    sizes, visited = visit(Swap(), value)
    assert sizes.boundary_bytes == 5 * 6 * FLOAT + 5 * LONG
    assert [x.requires_grad for x in visited.handed.tensors] == [False, True]
    following = Visit(Swap(), visited.handed, CPU)
    assert len(following.times(0.0)) == 1
    assert following.handed.structure.build(following.handed.tensors)["name"] == "kept"


def test_a_tensor_handed_on_twice_crosses_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    sizes, visited = visit(Twice(), torch.randn(5, 6, requires_grad=True))
    assert sizes.boundary_bytes == 5 * 6 * FLOAT
    a, b = visited.handed.structure.build(visited.handed.tensors)
    assert a is b


def test_several_arguments() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            return x + y

    x, y = torch.randn(5, 6), torch.randn(5, 6)
    _, visited = visit(Adds(), Call((x,), {"y": y}))
    assert torch.equal(visited.handed.tensors[0], x + y)


def test_the_first_microbatch_is_the_largest() -> None:
    value = (torch.arange(10).view(5, 2), replicate(torch.arange(3)))
    handed = arrived(value, chunks=2)
    assert [x.tolist() for x in handed.tensors] == [[[0, 1], [2, 3], [4, 5]], [0, 1, 2]]


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
        return x + skip.relu_()  # which writes to it


def test_skip_tensors_count_at_every_boundary_up_to_their_layer() -> None:
    one, two = Namespace(), Namespace()
    layers = [Stash().isolate(one), Stash().isolate(two), nn.Tanh(), Pop().isolate(two), Pop().isolate(one)]
    handed = arrived(torch.randn(5, 6, requires_grad=True))
    boundaries: list[int] = []
    for layer in layers:
        visited = Visit(layer, handed, CPU)
        boundaries.append(visited.sizes().boundary_bytes)
        assert len(visited.times(0.0)) == 1
        handed = visited.handed
    assert boundaries == [each * 5 * FLOAT for each in (1 + 6, 1 + 6 + 1, 1 + 6 + 1, 1 + 6, 6)]
    assert not handed.waiting
    assert handed.tensors[0].requires_grad


def test_skips_of_the_caller_are_none_of_its_business() -> None:
    stashing = Stash()
    with carrying({}) as held:
        stashing(torch.randn(5, 6))
        before = dict(held)
        visit(Stash(), torch.randn(5, 6))
        assert held == before
        with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
            visit(Pop(), torch.randn(5, 6))


@pytest.mark.parametrize("chunks", [0, -1])
def test_refuses_numbers_of_chunks(chunks: int) -> None:
    with pytest.raises(ValueError, match=f"^number of chunks must be positive integer, got {chunks}$"):
        arrived(torch.randn(5, 6), chunks)


def test_refuses_samples_without_tensors() -> None:
    with pytest.raises(TypeError, match=r"^expected Tensor, but got tuple$"):
        arrived((1, None))
    with pytest.raises(TypeError, match=r"^expected Tensor, but got set"):
        arrived({1})
    with pytest.raises(ValueError, match=r"^the sample is on the meta device; pass one with data$"):
        arrived(torch.randn(5, 6, device="meta"))
