"""Stages, boundary specs and modes: everything that programs are specialised on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gpipe_fast._extension import Arena, BoundaryForm, operator_settings, restore_operator_settings
from gpipe_fast.devices import kind_of
from gpipe_fast.fuse.left_out import number_left_out
from gpipe_fast.layers.sharded import GradientPart
from gpipe_fast.layers.structure import ONE_TENSOR, Structure, canonical
from gpipe_fast.lower.program import OwnGroup
from gpipe_fast.skip import Key, Skip
from gpipe_fast.strides import Bits, bits_of, empty_like, with_bits
from gpipe_fast.trace.joint_graph import GraphRole, TracedPorts, buffers_of, parameters_of
from gpipe_fast.trace.layer_states import LayerState, LayerStates, StateKey
from gpipe_fast.trace.layers_function import TraceContext
from gpipe_fast.trace.tensor_metadata import AnyTensor


@dataclass(frozen=True)
class TensorSpec:
    """The properties of a boundary tensor that a program is specialised on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    bits: Bits

    @classmethod
    def of(cls, tensor: AnyTensor, requires_grad: bool) -> TensorSpec:
        """Describes a tensor: real, fake or metadata."""
        shape, bits = tuple(tensor.shape), bits_of(tensor)
        return cls(shape, tensor.stride(), tensor.dtype, tensor.device, requires_grad, bits)

    def meta_tensor(self) -> Tensor:
        """Returns a meta tensor of this layout and dtype."""
        empty = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return with_bits(empty, self.bits)

    def example(self) -> Tensor:
        """Returns an uninitialized tensor of this spec."""
        return empty_like(self.meta_tensor(), self.device).requires_grad_(self.requires_grad)


# A lock held while tracing, because a trace changes process-wide state of PyTorch.
TRACING_LOCK = threading.RLock()


class Lock(Protocol):
    """A lock that its owner may acquire again."""

    def acquire(self, blocking: bool = True) -> bool:
        """Acquires it; without waiting if it must not block. Returns whether it is held."""

    def release(self) -> None:
        """Releases it."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *error: Any) -> None: ...


Autocast = tuple[tuple[str, torch.dtype], ...]


class TorchModes(NamedTuple):
    """PyTorch's thread-local and process-wide settings that a program depends on.

    Attributes:
        grad: whether gradients are enabled.
        autocast: the device types with autocast enabled, and their autocast dtypes.
        num_threads: the number of intra-op threads.
        deterministic: whether only deterministic algorithms are allowed.
        default_dtype: the default dtype of new tensors.
        operator_settings: selects the operators of attention and batch norm (csrc/pipeline/settings.h).
        fast_attention: whether multi-head attention may use its fused fast path in inference.
        left_out: the number of fused kernels that are left out, because they failed.
    """

    grad: bool
    autocast: Autocast
    num_threads: int
    deterministic: bool
    default_dtype: torch.dtype
    operator_settings: bytes
    fast_attention: bool
    left_out: int

    def process_wide(self) -> Hashable:
        """Returns the modes that are process-wide, not thread-local."""
        return self.deterministic, self.default_dtype, self.operator_settings, self.fast_attention

    def of_captures(self) -> TorchModes:
        """Returns the modes without those that concern programs alone."""
        return self._replace(num_threads=0, left_out=0)

    @classmethod
    def now(cls) -> TorchModes:
        """Returns the modes of the calling thread."""
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
            operator_settings(),
            torch.backends.mha.get_fastpath_enabled(),
            number_left_out(),
        )


@contextlib.contextmanager
def with_operator_settings(modes: TorchModes) -> Iterator[None]:
    """Sets the process-wide operator settings for a block: a trace in a backward needs the forward's."""
    mha = torch.backends.mha
    before = operator_settings(), mha.get_fastpath_enabled()
    if before == (modes.operator_settings, modes.fast_attention):
        yield
        return
    restore_operator_settings(modes.operator_settings)
    mha.set_fastpath_enabled(modes.fast_attention)
    try:
        yield
    finally:
        restore_operator_settings(before[0])
        mha.set_fastpath_enabled(before[1])


@contextlib.contextmanager
def exact_autocast(autocast: Autocast) -> Iterator[None]:
    """Enables autocast for exactly these device types in a block, without caching casts, as pipelines do."""
    wanted = dict(autocast)
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if kind in wanted or torch.is_autocast_enabled(kind):
                stack.enter_context(
                    torch.autocast(kind, wanted.get(kind), enabled=kind in wanted, cache_enabled=False)
                )
        yield


@dataclass(frozen=True)
class BoundarySpec:
    """The specs of a stage's inputs or outputs for one micro-batch.

    Attributes:
        tensors: the specs of the boundary tensors, in order; skip tensors last.
        structure: how the tensors other than skip tensors are nested, and the values beside them.
        skips: whether each skip connection that the stage pops or stashes carries a tensor, not None.
    """

    tensors: tuple[TensorSpec, ...]
    structure: Structure = ONE_TENSOR
    skips: tuple[bool, ...] = ()

    @property
    def num_plain(self) -> int:
        """The number of tensors that are not skip tensors."""
        return len(self.tensors) - sum(self.skips)

    def with_skips(self, skips: Sequence[TensorSpec | None]) -> BoundarySpec:
        """Returns the specs with skip tensors appended; there must be none yet."""
        tensors = (*self.tensors, *(spec for spec in skips if spec is not None))
        return BoundarySpec(tensors, self.structure, tuple(spec is not None for spec in skips))

    def split_skips(self) -> tuple[BoundarySpec, list[TensorSpec | None]]:
        """Returns the specs without skip tensors, and the specs of the skip tensors."""
        skip_specs = iter(self.tensors[self.num_plain :])
        skips = [next(skip_specs) if is_tensor else None for is_tensor in self.skips]
        return BoundarySpec(self.tensors[: self.num_plain], self.structure), skips

    def moved(self, source: torch.device, target: torch.device) -> BoundarySpec:
        """Returns the specs with the tensors of one device on another."""
        if source == target:
            return self
        tensors = (replace(spec, device=target) if spec.device == source else spec for spec in self.tensors)
        return replace(self, tensors=tuple(tensors))

    def examples(self) -> list[Tensor]:
        """Returns an uninitialized tensor for each spec."""
        return [spec.example() for spec in self.tensors]


def form_of(boundary: BoundarySpec) -> BoundaryForm:
    """Returns the C++ form of boundary specs: their nesting, and which tensors need gradients."""
    plain, skips = boundary.split_skips()
    return BoundaryForm(
        canonical(boundary.structure),
        [spec.requires_grad for spec in plain.tensors],
        [None if spec is None else spec.requires_grad for spec in skips],
    )


def outputs_of(ports: TracedPorts) -> BoundarySpec:
    """Returns the specs of a graph's outputs."""
    tensors, differentiable = ports.of(GraphRole.OUTPUT), ports.differentiable_outputs()
    specs = tuple(TensorSpec.of(tensors[i], i in differentiable) for i in range(len(tensors)))
    return BoundarySpec(specs, ports.joint.structure, ports.joint.stashed)


# A parameter that several stages share: for each of them, its number, and the index into its parameters.
Tie = tuple[tuple[int, int], ...]


class StageOptions(NamedTuple):
    """The arguments of `GPipe` that hold for all stages.

    Attributes:
        deferred: whether batch norm's running statistics are updated once per mini-batch.
        grad_dtype: the dtype in which gradients of lower precision are accumulated over micro-batches; None
            for the gradients' own dtype.
        fuse: whether stages on GPUs use fused kernels.
        is_absent: whether the stages are only traced, for devices that the machine need not have.
        is_remote: whether the stage runs in another process; here it is only traced, for what it sends.
        ties: the parameters that stages in different processes share.
        by_nccl: whether tensors travel between processes by NCCL.
        devices: the devices of all stages. Each stage is traced for the first of them that is of the kind of
            its own; if there are none, for its own.
    """

    deferred: bool = False
    grad_dtype: torch.dtype | None = None
    fuse: bool = False
    is_absent: bool = False
    is_remote: bool = False
    ties: Sequence[Tie] = ()
    by_nccl: bool = False
    devices: tuple[torch.device, ...] = ()


_DEFAULT_OPTIONS = StageOptions()


class Stage:
    """A run of consecutive layers placed on a device, and the scratch memory that its programs share.

    Attributes:
        layers: the layers.
        first_layer: index of the first layer in the whole model.
        device: the device of the layers.
        traced_device: the device for which they are traced, which is the same for equal GPUs.
        arena: scratch memory.
        own_group: returns the name of the group that its collectives use in place of another; None if they
            use that itself.
        sharded_gradients: what this process computes of the gradients of sharded parameters, by the index of
            the parameter, as far as known from traces.
        skips: the skip connections of the whole model.
        pops: numbers of the skip connections from earlier layers that the stage pops, in numerical order.
        stashes: numbers of the skip connections to later layers that the stage stashes, in stash order.
        options: the arguments of `GPipe` that hold for all stages.
        states: the known states of the model's layers.
        has_loss: whether the last layer is the loss of a step, behind layers that calls have, too.
        loss_states: the states in which the loss was found.
    """

    has_loss = False

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        device: torch.device,
        whole: Stage | None = None,
        skips: Sequence[Skip] = (),
        options: StageOptions = _DEFAULT_OPTIONS,
        states: LayerStates | None = None,
    ) -> None:
        self.layers = list(layers)
        self.first_layer = first_layer
        self.device = device
        self.traced_device = next((d for d in options.devices if kind_of(d) == kind_of(device)), device)
        self.arena: Arena = Arena() if whole is None else whole.arena
        self.own_group: OwnGroup | None = None if whole is None else whole.own_group
        self.sharded_gradients: dict[int, GradientPart] = {} if whole is None else whole.sharded_gradients
        # None instead of self, because a reference cycle would keep the arena until garbage collection.
        self._whole = whole
        self.states = LayerStates() if states is None else states
        self.loss_states: set[LayerState] = set()
        self.skips = skips
        self.options = options
        own = range(first_layer, first_layer + len(self.layers))
        self.pops = [i for i, s in enumerate(skips) if s.target in own and s.source not in own]
        self.stashes = sorted(
            (i for i, s in enumerate(skips) if s.source in own and s.target not in own),
            key=lambda i: skips[i].stash_order,
        )

    @property
    def whole(self) -> Stage:
        """The stage that this is a part of, or this stage itself."""
        return self._whole or self

    def state_key(self, modes: TorchModes) -> StateKey:
        """Returns the key of the layers' state under modes."""
        found = StateKey.of(self.states, self.layers, modes.of_captures())
        if self.has_loss:
            self.whole.loss_states.add(found.states[-1])
        return found

    def part(self, begin: int, end: int) -> Stage:
        """Returns a part of the stage, layers `begin` to `end`, which shares the stage's arena."""
        first = self.first_layer + begin
        layers = self.layers[begin:end]
        part = Stage(layers, first, self.device, self.whole, self.skips, self.options, self.states)
        part.traced_device = self.traced_device
        part.has_loss = self.has_loss and end == len(self.layers)
        return part

    def with_loss(self, layer: nn.Module, skips: Sequence[Skip]) -> Stage:
        """Returns a stage with one more layer, which shares this stage's arena.

        Args:
            layer: the loss, which is the last layer of all.
            skips: the skip connections of the whole model with that layer.
        """
        layers = [*self.layers, layer]
        found = Stage(
            layers, self.first_layer, self.device, skips=skips, options=self.options, states=self.states
        )
        found.arena, found.traced_device, found.has_loss = self.arena, self.traced_device, True
        found.own_group, found.sharded_gradients = self.own_group, self.sharded_gradients
        return found

    def trace_on_own_device(self) -> None:
        """Lets this stage be traced for its own device, not for an equal one."""
        self.traced_device = self.whole.traced_device = self.device

    def part_inputs(self, input_specs: BoundarySpec, part: Stage) -> BoundarySpec:
        """Returns the specs of the inputs of a part with the same first layer, given the stage's inputs."""
        plain, popped = input_specs.split_skips()
        return plain.with_skips([s for i, s in zip(self.pops, popped, strict=True) if i in part.pops])

    def keys(self, skips: Sequence[int]) -> list[Key]:
        """Returns the keys under which layers stash and pop these skip connections."""
        return [self.skips[i].key for i in skips]

    def trace_context(self, popped: Sequence[bool]) -> TraceContext:
        """Returns the context of the layers in a trace, given which of the skips they pop are tensors."""
        pops, stashes = self.keys(self.pops), self.keys(self.stashes)
        options = self.options
        modes = TorchModes.now().of_captures()
        return TraceContext(
            pops,
            popped,
            stashes,
            options.deferred,
            self.traced_device,
            options.is_absent,
            lambda layer, description: self.states.of(layer, description, modes),
        )

    def parameters(self) -> list[int]:
        """Returns the layers' parameters as indices into the whole stage's parameters, in port order."""
        return _indices(parameters_of(self.layers), parameters_of(self.whole.layers))

    def buffers(self) -> list[int]:
        """Returns the layers' buffers as indices into the whole stage's buffers, in port order."""
        return _indices(buffers_of(self.layers), buffers_of(self.whole.layers))


def given_skips(stages: Sequence[Stage]) -> list[int]:
    """Returns the numbers of the skip connections whose tensors the caller gives."""
    return [number for number, skip in enumerate(stages[-1].skips) if skip.source < 0]


def _indices(tensors: Sequence[Tensor], among: Sequence[Tensor]) -> list[int]:
    position = {id(tensor): index for index, tensor in enumerate(among)}
    return [position[id(tensor)] for tensor in tensors]
