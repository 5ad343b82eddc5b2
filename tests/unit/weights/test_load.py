"""Layers on the meta device: errors before they are loaded, loading them, and the memory that it takes."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gpipe_fast import GPipe, verify
from tests.unit.weights.layers import Rotation, assert_loaded, build, inputs, on_meta

pytestmark = pytest.mark.usefixtures("one_thread")


# Before loading


@pytest.mark.parametrize("balance", [[2, 3], None])
def test_a_call_before_loading_names_a_tensor_and_what_to_do(balance: list[int] | None) -> None:
    with torch.device("meta"):
        model = GPipe(build(), balance, devices=["cpu"] * 2, chunks=8)
    message = r"^layer 0 \(Linear\) has 'weight' on the meta device, without data; call model.load_weights"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(inputs())
    with pytest.raises(RuntimeError, match=message):
        verify(model, inputs(), lambda y: y.sum())
    model.load_weights(build().state_dict())
    model(inputs())


def test_the_first_call_after_loading_measures_the_layers() -> None:
    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(200):
                x = x.tanh()
            return super().forward(x)

    layers = [Slow(8, 8), *(nn.Linear(8, 8) for _ in range(3))]
    with torch.device("meta"):
        meta = [Slow(8, 8), *(nn.Linear(8, 8) for _ in range(3))]
    model = GPipe(nn.Sequential(*meta), devices=["cpu"] * 2, chunks=8)
    with pytest.raises(RuntimeError, match="on the meta device"):
        model(inputs())
    assert model.balance == [2, 2]
    model.load_weights(nn.Sequential(*layers).state_dict())
    model(inputs())
    assert model.balance == [1, 3]


def test_placement_and_explanations_work_before_loading() -> None:
    model = on_meta()
    model.balance = [1, 4]
    model.devices = ["cpu:0", "cpu:0"]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert "Stage 1" in str(model.explain(inputs(), device="cuda"))
    loaded = copy.deepcopy(model)
    for each in (model, loaded):
        each.load_weights(build().state_dict())
        assert_loaded(each, build())


# Loading


def test_load_weights_equals_load_state_dict_of_the_plain_layers() -> None:
    plain = build()
    model = on_meta()
    found = model.load_weights(plain.state_dict())
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert_loaded(model, plain)


def test_tied_parameters_stay_tied_and_need_one_name() -> None:
    model, plain = on_meta(), build()
    state = plain.state_dict()
    del state["4.weight"]
    model.load_weights(state)
    assert model[0].weight is model[4].weight
    assert_loaded(model, plain)


def test_an_optimizer_created_before_loading_trains_the_parameters() -> None:
    model, plain = on_meta(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.label = "kept"
    parameters = list(model.parameters())
    model.load_weights(plain.state_dict())
    model(inputs()).square().sum().backward()
    optimizer.step()
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model[0].weight.label == "kept"
    assert not torch.equal(model[0].weight, plain[0].weight)


def test_dtypes_strides_and_requires_grad_of_the_layers_are_kept() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), nn.ReLU()).half()
    layers[0].weight.requires_grad_(False)
    model = GPipe(layers, [1, 1])
    model.load_weights(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).state_dict())
    weight = model[0].weight
    assert weight.dtype == torch.half
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert model[0].bias.requires_grad


class Recurrent(nn.Module):
    """Has weak references to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


@pytest.mark.filterwarnings("ignore:.*runs in Python", "ignore:.*weight_norm", "ignore:.*batch_first")
@pytest.mark.parametrize(
    "layer",
    [
        Recurrent,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0),
    ],
)
def test_layers_that_refer_to_their_parameters_are_loaded(layer: Callable[[], nn.Module]) -> None:
    """`weight_norm` of `nn.utils` has a hook that computes a plain attribute before each call."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(layer(), nn.Linear(8, 8)), inputs().view(4, 4, 8)
    with torch.device("meta"):
        model = GPipe(nn.Sequential(layer(), nn.Linear(8, 8)), [1, 1], chunks=2)
    model.load_weights(plain.state_dict())
    y, expected = model(x), torch.cat([plain(part) for part in x.chunk(2)])
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_layers_with_data_are_loaded_too() -> None:
    plain = build()
    model = GPipe(copy.deepcopy(plain), [2, 3], chunks=2)
    weight = model[0].weight
    with torch.no_grad():
        weight.zero_()
    model.load_weights(plain.state_dict())
    assert model[0].weight is weight
    assert_loaded(model, plain)


@pytest.mark.parametrize("load", [GPipe.load_weights, GPipe.load_state_dict])
def test_layers_that_are_loaded_under_inference_mode_can_be_trained(load: Callable[..., object]) -> None:
    plain, model = build(rotation=True), on_meta(rotation=True)
    if load is GPipe.load_state_dict:
        model[2].angles, model[2].offset = plain[2].angles.clone(), plain[2].offset
    options = {"init": Rotation.reset_tables} if load is GPipe.load_weights else {}
    with torch.inference_mode():
        load(model, plain.state_dict(), **options)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    assert_loaded(model, plain)


def test_a_buffer_may_be_tied_to_one_that_is_not_in_the_state_dict() -> None:
    def layers() -> nn.Sequential:
        table = torch.arange(8.0)
        tied = [nn.Linear(8, 8), nn.Linear(8, 8)]
        for layer, persistent in zip(tied, (True, False), strict=True):
            layer.register_buffer("table", table, persistent=persistent)
        return nn.Sequential(*tied)

    plain = layers()
    with torch.device("meta"):
        on_meta = layers().to("meta")
    on_meta[1].table = on_meta[0].table
    for model in (GPipe(layers(), [1, 1]), GPipe(on_meta, [1, 1])):
        model.load_weights(plain.state_dict())
        assert model[1].table is model[0].table
        assert torch.equal(model[1].table, plain[1].table)


def test_state_dicts_of_torchgpipe_are_converted() -> None:
    plain, model = build(), on_meta()
    model.load_weights({f"partitions.{int(k[0]) // 2}.{k}": v for k, v in plain.state_dict().items()})
    assert_loaded(model, plain)


def test_hooks_of_modules_may_compute_what_is_loaded() -> None:
    def join(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        halves = [state.pop(f"{prefix}weight_{i}") for i in range(2)]
        state[prefix + "weight"] = torch.cat(halves).view(8, 8) * 2

    plain, model = build(), on_meta()
    model[2].register_load_state_dict_pre_hook(join)
    state = plain.state_dict()
    first, second = (state.pop("2.weight") / 2).chunk(2)
    model.load_weights({**state, "2.weight_0": first, "2.weight_1": second})
    assert_loaded(model, plain)


def test_load_state_dict_gives_memory_to_meta_layers() -> None:
    plain = build()
    model = on_meta()
    model.load_state_dict(plain.state_dict())
    assert model[0].weight is model[4].weight
    assert_loaded(model, plain)


def test_load_state_dict_of_a_module_around_the_pipeline_loads_it() -> None:
    plain = build()
    outer = nn.ModuleDict({"pipe": on_meta()})
    outer.load_state_dict({f"pipe.{name}": tensor for name, tensor in plain.state_dict().items()})
    assert_loaded(outer["pipe"], plain)  # type: ignore[arg-type]


def test_load_state_dict_may_assign() -> None:
    """PyTorch then makes two parameters of a tied one."""
    plain, model = build(), on_meta()
    state = copy.deepcopy(plain.state_dict())
    model.load_state_dict(state, assign=True)
    assert model[2].weight.data_ptr() == state["2.weight"].data_ptr()
    model[4].weight = model[0].weight
    assert_loaded(model, plain)


def test_swapping_parameters_on_conversion_is_supported() -> None:
    plain, model = build(), on_meta()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_weights(plain.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_loaded(model, plain)


# Memory

PEAK = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from gpipe_fast import GPipe

def kib(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

width, path = int(sys.argv[1]), sys.argv[2]
with torch.device("meta"):
    model = GPipe(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16))), [8, 8])
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = kib("VmRSS")
model.load_weights(path)
print((kib("VmHWM") - before) * 1024)
"""


def test_loading_on_the_cpu_takes_the_memory_of_the_model_and_one_tensor(tmp_path: Path) -> None:
    width, path = 1024, tmp_path / "model.safetensors"
    save_file({f"{i}.weight": torch.full((width, width), float(i)) for i in range(16)}, path)
    command = [sys.executable, "-c", PEAK, str(width), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tensor = 4 * width * width
    assert 16 * tensor <= int(done.stdout) <= 17 * tensor + tensor // 2
