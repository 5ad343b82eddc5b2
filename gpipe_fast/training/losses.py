"""Losses as sums over micro-batches, each divided by a number of the whole mini-batch.

A mean over unequal micro-batches, or over targets of which some do not count, is no mean of their means. A
known loss is therefore computed as a sum, and divided by what PyTorch's mean divides the whole by.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Generator, Hashable
from numbers import Real
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.layers.structure import Structure
from gpipe_fast.skip import GIVEN, Skippable, pop, skippable
from gpipe_fast.torch_private import pytree
from gpipe_fast.trace.repeatable import content_of
from gpipe_fast.trace.traceability import HOOKS

Normalizer = float | Tensor | Callable[[Any], Any] | None

# Losses of classes, and losses of elements: the functions, and the modules that call them.
_OF_CLASSES: dict[Any, Any] = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
_OF_ELEMENTS: dict[Any, Any] = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
}
_FUNCTIONS = _OF_CLASSES | _OF_ELEMENTS
_FORWARDS = {cls: cls.forward for cls in _FUNCTIONS}
# Losses whose mean is divided by the sum of the weights of elements.
_WEIGHTED = (F.mse_loss, F.l1_loss)


class Loss(NamedTuple):
    """A loss of a mini-batch: the sum of the losses of its micro-batches, divided by a number.

    Attributes:
        total: returns the loss of an output and its target, a 0-dimensional tensor.
        key: equal for losses that compute the same.
        divisor: returns the number, given the target of the mini-batch; a tensor if it depends on elements.
            None for a sum, which is not divided.
    """

    total: Callable[..., Tensor]
    key: Hashable
    divisor: Callable[[Any], Any] | None = None


def loss_of(loss_fn: Any, normalizer: Normalizer) -> Loss:
    """Returns a loss as a sum and a divisor.

    Args:
        loss_fn: a function of an output and a target; one of PyTorch's losses, or else a sum.
        normalizer: the divisor, or a function of the target that returns it; None for that of the loss.

    Raises:
        TypeError: the loss is not a function.
        ValueError: the reduction of the loss is not known, or is ``'none'``.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function of an output and a target, got {type(loss_fn).__name__}; pass one "
            "such as torch.nn.functional.cross_entropy"
        )
    function, arguments = _call_of(loss_fn)
    divisor = _divisor_of(normalizer)
    if function is None:
        if divisor is None or getattr(loss_fn, "reduction", None) == "mean":
            raise ValueError(
                f"the divisor of {_name(loss_fn)} is not known, so the losses of micro-batches cannot be "
                "combined; let loss_fn return a sum, and pass normalizer=, a number or a function of the "
                "target, by which the sum over the mini-batch is divided"
            )
        return Loss(loss_fn, key_of(loss_fn), divisor)
    reduction = arguments["reduction"]
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"loss_fn must reduce to a number, got reduction={reduction!r}; pass 'mean' or 'sum'"
        )
    if divisor is None and reduction == "mean":
        if function in _WEIGHTED and arguments.get("weight") is not None:
            raise ValueError(
                f"{function.__name__} got weight=, which is not split into micro-batches; pass the weights "
                "in the target, let loss_fn return a sum, and pass normalizer="
            )
        by = _number_of_classes if function in _OF_CLASSES.values() else _number_of_elements
        divisor = functools.partial(by, arguments)
    total = functools.partial(function, **{**arguments, "reduction": "sum"})
    if function in _OF_ELEMENTS.values():
        total = functools.partial(_of_equal_shapes, total)
    key = function, key_of(_items(arguments))
    return Loss(total, key, divisor)


def _call_of(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function of PyTorch that a loss calls, and its arguments; None if there is none."""
    if type(loss_fn) in _FUNCTIONS and _is_unchanged(loss_fn):
        function = _FUNCTIONS[type(loss_fn)]
        names = [*inspect.signature(function).parameters][2:]
        attributes = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
        return function, attributes
    given: dict[str, Any] = {}
    while type(loss_fn) is functools.partial and not loss_fn.args:
        given = {**loss_fn.keywords, **given}
        loss_fn = loss_fn.func
    if loss_fn not in _FUNCTIONS.values() or given.keys() & {"size_average", "reduce"}:
        return None, {}
    return loss_fn, {"reduction": "mean", **given}


def _is_unchanged(loss_fn: nn.Module) -> bool:
    """Returns whether a loss of PyTorch, which is a module, runs no other code than PyTorch's."""
    function = _FUNCTIONS[type(loss_fn)]
    own_forward = getattr(loss_fn.forward, "__func__", None) is _FORWARDS[type(loss_fn)]
    hooked = any(vars(loss_fn)[table] for table in HOOKS)
    return own_forward and not hooked and getattr(F, function.__name__) is function


def check_target(loss_fn: Any, target: Any, method: str) -> None:
    """Checks that there is a target for one of PyTorch's losses.

    Raises:
        TypeError: there is none.
    """
    function, arguments = _call_of(loss_fn) if target is None and callable(loss_fn) else (None, {})
    if function is not None and "target" not in arguments:
        raise TypeError(
            f"{method} got no target, but {_name(loss_fn)} compares the output with one; pass target=, or a "
            "loss_fn of the output alone, with normalizer="
        )


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


def _divisor_of(normalizer: Normalizer) -> Callable[[Any], Any] | None:
    if normalizer is None or callable(normalizer):
        return normalizer
    return lambda target: normalizer


def _number_of_classes(arguments: dict[str, Any], target: Tensor) -> Any:
    """Returns the number of targets that count, or the sum of their classes' weights."""
    if target.is_floating_point():  # probabilities of classes, along dimension 1
        return target.numel() / target.shape[1 if target.dim() > 1 else 0]
    counts = target != arguments.get("ignore_index", -100)
    weight = arguments.get("weight")
    if weight is None:
        return counts.sum()
    classes = target.where(counts, 0).long()
    return torch.where(counts, weight.to(target.device)[classes], 0).sum()


def _number_of_elements(arguments: dict[str, Any], target: Tensor) -> int:
    return target.numel()


def _of_equal_shapes(total: Callable[..., Tensor], output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        raise ValueError(
            f"the output of shape {list(output.shape)} and the target of shape {list(target.shape)} differ; "
            "reshape one of them, because the loss would compare all pairs"
        )
    return total(output, target)


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
    elif inspect.isfunction(value):
        cells = tuple(map(content_of, value.__closure__ or ()))
        defaults = value.__defaults__, _items(value.__kwdefaults__)
        parts = value.__code__, id(value.__globals__), cells, defaults, _items(vars(value))
    else:
        return id(value)
    known[id(value)] = len(known)
    return key_of(parts, known)


def _items(values: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((values or {}).items()))


def _name(loss_fn: Any) -> str:
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))


def loss_layer(
    loss: Loss, structure: Structure | None, num_tensors: int, keeps_output: bool, dim: int
) -> nn.Module:
    """Returns a layer that computes a loss of its input and of tensors that the caller gives.

    Args:
        loss: the loss.
        structure: the nesting of the target; None if the loss has no target.
        num_tensors: the number of tensors of the target.
        keeps_output: whether the layer also returns its input, detached.
        dim: the dimension along which outputs of micro-batches are concatenated.

    Returns:
        The layer. It returns the loss in the shape `shape_of_loss`.
    """
    layer: Skippable = _layer_class(num_tensors)(loss.total, structure, keeps_output, dim)
    return layer.isolate(GIVEN)


def shape_of_loss(dim: int) -> list[int]:
    """Returns the shape of one element with a dimension ``dim``, which may be negative."""
    return [1] * (dim + 1 if dim >= 0 else -dim)


@functools.cache
def _layer_class(num_tensors: int) -> type[Skippable]:
    """Returns the class of layers for targets of this many tensors."""

    class Loss(nn.Module):
        def __init__(self, total: Any, structure: Structure | None, keeps_output: bool, dim: int) -> None:
            super().__init__()
            self.total, self.structure, self.keeps_output, self.dim = total, structure, keeps_output, dim

        def forward(self, output: Any) -> Generator[Any, Any, Any]:
            tensors = []
            for index in range(num_tensors):
                tensor = yield pop(f"target{index}")
                tensors.append(tensor)
            target = () if self.structure is None else (self.structure.build(tensors),)
            loss = self.total(output, *target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError(
                    f"loss_fn must return a tensor with one element, got {getattr(loss, 'shape', loss)}; let "
                    "it return a sum"
                )
            if loss.dtype in (torch.bfloat16, torch.float16):
                loss = loss.float()  # the losses of micro-batches are added up in float32
            loss = loss.reshape(shape_of_loss(self.dim))
            if not self.keeps_output:
                return loss
            return loss, pytree.tree_map_only(Tensor, Tensor.detach, output)

    return skippable(pop=[f"target{index}" for index in range(num_tensors)])(Loss)
