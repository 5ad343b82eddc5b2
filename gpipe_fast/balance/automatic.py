"""Automatic balancing: measures the cost of each layer and partitions the layers by it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gpipe_fast.balance.partition import balance_by_cost, check_partitions
from gpipe_fast.devices import Device
from gpipe_fast.layers.structure import LayerSequence
from gpipe_fast.profile import check_is_sequence, check_timeout, profile_layers


def balance_by_time(
    partitions: int,
    module: nn.Sequential | LayerSequence,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Balances layers such that the slowest partition takes the least time, forward plus backward.

    Times each layer separately (see `profile_layers`), with the caller's intra-op threads divided by the
    number of partitions, and uses the medians. Changes neither the module nor its gradients nor the sample::

        sample = torch.randn(16, 3, 224, 224)  # a micro-batch
        model = GPipe(module, balance_by_time(4, module, sample), chunks=8)

    Args:
        partitions: the number of partitions.
        module: the layers, as a ``Sequential`` or a `GPipe`.
        sample: the only argument of a `GPipe` call, ideally of a micro-batch's size.
        timeout: the time to measure for, in seconds; at least three rounds are measured.
        device: the device to measure on; by default CUDA if available, else the CPU.

    Returns:
        The number of layers of each partition, `GPipe`'s ``balance``.

    Raises:
        TypeError: ``module`` is neither a ``Sequential`` nor a `GPipe`, or ``sample`` contains no tensor.
        ValueError: there are fewer layers than partitions; a parameter is lazy or on the meta device;
            ``timeout`` is not a number of seconds.
        RuntimeError: a layer fails; the message names the layer.
    """
    check_is_sequence(module)
    check_partitions(partitions, len(module))
    check_timeout(timeout)
    return default_balance(partitions, module, sample, timeout=timeout, device=device)


def balance_by_size(
    partitions: int,
    module: nn.Sequential | LayerSequence,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balances layers such that the largest partition takes the least memory.

    The size of a layer is the activations that autograd saves for one micro-batch, plus the parameters with
    their gradients and optimiser state::

        activation_bytes + parameter_bytes * param_scale

    (see `LayerProfile`). The function runs a whole micro-batch. torchgpipe runs one sample and multiplies by
    the micro-batch size, which fails for layers that reject a single sample (batch norm).

    | optimiser         | param_scale | state besides parameters and gradients    |
    |-------------------|-------------|-------------------------------------------|
    | SGD               | 2, 3        | none; with momentum, a buffer             |
    | Adam, AdamW       | 4, 5        | two moments; with amsgrad, a third        |
    | RMSprop           | 3 to 5      | a mean; momentum buffer; mean if centered |
    | Adagrad, Adadelta | 3, 4        | a sum; two means                          |

    Args:
        partitions: the number of partitions.
        module: the layers, as a ``Sequential`` or a `GPipe`.
        input: a mini-batch of the size used in training: the only argument of a `GPipe` call.
        chunks: the number of micro-batches per mini-batch; the first one, the largest, is measured.
        param_scale: the memory of parameters, gradients and optimiser state, as a multiple of the
            parameters' memory.
        device: the device to measure on; by default CUDA if available, else the CPU.

    Returns:
        The number of layers of each partition, `GPipe`'s ``balance``.

    Raises:
        TypeError: ``module`` is neither a ``Sequential`` nor a `GPipe`, or ``input`` contains no tensor.
        ValueError: there are fewer layers than partitions; a parameter is lazy or on the meta device;
            ``chunks`` is not positive, or ``param_scale`` is not a finite number.
        RuntimeError: a layer fails; the message names the layer.
    """
    check_is_sequence(module)
    check_partitions(partitions, len(module))
    if not isinstance(param_scale, (int, float)) or not math.isfinite(param_scale):
        raise ValueError(f"param_scale must be a finite number, got {param_scale!r}")
    profiles = profile_layers(module, input, device=device, timeout=None, chunks=chunks)
    return balance_by_cost(
        partitions, [each.activation_bytes + each.parameter_bytes * param_scale for each in profiles]
    )


def default_balance(
    partitions: int,
    module: nn.Sequential | LayerSequence,
    microbatch: Any,
    *,
    timeout: float = 0.5,
    threads: int | None = None,
    device: Device | None = None,
) -> list[int]:
    """Returns the default balance, by measured time like `balance_by_time`; at most one partition per layer.

    Args:
        partitions: the maximum number of partitions, at least 1.
        module: the layers; without layers the balance is empty.
        microbatch: the first layer's argument, or a `structure.CallArguments` with its arguments.
        timeout: the time to measure for, in seconds.
        threads: intra-op threads of a stage; by default the caller's threads divided by the partitions.
        device: the device to measure on; by default CUDA if available, else the CPU.

    Raises:
        TypeError: see `balance_by_time`.
        ValueError: see `balance_by_time`.
        RuntimeError: see `balance_by_time`.
    """
    check_is_sequence(module)
    if not len(module):
        return []
    partitions = min(partitions, len(module))
    threads = threads or max(1, torch.get_num_threads() // partitions)
    profiles = profile_layers(module, microbatch, device=device, timeout=timeout, threads=threads)
    return balance_by_cost(partitions, [each.forward_seconds + each.backward_seconds for each in profiles])
