"""Layers on the meta device: errors before they are loaded, loading them, and the memory that it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gpipe_fast import GPipe, verify
from tests.internals import balance_is_pending
from tests.programs import run_python

pytestmark = pytest.mark.usefixtures("one_thread")


class Rotation(nn.Module):
    """Has a buffer and a plain tensor that are not in the state dict."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("angles", torch.empty(width), persistent=False)
        self.offset = torch.empty(width)
        self.reset_tables()

    def reset_tables(self) -> None:
        self.angles.copy_(torch.arange(8.0) / 8)
        self.offset = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.angles + self.offset


def build(*, rotation: bool = False) -> nn.Sequential:
    """Returns layers with a tied weight, a buffer, and parameters of three kinds."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
    last.weight = first.weight
    middle = Rotation() if rotation else nn.Linear(8, 8)
    return nn.Sequential(first, nn.BatchNorm1d(8), middle, nn.GELU(), last)


def on_meta(**options: Any) -> GPipe:
    with torch.device("meta"):
        return GPipe(build(**options), [2, 3], chunks=2)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 128).view(16, 8)


def assert_loaded(model: GPipe, plain: nn.Sequential) -> None:
    """Checks a step against the plain loop."""
    for (name, tensor), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(tensor, expected), name
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    x = inputs()
    y, expected = model(x), torch.cat([plain(part) for part in x.chunk(2)])
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        if name == "0.weight":  # its gradients of two stages are added last
            torch.testing.assert_close(ours.grad, theirs.grad)
        else:
            assert torch.equal(ours.grad, theirs.grad), name


# Before loading


@pytest.mark.parametrize("balance", [[2, 3], None])
def test_a_call_before_loading_names_a_tensor_and_what_to_do(balance: list[int] | None) -> None:
    with torch.device("meta"):
        model = GPipe(build(), balance, devices=["cpu"] * 2, chunks=8)
    message = r"^layer 0 \(Linear\) has 'weight' on the meta device, without data; call model.load_weights"
    with pytest.raises(RuntimeError, match=message):
        model(inputs())
    with pytest.raises(RuntimeError, match=message):
        verify(model, inputs(), lambda y: y.sum())
    assert balance_is_pending(model) == (balance is None)
    model.load_weights(build().state_dict())
    model(inputs())


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


def load_a_dict(model: GPipe, state: dict[str, Tensor]) -> None:
    found = model.load_weights(state)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])


def load_without_a_tied_name(model: GPipe, state: dict[str, Tensor]) -> None:
    model.load_weights({name: tensor for name, tensor in state.items() if name != "4.weight"})


def load_with_swaps(model: GPipe, state: dict[str, Tensor]) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_weights(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def load_a_dict_of_torchgpipe(model: GPipe, state: dict[str, Tensor]) -> None:
    model.load_weights({f"partitions.{int(k[0]) // 2}.{k}": v for k, v in state.items()})


def load_from_outside(model: GPipe, state: dict[str, Tensor]) -> None:
    nn.ModuleDict({"pipe": model}).load_state_dict({f"pipe.{k}": v for k, v in state.items()})


@pytest.mark.parametrize(
    "load",
    [
        load_a_dict,
        load_without_a_tied_name,
        load_with_swaps,
        load_a_dict_of_torchgpipe,
        GPipe.load_state_dict,
        load_from_outside,
    ],
)
def test_loaded_layers_equal_the_plain_ones_and_stay_tied(load: Callable[..., object]) -> None:
    plain = build()
    model = on_meta()
    load(model, plain.state_dict())
    assert model[0].weight is model[4].weight
    assert_loaded(model, plain)


class Recurrent(nn.LSTM):
    """Has weak references to its parameters."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


@pytest.mark.filterwarnings("ignore:.*runs in Python", "ignore:.*weight_norm")
@pytest.mark.parametrize(
    "layer",
    [
        lambda: Recurrent(8, 8),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    ],
)
def test_layers_that_refer_to_their_parameters_are_loaded(layer: Callable[[], nn.Module]) -> None:
    """`weight_norm` of `nn.utils` has a hook that computes a plain attribute before each call."""
    torch.manual_seed(0)
    plain = nn.Sequential(layer(), nn.Linear(8, 8))
    with torch.device("meta"):
        model = GPipe(nn.Sequential(layer(), nn.Linear(8, 8)), [1, 1], chunks=2)
    model.load_weights(plain.state_dict())
    assert_loaded(model, plain)


def test_layers_that_are_loaded_again_keep_their_tensors() -> None:
    plain = build()
    model = GPipe(copy.deepcopy(plain), [2, 3], chunks=2)
    weight = model[0].weight
    with torch.no_grad():
        weight.zero_()
    model.load_weights(plain.state_dict())
    assert model[0].weight is weight
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
    done = run_python("-c", PEAK, str(width), str(path))
    assert done.returncode == 0, done.stderr
    tensor = 4 * width * width
    assert 16 * tensor <= int(done.stdout) < 18 * tensor


# Sources that do not fit


def test_a_source_that_does_not_fit_is_refused_with_all_names_before_anything_is_loaded() -> None:
    model, state = on_meta(), dict(build().state_dict())
    del state["0.bias"], state["1.bias"]
    state |= {"7.bias": torch.ones(1), "2.weight": torch.ones(3)}
    names = r'Missing key.*"0.bias", "1.bias"(?s:.*)Unexpected key.*"7.bias"(?s:.*)size mismatch for 2.weight'
    with pytest.raises(RuntimeError, match=names):
        model.load_weights(state)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    loaded = GPipe(build(), [2, 3])
    before = copy.deepcopy(loaded.state_dict())
    with pytest.raises(RuntimeError, match=names):
        loaded.load_weights({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert all(map(torch.equal, loaded.state_dict().values(), before.values()))


class Failing(Mapping[str, Tensor]):
    """A state dict from which one tensor cannot be read, except for its first time."""

    def __init__(self, state: Mapping[str, Tensor], name: str) -> None:
        self.state, self.name, self.reads = state, name, 0

    def __getitem__(self, name: str) -> Tensor:
        self.reads += name == self.name
        if name == self.name and self.reads == 2:
            raise OSError("the disk is gone")
        return self.state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def test_a_tensor_that_cannot_be_read_is_named_and_the_model_can_be_loaded_again() -> None:
    plain, model = build(), on_meta()
    source = Failing(plain.state_dict(), "2.weight")
    with pytest.raises(RuntimeError, match=r'parameter named "2.weight".*the disk is gone'):
        model.load_weights(source)
    assert model[2].weight.is_meta
    with pytest.raises(RuntimeError, match=r"layer 2 \(Linear\) has 'weight' on the meta device"):
        model(inputs())
    model.load_weights(source)
    assert_loaded(model, plain)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_tensor_hooks_that_would_be_lost_are_refused_before_anything_is_loaded(kind: str) -> None:
    plain, model = build(), on_meta()
    handle = getattr(model[2].weight, kind)(lambda tensor: None)
    for state, strict in ((plain.state_dict(), True), ({}, False)):
        with pytest.raises(RuntimeError, match="a tensor hook on a meta tensor would be lost"):
            model.load_weights(state, strict=strict, init=lambda module: module.reset_parameters())
    assert model[2].weight.is_meta
    handle.remove()
    model.load_weights(plain.state_dict())
    assert_loaded(model, plain)


# Tensors that the source lacks


def test_init_sets_the_tensors_that_the_source_lacks() -> None:
    plain, model, called = build(rotation=True), on_meta(rotation=True), []

    def init(module: nn.Module) -> None:
        called.append(module)
        module.reset_tables()  # type: ignore[operator]

    model.load_weights(plain.state_dict(), init=init)
    assert called == [model[2]]
    assert_loaded(model, plain)


def remove_angles(module: Any) -> None:
    module.angles = torch.empty(8, device="meta")


@pytest.mark.parametrize("init", [lambda module: module.angles[1:].zero_(), remove_angles])
def test_an_init_that_leaves_tensors_unset_is_refused(init: Callable[[Any], object]) -> None:
    plain, model = build(rotation=True), on_meta(rotation=True)
    with pytest.raises(RuntimeError, match=r"^init left 2\.angles on the meta device or with NaN"):
        model.load_weights(plain.state_dict(), init=init)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load_weights(plain.state_dict(), init=Rotation.reset_tables)
    assert_loaded(model, plain)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int64, 0), (torch.uint8, 1), (torch.bool, 0), (torch.complex64, 1), (torch.float8_e4m3fn, 0)],
)
def test_tensors_of_every_dtype_must_be_set(dtype: torch.dtype, value: int) -> None:
    layer = nn.Linear(8, 8)
    layer.register_buffer("table", torch.empty(4, dtype=dtype), persistent=False)
    layer.register_buffer("empty", torch.empty(0, dtype=dtype), persistent=False)
    model = GPipe(nn.Sequential(layer.to("meta")), [1])
    state = nn.Sequential(nn.Linear(8, 8)).state_dict()
    with pytest.raises(RuntimeError, match=r"^init left 0\.table on .* or did not write to it"):
        model.load_weights(state, init=lambda module: None)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load_weights(state, init=lambda module: module.table.copy_(torch.tensor(value)))
    assert model[0].table.dtype == dtype
    assert model[0].table.to(torch.complex64).tolist() == [value] * 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_init_that_fails_leaves_all_modules_on_the_meta_device(error: type[BaseException]) -> None:
    """Otherwise, modules that it had initialised before would keep these values with a mended `init`."""
    model, called = on_meta(), []

    def init(module: Any) -> None:
        called.append(module)
        if len(called) == 2:
            raise error
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)

    with pytest.raises(error):
        model.load_weights({}, strict=False, init=init)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_parameters_may_be_missing_without_strict() -> None:
    plain, model = build(), on_meta()
    state = plain.state_dict()
    del state["2.bias"]
    found = model.load_weights({**state, "9.x": torch.ones(1)}, strict=False, init=lambda m: m.bias.fill_(3))
    assert (found.missing_keys, found.unexpected_keys) == (["2.bias"], ["9.x"])
    nn.init.constant_(plain[2].bias, 3)
    assert_loaded(model, plain)


@pytest.mark.filterwarnings("error", "ignore:.* stages leaves? the stages idle")
def test_init_alone_initialises_a_whole_model() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    torch.manual_seed(1)
    plain = layers()
    with torch.device("meta"):
        model = GPipe(layers(), [1, 2], chunks=2)
    torch.manual_seed(1)
    model.load_weights({}, strict=False, init=lambda module: module.reset_parameters())
    assert_loaded(model, plain)
