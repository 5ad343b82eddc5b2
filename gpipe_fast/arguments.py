"""What users pass, checked as torchgpipe checks it and with its messages."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from gpipe_fast.devices import elsewhere
from gpipe_fast.layers.skip import verify_skippables
from gpipe_fast.layers.structure import BatchDim, Call, Inputs
from gpipe_fast.layers.title import title

CHECKPOINT_MODES = ("always", "except_last", "never")
TRANSPORTS = ("auto", "peer", "pinned")


def checked_chunks(chunks: int | str) -> int | Literal["auto"]:
    """The number of micro-batches, or 'auto'; text and fractions are converted, as torchgpipe does.

    Raises:
        ValueError: it is neither.
    """
    if chunks == "auto":
        return "auto"
    try:
        number = 0 if isinstance(chunks, bool) else int(chunks)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number <= 0:
        raise ValueError(f"number of chunks must be positive integer or 'auto', got {chunks!r}")
    return number


def checked_mode(checkpoint: str) -> str:
    """The checkpoint mode.

    Raises:
        ValueError: there is no such mode.
    """
    mode = str(checkpoint)
    if mode not in CHECKPOINT_MODES:
        raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', got {checkpoint!r}")
    return mode


def checked_grad_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """In what gradients are added up.

    Raises:
        ValueError: it is neither None nor ``torch.float32``.
    """
    if dtype is not None and dtype is not torch.float32:
        raise ValueError(f"grad_dtype is either None or torch.float32, got {dtype!r}")
    return dtype


def checked_transport(transport: str) -> str:
    """How boundary tensors go between GPUs.

    Raises:
        ValueError: there is no such way.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is not one of {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    return transport


def checked_batch_dim(batch_dim: int | Iterable[int]) -> BatchDim:
    """The dimension of the batch, of all tensors or of each.

    Raises:
        TypeError: it is neither an integer nor several.
        ValueError: there is none.
    """
    try:
        return operator.index(batch_dim)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        dims = tuple(operator.index(dim) for dim in batch_dim)  # type: ignore[union-attr]
    except TypeError:
        raise TypeError(
            "batch_dim is an integer, or a tuple with one for each tensor of the input that is cut, got "
            f"{batch_dim!r}"
        ) from None
    if not dims:
        raise ValueError("batch_dim has no entry; pass one integer, or one for each tensor that is cut")
    return dims


def check_module(module: nn.Sequential) -> None:
    """Refuses what is no sequence of layers that can be cut.

    Raises:
        TypeError: it is no ``Sequential``, or skip connections do not match.
        ValueError: a layer stands in it twice, or is None.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, got {type(module).__name__}")
    if len(list(module.children())) != len(module):
        raise ValueError(
            f"module with duplicate children is not supported; {len(list(module.children()))} of its "
            f"{len(module)} layers are distinct modules"
        )
    verify_skippables(module)


def checked_balance(balance: Iterable[int], num_layers: int) -> list[int]:
    """Layers per partition.

    Raises:
        TypeError: it is not a list of numbers.
        ValueError: they are not as many as there are, or a partition has none.
    """
    if isinstance(balance, (str, bytes)) or not isinstance(balance, Iterable):
        raise TypeError(
            f"balance must be a list that says how many layers each stage takes, such as [{num_layers}] for "
            f"one stage, got {balance!r}; to choose only the number of stages, leave balance out and pass "
            "devices=['cpu'] * 2, or as many GPUs"
        )
    sizes = list(balance)
    if not all(isinstance(size, (Real, Tensor)) for size in sizes):
        raise TypeError(
            f"all balance numbers must be positive integer (balance: {sizes}); every stage takes a layer"
        )
    if sum(sizes) != num_layers:
        raise ValueError(
            f"module and sum of balance have different length (module: {num_layers}, "
            f"sum of balance: {sum(sizes)}); balance says how many layers each stage takes"
        )
    if any(size <= 0 or size != int(size) for size in sizes):
        raise ValueError(
            f"all balance numbers must be positive integer (balance: {sizes}); every stage takes a layer"
        )
    return [int(size) for size in sizes]


def check_holds_tensor(inputs: Inputs) -> None:
    """Refuses inputs without a tensor.

    Raises:
        TypeError: there is none.
    """
    if inputs.tensors:
        return
    value = inputs.structure.build([])
    if not isinstance(value, Call):
        raise TypeError(f"expected Tensor, but got {type(value).__name__}")
    if not value.args and not value.kwargs:
        raise TypeError("expected Tensor, but got no argument; call the model with a mini-batch: model(x)")
    kinds = [type(each).__name__ for each in (*value.args, *value.kwargs.values())]
    raise TypeError(f"expected Tensor, but got {', '.join(kinds)}")


def check_accepted(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses arguments that the first layer does not take.

    Raises:
        TypeError: they do not fit its ``forward``.
    """
    if layer._forward_pre_hooks or (not args and not kwargs):
        return  # hooks may change the arguments; calls without any have an error of their own
    function = getattr(layer.forward, "__func__", None)
    fault = function and _fault(function, len(args), tuple(kwargs))
    if fault:
        passed = ", ".join(["..."] * len(args) + [f"{name}=..." for name in kwargs])
        raise TypeError(
            f"model({passed}) passes its arguments to {title(0, layer)}, which does not take them: {fault}"
        )


@functools.lru_cache(maxsize=64)
def _fault(forward: Callable[..., Any], num_args: int, names: tuple[str, ...]) -> str:
    """Why a method does not take such arguments; empty if it does, or if nobody knows."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(None, *(None,) * num_args, **dict.fromkeys(names))
    except TypeError as error:
        parameters = list(signature.parameters.values())[1:]
        return (
            f"{error}; it takes {signature.replace(parameters=parameters, return_annotation=signature.empty)}"
        )
    return ""


def check_inputs(inputs: Inputs, devices: Sequence[torch.device]) -> None:
    """Refuses what cannot be cut into micro-batches, or is elsewhere than the first stage.

    Raises:
        TypeError: there is no tensor, or one of a kind that programs do not take.
        ValueError: the tensors do not fit.
    """
    check_holds_tensor(inputs)
    for tensor, dim in zip(inputs.tensors, inputs.dims.inputs, strict=True):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            _refuse_kind(tensor)
        if dim is not None and not -tensor.dim() <= dim < tensor.dim():
            _refuse_dimension(tensor, dim)
        if devices and elsewhere(tensor.device, devices[0]):
            raise ValueError(
                f"the input must be on the first stage's device {devices[0]}, got {tensor.device}"
            )
    parts = [(x, d) for x, d in zip(inputs.tensors, inputs.dims.inputs, strict=True) if d is not None]
    if not parts:
        raise ValueError("there is nothing to cut into micro-batches: all tensors are replicated")
    if len(parts) > 1 and len({tensor.size(dim) for tensor, dim in parts}) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor, _ in parts)
        dims = [dim for _, dim in parts]
        which = f"along dimensions {dims}, as batch_dim says" if any(dims) else "their first dimension"
        raise ValueError(
            f"the inputs must have the same batch size, {which}; got {shapes}; what is not cut "
            "belongs into gpipe_fast.replicate(...)"
        )


def _refuse_kind(tensor: Tensor) -> NoReturn:
    """Says what an input is, and what to pass instead."""
    if tensor.is_nested:
        kind, instead = "a nested tensor", "torch.nested.to_padded_tensor(x, 0.0)"
    elif tensor.is_quantized:
        kind, instead = "a quantized tensor", "x.dequantize()"
    else:
        kind, instead = f"a tensor of layout {tensor.layout}", "x.to_dense()"
    raise TypeError(f"inputs must be dense, strided tensors, got {kind}; pass {instead}")


def _refuse_dimension(tensor: Tensor, dim: int) -> NoReturn:
    what = "a 0-dimensional tensor" if tensor.dim() == 0 else f"shape {list(tensor.shape)}"
    which = f" {dim}, its batch_dim," if tensor.dim() else ""
    raise ValueError(
        f"the input has no dimension{which} to cut into micro-batches, got {what}; wrap it in "
        "gpipe_fast.replicate(...) to give it whole to every micro-batch"
    )
