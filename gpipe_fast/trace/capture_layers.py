"""Captures the layers of a stage one by one, each for what the layers before it return."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast import switches
from gpipe_fast.layers.quantized import give_parts
from gpipe_fast.layers.structure import arguments_of, flatten
from gpipe_fast.randomness.random import KeyedRandomMode
from gpipe_fast.skip import Key, Skippable, outer_skips, take_stashed
from gpipe_fast.strides import NO_BITS, bits_of, empty_like, with_bits
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode, enable_python_dispatcher, is_traced
from gpipe_fast.trace.dynamo import Captured, Refused, capture
from gpipe_fast.trace.interrupts import handle_interrupt
from gpipe_fast.trace.layer_states import LayerState
from gpipe_fast.trace.traceability import Untraceable

FindState = Callable[[nn.Module, Hashable], LayerState]


def capture_layers(
    layers: Sequence[nn.Module],
    descriptions: Sequence[Hashable],
    value: Any,
    skips: dict[Key, Tensor | None],
    key: Tensor,
    mode: FakeTensorMode,
    find_state: FindState,
    on_gpu: bool,
) -> list[Captured]:
    """Captures layers, or finds their captures.

    Args:
        layers: the layers; fake tensors may be in place of parameters and buffers.
        descriptions: the layers' descriptions, with their own parameters and buffers.
        value: the first layer's argument, of fake tensors.
        skips: the skip tensors that the layers pop from earlier layers.
        key: a fake key for random operators.
        mode: the fake mode.
        find_state: returns the state of a layer with a given description.
        on_gpu: whether tensors may be on a GPU although PyTorch sees none.

    Raises:
        Untraceable: a layer cannot be captured.
    """
    captures: list[Captured] = []
    for index, (layer, description) in enumerate(zip(layers, descriptions, strict=True)):
        handle_interrupt()
        args, kwargs = arguments_of(value)
        stashes, pops = outer_skips(layer)
        try:
            popped = take_stashed(skips, pops)
            captured = _captured(layer, args, kwargs, popped, find_state(layer, description))
            captures.append(captured)
            random_mode = KeyedRandomMode(key, on_gpu=on_gpu)
            random_mode.enter_layer(index)
            if index + 1 < len(layers):
                # Some fake kernels, as of padding, keep symbols only under PyTorch's dispatcher in Python.
                symbolic = contextlib.nullcontext() if mode.shape_env is None else enable_python_dispatcher()
                with _fake_tensors(layer, mode), mode, random_mode, symbolic:
                    value, stashed = captured.run(layer, args, kwargs, popped, partial(_fake, mode))
                skips.update(zip(stashes, stashed, strict=True))
        except Refused as refused:
            raise Untraceable(index, str(refused)) from None
    return captures


def _captured(
    layer: nn.Module, args: Any, kwargs: Any, popped: Sequence[Tensor | None], state: LayerState
) -> Captured:
    prepare = getattr(layer, "prepare", None)
    if isinstance(layer, Skippable) and prepare is not None:
        prepare(args, popped)
    try:
        # Dynamo makes one input of a tensor that is given twice.
        tensors, structure = flatten((args, kwargs, popped), deduplicate=True)
    except TypeError as error:
        raise Refused(f"its argument is not made of tensors and constants: {error}") from None
    key = (structure, *((key_of_fake(tensor), tensor.is_leaf) for tensor in tensors))
    found = None if switches.is_disabled("equal-layers") else state.reuse(key)
    if found is None:
        args, kwargs, popped = structure.build([_without_conjugated_base(tensor) for tensor in tensors])
        found = capture(layer, args, kwargs, popped)
        state.add(layer, key, found)
    return found


def _without_conjugated_base(tensor: Tensor) -> Tensor:
    """Returns a fake tensor; for a real view of a conjugated one, which Dynamo refuses, a new one like it."""
    base = tensor._base
    if base is None or not base.is_conj() or tensor.is_complex():
        return tensor
    memory = with_bits(empty_like(tensor), NO_BITS).requires_grad_(tensor.requires_grad)
    return with_bits(memory.view_as(memory), bits_of(tensor))


def key_of_fake(tensor: Tensor) -> Hashable:
    """Returns a key that is equal for fake tensors of one mode that a trace cannot tell apart."""

    def expressions(sizes: Sequence[int | torch.SymInt]) -> tuple[Hashable, ...]:
        return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)

    return (
        expressions(tensor.shape),
        expressions(tensor.stride()),
        bits_of(tensor),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


@contextlib.contextmanager
def _fake_tensors(layer: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Replaces the parameters and buffers of a layer by fake tensors in a block."""
    with tensors_restored([layer]):
        for module in layer.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = _fake(mode, tensor)
        yield


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Returns a fake tensor for a real one, with its parts if it is quantized; a fake one as it is."""
    if is_traced(tensor):
        return tensor
    fake = mode.from_tensor(tensor, static_shapes=True)
    give_parts(fake, tensor, partial(_fake, mode))
    return fake


@contextlib.contextmanager
def tensors_restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Restores the tables of parameters and buffers of layers after a block."""
    tables: list[tuple[Any, dict[str, Any]]] = [
        (table, dict(table))
        for layer in layers
        for module in layer.modules()
        for table in (module._parameters, module._buffers)
        if isinstance(table, dict)
    ]
    try:
        yield
    finally:
        for table, before in tables:
            if any(table.get(name) is not tensor for name, tensor in before.items()):
                table.update(before)
