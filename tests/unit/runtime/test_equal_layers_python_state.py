"""Layers that are equal, apart from Python state that forward reads in unusual ways, equal a plain loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime import equal_layers
from gpipe_fast.runtime.equal_layers import FakeInputs, PartGraphs, trace_stage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.trace.joint_graph import JointGraph
from tests.reference import check_step, loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


class Branch(nn.Module):
    """A layer with enough modules to be a part of its own; it holds a number."""

    def __init__(self, number: int = 1) -> None:
        super().__init__()
        self.number = number
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return x + self.branch(x)


class ReadsVars(Branch):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * vars(self)["number"]


class ReadsDict(Branch):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.__dict__["number"]


class ReadsCopy(Branch):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * copy.copy(self).number


SCALES: dict[int, float] = {}


class ReadsIdentity(Branch):
    def __init__(self, number: int) -> None:
        super().__init__(1)
        SCALES[id(self)] = float(number)

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * SCALES[id(self)]


class _Config:
    def __init__(self, hidden: nn.Module) -> None:
        self.hidden = hidden


class ReadsModuleInObject(Branch):
    """The module in the object is found only once the trace has shown that forward reads it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        hidden = nn.Module()
        hidden.width = 2  # type: ignore[assignment]
        del self.number  # the attribute of the object comes first
        self.config = _Config(hidden)
        self.number = number

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * (self.number + self.config.hidden.width)


@pytest.mark.parametrize("kind", [ReadsVars, ReadsDict, ReadsCopy, ReadsIdentity, ReadsModuleInObject])
def test_layers_that_differ_in_what_they_read(kind: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    check_step(nn.Sequential(*(kind(n) for n in (2, 3, 4))), torch.randn(4, 8), 2, budgets=(0.0,))


class _LookedUp:
    """Looks its attributes up in its own dictionary, as the configurations of transformers do."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        assert super().__getattribute__("__dict__").get("per_layer") is None
        return super().__getattribute__(name)


class ReadsConfiguration(Branch):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.configuration = _LookedUp()

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.configuration.scale


def test_equal_layers_whose_configuration_reads_its_own_dictionary_are_traced_once() -> None:
    model = GPipe(nn.Sequential(*map(ReadsConfiguration, (2, 3, 4))), [3])
    with patch.object(equal_layers, "trace", wraps=equal_layers.trace) as traced:
        model(torch.randn(4, 8, requires_grad=True))
    assert traced.call_count == 1


def test_equal_stages_whose_equal_layers_read_identities() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ReadsIdentity(2), ReadsIdentity(3))
    check_step(model, torch.randn(4, 8), 4, [1, 1], budgets=(0.0,))


class Activated(Branch):
    """Reads a global variable, which equal layers before it do not."""

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.branch(x))


def test_equal_stages_with_layers_that_read_nothing() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (Branch(), Branch(), Activated())]
    check_step(nn.Sequential(*layers), torch.randn(4, 8), 4, [3, 3], budgets=(0.0,))


class Buffer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((8,), value))


class Unregistered(Branch):
    """Refers to a module that is not its child."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.others[0].value


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_buffers_of_modules_that_are_not_children(balance: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Unregistered(Buffer(2.0)), Unregistered(Buffer(3.0)))
    check_step(model, torch.randn(4, 8), 4, balance, budgets=(0.0,))


class Statistics(Branch):
    """Writes a buffer that another layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.value += x.mean(0)
        return self.branch(x)


class ReadsStatistics(Unregistered):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.others[0].value.clone()


def test_a_layer_that_reads_a_buffer_of_another() -> None:
    torch.manual_seed(0)
    statistics = Statistics()
    model = nn.Sequential(statistics, Branch(), Branch(), ReadsStatistics(statistics))
    check_step(model, torch.randn(4, 8), 2, budgets=(0.0,))


class Config(dict[str, float]):
    """A dictionary with attributes."""

    scale: float


class ReadsConfig(Branch):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.config = Config(unused=1.0)
        self.config.scale = scale

    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.config.scale


def test_attributes_of_a_dictionary() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(ReadsConfig(n) for n in (2.0, 2.0, 3.0)))
    x, pipe = torch.randn(4, 8), GPipe(model, [3], chunks=2)
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 2)) == []
    model[0].config.scale = 5.0  # type: ignore[union-attr]
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 2)) == []


class Normalized(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())


@pytest.mark.filterwarnings("ignore:.*runs in Python")
def test_buffers_in_the_same_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Normalized() for _ in range(3)))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    norms[1].running_mean = norms[0].running_mean.detach()  # type: ignore[union-attr]
    check_step(model, torch.randn(4, 8), 2, budgets=(0.0,))


class Tied(Unregistered):
    def forward(self, x: Tensor) -> Any:
        return F.linear(self.branch(x), self.others[0].branch[0].weight)


def test_a_layer_that_reads_a_parameter_of_another() -> None:
    torch.manual_seed(0)
    first = Branch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no layer runs in Python
        model = nn.Sequential(first, Branch(), Branch(), Tied(first))
        check_step(model, torch.randn(4, 8), 2, budgets=(0.0,))


class Scaled(Branch):
    def forward(self, x: Tensor) -> Any:
        return self.branch(x) * self.number


def test_equal_layers_keep_a_bounded_number_of_graphs() -> None:
    layers, known = [Scaled(), Scaled()], PartGraphs(4)
    boundary = BoundarySpec((TensorSpec.of(torch.randn(2, 8), True),))
    for number in range(6):
        for layer in layers:
            layer.number = number
        stage = Stage(layers, 0, torch.device("cpu"))
        joint = trace_stage(stage, FakeInputs.of(boundary, False), (), known)
        assert isinstance(joint, JointGraph)
    assert len(known.graphs()) == 4
