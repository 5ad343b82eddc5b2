"""Stages, and what reaches them: all that programs are specialised on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Arena, Form, choices_now, choose
from gpipe_fast.layers.skip import Key, Skip
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, shared
from gpipe_fast.trace.trace import buffers_of, parameters_of


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
    """The global state that a program depends on.

    Attributes:
        grad: whether gradients are enabled.
        autocast: the kinds of devices for which it is, and to what.
        num_threads: intra-op threads.
        deterministic: whether algorithms have to be.
        default_dtype: of new tensors.
        choices: which operators attention and batch norm come to be (csrc/pipeline/settings.h).
        fast_attention: whether attention in inference may be one operator.
    """

    grad: bool
    autocast: Autocast
    num_threads: int
    deterministic: bool
    default_dtype: torch.dtype
    choices: bytes
    fast_attention: bool

    def process_wide(self) -> Hashable:
        """Those that are not a thread's own."""
        return self.deterministic, self.default_dtype, self.choices, self.fast_attention

    @classmethod
    def now(cls) -> Modes:
        """Those of this thread, at present."""
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(
            torch.is_grad_enabled(),
            autocast,
            torch.get_num_threads(),
            deterministic,
            torch.get_default_dtype(),
            choices_now(),
            torch.backends.mha.get_fastpath_enabled(),
        )


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
def choosing(modes: Modes) -> Iterator[None]:
    """Sets the process's choices of operators for the block: traces in a backward need their forward's."""
    mha = torch.backends.mha
    before = choices_now(), mha.get_fastpath_enabled()
    if before == (modes.choices, modes.fast_attention):
        yield
        return
    choose(modes.choices)
    mha.set_fastpath_enabled(modes.fast_attention)
    try:
        yield
    finally:
        choose(before[0])
        mha.set_fastpath_enabled(before[1])


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
    """What crosses into a stage, or out of it, for one micro-batch.

    Attributes:
        tensors: in order; those of skip connections last.
        structure: how the others are nested, and what is beside them.
        skips: of the skip connections that the stage pops, or stashes, which are tensors, not None.
    """

    tensors: tuple[Spec, ...]
    structure: Structure = ONE_TENSOR
    skips: tuple[bool, ...] = ()

    @property
    def num_plain(self) -> int:
        """How many tensors are not of skip connections."""
        return len(self.tensors) - sum(self.skips)

    def with_skips(self, skips: Sequence[Spec | None]) -> Boundary:
        """With skip connections, where there were none."""
        tensors = (*self.tensors, *(spec for spec in skips if spec is not None))
        return Boundary(tensors, self.structure, tuple(spec is not None for spec in skips))

    def apart(self) -> tuple[Boundary, list[Spec | None]]:
        """Without them, and these."""
        of_skips = iter(self.tensors[self.num_plain :])
        skips = [next(of_skips) if is_tensor else None for is_tensor in self.skips]
        return Boundary(self.tensors[: self.num_plain], self.structure), skips


def form_of(boundary: Boundary) -> Form:
    """How what crosses is nested, and which of it needs gradients, as C++ has it."""
    plain, skips = boundary.apart()
    return Form(
        shared(boundary.structure),
        [spec.requires_grad for spec in plain.tensors],
        [None if spec is None else spec.requires_grad for spec in skips],
    )


class Stage:
    """A run of consecutive layers placed on a device, and the scratch memory its programs share.

    Attributes:
        layers: the layers.
        first_layer: index of the first one in the whole model.
        device: where they are.
        arena: scratch memory.
        skips: the skip connections of the whole model.
        pops: which of them it takes from layers before it, in the order of its own.
        stashes: which it leaves to layers after it, likewise.
        deferred: whether batch norm's running statistics wait for the whole mini-batch.
        grad_dtype: in what gradients of lower precision are added up over micro-batches; None for their own.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        device: torch.device,
        whole: Stage | None = None,
        skips: Sequence[Skip] = (),
        deferred: bool = False,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self.layers = list(layers)
        self.first_layer = first_layer
        self.device = device
        self.arena: Arena = Arena() if whole is None else whole.arena
        # Not itself, since such a cycle would keep the memory until the collector comes.
        self._whole = whole
        self.skips = skips
        self.deferred = deferred
        self.grad_dtype = grad_dtype
        own = range(first_layer, first_layer + len(self.layers))
        self.pops = [i for i, s in enumerate(skips) if s.target in own and s.source not in own]
        self.stashes = sorted(
            (i for i, s in enumerate(skips) if s.source in own and s.target not in own),
            key=lambda i: skips[i].stash_order,
        )

    @property
    def whole(self) -> Stage:
        """The stage that this is a part of, or itself."""
        return self._whole or self

    def part(self, begin: int, end: int) -> Stage:
        """Some of its layers, which share its memory."""
        first = self.first_layer + begin
        layers = self.layers[begin:end]
        return Stage(layers, first, self.device, self.whole, self.skips, self.deferred, self.grad_dtype)

    def narrowed(self, arriving: Boundary, part: Stage) -> Boundary:
        """Of what arrives here, what would arrive at a part with the same first layer."""
        plain, popped = arriving.apart()
        return plain.with_skips([s for i, s in zip(self.pops, popped, strict=True) if i in part.pops])

    def keys(self, skips: Sequence[int]) -> list[Key]:
        """What the layers know some skip connections by."""
        return [self.skips[i].key for i in skips]

    def parameters(self) -> list[int]:
        """Of the parameters of the whole, those that it has, in the order of its ports."""
        return _positions(parameters_of(self.layers), parameters_of(self.whole.layers))

    def buffers(self) -> list[int]:
        """Likewise."""
        return _positions(buffers_of(self.layers), buffers_of(self.whole.layers))


def _positions(tensors: Sequence[Tensor], among: Sequence[Tensor]) -> list[int]:
    position = {id(tensor): index for index, tensor in enumerate(among)}
    return [position[id(tensor)] for tensor in tensors]
