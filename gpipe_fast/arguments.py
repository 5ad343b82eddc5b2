"""Checks of user arguments, with torchgpipe's rules and error messages where it has them; and warnings about
calls that work but are probably unintended.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe_fast.devices import devices_differ
from gpipe_fast.layers.batchnorm import SMALLER_BATCHES
from gpipe_fast.layers.structure import BatchDim, BatchDims, CallArguments, Inputs, layer_title
from gpipe_fast.schedule import bubble
from gpipe_fast.skip import verify_skippables
from gpipe_fast.user_warning import warn_user

_HOLD_A_TENSOR = "a mini-batch needs at least one tensor, which is split into micro-batches"


def check_no_others(others: tuple[Any, ...]) -> None:
    """Checks that only the module and the balance are passed by position.

    Raises:
        TypeError: there are other positional arguments.
    """
    if others:
        raise TypeError(
            f"GPipe takes the module and the balance by position, got {2 + len(others)} arguments; pass the "
            "others by name: GPipe(module, balance, devices=['cpu', 'cpu'], chunks=8)"
        )


def check_module(module: nn.Sequential, hint: str = "") -> None:
    """Checks that the module is a sequence of layers that can be partitioned.

    Args:
        module: the module.
        hint: what to do with another module, at the end of the message.

    Raises:
        TypeError: `module` is not a ``Sequential``, or its skip connections do not match.
        ValueError: a layer occurs twice, is None, is sharded by ``fully_shard``, or has a sparse parameter or
            buffer.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, got {type(module).__name__}{hint}")
    if len(list(module.children())) != len(module):
        raise ValueError(
            f"module with duplicate children is not supported; {len(list(module.children()))} of its "
            f"{len(module)} layers are distinct modules; pass copy.deepcopy(layer) where a layer "
            "occurs again, or let distinct layers share its parameters"
        )
    _check_no_fsdp(module)
    check_not_sparse(module)
    verify_skippables(module)


def _check_no_fsdp(module: nn.Sequential) -> None:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for number, layer in enumerate(module):
        if isinstance(module, fsdp) or any(isinstance(each, fsdp) for each in layer.modules()):
            raise ValueError(
                f"{layer_title(number, layer)} is sharded by fully_shard, whose hooks gather parameters and "
                "reduce gradients, and stages run no hooks around a backward; pass the layers through "
                "gpipe_fast.shard(layers, mesh['fsdp']) in its place, and GPipe mesh=..., with 'fsdp'"
            )


def check_not_sparse(layers: Iterable[nn.Module]) -> None:
    """Checks that all parameters and buffers of layers are dense.

    Raises:
        ValueError: one is not.
    """
    for number, layer in enumerate(layers):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if not nn.parameter.is_lazy(tensor) and tensor.layout is not torch.strided:
                raise ValueError(
                    f"{layer_title(number, layer)} has {name!r} of layout {tensor.layout}, "
                    "but parameters and buffers must be dense; register its indices and values as buffers, "
                    "or keep it as a plain attribute on the layer's device"
                )


def check_holds_tensor(inputs: Inputs) -> None:
    """Checks that the inputs contain a tensor.

    Raises:
        TypeError: the inputs contain no tensor.
    """
    if inputs.tensors:
        return
    value = inputs.structure.build([])
    if not isinstance(value, CallArguments):
        raise TypeError(f"expected Tensor, but got {type(value).__name__}; {_HOLD_A_TENSOR}")
    if not value.args and not value.kwargs:
        raise TypeError("expected Tensor, but got no argument; call the model with a mini-batch: model(x)")
    kinds = [type(each).__name__ for each in (*value.args, *value.kwargs.values())]
    raise TypeError(f"expected Tensor, but got {', '.join(kinds)}; {_HOLD_A_TENSOR}")


def check_signature(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks that the first layer's ``forward`` accepts the arguments of a call.

    Raises:
        TypeError: the arguments do not match the signature of ``forward``.
    """
    if layer._forward_pre_hooks or (not args and not kwargs):
        return  # hooks may change the arguments; check_inputs() reports calls without arguments
    function = getattr(layer.forward, "__func__", None)
    fault = function and _signature_mismatch(function, len(args), tuple(kwargs))
    if fault:
        passed = ", ".join(["..."] * len(args) + [f"{name}=..." for name in kwargs])
        raise TypeError(
            f"model({passed}) passes its arguments to {layer_title(0, layer)}, "
            f"which does not take them: {fault}"
        )


@functools.lru_cache(maxsize=64)
def _signature_mismatch(forward: Callable[..., Any], num_args: int, names: tuple[str, ...]) -> str:
    """Returns why a method does not accept these arguments; "" if it does, or if its signature is unknown."""
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
    """Checks that the inputs can be split into micro-batches and are on the device of the first stage.

    Raises:
        TypeError: there is no tensor, or a tensor is not dense and strided.
        ValueError: a tensor lacks the batch dimension or is on another device, batch sizes differ, or all
            tensors are replicated.
    """
    check_holds_tensor(inputs)
    for tensor, dim in zip(inputs.tensors, inputs.dims.inputs, strict=True):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            _refuse_kind(tensor)
        if dim is not None and not -tensor.dim() <= dim < tensor.dim():
            _refuse_dimension(tensor, dim)
        if devices and devices_differ(tensor.device, devices[0]):
            raise ValueError(
                f"the input must be on the first stage's device {devices[0]}, got {tensor.device}; pass "
                f"x.to('{devices[0]}')"
            )
    parts = [(x, d) for x, d in zip(inputs.tensors, inputs.dims.inputs, strict=True) if d is not None]
    if not parts:
        raise ValueError(
            "the inputs cannot be split into micro-batches, since all tensors are replicated; pass at least "
            "one tensor without gpipe_fast.replicate(...)"
        )
    if len(parts) > 1 and len({tensor.size(dim) for tensor, dim in parts}) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor, _ in parts)
        dims = [dim for _, dim in parts]
        which = f"along dimensions {dims} (batch_dim)" if any(dims) else "their first dimension"
        raise ValueError(
            f"the inputs must have the same batch size, {which}; got {shapes}; wrap inputs that "
            "every micro-batch needs whole in gpipe_fast.replicate(...)"
            + (_EDGES if any(_may_be_edges(tensor) for tensor, _ in parts) else "")
        )


_WHOLE_GRAPHS = "these cannot be split; pass whole graphs as samples, padded to one size"
_EDGES = (
    ", unless one numbers the samples of another, as the edge_index of a graph does its nodes: "
    f"{_WHOLE_GRAPHS}"
)


@contextlib.contextmanager
def naming_edges(inputs: Inputs) -> Iterator[None]:
    """Adds to an error of a layer that an input may number samples that are in other micro-batches."""
    try:
        yield
    except IndexError as error:
        whole = (x for x, dim in zip(inputs.tensors, inputs.dims.inputs, strict=True) if dim is None)
        if any(map(_may_be_edges, whole)):
            error.args = (
                f"{error}; every micro-batch gets an input whole that looks like the edge_index of a graph, "
                f"which numbers the nodes of the mini-batch: {_WHOLE_GRAPHS}",
            )
        raise


def _may_be_edges(tensor: Tensor) -> bool:
    """Whether a tensor has the form of PyTorch Geometric's ``edge_index``."""
    return tensor.dim() == 2 and len(tensor) == 2 and tensor.dtype in (torch.int32, torch.int64)


def _refuse_kind(tensor: Tensor) -> NoReturn:
    """Raises TypeError for a tensor that is not dense and strided, and names the conversion to apply."""
    if tensor.is_nested:
        kind, instead = "a nested tensor", "torch.nested.to_padded_tensor(x, 0.0)"
    elif tensor.is_quantized:
        kind, instead = "a quantized tensor", "x.dequantize()"
    else:
        kind, instead = f"a tensor of layout {tensor.layout}", "x.to_dense()"
    raise TypeError(f"inputs must be dense, strided tensors, got {kind}; pass {instead}")


def _refuse_dimension(tensor: Tensor, dim: int) -> NoReturn:
    what = "a 0-dimensional tensor" if tensor.dim() == 0 else f"shape {list(tensor.shape)}"
    which = f" {dim} (batch_dim)" if tensor.dim() else ""
    raise ValueError(
        f"the input has no dimension{which} to split into micro-batches, got {what}; wrap it in "
        "gpipe_fast.replicate(...) to pass it whole to every micro-batch"
    )


def pass_through(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim) -> Any:
    """Returns the only argument of a `GPipe` without layers, which splits nothing, so any shape will do.

    Raises:
        TypeError: there is not exactly one argument, or it contains no tensor.
    """
    if not args and kwargs.keys() == {"input"}:
        args, kwargs = (kwargs["input"],), {}
    inputs = Inputs.of(args, kwargs, batch_dim)
    if len(args) != 1 or kwargs:
        raise TypeError(
            "a GPipe without layers takes one positional argument and returns it, got "
            f"{len(args) + len(kwargs)} arguments ({len(kwargs)} by keyword)"
        )
    check_holds_tensor(inputs)
    return inputs.structure.build(inputs.tensors) if None in inputs.dims.inputs else args[0]


def enough_chunks(num_stages: int, batch_size: int) -> int:
    """Returns the number of micro-batches with which stages are seldom idle, if there are enough samples."""
    return max(1, min(4 * num_stages, batch_size))


@functools.cache
def warn_idle_stages(num_stages: int, chunks: int, num_samples: int, batch_norm: bool = False) -> None:
    """Warns of too few micro-batches, once per process and set of numbers.

    The registry of `warnings` does not suffice: any change of its filters clears it, and PyTorch makes some.

    Args:
        num_stages: K, at least 2.
        chunks: M.
        num_samples: the number of samples, which is the maximum number of micro-batches.
        batch_norm: whether micro-batches are normalised by their own statistics.
    """
    stages = f"{num_stages} stages"
    few = f"1 micro-batch on {stages} leaves" if chunks == 1 else f"{chunks} micro-batches on {stages} leave"
    idle = f"{few} the stages idle for up to {bubble(num_stages, chunks):.0%} of a step"
    enough = enough_chunks(num_stages, num_samples)
    if enough <= chunks:
        samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
        warn_user(
            f"{idle}, and a mini-batch of {samples} has no more micro-batches; pass more samples at once"
        )
    else:
        less = f"{bubble(num_stages, enough):.0%}"
        warn_user(
            f"{idle}; chunks={enough} or chunks='auto' would reduce it to {less}, but smaller micro-batches "
            "can compute more slowly: model.report(...) predicts which number is fastest"
            + (f"; {SMALLER_BATCHES}" if batch_norm else "")
        )


def warn_surplus_devices(num_devices: int, num_layers: int) -> None:
    """Warns of devices that get no stage, because there are more of them than layers.

    Args:
        num_devices: how many devices the user has passed.
        num_layers: the number of layers.
    """
    if num_devices > num_layers > 0:
        warn_user(
            f"{num_devices} devices were passed for {num_layers} layers, and a stage has at least one layer, "
            f"so the last {num_devices - num_layers} stay idle; pass {num_layers} devices, or split layers "
            "into smaller ones"
        )


def warn_sequence_first(stages: Iterable[Sequence[nn.Module]], dims: BatchDims) -> None:
    """Warns of torch.nn layers that expect the sequence first, if inputs are split along dimension 0.

    Only layers of the pipeline itself and of nested ``Sequential`` modules are checked: another module may
    transpose its input before it calls such a layer.

    Args:
        stages: the layers of each stage.
        dims: the dimensions along which inputs are split.
    """
    if 0 not in dims.inputs:
        return
    number = 0
    for index, layers in enumerate(stages):
        for layer in layers:
            kind = next(
                (type(m).__name__ for m in _flatten_sequentials(layer) if _takes_sequence_first(m)), None
            )
            if kind is not None:
                warn_user(
                    f"stage {index}, {layer_title(number, layer)}: {kind} has batch_first=False, but "
                    "micro-batches are split along dimension 0, its time dimension unless an earlier "
                    "layer transposes the input; pass batch_dim=1 to GPipe, or batch_first=True to the layer"
                )
            number += 1


def warn_square_input(inputs: Inputs) -> None:
    """Warns of a square input that is split: a mask of positions, if there are as many of them as samples.

    Args:
        inputs: the arguments of a call.
    """
    batch, *others = inputs.tensors[0].shape
    for index, (tensor, dim) in enumerate(zip(inputs.tensors, inputs.dims.inputs, strict=True)):
        if index and dim == 0 and batch in others[:1] and tuple(tensor.shape) == (batch, batch):
            warn_user(
                f"input {index} of shape {list(tensor.shape)} is split into micro-batches, because its first "
                "dimension has the batch's size; if that is by chance, as of a mask of positions, wrap it in "
                "gpipe_fast.replicate(...)"
            )


def _flatten_sequentials(layer: nn.Module) -> Iterator[nn.Module]:
    if isinstance(layer, nn.Sequential):
        for inner in layer:
            yield from _flatten_sequentials(inner)
    else:
        yield layer


def _takes_sequence_first(module: nn.Module) -> bool:
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return any(map(_takes_sequence_first, module.layers))
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    known = isinstance(module, (nn.RNNBase, nn.MultiheadAttention, nn.Transformer))
    return known and not module.batch_first
