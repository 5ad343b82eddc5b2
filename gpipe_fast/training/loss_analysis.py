"""Finds how the loss of a mini-batch is the sum of shares of its micro-batches, for any function of a user.

The function is captured by Dynamo, like a layer, with symbols for all sizes; `split_loss` splits its graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, nn

from gpipe_fast.layers.structure import Structure, flatten
from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.dynamo import results_given
from gpipe_fast.torch_private.fake_tensors import enable_python_dispatcher, logging_disabled
from gpipe_fast.trace.dynamo import Refused, capture
from gpipe_fast.trace.fake import hint
from gpipe_fast.trace.layer_states import LayerStates, StateKey, describe
from gpipe_fast.trace.symbols import SymbolicInputs
from gpipe_fast.training.loss_graph import (
    Input,
    MixesSamples,
    expression,
    reduced_like,
    split_loss,
)

# Numbers of samples for which the user's code has to decide alike.
_NUMBERS = 2, 3, 100, 10_007, 1_000_003


class UserLoss(nn.Module):
    """A loss as a function of the tensors of an output and a target.

    Attributes:
        function: the user's function or module; of a method of a module, the function of the class.
        owner: the module whose method it is; None for another function.
        target: the nesting of the target; None if there is none.
    """

    def __init__(self, function: Callable[..., Any], target: Structure | None) -> None:
        super().__init__()
        self.owner: nn.Module | None = None
        if inspect.ismethod(function) and isinstance(function.__self__, nn.Module):
            self.owner, function = function.__self__, function.__func__  # whose parameters are the loss's
        self.function, self.target = function, target
        self.output: Structure | None = None

    @property
    def given(self) -> Callable[..., Any]:
        """What the user has given: the function, the module or the method."""
        return self.function if self.owner is None else types.MethodType(self.function, self.owner)

    def forward(self, *tensors: Tensor) -> Any:
        """Returns the loss of the tensors of an output and a target."""
        assert self.output is not None
        number = self.output.num_tensors
        return self.of(self.output.build(tensors[:number]), tensors[number:])

    def of(self, output: Any, targets: Sequence[Tensor]) -> Any:
        """Returns the loss of an output and the tensors of a target."""
        target = () if self.target is None else (self.target.build(targets),)
        return self.function(*(() if self.owner is None else (self.owner,)), output, *target)


class _Size(NamedTuple):
    """A size of a tensor of the outputs and targets: the tensor's number, and the dimension."""

    tensor: int
    dim: int


# What an input of the graph of a loss is besides: a tensor of the outputs and targets, by its number; a
# parameter of the loss, by the names that lead to it; or another tensor.
_Source = int | tuple[str, ...] | Tensor


class Shares:
    """The shares of micro-batches in a loss, which is analysed for the first outputs.

    Attributes:
        loss: the user's loss.
        waiting: what to call once the loss is analysed, with the vector of measures that it fills.
    """

    def __init__(
        self, loss: UserLoss, dims: Sequence[int | None], output_dim: int, device: torch.device
    ) -> None:
        """Prepares the analysis.

        Args:
            loss: the user's loss.
            dims: the batch dimension of each tensor of the target; None for one that is not split.
            output_dim: the batch dimension of the outputs.
            device: the device of the last stage.
        """
        self.loss, self._dims, self._output_dim, self._device = loss, tuple(dims), output_dim, device
        self._found: _Analysis | None = None
        self.waiting: list[tuple[Callable[[], None], Tensor]] = []

    def is_stale(self) -> bool:
        """Returns whether something that the loss reads besides its arguments has changed."""
        return self._found is not None and not self._found.state.holds([self.loss])

    def prepare(self, output: Any, targets: Sequence[Tensor]) -> None:
        """Analyses the loss, unless that has happened for outputs and targets like these.

        Args:
            output: the output of the last layer for a micro-batch; its tensors may be fake.
            targets: the tensors of the target.

        Raises:
            MixesSamples: it is no sum of shares.
            Refused: the function cannot be captured.
            ValueError: it does not return one element.
        """
        tensors, structure = flatten(output)
        if (
            self._found is not None
            and structure == self.loss.output
            and self._found.holds([*tensors, *targets])
        ):
            return
        self.loss.output = structure
        dims = [_dim_of(tensor, self._output_dim) for tensor in tensors]
        if None in dims:
            raise MixesSamples(
                "an output of the last layer has no batch dimension; return a value for each sample"
            )
        dims += [
            None if dim is None else _dim_of(tensor, dim)
            for tensor, dim in zip(targets, self._dims, strict=True)
        ]
        # The user's code or a parameter may fix sizes, such as that of the classes; others may be small.
        *first, last = _kept_sizes([*tensors, *targets], dims)
        for kept in (*first, last):
            try:
                found = _Analysis(self.loss, [*tensors, *targets], dims, len(tensors), self._device, kept)
            except MixesSamples:
                raise
            except Exception:
                if kept is last:
                    raise
                continue
            if found.holds([*tensors, *targets]):
                self._found = found
                break
        else:
            raise MixesSamples("its Python code decides by the number of samples")
        while self.waiting:
            self.waiting.pop()[0]()

    def measures(self, targets: Sequence[Tensor], batch_size: int) -> list[Tensor] | None:
        """Returns the measures of a mini-batch but its size; None before the first outputs are known."""
        return None if self._found is None else self._found.measures(targets, batch_size)

    @property
    def are_sums(self) -> tuple[bool, ...]:
        """For each measure, whether those of replicas add up."""
        assert self._found is not None
        return self._found.split.are_sums

    def __call__(self, output: Any, targets: Sequence[Tensor], measures: Tensor) -> Any:
        """Returns the share of a micro-batch."""
        found = self._found
        assert found is not None
        # Few objects are read here, because all of them are guarded in each call.
        is_tensor = isinstance(output, Tensor)
        tensors = [output] if is_tensor else [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        inputs = [_read(each, self.loss, [*tensors, *targets]) for each in found.sources]
        return found.share(*inputs, measures)[0]


def _read(source: _Source, loss: nn.Module, tensors: Sequence[Tensor]) -> Any:
    """Returns an input of the graph of a loss."""
    if isinstance(source, int):
        return tensors[source]
    return source if isinstance(source, Tensor) else functools.reduce(getattr, source, loss)


class _Analysis:
    """A loss that is split, for outputs and targets of some kinds.

    Attributes:
        split: the split loss.
        share: returns the share of a micro-batch.
        sources: what its inputs are, before the measures.
        state: the state of the loss in which it was captured.
    """

    def __init__(
        self,
        loss: UserLoss,
        tensors: Sequence[Tensor],
        dims: Sequence[int | None],
        num_outputs: int,
        device: torch.device,
        kept: Collection[int],
    ) -> None:
        self._loss, self._num_outputs, self._dims, self._device = loss, num_outputs, dims, device
        self._allowed: set[int] = set()  # batch sizes of mini-batches
        self._shapes = [[hint(size) for size in tensor.shape] for tensor in tensors[:num_outputs]]
        self._kinds = [(tensor.dtype, tensor.requires_grad) for tensor in tensors]
        shapes = _probe_shapes(tensors, dims, kept)
        probes = [
            torch.empty(shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]
        symbolic = SymbolicInputs(probes, [[True] * len(shape) for shape in shapes])
        with symbolic.mode:  # no leaves, as in a step
            self._inputs = [x.clone() if x.requires_grad else x for x in symbolic.inputs]
        with results_given(reduced_like), logging_disabled():
            self._captured = captured = capture(loss, self._inputs, {})
        if captured.graph is None:
            raise MixesSamples("it computes nothing from the output")
        constants = iter(captured.constants)
        self._all = [self._source(name, constants) for name in captured.inputs]
        with symbolic.mode, enable_python_dispatcher():
            inputs = [Input(self._fake(each, symbolic), self._is_output(each)) for each in self._all]
        batch = self._inputs[0].shape[dims[0] or 0]
        with undisturbed(self._device):
            self.split = split_loss(captured.graph, inputs, batch, symbolic.mode, device)
        first_error = self.split.refused.get(0)
        if first_error is not None:
            raise first_error
        (value,) = self.split.values
        if (
            self.split.kinds[0] not in ("share", "whole")
            or not isinstance(value, Tensor)
            or value.numel() != 1
        ):
            raise ValueError(
                "loss_fn must return a tensor with one element, got "
                f"{getattr(value, 'shape', value)}; let it return a mean or a sum"
            )
        self._batch = expression(batch)
        self.share = self.split.share
        self.sources = tuple(each for each in self._all if not isinstance(each, _Size))
        states = LayerStates()
        states.of(loss, describe([loss])[0], None).add(loss, None, captured)
        self.state = StateKey.of(states, [loss], None)
        if not all(self._allows(self._of_samples(self._inputs, number)) for number in _NUMBERS):
            raise MixesSamples("its Python code decides by the number of samples")

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the split loss is that for outputs and targets like these."""
        if self._kinds != [(tensor.dtype, tensor.requires_grad) for tensor in tensors]:
            return False
        sizes: dict[Any, Any] = {}
        for own, tensor in zip(self._inputs, tensors, strict=True):
            if own.dim() != tensor.dim():
                return False
            for known, size in zip(map(expression, own.shape), tensor.shape, strict=True):
                is_symbol = isinstance(known, sympy.Symbol)
                if (sizes.setdefault(known, size) if is_symbol else known) != size:
                    return False
                if is_symbol and known != self._batch and size < 2:
                    return False
        if sizes[self._batch] == 1:  # PyTorch traces for at least two
            tensors = self._of_samples(tensors, 2)
        self._shapes = [[hint(size) for size in tensor.shape] for tensor in tensors[: self._num_outputs]]
        return self._allows(tensors)

    def _allows(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the user's code decides for the sizes of tensors as it did in the capture."""
        try:
            self._captured.check_sizes(self._loss, tensors, {})
        except Refused:
            return False
        return True

    def _of_samples(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Returns meta tensors in the place of others, for another number of samples."""
        return [
            torch.empty([number if d == dim else hint(size) for d, size in enumerate(x.shape)], device="meta")
            for x, dim in zip(tensors, self._dims, strict=True)
        ]

    def measures(self, targets: Sequence[Tensor], batch_size: int) -> list[Tensor]:
        """Returns the measures of a mini-batch but the number of samples."""
        if batch_size not in self._allowed:
            if not self._allows(self._of_samples(self._inputs, max(2, batch_size))):
                raise MixesSamples("its Python code decides by the number of samples")
            self._allowed.add(batch_size)
        if len(self.split.are_sums) == 1:
            return []
        sizes = {self._batch: batch_size}
        for own, tensor in zip(self._inputs[self._num_outputs :], targets, strict=True):
            sizes |= zip(map(expression, own.shape), tensor.shape, strict=True)
        # Of outputs, only shapes and dtypes are read.
        outputs = [
            torch.zeros((), dtype=own.dtype, device=self._device).expand(
                [batch_size if d == dim else size for d, size in enumerate(shape)]
            )
            for own, shape, dim in zip(self._inputs, self._shapes, self._dims, strict=False)
        ]
        given: list[Any] = [*outputs[: self._num_outputs], *targets]
        with torch.no_grad():
            found: tuple[Tensor, ...] = self.split.measures.forward(
                *[
                    sizes.get(expression(self._inputs[each.tensor].shape[each.dim]))
                    if isinstance(each, _Size)
                    else _read(each, self._loss, given)
                    for each in self._all
                ]
            )
        return list(found)

    def _is_output(self, source: _Source | _Size) -> bool:
        return isinstance(source, int) and source < self._num_outputs

    def _source(self, name: str, constants: Iterator[Callable[[nn.Module], Tensor]]) -> _Source | _Size:
        argument = _ARGUMENT.fullmatch(name)
        if argument is not None:
            return int(argument[1]) if argument[2] is None else _Size(int(argument[1]), int(argument[2]))
        if _PARAMETER.fullmatch(name):
            return tuple(re.findall(r"\['([^']*)'\]", name)[1:])
        constant = next(constants)(self._loss)
        if constant.requires_grad:
            raise MixesSamples(
                "it computes with a tensor that requires a gradient and is no parameter of it; pass an "
                "nn.Module that has it as a parameter"
            )
        return constant

    def _fake(self, source: _Source | _Size, symbolic: SymbolicInputs) -> Any:
        if isinstance(source, _Size):
            return self._inputs[source.tensor].shape[source.dim]
        if isinstance(source, int):
            return self._inputs[source]
        return symbolic.mode.from_tensor(_read(source, self._loss, ()), static_shapes=True)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Lets a block compute on a device without the caller's modes, and without drawing its random numbers."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


_ARGUMENT = re.compile(r"L\['args'\]\[(\d+)\](?:\.size\(\)\[(\d+)\])?")
_ITEM = r"\['[^']*'\]"
_PARAMETER = re.compile(rf"L\['layer'\](\._modules{_ITEM})*\._(parameters|buffers){_ITEM}")


def _dim_of(tensor: Tensor, dim: int) -> int | None:
    """Returns the batch dimension of an output; None if it has none."""
    dim = dim if dim >= 0 else dim + tensor.dim()
    return dim if 0 <= dim < tensor.dim() else None


def _other_sizes(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[int]:
    """Returns the sizes of dimensions that are not the batch, in descending order."""
    pairs = zip(tensors, dims, strict=True)
    found = {hint(size) for x, dim in pairs for d, size in enumerate(x.shape) if d != dim}
    return sorted(found, reverse=True)


def _kept_sizes(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[list[int]]:
    """Returns the sizes that each analysis to be tried keeps: none, then each of them alone, then all."""
    sizes = _other_sizes(tensors, dims)
    return [[], *([size] for size in sizes if len(sizes) > 1), sizes]


def _probe_shapes(
    tensors: Sequence[Tensor], dims: Sequence[int | None], kept: Collection[int]
) -> list[list[int]]:
    """Returns small shapes in which equal sizes are equal, and no other size is that of the batch by chance.

    Args:
        tensors: the outputs and targets.
        dims: the batch dimension of each.
        kept: the sizes that stay as they are.

    Raises:
        MixesSamples: the batch sizes differ.
    """
    pairs = list(zip(tensors, dims, strict=True))
    sizes = {hint(tensor.shape[dim]) for tensor, dim in pairs if dim is not None}
    if len(sizes) > 1:
        raise MixesSamples(f"outputs and targets have different batch sizes, {sorted(sizes)}")
    primes = (n for n in (5, 7, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if n not in kept)
    numbers = {
        size: size if size in kept or size < 2 else next(primes, size)
        for size in reversed(_other_sizes(tensors, dims))
    }
    batch = next(n for n in (11, 3, 53, 59, 61, 67) if n not in numbers.values())
    return [
        [batch if d == dim else numbers[hint(size)] for d, size in enumerate(tensor.shape)]
        for tensor, dim in pairs
    ]


def name_of(function: Any) -> str:
    """Returns the name of a function or of the class of a module."""
    return str(getattr(function, "__name__", type(function).__name__))
