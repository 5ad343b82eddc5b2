"""Stages, and what reaches them: all that programs are specialised on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Arena, Form
from gpipe_fast.structure import ONE_TENSOR, Structure, shared
from gpipe_fast.trace import buffers_of, parameters_of


@dataclass(frozen=True)
class Spec:
    """What a program is specialised on of one boundary tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, requires_grad: bool) -> Spec:
        """Describes a tensor, real or fake."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, requires_grad)

    def on_meta(self) -> Tensor:
        """Shape and strides alone."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def example(self) -> Tensor:
        """A tensor that this describes, its elements arbitrary."""
        empty = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return empty.requires_grad_(self.requires_grad)


# Held while tracing, which changes state of PyTorch's own, for all threads.
TURN = threading.RLock()
# The child of a fork must not find it held by a thread that it does not have.
os.register_at_fork(after_in_child=TURN._at_fork_reinit)  # type: ignore[attr-defined]

Autocast = tuple[tuple[str, torch.dtype], ...]


class Modes(NamedTuple):
    """The global state that a program depends on."""

    grad: bool
    autocast: Autocast
    num_threads: int

    @classmethod
    def now(cls) -> Modes:
        """Those of this thread, at present."""
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        return cls(torch.is_grad_enabled(), autocast, torch.get_num_threads())


@contextlib.contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Sets the calling thread's count for the block: what is lowered depends on it."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def under(autocast: Autocast) -> Iterator[None]:
    """Under exactly these for a block, as a pipeline computes: with every cast made anew."""
    wanted = dict(autocast)
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if kind in wanted or torch.is_autocast_enabled(kind):
                stack.enter_context(
                    torch.autocast(kind, wanted.get(kind), enabled=kind in wanted, cache_enabled=False)
                )
        yield


@dataclass(frozen=True)
class Boundary:
    """What crosses into a stage for one micro-batch.

    Attributes:
        tensors: in order.
        structure: how they are nested, and what is beside them.
    """

    tensors: tuple[Spec, ...]
    structure: Structure = ONE_TENSOR


def form_of(boundary: Boundary) -> Form:
    """How what crosses is nested, and which of it needs gradients, as C++ has it."""
    return Form(shared(boundary.structure), [spec.requires_grad for spec in boundary.tensors])


class Stage:
    """A run of consecutive layers placed on a device, and the scratch memory its programs share.

    Attributes:
        layers: the layers.
        first_layer: index of the first one in the whole model.
        device: where they are.
        arena: scratch memory.
    """

    def __init__(
        self, layers: Sequence[nn.Module], first_layer: int, device: torch.device, whole: Stage | None = None
    ) -> None:
        self.layers = list(layers)
        self.first_layer = first_layer
        self.device = device
        self.arena: Arena = Arena() if whole is None else whole.arena
        # Not itself, since such a cycle would keep the memory until the collector comes.
        self._whole = whole

    @property
    def whole(self) -> Stage:
        """The stage that this is a part of, or itself."""
        return self._whole or self

    def part(self, begin: int, end: int) -> Stage:
        """Some of its layers, which share its memory."""
        return Stage(self.layers[begin:end], self.first_layer + begin, self.device, self.whole)

    def parameters(self) -> list[int]:
        """Of the parameters of the whole, those that it has, in the order of its ports."""
        return _positions(parameters_of(self.layers), parameters_of(self.whole.layers))

    def buffers(self) -> list[int]:
        """Likewise."""
        return _positions(buffers_of(self.layers), buffers_of(self.whole.layers))


def _positions(tensors: Sequence[Tensor], among: Sequence[Tensor]) -> list[int]:
    position = {id(tensor): index for index, tensor in enumerate(among)}
    return [position[id(tensor)] for tensor in tensors]
