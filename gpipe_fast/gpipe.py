"""GPipe: the user's Sequential, trained as a pipeline."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from gpipe_fast.compile import CompiledStage, Compiler, Refusal, Spec, Stage, budget_of, modes
from gpipe_fast.lifetime import open_pipeline
from gpipe_fast.partition import cut_evenly
from gpipe_fast.plan import Plan, make_plan
from gpipe_fast.random import minibatch_key
from gpipe_fast.recording import Recording, record
from gpipe_fast.state import State
from gpipe_fast.trace import parameters_of

# Signatures whose programs a module remembers.
_SIGNATURES = 32

# Tracing changes state of PyTorch's own, for all threads.
_turn = threading.RLock()
# The child of a fork must not find it held by a thread that it does not have.
os.register_at_fork(after_in_child=_turn._at_fork_reinit)  # type: ignore[attr-defined]

# What a copy makes anew.
_NOT_COPIED = frozenset({"_layers", "_stages", "_state", "_compiler", "_compiled", "_plans", "_pipeline"})

CHECKPOINT_MODES = ("always", "except_last", "never")
Device = torch.device | int | str


class GPipe(nn.Module):
    """Trains a sequence of layers as a pipeline of stages over micro-batches.

    The numbers are those of ``torch.cat([module(c) for c in x.chunk(chunks)])``: outputs, gradients and
    buffers, bit for bit on the CPU. Children, parameter names and ``state_dict`` are those of ``module``::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        loss_fn(model(x), y).backward()

    Args:
        module: the layers; they are not copied.
        balance: layers per partition; by default an even cut by parameter count into one partition a device.
        devices: one for each partition; by default CPU stages.
        chunks: micro-batches per mini-batch; a mini-batch is cut as ``Tensor.chunk`` cuts it.
        checkpoint: which micro-batches recompute their activations in the backward: ``'always'``,
            ``'except_last'`` or ``'never'``. In eval mode none does.

    Raises:
        TypeError: ``module`` is not a ``Sequential``.
        ValueError: ``balance``, ``chunks`` or ``checkpoint`` does not fit.
        IndexError: there are fewer devices than partitions.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        devices: Sequence[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
    ) -> None:
        super().__init__()
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.threads_per_stage = None
        if not isinstance(module, nn.Sequential):
            raise TypeError(f"module must be nn.Sequential to be partitioned, got {type(module).__name__}")
        layers = list(module)
        if len({id(layer) for layer in layers}) != len(layers):
            raise ValueError("module with duplicate children is not supported")
        self.balance = _balance(layers, balance, devices)
        self.devices = _devices(devices, len(self.balance))
        _refuse_ties_across(layers, self.balance)
        for name, layer in module.named_children():
            if hasattr(self, name):
                raise ValueError(f"a layer named {name!r} would hide GPipe's own attribute; rename the layer")
            self.add_module(name, layer)
        self.train(module.training)
        self._pipeline = open_pipeline(max(1, len(self.balance)))
        self._begin()

    def _begin(self) -> None:
        self._layers = list(self)
        self._stages = _stages(self._layers, self.balance, self.devices)
        self._state = State()
        self._compiler = Compiler()
        self._compiled: OrderedDict[Hashable, list[list[CompiledStage]]] = OrderedDict()
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """What copying and pickling keep: all but threads and programs, which are made again when needed."""
        return {k: v for k, v in vars(self).items() if k not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pipeline = open_pipeline(max(1, len(self.balance)))
        self._begin()

    @property
    def chunks(self) -> int:
        """Micro-batches per mini-batch; may be set between calls."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        number = int(chunks)
        if number <= 0:
            raise ValueError(f"number of chunks must be positive integer, got {chunks}")
        self._chunks = number

    @property
    def checkpoint(self) -> str:
        """Which micro-batches recompute: 'always', 'except_last' or 'never'; may be set between calls."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        mode = str(checkpoint)
        if mode not in CHECKPOINT_MODES:
            raise ValueError(
                f"checkpoint is not one of 'always', 'except_last', or 'never', got {checkpoint!r}"
            )
        self._checkpoint = mode

    @property
    def threads_per_stage(self) -> int | None:
        """Intra-op threads of each stage; may be set between calls.

        None, the default, divides those of the caller (``torch.get_num_threads()``) among the stages.
        """
        return self._threads_per_stage

    @threads_per_stage.setter
    def threads_per_stage(self, threads: int | None) -> None:
        if threads is not None and (not isinstance(threads, int) or threads <= 0):
            raise ValueError(f"threads_per_stage must be a positive integer or None, got {threads!r}")
        self._threads_per_stage = threads

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer by position; negative positions count from the end."""
        if not isinstance(index, int):
            raise TypeError(f"layers are indexed by integers, got {type(index).__name__}")
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        return self.children()

    def forward(self, input: Tensor) -> Tensor:
        """Runs one mini-batch.

        Args:
            input: any dtype; its first dimension is cut into micro-batches.

        Returns:
            What the last layer returns for each micro-batch, concatenated along the first dimension.

        Raises:
            TypeError: ``input`` is not a tensor.
            ValueError: ``input`` has no dimension to cut, or is not on the first stage's device.
            RuntimeError: a stage cannot be traced; the message names the layer and the reason.
        """
        _check_input(input, self.devices)
        if not len(self):
            return input
        with _turn:
            layers = cast(Collection[nn.Module], self._modules.values())
            self._state.look(layers)
            if self._state.layers != self._layers:
                # One was replaced since the last call.
                self.balance = _balance(self._state.layers, self.balance, None)
                self._begin()
                self._state.look(layers)
            plan = self._plan(input)
            parameters, buffers = self._state.parameters, self._state.buffers
        # What draws nothing leaves PyTorch's generator as it was.
        key = minibatch_key() if plan.draws else 0
        return self._pipeline.forward(plan.native, input, parameters, buffers, key)

    def recording(self) -> AbstractContextManager[Recording]:
        """Records begin and end of every action and of every wait inside a block.

        ::

        with model.recording() as recording:
            loss_fn(model(x), y).backward()
        print(recording.bubble())
        """
        return record(self._pipeline)

    def _plan(self, input: Tensor) -> Plan:
        """The plan for such an input, made when it is first seen."""
        training = self.training and torch.is_grad_enabled()
        # Of all micro-batches but the last, and of the last.
        recompute = (self.checkpoint != "never", self.checkpoint == "always")
        budgets = tuple(budget_of(training and r) for r in recompute)
        threads = self.threads_per_stage or max(1, torch.get_num_threads() // len(self._stages))
        requires_grad = torch.is_grad_enabled() and input.requires_grad
        signature = (
            Spec.of(input, requires_grad),
            self.chunks,
            threads,
            modes(),
            self._state.fingerprint,
        )
        key = (signature, budgets)
        plan = self._plans.get(key)
        if plan is None:
            microbatches = input.detach().chunk(self.chunks)
            with _intra_op_threads(threads):
                pipelines = self._compile(signature, microbatches, requires_grad)
                plan = make_plan(pipelines, [budgets[0]] * (len(microbatches) - 1) + [budgets[1]], threads)
            _remember(self._plans, key, plan)
        self._plans.move_to_end(key)
        return plan

    def _compile(
        self, signature: Hashable, microbatches: Sequence[Tensor], requires_grad: bool
    ) -> list[list[CompiledStage]]:
        """The compiled stages of each micro-batch."""
        # Only the last micro-batch can differ from the others.
        specs = dict.fromkeys(Spec.of(m, requires_grad) for m in (microbatches[0], microbatches[-1]))
        compiled = self._compiled.get(signature)
        if compiled is None:
            found = self._compiler.compile(self._stages, [(spec,) for spec in specs])
            if isinstance(found, Refusal):
                raise RuntimeError(_explain(found, self._stages))
            num_outputs = len(found[0][-1].outputs)
            if num_outputs != 1:
                raise RuntimeError(f"the last layer must return one tensor, it returns {num_outputs}")
            if not found[0][-1].outputs[0].shape:
                raise RuntimeError(
                    "the last layer returns a 0-dimensional tensor, which cannot be concatenated"
                )
            compiled = found
            _remember(self._compiled, signature, compiled)
        return [compiled[0]] * (len(microbatches) - 1) + [compiled[-1]]


_Cached = TypeVar("_Cached")


def _remember(cache: OrderedDict[Hashable, _Cached], key: Hashable, value: _Cached) -> None:
    cache[key] = value
    while len(cache) > _SIGNATURES:
        cache.popitem(last=False)


@contextlib.contextmanager
def _intra_op_threads(number: int) -> Iterator[None]:
    """Sets the calling thread's count for the block: what is lowered depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_input(input: object, devices: Sequence[torch.device]) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"expected Tensor, but got {type(input)}")
    if input.dim() == 0:
        raise ValueError("the input has no dimension to cut into micro-batches, got a 0-dimensional tensor")
    if devices and input.device != devices[0]:
        raise ValueError(f"the input must be on the first stage's device {devices[0]}, got {input.device}")


def _balance(
    layers: Sequence[nn.Module], balance: Sequence[int] | None, devices: Sequence[Device] | None
) -> list[int]:
    if balance is None:
        wanted = len(devices) if devices is not None else os.cpu_count() or 1
        if not layers:
            return []
        costs = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        return cut_evenly(costs, max(1, min(wanted, len(layers))))
    sizes = list(balance)
    if sum(sizes) != len(layers):
        raise ValueError(
            f"module and sum of balance have different length (module: {len(layers)}, "
            f"sum of balance: {sum(sizes)}); balance says how many layers each stage takes"
        )
    if any(size <= 0 for size in sizes):
        raise ValueError(f"all balance numbers must be positive integer (balance: {sizes})")
    return sizes


def _devices(devices: Sequence[Device] | None, num_partitions: int) -> list[torch.device]:
    if devices is None:
        return [torch.device("cpu")] * num_partitions
    if len(devices) < num_partitions:
        raise IndexError(
            "too few devices to hold given partitions "
            f"(devices: {len(devices)}, partitions: {num_partitions})"
        )
    chosen = [torch.device(d) for d in devices][:num_partitions]
    others = sorted({str(d) for d in chosen if d.type != "cpu"})
    if others:
        raise ValueError(
            f"stages run on the CPU only so far, got devices {', '.join(others)}; pass devices=None"
        )
    return chosen


def _refuse_ties_across(layers: Sequence[nn.Module], balance: Sequence[int]) -> None:
    owner: dict[int, int] = {}
    first = 0
    for stage_index, size in enumerate(balance):
        for parameter in parameters_of(layers[first : first + size]):
            if owner.setdefault(id(parameter), stage_index) != stage_index:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is shared by stages "
                    f"{owner[id(parameter)]} and {stage_index}; keep the layers that share it in one stage"
                )
        first += size


def _stages(
    layers: Sequence[nn.Module], balance: Sequence[int], devices: Sequence[torch.device]
) -> list[Stage]:
    stages: list[Stage] = []
    first = 0
    for size, device in zip(balance, devices, strict=True):
        stages.append(Stage(layers[first : first + size], first, device))
        first += size
    return stages


def _explain(refusal: Refusal, stages: Sequence[Stage]) -> str:
    stage, untraceable = stages[refusal.stage_index], refusal.untraceable
    where = f"stage {refusal.stage_index}"
    if untraceable.layer is not None:
        layer = stage.layers[untraceable.layer]
        where += f", layer {stage.first_layer + untraceable.layer} ({type(layer).__name__})"
    return f"{where} cannot be traced faithfully: {untraceable.reason}"
