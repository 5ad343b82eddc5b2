"""What a layer in Python may change: buffers, its inputs, and the random generators of Python and NumPy.

Snapshots of buffers are restored after a failure, for a recompute, and after Ctrl-C. A layer may write its
inputs, which are then copies. PyTorch's random operators draw by key (`gpipe_fast.randomness`), and a
recompute repeats the draws; those of ``random`` and ``numpy.random`` cannot be repeated, because all threads
share one state. Layers that draw from them are not repeatable (`gpipe_fast.trace.repeatable`), except modules
that ask for their phase. For these, the states before and after a forward tell whether it, or another thread
meanwhile, has drawn.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpipe_fast.strides import span
from gpipe_fast.torch_private.autograd import preserve_version_counter
from gpipe_fast.trace.repeatable import nested_code

_Result = TypeVar("_Result")


class BufferSnapshot(NamedTuple):
    """A snapshot of a buffer, or of a parameter that the forward writes."""

    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor

    def is_changed(self) -> bool:
        """Returns whether the module holds another tensor now, or the tensor has other elements."""
        # Batch norm writes its running statistics without incrementing their version counters.
        replaced = getattr(self.module, self.name, None) is not self.buffer
        return replaced or not torch.equal(self.buffer, self.copy)

    def restore(self) -> None:
        """Restores the tensor and its elements in the module."""
        if getattr(self.module, self.name, None) is not self.buffer:
            setattr(self.module, self.name, self.buffer)
        # Inference tensors may be written in inference mode only. Ctrl-C may keep the mode from being left.
        with torch.inference_mode() if self.buffer.is_inference() else contextlib.nullcontext():
            self.buffer.detach().copy_(self.copy)


def snapshot_buffers(layers: Sequence[nn.Module]) -> list[BufferSnapshot]:
    """Takes snapshots of all buffers, and of the tables that embeddings with ``max_norm`` renormalize."""
    return [
        BufferSnapshot(module, name, tensor, tensor.detach().clone())
        for module, name, tensor in _writable(layers)
    ]


def _writable(layers: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in (module for layer in layers for module in layer.modules()):
        for name, tensor in (*module._buffers.items(), *_renormalized_tables(module).items()):
            if tensor is not None:
                yield module, name, tensor


def _renormalized_tables(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the parameters that an embedding with ``max_norm`` renormalizes in its forward."""
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return module._parameters if is_table and module.max_norm is not None else {}


def run_with_buffers(
    layers: Sequence[nn.Module], buffers: Sequence[BufferSnapshot], run: Callable[[], _Result]
) -> _Result:
    """Returns what ``run`` returns with the snapshots' values, without incrementing version counters.

    Afterwards, the buffers are as they were. A write of equal elements does not increment a version, either.
    """
    names = [(snapshot.module, snapshot.name) for snapshot in buffers]
    current = [
        BufferSnapshot(m, n, b, b.detach().clone()) for m, n in names if (b := getattr(m, n)) is not None
    ]
    tensors = {id(snapshot.buffer): snapshot.buffer for snapshot in (*buffers, *current)}
    tensors |= {id(tensor): tensor for _, _, tensor in _writable(layers)}
    versions = preserve_version_counter(tuple(tensors.values()))  # autograd checks them

    def run_restored() -> _Result:
        for snapshot in buffers:
            snapshot.restore()
        return run()

    def undo() -> None:
        for snapshot in current:
            snapshot.restore()
        versions.__exit__()

    return run_and_undo(run_restored, undo)


def run_and_undo(run: Callable[[], _Result], undo: Callable[[], None]) -> _Result:
    """Returns what ``run`` returns, after ``undo`` has undone its changes.

    A worker receives Ctrl-C as a ``KeyboardInterrupt`` at any function call, also at that of a context
    manager's ``__exit__``, whose code then does not run. So no context manager is used here.

    Args:
        run: a function that may raise.
        undo: undoes all changes, however far ``run`` has come; it is called twice if Ctrl-C interrupts it.
    """
    try:
        return run()
    finally:
        try:
            undo()
        except KeyboardInterrupt:
            undo()
            raise


# PyTorch's alignment of memory in bytes; matrix products of memory aligned differently may round differently.
_ALIGNMENT = 64


class _WritableCopy(torch.autograd.Function):
    """A copy with the original's strides and alignment, including overlaps and gaps in memory."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        length = span(tensor.shape, tensor.stride())
        memory = tensor.new_empty(length + _ALIGNMENT)
        misalignment = (tensor.data_ptr() - memory.data_ptr()) % _ALIGNMENT
        begin = misalignment // tensor.element_size()
        memory[begin : begin + length].copy_(tensor.as_strided((length,), (1,)))
        # A tensor on the same storage, not a view: autograd forbids writing a view that a Function returns.
        storage = memory.untyped_storage()
        return tensor.new_empty(0).set_(storage, begin, tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def writable_copy(tensor: Tensor) -> Tensor:
    """Returns a differentiable copy with the original's strides, alignment and bits.

    An operator that resolves bits first may compute with other strides, and round differently.
    """
    if tensor.is_conj():
        return writable_copy(tensor.conj()).conj()
    if tensor.is_neg():
        negated: Tensor = torch.ops.aten._neg_view(writable_copy(torch.ops.aten._neg_view(tensor)))
        return negated
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return tensor.clone()
    if tensor.data_ptr() % _ALIGNMENT == 0:
        copy = tensor.clone()
        if copy.stride() == tensor.stride():
            return copy
    copied: Tensor = _WritableCopy.apply(tensor)
    return copied


# The maximum number of values searched for generators.
_MAX_VALUES = 50_000
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "triton", "gpipe_fast"}
_ATOMIC = (bool, int, float, complex, str, bytes, type(None), enum.Enum)


class PythonGenerators:
    """The generators that modules can draw from: those in their reach, and global ones of packages in it.

    In a large program, modules reach more values than are searched: the nearest are, breadth-first, and the
    global generators count as in reach.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        """Searches the modules for generators."""
        self._modules = modules
        found = _reachable(modules)
        is_complete = len(found) < _MAX_VALUES
        self._found = [value for value in found if _is_generator(value)]
        packages = {value.__name__.partition(".")[0] for value in found if isinstance(value, ModuleType)}
        if "random" in packages or not is_complete:
            self._found.append(random._inst)
        if "numpy" in packages or (not is_complete and "numpy.random" in sys.modules):
            self._found.append(sys.modules["numpy"].random.mtrand._rand)

    def states(self) -> dict[int, object]:
        """Returns the generators' states as comparable values; takes 10 to 30 µs per generator."""
        replaceable = [v for module in self._modules for v in vars(module).values() if _is_generator(v)]
        return {id(generator): _state_of(generator) for generator in (*self._found, *replaceable)}


def _is_generator(value: object) -> bool:
    numpy = sys.modules.get("numpy.random")
    of_numpy = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (random.Random, *of_numpy)) and not isinstance(value, random.SystemRandom)


def _state_of(generator: Any) -> object:
    if isinstance(generator, random.Random):
        return generator.getstate()
    # The global RandomState of NumPy hides its bit generator.
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


def _reachable(roots: Iterable[object]) -> Collection[Any]:
    """Returns the values that some values can reach by attributes, elements, closures and named variables."""
    found: dict[int, Any] = {}
    pending = deque(roots)
    while pending and len(found) < _MAX_VALUES:
        value = pending.popleft()
        if not isinstance(value, _ATOMIC) and id(value) not in found:
            found[id(value)] = value
            pending += _referents(value)
    return found.values()


def _referents(value: Any) -> Iterable[object]:
    """Returns what a value refers to; functions, classes and Python modules of libraries refer to nothing."""
    if isinstance(value, (FrameType, TracebackType)):  # of an exception that was raised: all variables
        return ()
    if not isinstance(value, (FunctionType, type, ModuleType)):
        return gc.get_referents(value)
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if isinstance(name, str) and name.partition(".")[0] in _LIBRARIES:
        return ()
    if isinstance(value, FunctionType):
        names = [name for code in nested_code(value.__code__) for name in code.co_names]
        variables = [table.get(name) for name in names for table in (value.__globals__, sys.modules)]
        return (value.__defaults__, value.__kwdefaults__, value.__closure__, value.__dict__, *variables)
    return (*getattr(value, "__bases__", ()), *vars(value).values())
