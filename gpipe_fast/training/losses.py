"""The losses of steps: what the last stage computes of them for each micro-batch, so that all add up.

A mean over unequal micro-batches, or over targets of which some do not count, is no mean of their means. So
each micro-batch computes its share of the loss of the mini-batch (`gpipe_fast/training/loss_analysis.py`); or
a sum, which is divided by the caller's normalizer.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import operator
from collections.abc import Callable, Generator, Hashable, Sequence
from numbers import Real
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.layers.structure import Structure
from gpipe_fast.runtime.processes import Processes
from gpipe_fast.skip import GIVEN, STASHED, Skippable, pop, skippable
from gpipe_fast.torch_private import pytree
from gpipe_fast.trace.dynamo import Refused
from gpipe_fast.trace.repeatable import content_of
from gpipe_fast.trace.traceability import HOOKS
from gpipe_fast.training.loss_analysis import Shares, UserLoss, name_of
from gpipe_fast.training.loss_graph import MixesSamples, fill_measures

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
    if is_loss and "reduction" in inspect.signature(function).parameters:
        return (
            functools.partial(loss_fn, reduction="sum")
            if given.get("reduction", "mean") in _MEANS
            else loss_fn
        )
    return loss_fn


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
        layer.module.shares = Shares(layer.module.user, dims, dim, device)
    layer.isolate(GIVEN)
    return layer


def shape_of_loss(dim: int) -> list[int]:
    """Returns the shape of one element with a dimension ``dim``, which may be negative."""
    return [1] * (dim + 1 if dim >= 0 else -dim)


class LossLayer(Skippable):
    """The layer of a loss, after the last layer of the model."""

    module: Any

    @property
    def shares(self) -> Shares | None:
        """The shares of micro-batches; None if they compute the function itself."""
        found: Shares | None = self.module.shares
        return found

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""
        function: Callable[..., Any] = self.module.user.given
        return function

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
            try:
                found = self.shares.measures(targets, batch_size)
            except MixesSamples as error:
                raise ValueError(_refusal(self.function, error)) from None
            if found is None:
                # Layers before the loss run in Python, and it is analysed during the run.
                again = functools.partial(self.measure, measures, targets, batch_size, processes)
                self.shares.waiting.append((again, measures))
                return
            if processes.num_replicas > 1 and not all(self.shares.are_sums):
                raise ValueError(
                    f"{name_of(self.function)} computes a number of all targets that is no sum, and with "
                    "replicas those of several processes would have to be combined; pass normalizer="
                )
            others = found
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
            self.shares: Shares | None = None

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
