"""Checks of user arguments, with torchgpipe's rules and error messages where it has them; and warnings about
calls that work but are probably unintended.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn

from gpipe_fast import switches
from gpipe_fast._extension import Capture
from gpipe_fast.devices import devices_differ
from gpipe_fast.layers.skip import verify_skippables
from gpipe_fast.layers.structure import BatchDim, BatchDims, CallArguments, Inputs, layer_title
from gpipe_fast.lower.checkpoint import CHECKPOINT_MODES as CHECKPOINT_MODES
from gpipe_fast.lower.checkpoint import CheckpointChoice, CheckpointSetting, checkpoint_policy
from gpipe_fast.schedule import SCHEDULES, Schedule, ScheduleChoice, bubble
from gpipe_fast.user_warning import warn_user

# Bytes as a number or a text, or one of these for each device; None for no limit.
MemoryLimit = int | float | str | Sequence[int | float | str] | None
BACKENDS = ("auto", "aten", "eager")
TRANSPORTS = ("auto", "peer", "pinned")
# When mini-batches on GPUs are captured as CUDA graphs.
CAPTURES = {False: Capture.NEVER, "auto": Capture.WHERE_IT_PAYS, True: Capture.ALWAYS}
_UNITS = {"B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_HOLD_A_TENSOR = "a mini-batch needs at least one tensor, which is split into micro-batches"


def checked_chunks(chunks: int | str) -> int | Literal["auto"]:
    """Returns the number of micro-batches, or 'auto'. Converts strings, as torchgpipe does.

    Raises:
        ValueError: `chunks` is neither a positive integer nor 'auto'.
    """
    if chunks == "auto":
        return "auto"
    try:
        number = 0 if isinstance(chunks, bool) else int(chunks)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number <= 0 or (number != chunks and not isinstance(chunks, str)):
        raise ValueError(f"number of chunks must be positive integer or 'auto', got {chunks!r}")
    return number


def checked_checkpoint(checkpoint: CheckpointChoice, num_stages: int | None = None) -> CheckpointSetting:
    """Returns the checkpoint mode, the share of activations to save, or one of these for each stage.

    Raises:
        ValueError: `checkpoint` is neither one of `CHECKPOINT_MODES`, nor a number from 0 to 1, nor a list of
            these; or the list does not have one for each stage.
    """
    given = checkpoint if isinstance(checkpoint, (list, tuple)) else [checkpoint]
    each = [_checked_mode(one) for one in given]
    if not each or None in each:
        raise ValueError(
            "checkpoint is not one of 'always', 'except_last', or 'never', nor 'except_attention', a number "
            f"from 0 to 1, or a list with one of these for each stage, got {checkpoint!r}"
        )
    found = tuple(cast(list[str | float], each))
    if given is not checkpoint:
        return found[0]
    if num_stages is not None:
        checkpoint_policy(found, num_stages, True)  # raises if there is not one for each stage
    return found


def checked_capture(capture: bool | str) -> bool | str:
    """Returns whether graphs are captured: a truth value or 'auto'.

    Raises:
        ValueError: ``capture`` is neither.
    """
    if capture not in (True, False, "auto"):
        raise ValueError(
            "capture is one of True, False, or 'auto' (only where the host's launches take about as long as "
            f"the device's work), got {capture!r}"
        )
    return capture if isinstance(capture, str) else bool(capture)


def checked_memory(memory: MemoryLimit, devices: Sequence[torch.device]) -> dict[torch.device, int] | None:
    """Returns the bytes of each device; None if there is no limit.

    Args:
        memory: a number of bytes, a text such as ``'20GiB'``, or one of these for each device.
        devices: the device of each stage.

    Raises:
        ValueError: ``memory`` is none of these, or not one for each device.
    """
    if memory is None:
        return None
    distinct = list(dict.fromkeys(devices))
    each = list(memory) if isinstance(memory, (list, tuple)) else [memory] * len(distinct)
    if len(each) != len(distinct):
        raise ValueError(
            f"memory has {len(each)} values, but the stages are on {len(distinct)} devices, "
            f"{', '.join(map(str, distinct))}; pass one value for all, or one for each device"
        )
    return {device: _checked_bytes(value) for device, value in zip(distinct, each, strict=True)}


def _checked_bytes(value: Any) -> int:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?i?B)?\s*", value) if isinstance(value, str) else None
    number = found[1] if found else value
    try:
        size = 0 if isinstance(number, bool) else float(number) * _UNITS[(found and found[2]) or "B"]
    except (TypeError, ValueError, KeyError):
        size = 0
    if not 1 <= size < float("inf"):
        raise ValueError(
            f"memory must be a number of bytes or a text such as '20GiB' or '500MB', got {value!r}; offload "
            "to the host is not possible: what does not fit is recomputed"
        )
    return int(size)


def _checked_mode(value: Any) -> str | float | None:
    """Returns the mode or the share; None if it is neither."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value) if 0 <= float(value) <= 1 else None
    mode = str(value)
    return mode if mode in CHECKPOINT_MODES else None


def checked_grad_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype in which gradients are accumulated over micro-batches.

    Raises:
        ValueError: `dtype` is neither None nor ``torch.float32``.
    """
    if dtype is not None and dtype is not torch.float32:
        raise ValueError(f"grad_dtype must be None or torch.float32, got {dtype!r}")
    return dtype


def checked_backend(backend: str) -> str:
    """Returns the backend.

    Raises:
        ValueError: `backend` is not one of `BACKENDS`.
    """
    return _one_of("backend", backend, BACKENDS)


def switched_backend(backend: str) -> str:
    """Returns the backend, or 'eager' if capture is switched off.

    Raises:
        RuntimeError: the backend is 'aten', which allows no layer in Python.
    """
    if not switches.is_disabled("capture"):
        return backend
    if backend == "aten":
        raise RuntimeError(
            f"{switches.VARIABLE}=capture runs all layers in Python, and backend='aten' allows none; pass "
            "backend='auto' to GPipe, or unset the variable"
        )
    return "eager"


def checked_transport(transport: str) -> str:
    """Returns the transport for boundary tensors between GPUs.

    Raises:
        ValueError: `transport` is not one of `TRANSPORTS`.
    """
    return _one_of("transport", transport, TRANSPORTS)


def checked_schedule(schedule: ScheduleChoice) -> ScheduleChoice:
    """Returns the schedule of a step.

    Raises:
        TypeError: `schedule` is neither a name, nor a schedule, nor a function.
        ValueError: `schedule` is a name that is not in `SCHEDULES`.
    """
    if isinstance(schedule, Schedule) or (callable(schedule) and not isinstance(schedule, type)):
        return schedule
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, a gpipe_fast.schedule.Schedule, or "
            f"a function of the numbers of stages and micro-batches that returns one, got {schedule!r}"
        )
    return _one_of("schedule", schedule, SCHEDULES)


def _one_of(argument: str, value: str, choices: Collection[str]) -> str:
    if value not in choices:
        raise ValueError(f"{argument} is not one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def checked_threads_per_stage(threads: int | None) -> int | None:
    """Returns the number of intra-op threads of each stage.

    Raises:
        ValueError: `threads` is neither a positive integer nor None.
    """
    if threads is not None and (type(threads) is not int or threads <= 0):
        raise ValueError(f"threads_per_stage must be a positive integer or None, got {threads!r}")
    return threads


def checked_batch_dim(batch_dim: int | Iterable[int]) -> BatchDim:
    """Returns the batch dimension: one for all tensors, or a tuple with one for each tensor that is split.

    Raises:
        TypeError: `batch_dim` is neither an integer nor an iterable of integers.
        ValueError: `batch_dim` is empty.
    """
    try:
        return operator.index(batch_dim)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        dims = tuple(operator.index(dim) for dim in batch_dim)  # type: ignore[union-attr]
    except TypeError:
        raise TypeError(
            "batch_dim must be an integer, or a tuple with one integer for each input tensor that is split "
            f"into micro-batches, got {batch_dim!r}"
        ) from None
    if not dims:
        raise ValueError("batch_dim is empty; pass one integer, or one for each input tensor that is split")
    return dims


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
        ValueError: a layer occurs twice, is None, or has parameters that are sharded over processes, or a
            sparse parameter or buffer.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be nn.Sequential to be partitioned, got {type(module).__name__}{hint}")
    if len(list(module.children())) != len(module):
        raise ValueError(
            f"module with duplicate children is not supported; {len(list(module.children()))} of its "
            f"{len(module)} layers are distinct modules; pass copy.deepcopy(layer) where a layer "
            "occurs again, or let distinct layers share its parameters"
        )
    _check_not_sharded(module)
    _check_not_sparse(module)
    verify_skippables(module)


def _check_not_sharded(module: nn.Sequential) -> None:
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # else there are none
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for number, layer in enumerate(module):
        if isinstance(module, fsdp) or any(isinstance(each, fsdp) for each in layer.modules()):
            raise ValueError(
                f"{layer_title(number, layer)} is sharded by fully_shard, whose hooks gather parameters and "
                "reduce gradients, and stages run no hooks around a backward; pass the layers without it, "
                "and a mesh with a dimension 'dp_replicate' for data parallelism"
            )
        for name, parameter in layer.named_parameters():
            if isinstance(parameter, dtensor):
                raise ValueError(
                    f"{layer_title(number, layer)} has the DTensor {name!r} of placements "
                    f"{parameter.placements}, and stages that run concurrently would mix up the collectives "
                    "of such layers; pass layers with plain parameters, or use torchtitan for tensor "
                    "parallelism inside a stage"
                )


def _check_not_sparse(module: nn.Sequential) -> None:
    for number, layer in enumerate(module):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if not nn.parameter.is_lazy(tensor) and tensor.layout is not torch.strided:
                raise ValueError(
                    f"{layer_title(number, layer)} has {name!r} of layout {tensor.layout}, "
                    "but parameters and buffers must be dense; register its indices and values as buffers, "
                    "or keep it as a plain attribute on the layer's device"
                )


def checked_balance(balance: Iterable[int], num_layers: int) -> list[int]:
    """Returns the number of layers of each partition.

    Raises:
        TypeError: `balance` is not a list of numbers.
        ValueError: `balance` does not sum to `num_layers`, or a partition has no layer.
    """
    if isinstance(balance, (str, bytes)) or not isinstance(balance, Iterable):
        raise TypeError(
            f"balance must be a list with the number of layers of each stage, such as [{num_layers}] for "
            f"one stage, got {balance!r}; to choose only the number of stages, leave balance out and pass "
            "devices, such as ['cpu'] * 2 or ['cuda:0', 'cuda:1']"
        )
    sizes = list(balance)
    if not all(isinstance(size, (Real, Tensor)) for size in sizes):
        raise TypeError(
            f"all balance numbers must be positive integer (balance: {sizes}); every stage needs a layer"
        )
    if sum(sizes) != num_layers:
        raise ValueError(
            f"module and sum of balance have different length (module: {num_layers}, "
            f"sum of balance: {sum(sizes)}); balance is the number of layers of each stage, and every module "
            "that is assigned to the model is a layer"
        )
    if any(size <= 0 or size != int(size) for size in sizes):
        raise ValueError(
            f"all balance numbers must be positive integer (balance: {sizes}); every stage needs a layer"
        )
    return [int(size) for size in sizes]


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
        )


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


@functools.cache
def warn_idle_stages(num_stages: int, chunks: int, num_samples: int) -> None:
    """Warns of too few micro-batches, once per process and set of numbers.

    The registry of `warnings` does not suffice: any change of its filters clears it, and PyTorch makes some.

    Args:
        num_stages: K, at least 2.
        chunks: M.
        num_samples: the number of samples, which is the maximum number of micro-batches.
    """
    stages = f"{num_stages} stages"
    few = f"1 micro-batch on {stages} leaves" if chunks == 1 else f"{chunks} micro-batches on {stages} leave"
    idle = f"{few} the stages idle for up to {bubble(num_stages, chunks):.0%} of a step"
    enough = min(4 * num_stages, num_samples)
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
