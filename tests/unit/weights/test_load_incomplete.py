"""Sources that do not fit the layers, cannot be read, or lack tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.unit.weights.layers import Rotation, assert_loaded, build, inputs, on_meta

pytestmark = pytest.mark.usefixtures("one_thread")

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


def test_tensors_that_the_source_lacks_are_named() -> None:
    model = on_meta(rotation=True)
    names = r"^the source lacks 2.angles, on the meta device; pass init=function"
    with pytest.raises(RuntimeError, match=names):
        model.load_weights(build(rotation=True).state_dict())
    assert all(parameter.is_meta for parameter in model.parameters())


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


def fail(module: nn.Module) -> None:
    raise RuntimeError("init left 2.angles on the meta device or with NaN, says the user")


@pytest.mark.parametrize("init", [lambda module: module.angles[1:].zero_(), remove_angles, fail])
def test_an_init_that_fails_or_leaves_tensors_unset_is_refused(init: Callable[[Any], object]) -> None:
    plain, model = build(rotation=True), on_meta(rotation=True)
    with pytest.raises(RuntimeError, match=r"^init left 2\.angles on the meta device or with NaN"):
        model.load_weights(plain.state_dict(), init=init)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load_weights(plain.state_dict(), init=Rotation.reset_tables)
    assert_loaded(model, plain)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("value", [0, 1])
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


def test_init_may_replace_or_remove_tensors() -> None:
    def init(module: Any) -> None:
        module.angles, module.offset = torch.zeros(8, dtype=torch.int64), None

    model = on_meta(rotation=True)
    model.load_weights(build(rotation=True).state_dict(), init=init)
    assert model[2].angles.tolist() == [0] * 8
    model[2].angles = torch.empty(8, device="meta")
    model.load_weights(build(rotation=True).state_dict(), init=lambda module: setattr(module, "angles", None))
    assert model[2].angles is None


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


def test_init_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="init must be a function of a module, got int; "):
        GPipe(build(), [2, 3]).load_weights(build().state_dict(), init=3)  # type: ignore[arg-type]


def test_init_is_called_for_plain_attributes() -> None:
    class Offset(nn.Linear):
        offset = torch.empty(0)

        def reset_offset(self) -> None:
            self.offset = torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.offset

    plain = Offset(8, 8)
    plain.reset_offset()
    with torch.device("meta"):
        layer = Offset(8, 8)
        layer.offset = torch.empty(8)
    model = GPipe(nn.Sequential(layer), [1], chunks=2)
    model.load_weights({f"0.{k}": v for k, v in plain.state_dict().items()}, init=Offset.reset_offset)
    assert torch.equal(model(inputs()), torch.cat([plain(part) for part in inputs().chunk(2)]))


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
