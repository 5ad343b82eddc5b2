"""What users pass, checked as torchgpipe checks it and with its messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from gpipe_fast.devices import elsewhere
from gpipe_fast.layers.skip import verify_skippables
from gpipe_fast.layers.structure import Inputs

CHECKPOINT_MODES = ("always", "except_last", "never")
TRANSPORTS = ("auto", "peer", "pinned")


def checked_chunks(chunks: int | str) -> int | Literal["auto"]:
    """The number of micro-batches, or 'auto'.

    Raises:
        ValueError: it is neither.
    """
    if chunks == "auto":
        return "auto"
    try:
        number = int(chunks)
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
        ValueError: they are not as many as there are, or a partition has none.
    """
    sizes = list(balance)
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
    if not inputs.tensors:
        raise TypeError(f"expected Tensor, but got {type(inputs.structure.build([])).__name__}")


def check_inputs(inputs: Inputs, devices: Sequence[torch.device]) -> None:
    """Refuses what cannot be cut into micro-batches, or is elsewhere than the first stage.

    Raises:
        TypeError: there is no tensor.
        ValueError: the tensors do not fit.
    """
    check_holds_tensor(inputs)
    for tensor, whole in zip(inputs.tensors, inputs.replicated, strict=True):
        if tensor.dim() == 0 and not whole:
            raise ValueError(
                "the input has no dimension to cut into micro-batches, got a 0-dimensional tensor; wrap it "
                "in gpipe_fast.replicate(...) to give it whole to every micro-batch"
            )
        if devices and elsewhere(tensor.device, devices[0]):
            raise ValueError(
                f"the input must be on the first stage's device {devices[0]}, got {tensor.device}"
            )
    parts = [x for x, whole in zip(inputs.tensors, inputs.replicated, strict=True) if not whole]
    if not parts:
        raise ValueError("there is nothing to cut into micro-batches: all tensors are replicated")
    if len(parts) > 1 and any(tensor.size(0) != parts[0].size(0) for tensor in parts):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in parts)
        raise ValueError(
            f"the inputs must have the same batch size, their first dimension; got {shapes}; what is not cut "
            "belongs into gpipe_fast.replicate(...)"
        )
