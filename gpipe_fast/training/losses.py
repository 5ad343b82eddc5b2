"""The losses of steps: what the last stage computes of them for each micro-batch, so that all add up.

A mean over unequal micro-batches, or over targets of which some do not count, is no mean of their means. So
each micro-batch computes its share of the loss of the mini-batch; or a sum, which is divided by the caller's
normalizer. A user's function is captured by Dynamo, like a layer, with symbols for all sizes, and
`split_loss` splits its graph into shares.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from numbers import Real
from types import CodeType
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.layers.structure import Structure, flatten
from gpipe_fast.runtime.processes import Processes
from gpipe_fast.skip import GIVEN, STASHED, Skippable, pop, skippable
from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.dynamo import results_given
from gpipe_fast.torch_private.fake_tensors import enable_python_dispatcher, logging_disabled
from gpipe_fast.trace.dynamo import Refused, capture
from gpipe_fast.trace.fake import hint
from gpipe_fast.trace.layer_states import LayerStates, StateKey, describe
from gpipe_fast.trace.repeatable import content_of
from gpipe_fast.trace.symbols import SymbolicMode
from gpipe_fast.trace.traceability import HOOKS
from gpipe_fast.training.loss_graph import (
    Input,
    MixesSamples,
    expression,
    fill_measures,
    reduced_like,
    split_loss,
)

Normalizer = float | Tensor | Callable[[Any], Any] | None
LOSSES = "exact", "per-microbatch"


class Loss(NamedTuple):
    """A loss of a mini-batch.

    Attributes:
        function: the user's function of an output and its target.
        divisor: returns the number by which the sum of what the function returns for micro-batches is
            divided, given the target of the mini-batch; a tensor if it depends on elements. None for 1.
        combines: ``'exact'`` if micro-batches compute their shares, ``'per-microbatch'`` if the mean over
            samples of what the function returns is taken, or ``'sum'`` for the sum.
    """

    function: Callable[..., Tensor]
    divisor: Callable[[Any], Any] | None = None
    combines: str = "sum"


def loss_of(loss_fn: Any, normalizer: Normalizer = None, loss: str = "exact") -> Loss:
    """Returns a loss.

    Args:
        loss_fn: a function of an output and a target.
        normalizer: the number by which the sum of the losses is divided, or a function of the target that
            returns it; None if the loss is that of the mini-batch. A mean of PyTorch becomes a sum.
        loss: as for `GPipe.step`.

    Raises:
        TypeError: the loss is not a function.
        ValueError: ``loss`` is unknown.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function of an output and a target, got {type(loss_fn).__name__}; pass one "
            "such as torch.nn.functional.cross_entropy"
        )
    if loss not in LOSSES:
        raise ValueError(f"loss is not one of {', '.join(map(repr, LOSSES))}, got {loss!r}")
    if normalizer is None:
        return Loss(loss_fn, None, loss)
    return Loss(_as_sum(loss_fn), normalizer if callable(normalizer) else lambda target: normalizer)


def _as_sum(loss_fn: Any) -> Any:
    """Returns the sum whose mean a loss of PyTorch is; another function unchanged."""
    if isinstance(loss_fn, _PYTORCH) and loss_fn.reduction in _MEANS:
        summed = copy.copy(loss_fn)
        summed.reduction = "sum"
        return summed
    function: Any = loss_fn
    given: dict[str, Any] = {}
    while type(function) is functools.partial:
        function, given = function.func, {**function.keywords, **given}
    is_loss = vars(F).get(name_of(function)) is function
    is_reduced = is_loss and "reduction" in inspect.signature(function).parameters
    is_mean = is_reduced and given.get("reduction", "mean") in _MEANS
    return functools.partial(loss_fn, reduction="sum") if is_mean else loss_fn


_MEANS = "mean", "batchmean"
# The base class of PyTorch's losses.
_PYTORCH: Any = nn.MSELoss.__mro__[1]


def check_target(loss_fn: Any, target: Any, method: str) -> None:
    """Checks that there is a target if the loss needs one.

    Raises:
        TypeError: there is none.
    """
    if target is not None or not callable(loss_fn):
        return
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise TypeError(
            f"{method} got no target, but {name_of(loss_fn)} compares the output with one; pass target=, or "
            "a loss_fn of the output alone"
        ) from None
    except ValueError:  # no signature
        return


def check_normalizer(normalizer: Normalizer) -> None:
    """Checks that the losses can be divided by their normalizer.

    Raises:
        ValueError: it is 0 or not finite.
    """
    if isinstance(normalizer, Real) and not (normalizer and math.isfinite(normalizer)):
        raise ValueError(
            f"the sum of the losses cannot be divided by normalizer={normalizer}; pass the number of samples "
            "or targets of the mini-batch, such as len(target), or 1 for the sum"
        )


def key_of(value: Any, known: dict[int, int] | None = None) -> Hashable:
    """Returns a key by which functions that are made anew in each call, from the same line, are equal.

    The key is valid as long as the value exists and the variables that it closes over are unchanged.

    Args:
        value: a function, or a part of one.
        known: numbers the functions of which it is a part, which may refer to themselves.
    """
    known = {} if known is None else known
    if type(value) in (type(None), bool, int, float, str):
        return type(value), repr(value)  # tells 0.0 from -0.0, and 1 from True
    if type(value) is tuple:
        return tuple(key_of(part, known) for part in value)
    if id(value) in known or isinstance(value, CodeType):
        found: Hashable = known.get(id(value), value)
        return found
    if type(value) is functools.partial:
        parts: tuple[Any, ...] = value.func, value.args, _items(value.keywords)
    elif inspect.ismethod(value):
        parts = value.__func__, id(value.__self__)
    elif isinstance(value, nn.Module) and _is_known_by_its_attributes(value):
        attributes = {**vars(value), **dict.fromkeys(_TABLES)}
        own = attributes, value._buffers, value._modules
        parts = type(value), *map(_items, own)
    elif inspect.isfunction(value):
        cells = tuple(map(content_of, value.__closure__ or ()))
        defaults = value.__defaults__, _items(value.__kwdefaults__)
        parts = value.__code__, id(value.__globals__), cells, defaults, _items(vars(value))
    else:
        return id(value)
    known[id(value)] = len(known)
    return key_of(parts, known)


# The attributes of a module that are tables.
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]


def _is_known_by_its_attributes(module: nn.Module) -> bool:
    """Returns whether two of these modules with the same attributes compute the same."""
    return not module._parameters and not any(vars(module).get(table) for table in HOOKS)


def _items(values: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((values or {}).items(), key=operator.itemgetter(0)))


def loss_layer(
    loss: Loss,
    structure: Structure | None,
    dims: Sequence[int | None],
    keeps_output: bool,
    dim: int,
    device: torch.device,
) -> LossLayer:
    """Returns a layer that computes a loss of its input and of tensors that the caller gives.

    Args:
        loss: the loss.
        structure: the nesting of the target; None if the loss has no target.
        dims: the batch dimension of each tensor of the target; None for one that is not split.
        keeps_output: whether the layer also returns its input, detached.
        dim: the dimension along which outputs of micro-batches are concatenated.
        device: the device of the last stage.

    Returns:
        The layer. It returns the loss in the shape `shape_of_loss`.
    """
    measured = loss.combines != "sum"
    layer: LossLayer = _layer_class(len(dims) + measured)(loss, structure, keeps_output, dim)
    if loss.combines == "exact":
        layer.module.shares = LossShares(layer.module.user, dims, dim, device)
    layer.isolate(GIVEN)
    return layer


def shape_of_loss(dim: int) -> list[int]:
    """Returns the shape of one element with a dimension ``dim``, which may be negative."""
    return [1] * (dim + 1 if dim >= 0 else -dim)


class LossLayer(Skippable):
    """The layer of a loss, after the last layer of the model."""

    module: Any

    @property
    def shares(self) -> LossShares | None:
        """The shares of micro-batches; None if they compute the function itself."""
        found: LossShares | None = self.module.shares
        return found

    @property
    def function(self) -> Any:
        """What the user has given: the function, the module or the method."""
        user = self.module.user
        return user.function if user.owner is None else types.MethodType(user.function, user.owner)

    def computes(self, function: Callable[..., Any], key: Hashable) -> bool:
        """Returns whether the layer, made of a function with a given key, still computes such a function."""
        own = self.function
        is_same = own is function or key_of(own) == key
        return is_same and (self.shares is None or not self.shares.is_stale())

    def measure(
        self, measures: Tensor, targets: Sequence[Tensor], batch_size: int, processes: Processes
    ) -> None:
        """Computes the measures of a mini-batch, or lets `prepare` do so once the loss is analysed.

        Args:
            measures: the vector for them.
            targets: the tensors of the target.
            batch_size: the number of samples.
            processes: the processes of the pipeline.

        Raises:
            ValueError: the measures of replicas do not add up.
        """
        if not processes.has_last_stage:
            return
        others: list[Tensor] = []
        if self.shares is not None:
            found = self.shares.analysis
            if found is None:
                # Layers before the loss run in Python, and it is analysed during the run.
                again = functools.partial(self.measure, measures, targets, batch_size, processes)
                self.shares.waiting.append((again, measures))
                return
            try:
                others = found.measures(targets, batch_size)
            except MixesSamples as error:
                raise ValueError(_refusal(self.function, error)) from None
            if processes.num_replicas > 1 and not all(found.split.are_sums):
                raise ValueError(
                    f"{name_of(self.function)} computes a number of all targets that is no sum, and with "
                    "replicas those of several processes would have to be combined; pass normalizer="
                )
        fill_measures(measures, batch_size, others)
        if processes.num_replicas > 1:
            measures.copy_(processes.sum_of_counts(measures))

    def prepare(self, args: Sequence[Any], popped: Sequence[Tensor | None]) -> None:
        """Analyses the loss before it is captured, or run in Python.

        Args:
            args: the output of the layer before.
            popped: the tensors of the target, and the measures.

        Raises:
            ValueError: the loss of a mini-batch is no sum of shares of micro-batches.
        """
        if self.shares is None:
            return
        try:
            self.shares.prepare(args[0], [tensor for tensor in popped[:-1] if tensor is not None])
        except (MixesSamples, Refused) as error:
            raise ValueError(_refusal(self.function, error)) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer in Python."""
        keys = self.poppable()
        waiting = [] if self.shares is None else list(self.shares.waiting)
        self.prepare(args, [STASHED.tensors[key] for key in keys])
        for _, measures in waiting:
            STASHED.tensors[keys[-1]] = measures  # of which the engine has passed a copy
        return super().forward(*args, **kwargs)


def _refusal(function: Any, error: Exception) -> str:
    return (
        f"the loss of a mini-batch by {name_of(function)} does not follow from its micro-batches: {error}. "
        "Use loss_fn(model(x), y).backward(), which is always right; or let loss_fn return a sum over "
        "samples, and pass normalizer=, by which that of the mini-batch is divided; or pass "
        'loss="per-microbatch" for the mean of the losses of micro-batches'
    )


@functools.cache
def _layer_class(num_tensors: int) -> type[Any]:
    """Returns the class of layers that get this many tensors."""

    class Loss(nn.Module):
        def __init__(self, loss: Any, structure: Structure | None, keeps_output: bool, dim: int) -> None:
            super().__init__()
            self.user, self.combines = UserLoss(loss.function, structure), loss.combines
            self.keeps_output, self.dim = keeps_output, dim
            self.shares: LossShares | None = None

        def forward(self, output: Any) -> Generator[Any, Any, Any]:
            tensors = []
            for index in range(num_tensors):
                tensor = yield pop(f"target{index}")
                tensors.append(tensor)
            if self.shares is not None:
                loss = self.shares(output, tensors[:-1], tensors[-1])
            else:
                loss = self.user.of(output, tensors)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError(
                    f"loss_fn must return a tensor with one element, got {getattr(loss, 'shape', loss)}; let "
                    "it return a mean or a sum"
                )
            if loss.dtype in (torch.bfloat16, torch.float16):
                loss = loss.float()  # the losses of micro-batches are added up in float32
            if self.combines == "per-microbatch":
                first = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
                loss = loss / (tensors[-1][0] / first.shape[self.dim]).to(loss.dtype)
            loss = loss.reshape(shape_of_loss(self.dim))
            if not self.keeps_output:
                return loss
            return loss, pytree.tree_map_only(Tensor, Tensor.detach, output)

    found = skippable(pop=[f"target{index}" for index in range(num_tensors)])(Loss)
    return type("Loss", (LossLayer, found), {})


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


class LossShares:
    """The shares of micro-batches in a loss, which is analysed for the first outputs.

    Attributes:
        loss: the user's loss.
        analysis: the latest analysis; None before the first outputs are known.
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
        self.analysis: _Analysis | None = None
        self.waiting: list[tuple[Callable[[], None], Tensor]] = []

    def is_stale(self) -> bool:
        """Returns whether something that the loss reads besides its arguments has changed."""
        return self.analysis is not None and not self.analysis.state.holds([self.loss])

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
        known = self.analysis
        if known is not None and structure == self.loss.output and known.holds([*tensors, *targets]):
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
        # The user's code or a parameter may fix sizes, such as that of the classes; others may be small. Each
        # analysis that is tried keeps none of them, one alone, or all.
        sizes = _other_sizes([*tensors, *targets], dims)
        *first, last = [[], *([size] for size in sizes if len(sizes) > 1), sizes]
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
                self.analysis = found
                break
        else:
            raise MixesSamples("its Python code decides by the number of samples")
        while self.waiting:
            self.waiting.pop()[0]()

    def __call__(self, output: Any, targets: Sequence[Tensor], measures: Tensor) -> Any:
        """Returns the share of a micro-batch."""
        found = self.analysis
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
        self._kinds = [(tensor.dtype, tensor.requires_grad) for tensor in tensors]
        shapes = _probe_shapes(tensors, dims, kept)
        probes = [
            torch.empty(shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]
        symbolic = SymbolicMode(probes, [[True] * len(shape) for shape in shapes])
        with symbolic.mode:  # no leaves, as in a step
            self._inputs = [x.clone() if x.requires_grad else x for x in symbolic.inputs]
        with results_given(reduced_like), logging_disabled():
            self._captured = captured = capture(loss, self._inputs, {})
        if captured.graph is None:
            raise MixesSamples("it computes nothing from the output")
        constants = iter(captured.constants)
        self._all = [self._source(name, constants) for name in captured.inputs]
        with symbolic.mode, enable_python_dispatcher():
            inputs = [
                Input(self._fake(each, symbolic), isinstance(each, int) and each < num_outputs)
                for each in self._all
            ]
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

    def _fake(self, source: _Source | _Size, symbolic: SymbolicMode) -> Any:
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
