"""The function that a trace runs: a stage's layers as one function of a key and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Observer
from gpipe_fast.layers.batchnorm import deferring
from gpipe_fast.layers.skip import Key, carrying, take
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, call, flatten
from gpipe_fast.randomness.random import KeyedRandomMode
from gpipe_fast.trace import aot
from gpipe_fast.trace.arrival import Arrivals, finish
from gpipe_fast.trace.observe import Observation


@dataclass(frozen=True)
class Setting:
    """The context of a stage's layers: skip connections into and out of the stage, batch norm mode, device.

    Attributes:
        pops: the skip connections that the layers pop from earlier layers, in their order.
        popped: for each of ``pops``, whether it is a tensor (else None). Popped tensors are inputs of the
            graph, after the boundary activations.
        stashes: the skip connections that the layers stash for later layers.
        deferred: whether batch norm updates its running statistics once per mini-batch.
        device: the device on which the layers run, with copies of parameters that are on others; None for the
            parameters' own devices.
    """

    pops: Sequence[Key] = ()
    popped: Sequence[bool] = ()
    stashes: Sequence[Key] = ()
    deferred: bool = False
    device: torch.device | None = None


class Refused(Exception):
    """Raised where layers cannot be traced; the message says why."""


class NotPassedOn(Refused):
    """Raised where a stage returns a value that is not made of tensors and constants."""


class ChangesInput(Exception):
    """Raised where a layer changes an input in place."""


class _Mode(KeyedRandomMode):
    """Draws by key, and pauses the observer inside operators, where a trace spends most of its time."""

    def __init__(self, key: Tensor, observer: Observer) -> None:
        super().__init__(key)
        self._observer = observer

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        self._observer.pause()
        try:
            return super().__torch_dispatch__(*args, **kwargs)
        finally:
            self._observer.resume()


class LayersFunction(nn.Module):
    """The layers as one function of (key, inputs), whose results do not alias each other or an input.

    Attributes:
        returns: the nesting of the last layer's outputs; set by `forward`.
        stashed: for each stashed skip connection, whether it is a tensor; set by `forward`.
        unfused: indices of layers whose attention with dropout runs without a fused kernel on a GPU; set by
            `forward`.
        observation: observes the layers' Python code.
        copy_inputs: whether the inputs are copied, because layers change them in place.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        takes: Structure,
        arrivals: Arrivals,
        setting: Setting,
        observation: Observation,
        copy_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.observation = observation
        self.takes = takes
        self.returns = ONE_TENSOR
        self.setting = setting
        self.stashed: tuple[bool, ...] = ()
        self.unfused: tuple[int, ...] = ()
        self.copy_inputs = copy_inputs
        self.layers = nn.ModuleList(layers)
        self.arrivals = arrivals

    def forward(self, key: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the layers; returns the last layer's outputs, followed by the stashed skip tensors."""
        arrived = [x.clone() for x in inputs] if self.copy_inputs else list(inputs)
        setting = self.setting
        num_plain = len(arrived) - sum(setting.popped)
        of_skips = iter(arrived[num_plain:])
        popped = [next(of_skips) if is_tensor else None for is_tensor in setting.popped]
        with (
            carrying(dict(zip(setting.pops, popped, strict=True))) as carried,
            deferring(setting.deferred),
            self.observation.watching() as observer,
        ):
            self.unfused = ()
            value = self._run(key, observer, self.takes.build(arrived[:num_plain]))
            stashed = take(carried, setting.stashes)
        self.observation.layer = None
        try:
            outputs, self.returns = flatten(value, once=True)
        except TypeError as error:
            raise NotPassedOn(f"the stage returns a value that cannot be passed on: {error}") from None
        self.stashed = tuple(tensor is not None for tensor in stashed)
        return finish([*outputs, *(tensor for tensor in stashed if tensor is not None)], self.arrivals)

    def _run(self, key: Tensor, observer: Observer, value: Any) -> Any:
        for index, layer in enumerate(self.layers):
            self.observation.layer = index
            mode = _Mode(key, observer)
            mode.enter_layer(index)
            held = _tensors(layer)
            with mode, aot.annotate({"layer": index}):
                value = call(layer, value)
            self.observation.leave_layer()
            if mode.unfused_attention:
                self.unfused = (*self.unfused, index)
            for name, tensor in _tensors(layer).items():
                if held.get(name) is not tensor:
                    raise Refused(
                        f"its forward replaces the buffer or parameter {name.lstrip('.')}, a side effect"
                    )
        return value


def _tensors(layer: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{prefix}.{key}": tensor
        for prefix, module in layer.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
    }
