"""Equal layers of a stage are traced once, and their joined graphs compute what the plain loop does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.__main__ import gpt
from gpipe_fast import GPipe, verify
from gpipe_fast.runtime import equal_layers
from gpipe_fast.runtime.equal_layers import FakeInputs, PartGraphs, trace_stage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.joint_graph import JointGraph
from tests import quantized
from tests.models import tokens
from tests.reference import check_step, loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


class Part(nn.Module):
    """A layer with enough modules to be a part of its own; it holds a number, or anything else."""

    def __init__(self, number: Any = 1, middle: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.number = number
        self.branch = nn.Sequential(nn.Linear(8, 8), middle(), nn.Dropout(0.5))

    def forward(self, x: Any) -> Any:
        return self.branch(x)


class Residual(nn.Module):
    """Batch norm, whose buffers are written, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Split(nn.Module):
    """Makes two boundary tensors of one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.detach() + 1


class Swap(Part):
    """Two boundary tensors, which swap places."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return y, self.branch(x * y) + x * y


class PassOn(Swap):
    """Passes the second tensor through."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y, x = super().forward(pair)
        return x, y


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


class Transposed(Part):
    """Its outputs, and so the gradients of the layer before, are not contiguous."""

    def forward(self, x: Tensor) -> Any:
        return self.branch(x).transpose(0, 1).contiguous().transpose(0, 1)


class Multiplied(Part):
    """Multiplies by a number, or by a tensor that is neither a parameter nor a buffer."""

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.number


class InPlace(Part):
    """Changes the output of the layer before, so that it is traced together with it."""

    def forward(self, x: Tensor) -> Any:
        x += 1
        return self.branch(x) + x


class LastHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2)[:, 4:]


class ReadsAround(Part):
    """Reads memory that is not its input, but around it, and returns a view."""

    def forward(self, x: Tensor) -> Any:
        return self.branch(F.pad(x, (0, 4)) + x.as_strided((len(x), 8), (8, 1), 0))[:, 4:]


def tied() -> list[nn.Module]:
    layers = [Part() for _ in range(3)]
    layers[2].branch[0].weight = layers[1].branch[0].weight
    return [*layers]


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)


def rows() -> Tensor:
    return torch.randn(4, 8)


CONSTANTS = [torch.full((8,), scale) for scale in (1.0, 2.0)]
# Layers, their mini-batch, and how many parts a trace of each has, for each kind of gradient that arrives.
PARTS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[], Tensor], int]] = {
    "gpt": (lambda: list(gpt(16, 2, 2, 8, dropout=0.1)), lambda: tokens(4), 3),
    "batch norm": (lambda: [nn.Conv2d(3, 4, 3), *(Residual() for _ in range(3))], images, 2),
    "swapped pair": (lambda: [Split(), *(Swap() for _ in range(4)), Join()], rows, 5),
    "passed on": (lambda: [Split(), *(PassOn() for _ in range(4)), Join()], rows, 3),
    "transposed": (lambda: [Transposed() for _ in range(4)], rows, 3),
    "numbers that are not read": (lambda: [Part(i) for i in range(4)], rows, 1),
    "numbers that are read": (lambda: [Multiplied(i % 2) for i in range(4)], rows, 2),
    "constants": (lambda: [Transposed(), *map(Multiplied, CONSTANTS), Transposed()], rows, 5),
    "layers that cannot be joined": (lambda: [nn.Linear(8, 8), *(InPlace() for _ in range(3))], rows, 3),
    "tied layers": (tied, rows, 1),
    "memory around a view": (lambda: [LastHalf(), ReadsAround(), ReadsAround()], rows, 3),
}


@pytest.mark.parametrize("case", PARTS)
def test_equal_layers_are_traced_once_and_equal_the_plain_loop(case: str) -> None:
    torch.manual_seed(0)
    make_layers, make_input, num_traces = PARTS[case]
    with patch.object(equal_layers, "trace", wraps=equal_layers.trace) as traced:
        check_step(nn.Sequential(*make_layers()), make_input(), 2)
    assert traced.call_count == num_traces


@pytest.mark.parametrize("kind", ["own", "NF4", "torchao int8"])
def test_equal_layers_with_quantized_weights_are_traced_once(kind: str) -> None:
    pipe = GPipe(quantized.blocks(quantized.KINDS[kind]), [3, 1], chunks=2)
    with patch.object(equal_layers, "trace", wraps=equal_layers.trace) as traced:
        pipe(torch.randn(4, quantized.WIDTH, requires_grad=True))
    assert traced.call_count == 1


def test_parts_are_traced_in_the_modes_of_a_call() -> None:
    layers = gpt(16, 2, 2, 8)
    pipe, x = GPipe(layers, [len(layers)], chunks=2), tokens(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert verify(pipe, x, lambda y: y.float().square().mean())
    pipe.eval()
    with torch.no_grad():
        assert torch.equal(pipe(x), torch.cat([layers(part) for part in x.chunk(2)]))


def test_a_later_stage_uses_the_parts_of_an_earlier_one_and_a_changed_layer_is_traced_again() -> None:
    layers: list[Any] = [Multiplied(1) for _ in range(4)]
    pipe, x = GPipe(nn.Sequential(*layers), [2, 2], chunks=2), rows().requires_grad_()
    with patch.object(equal_layers, "trace", wraps=equal_layers.trace) as traced:
        pipe(x)
        assert traced.call_count == 1
        layers[1].number = 5
        assert unequal(pipeline_step(pipe, x), loop_step(nn.Sequential(*layers), x, 2)) == []
    assert traced.call_count == 2


def test_other_lengths_are_made_from_a_template_of_parts() -> None:
    layers = gpt(16, 2, 2, 32)
    pipe = GPipe(layers, [len(layers)], chunks=2)
    with patch.object(equal_layers, "trace", wraps=equal_layers.trace) as traced:
        for length in (5, 9, 31, 7):
            x = torch.ones(4, length, dtype=torch.int64)
            assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    assert traced.call_count < 4 * 3


class ReadsVars(Part):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * vars(self)["number"]


class ReadsCopy(Part):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * copy.copy(self).number


SCALES: dict[int, float] = {}


class ReadsIdentity(Part):
    def __init__(self, number: int) -> None:
        super().__init__()
        SCALES[id(self)] = float(number)

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * SCALES[id(self)]


class ReadsModuleInObject(Part):
    """The module in the object is found only once the trace has shown that forward reads it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        hidden: Any = nn.Module()
        hidden.width = 2
        del self.number  # the attribute of the object comes first
        self.config = SimpleNamespace(hidden=hidden)
        self.number = number

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * (self.number + self.config.hidden.width)


class ReadsScale(Part):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.number.scale


class LookedUp:
    """Looks its attributes up in its own dictionary, as the configurations of transformers do."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        assert super().__getattribute__("__dict__").get("per_layer") is None
        return super().__getattribute__(name)


class Config(dict[str, float]):
    """A dictionary with attributes."""

    def __init__(self, scale: float) -> None:
        super().__init__(unused=1.0)
        self.scale = scale


class Activated(Part):
    """Reads a global variable, which equal layers before it do not."""

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.branch(x))


class ReadsOther(Part):
    """Refers to a module that is not its child, in a list."""

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.number[0].value.clone()


class Statistics(Part):
    """Writes a buffer that another layer reads."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((8,), value))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.value += x.mean(0)
        return self.branch(x)


class Tied(Part):
    def forward(self, x: Tensor) -> Any:
        return F.linear(self.branch(x), self.number[0].branch[0].weight)


def read_buffers() -> list[nn.Module]:
    return [ReadsOther([Statistics(value)]) for value in (2.0, 3.0)]


def read_statistics() -> list[nn.Module]:
    statistics = Statistics()
    return [statistics, Part(), Part(), ReadsOther([statistics])]


def read_a_parameter() -> list[nn.Module]:
    first = Part()
    return [first, Part(), Part(), Tied([first])]


def share_buffers() -> list[nn.Module]:
    layers: list[Any] = [Part(middle=lambda: nn.BatchNorm1d(8)) for _ in range(3)]
    layers[1].branch[1].running_mean = layers[0].branch[1].running_mean.detach()
    return layers


# Layers and their balance.
CASES: dict[str, tuple[Callable[[], list[nn.Module]], list[int]]] = {
    "vars": (lambda: [ReadsVars(n) for n in (2, 3, 4)], [3]),
    "copy": (lambda: [ReadsCopy(n) for n in (2, 3, 4)], [3]),
    "identity": (lambda: [ReadsIdentity(n) for n in (2, 3, 4)], [3]),
    "identity in two stages": (lambda: [ReadsIdentity(n) for n in (2, 3)], [1, 1]),
    "module in an object": (lambda: [ReadsModuleInObject(n) for n in (2, 3, 4)], [3]),
    "nothing": (lambda: [kind() for _ in range(2) for kind in (Part, Part, Activated)], [3, 3]),
    "buffers": (read_buffers, [2]),
    "buffers in two stages": (read_buffers, [1, 1]),
    "a buffer of another layer": (read_statistics, [4]),
    "a parameter of another layer": (read_a_parameter, [4]),
    "buffers in the same memory": (share_buffers, [3]),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_that_differ_in_what_they_read(case: str) -> None:
    torch.manual_seed(0)
    make, balance = CASES[case]
    with warnings.catch_warnings():
        # PyTorch does not trace a copy of a module after `torch.compile` in the same process.
        if case not in ("buffers in the same memory", "copy"):
            warnings.filterwarnings("error", ".*runs in Python")
        check_step(nn.Sequential(*make()), torch.randn(4, 8), 2, balance, budgets=(0.0,))


def test_equal_layers_whose_configuration_reads_its_own_dictionary_are_traced_once() -> None:
    model = GPipe(nn.Sequential(*(ReadsScale(LookedUp()) for _ in range(3))), [3])
    with patch.object(equal_layers, "trace", wraps=equal_layers.trace) as traced:
        model(torch.randn(4, 8, requires_grad=True))
    assert traced.call_count == 1


def test_attributes_of_a_dictionary() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(ReadsScale(Config(n)) for n in (2.0, 2.0, 3.0)))
    x, pipe = torch.randn(4, 8), GPipe(model, [3], chunks=2)
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 2)) == []
    model[0].number.scale = 5.0  # type: ignore[union-attr]
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 2)) == []


def test_equal_layers_keep_a_bounded_number_of_graphs() -> None:
    layers, known = [Multiplied(), Multiplied()], PartGraphs(4)
    boundary = BoundarySpec((TensorSpec.of(torch.randn(2, 8), True),))
    for number in range(6):
        for layer in layers:
            layer.number = number
        stage = Stage(layers, 0, torch.device("cpu"))
        joint = trace_stage(stage, FakeInputs.of(boundary, False), (), known)
        assert isinstance(joint, JointGraph)
    assert len(known) == 4
