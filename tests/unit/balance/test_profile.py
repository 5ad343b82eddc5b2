"""Profiles of whole sequences, timed by a fake clock, and the state that profiling must not change."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, devices
from gpipe_fast.balance.profile import LayerProfile, first_device, profile_layers, table
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


def test_profiling_repeats_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch)
    model = sequence(clock, 0.1, 0.1)
    profile_layers(model, torch.randn(4), device="cpu", timeout=60.0)
    assert 60.0 < clock.now < 70.0


def test_a_timeout_of_none_skips_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch)
    profiles = profile_layers(sequence(clock, 1.0, 1.0), torch.randn(4), device="cpu", timeout=None)
    assert clock.now == 2.0
    assert all(math.isnan(x) for pair in layer_seconds(profiles) for x in pair)
    assert [each.parameter_bytes for each in profiles] == [4, 4]


def test_an_empty_sequential_has_an_empty_profile() -> None:
    assert profile_layers(nn.Sequential(), torch.randn(4), device="cpu") == []


def test_a_layer_that_occurs_twice_has_two_profiles() -> None:
    layer = nn.Linear(6, 6)
    profiles = profile_layers(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(4, 6), timeout=None)
    assert [each.name for each in profiles] == ["0", "1", "2"]


@models.every_model
@pytest.mark.parametrize("training", [True, False])
def test_profiling_changes_neither_model_nor_input_nor_random_state(
    make: models.Model, batch: models.Batch, training: bool
) -> None:
    model, x = make().train(training), batch(8)
    before, input = copy.deepcopy(model), x.clone()
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
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(part.training == training for part in model.modules())
    assert len(profiles) == len(model)
    assert all(each.forward_seconds > 0 and each.boundary_bytes > 0 for each in profiles)


def test_backwards_are_timed_under_inference_mode() -> None:
    with torch.inference_mode():
        profiles = profile_layers(models.mlp(), torch.randn(8, 6), device="cpu", timeout=0.0)
    assert all(each.backward_seconds > 0 for each in profiles)


def test_sizes_are_those_of_one_micro_batch() -> None:
    model, x = models.mlp(), models.features(8)
    whole = profile_layers(model, x, timeout=None)
    quarter = profile_layers(model, x, timeout=None, chunks=4)
    assert [4 * each.flops for each in quarter] == [each.flops for each in whole]
    assert [4 * each.activation_bytes for each in quarter] == [each.activation_bytes for each in whole]
    assert [each.parameter_bytes for each in quarter] == [each.parameter_bytes for each in whole]


def test_an_error_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(7, 7))
    message = r"^layer '1' \(Linear\) cannot be profiled: mat1 and mat2 shapes"
    with pytest.raises(RuntimeError, match=message) as raised:
        profile_layers(model, torch.randn(4, 6))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_error_in_a_backward_names_the_layer() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise OSError("no way back")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Fails.apply(x)

    with pytest.raises(RuntimeError, match=r"^layer '0' \(Layer\) cannot be profiled: no way back$"):
        profile_layers(nn.Sequential(Layer()), torch.randn(4, requires_grad=True))


def test_a_module_that_is_not_sequential_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^module must be nn.Sequential to be partitioned, got Linear$"):
        profile_layers(nn.Linear(1, 1), torch.randn(1))  # type: ignore[arg-type]


def test_profiling_leaves_gradients_unchanged() -> None:
    """Profiling copies the layers, so it allows gradients, which torchgpipe refuses."""
    model = models.mlp()
    model(models.features()).sum().backward()
    before = [(p.grad, cast(Tensor, p.grad).clone()) for p in model.parameters()]
    profile_layers(model, models.features(), timeout=0.0)
    for (gradient, value), parameter in zip(before, model.parameters(), strict=True):
        assert parameter.grad is gradient
        assert torch.equal(value, parameter.grad)


def test_meta_and_lazy_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^layer '1' \(Linear\) is on the meta device; give it data"):
        profile_layers(nn.Sequential(nn.ReLU(), nn.Linear(1, 1, device="meta")), torch.randn(1))
    with pytest.raises(ValueError, match=r"^layer '0' \(LazyLinear\) has lazy parameters; run the module"):
        profile_layers(nn.Sequential(nn.LazyLinear(1)), torch.randn(1))


def test_a_profile_is_immutable() -> None:
    profiles = profile_layers(models.mlp(), models.features(), timeout=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        profiles[0].flops = 0  # type: ignore[misc]


def test_a_table_has_a_row_for_each_layer() -> None:
    mib = 2**20
    text = table([LayerProfile(0, "0", "Linear", 0.0015, 0.003, 2_000_000, mib, 2 * mib, 3 * mib)])
    assert text.splitlines()[0].split("  ")[0] == "layer"
    assert " ".join(text.splitlines()[2].split()) == "0 Linear 1.500 3.000 2.000 1.000 2.000 3.000"


def test_a_progress_bar_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    model = models.mlp()
    profile_layers(model, models.features(), device="cpu", timeout=0.0, progress=True)
    assert "gpipe_fast: measuring layers" in capsys.readouterr().err
    for progress in (None, False):  # standard error is no terminal here
        profile_layers(model, models.features(), device="cpu", timeout=0.0, progress=progress)
        assert not capsys.readouterr().err


def test_profiling_works_without_tqdm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name == "tqdm":
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert len(profile_layers(models.mlp(), models.features(), timeout=None, progress=True)) == 5
    assert not capsys.readouterr().err


def test_the_default_device_is_the_first_gpu_or_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, wanted in ([torch.device("cuda:0"), torch.device("cuda:1")], "cuda:0"), (None, "cpu"):
        monkeypatch.setattr(devices, "default_devices", lambda answer=available: answer)
        assert first_device() == torch.device(wanted)


@pytest.mark.cuda
def test_profiling_on_a_gpu_leaves_the_model_on_the_cpu() -> None:
    model, x = models.convolutions(), models.images()
    state = torch.cuda.get_rng_state()
    profiles = profile_layers(model, x, timeout=0.0)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert [each.parameter_bytes for each in profiles] == [
        each.parameter_bytes for each in profile_layers(model, x, device="cpu", timeout=None)
    ]


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
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
