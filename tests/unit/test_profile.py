"""Profiles of whole sequences, timed by a fake clock, and the state that profiling must not change."""

from __future__ import annotations

import copy
import math
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_time
from gpipe_fast.layers.structure import replicate
from gpipe_fast.profile import (
    LayerProfile,
    profile_layers,
    table,
)
from gpipe_fast.skip import Namespace, pop, skip_scope, skippable, stash
from tests import models
from tests.unit.balance.timed_layers import Clock, sequence


def layer_seconds(profiles: list[LayerProfile]) -> list[tuple[float, float]]:
    return [(each.forward_seconds, each.backward_seconds) for each in profiles]


def assert_seconds(profiles: list[LayerProfile], wanted: list[tuple[float, float]]) -> None:
    for found, pair in zip(layer_seconds(profiles), wanted, strict=True):
        assert found == pytest.approx(pair, abs=1e-5)


def test_profiled_times_are_the_costs_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch)
    profiles = profile_layers(sequence(clock, 0.001, 0.5, 0.02), torch.randn(4), device="cpu")
    assert_seconds(profiles, [(0.001, 0.002), (0.5, 1.0), (0.02, 0.04)])
    assert [(each.index, each.name, each.kind) for each in profiles] == [
        (index, str(index), "TimedLayer") for index in range(3)
    ]


def test_times_are_medians_without_the_first_run_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first round counts bytes. Three rounds follow, in each of which both layers run twice."""
    clock = Clock(9, 9, *[9, 1, 9, 1], *[9, 1, 9, 1], *[9, 9, 9, 9]).install(monkeypatch)
    assert_seconds(profile_layers(sequence(clock, 1.0, 2.0), torch.randn(4), device="cpu"), [(1, 2), (2, 4)])
    assert not clock.slow


def test_layers_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are slow in the second of three rounds, so none of them seems more expensive."""
    clock = Clock(*[1] * 3, *[1] * 6, *[9] * 6).install(monkeypatch)
    assert_seconds(profile_layers(sequence(clock, 1.0, 1.0, 1.0), torch.randn(4), device="cpu"), [(1, 2)] * 3)


def test_a_timeout_of_none_skips_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch)
    profiles = profile_layers(sequence(clock, 1.0, 1.0), torch.randn(4), device="cpu", timeout=None)
    assert clock.now == pytest.approx(2.0, abs=1e-4)
    assert all(math.isnan(x) for pair in layer_seconds(profiles) for x in pair)
    assert [each.parameter_bytes for each in profiles] == [4, 4]


def test_an_empty_sequential_has_an_empty_profile() -> None:
    assert profile_layers(nn.Sequential(), torch.randn(4), device="cpu") == []


@pytest.mark.parametrize(("name", "training"), [("gpt", True), ("convolutions", True), ("dropout", False)])
def test_profiling_changes_neither_model_nor_input_nor_random_state(name: str, training: bool) -> None:
    """It copies the layers, so it allows gradients, which torchgpipe refuses."""
    make, batch = models.MODELS[name]
    model, x = make().train(training), batch(8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, input = copy.deepcopy(model), x.clone()
    gradients = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        torch.manual_seed(5)
        profiles = profile_layers(model, x, device="cpu", timeout=0.0, chunks=2)
        drawn = torch.rand(3)
        assert not torch.is_grad_enabled()
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert torch.equal(x, input)
    for (name, found), wanted in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(found, wanted), name
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(bool((g == 1).all()) for g in gradients)
    assert all(part.training == training for part in model.modules())
    assert len(profiles) == len(model)
    assert all(each.forward_seconds > 0 and each.boundary_bytes > 0 for each in profiles)


def test_sizes_are_those_of_one_micro_batch() -> None:
    model, x = models.mlp(), models.features(8)
    whole = profile_layers(model, x, timeout=None)
    quarter = profile_layers(model, x, timeout=None, chunks=4)
    assert [4 * each.flops for each in quarter] == [each.flops for each in whole]
    assert [4 * each.activation_bytes for each in quarter] == [each.activation_bytes for each in whole]
    assert [each.parameter_bytes for each in quarter] == [each.parameter_bytes for each in whole]


def test_a_table_has_a_row_for_each_layer() -> None:
    mib = 2**20
    text = table([LayerProfile(0, "0", "Linear", 0.0015, 0.003, 2_000_000, mib, 2 * mib, 3 * mib)])
    assert text.splitlines()[0].split("  ")[0] == "layer"
    assert " ".join(text.splitlines()[2].split()) == "0 Linear 1.500 3.000 2.000 1.000 2.000 3.000"


def test_the_progress_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    model = models.mlp()
    profile_layers(model, models.features(), device="cpu", timeout=0.0, progress=True)
    assert "gpipe_fast: measuring layers" in capsys.readouterr().err
    for progress in (None, False):  # standard error is no terminal here
        profile_layers(model, models.features(), device="cpu", timeout=0.0, progress=progress)
        assert not capsys.readouterr().err


def test_layers_run_with_the_threads_of_a_stage() -> None:
    class Note(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts.append(torch.get_num_threads())
            return x

    counts: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        pipe = GPipe(nn.Sequential(Note(), Note(), Note()), [1, 1, 1], chunks=2)
        x = torch.zeros(2, 1)
        for module, options, expected in (
            (pipe, {}, 2),
            (nn.Sequential(Note()), {}, 6),
            (pipe, {"threads": 3}, 3),
        ):
            counts.clear()
            profiles = profile_layers(module, x, timeout=0.0, **options)
            assert {*counts} == {expected}
            assert {each.threads for each in profiles} == {expected}
            assert table(profiles).endswith(f"intra-op threads: {expected}")
        counts.clear()
        balance_by_time(3, nn.Sequential(Note(), Note(), Note()), x, timeout=0.0)
        assert {*counts} == {2}
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


FLOAT, LONG = 4, 8


def profile(layers: nn.Module | list[nn.Module], value: Any, **options: Any) -> list[LayerProfile]:
    module = nn.Sequential(*(layers if isinstance(layers, list) else [layers]))
    return profile_layers(module, value, device="cpu", **({"timeout": 0.0} | options))


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x * x.view(-1).view_as(x)


def tied() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    layers[1].weight = layers[0].weight
    return layers


INPUT = 5 * 6 * FLOAT
# Layers, their input, and their operations and bytes: of parameters, activations and the boundary.
SIZES: list[tuple[nn.Module, Tensor, tuple[int, int, int, int]]] = [
    # 2 * 5 * 6 * 8 operations; the input is saved for the gradient of the weight.
    (nn.Linear(6, 8), torch.randn(5, 6), (2 * 5 * 6 * 8, (6 * 8 + 8) * FLOAT, INPUT, 5 * 8 * FLOAT)),
    (nn.ReLU(), torch.randn(5, 6, requires_grad=True), (0, 0, INPUT, INPUT)),
    (nn.ReLU(inplace=True), torch.randn(5, 6, requires_grad=True), (0, 0, INPUT, INPUT)),
    # x, which is saved twice, and x * x
    (Cube(), torch.randn(5, 6, requires_grad=True), (0, 0, 2 * INPUT, INPUT)),
    # The input, and the mean and deviation of the micro-batch; parameters and buffers do not count.
    (nn.BatchNorm1d(6), torch.randn(5, 6), (0, 2 * 6 * FLOAT, INPUT + 2 * 6 * FLOAT, INPUT)),
    (tied(), torch.randn(5, 6), (2 * 2 * 5 * 6 * 6, 6 * 6 * FLOAT, 2 * INPUT, INPUT)),
    (nn.Embedding(11, 6), torch.ones(5, 3).long(), (0, 66 * FLOAT, 15 * LONG, 5 * 3 * 6 * FLOAT)),
    (nn.Flatten(), torch.randn(5, 2, 3), (0, 0, 0, INPUT)),
]


@pytest.mark.parametrize(("layer", "x", "expected"), SIZES)
def test_sizes_are_counted(layer: nn.Module, x: Tensor, expected: tuple[int, int, int, int]) -> None:
    (found,) = profile(layer, x)
    sizes = found.flops, found.parameter_bytes, found.activation_bytes, found.boundary_bytes
    assert sizes == expected
    assert (found.backward_seconds == 0) == isinstance(layer, nn.Flatten)  # no output requires a gradient


def test_checkpointed_activations_are_not_counted() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    layer = Checkpointed(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 6))
    (found,) = profile(layer, torch.randn(5, 6, requires_grad=True))
    assert found.activation_bytes <= 5 * 6 * FLOAT


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_in_place_layer_does_not_change_its_input(requires_grad: bool) -> None:
    x = torch.randn(5, 6, requires_grad=requires_grad)
    before = x.detach().clone()
    (found,) = profile(nn.Dropout(0.5, inplace=True), x)
    assert torch.equal(x, before)
    assert x.grad is None
    assert (found.backward_seconds > 0) == requires_grad


class Swap(nn.Module):
    """Takes and returns a dict of tensors and a string."""

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        assert value["name"] == "kept"
        return {"a": value["b"] * 2, "b": value["a"], "name": "kept"}


def test_layers_with_nested_inputs_and_outputs_are_measured() -> None:
    value = {"a": torch.randn(5, 6, requires_grad=True), "b": torch.randint(9, (5,)), "name": "kept"}
    found = profile([Swap(), Swap()], value)
    assert [each.boundary_bytes for each in found] == [5 * 6 * FLOAT + 5 * LONG] * 2
    assert all(each.backward_seconds > 0 for each in found)


def test_a_tensor_that_is_returned_twice_crosses_the_boundary_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    class Same(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            assert pair[0] is pair[1]
            return pair[0]

    found = profile([Twice(), Same()], torch.randn(5, 6, requires_grad=True))
    assert [each.boundary_bytes for each in found] == [5 * 6 * FLOAT] * 2


def test_the_first_microbatch_is_the_largest() -> None:
    class Check(nn.Module):
        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            assert [x.tolist() for x in value] == [[[0, 1], [2, 3], [4, 5]], [0, 1, 2]]
            return value[0]

    profile(Check(), (torch.arange(10).view(5, 2), replicate(torch.arange(3))), chunks=2)


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
    found = profile(layers, torch.randn(5, 6, requires_grad=True))
    assert [each.boundary_bytes for each in found] == [
        each * 5 * FLOAT for each in (1 + 6, 1 + 6 + 1, 1 + 6 + 1, 1 + 6, 6)
    ]
    assert all(each.backward_seconds > 0 for each in found)


def test_measuring_neither_reads_nor_changes_the_callers_stashed_tensors() -> None:
    stashing = Stash()
    with skip_scope({}) as held:
        stashing(torch.randn(5, 6))
        before = dict(held)
        profile(Stash(), torch.randn(5, 6))
        assert held == before
        with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
            profile(Pop(), torch.randn(5, 6))
