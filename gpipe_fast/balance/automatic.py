"""How many layers each partition takes: found from what the layers cost, measured or given."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gpipe_fast.balance.partition import balance_by_cost, check_partitions
from gpipe_fast.balance.profile import LayerProfile, check_layers, check_timeout, profile, profile_layers
from gpipe_fast.devices import Device
from gpipe_fast.layers.structure import LayerSequence


def balance_by_time(
    partitions: int,
    module: nn.Sequential | LayerSequence,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Cuts layers so that the slowest partition takes as little time as possible, forward and backward.

    Every layer is timed by itself (see `profile_layers`), on as many intra-op threads as a stage would get of
    the caller's; what counts is the median. Nothing of the module, its gradients or the sample is changed::

        sample = torch.randn(16, 3, 224, 224)  # a micro-batch
        model = GPipe(module, balance_by_time(4, module, sample), chunks=8)

    Args:
        partitions: how many.
        module: the layers, as a ``Sequential`` or a `GPipe`.
        sample: best a micro-batch; as `GPipe` takes it as its only argument.
        timeout: seconds to go on measuring for; at least three rounds are made.
        device: where to measure; by default CUDA if there is any, else the CPU.

    Returns:
        Layers per partition, as `GPipe` takes it.

    Raises:
        TypeError: ``module`` is neither a ``Sequential`` nor a `GPipe`, or there is no tensor in ``sample``.
        ValueError: there are fewer layers than partitions; a parameter is not there yet; ``timeout`` is no
            number of seconds.
        RuntimeError: a layer fails; the message names it.
    """
    check_layers(module)
    check_partitions(partitions, len(module))
    check_timeout(timeout)
    with _threads_of_a_stage(partitions):
        profiles = profile_layers(module, sample, device=device, timeout=timeout)
    return _by_time(partitions, profiles)


def balance_by_size(
    partitions: int,
    module: nn.Sequential | LayerSequence,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Cuts layers so that the largest partition takes as little memory as possible.

    A layer's bytes are what autograd saves of one micro-batch, and parameters with all that goes with them::

        activation_bytes + parameter_bytes * param_scale

    (see `LayerProfile`). The micro-batch is really run: torchgpipe runs one sample instead, and multiplies by
    the micro-batch's size, which a layer that fails on one sample (batch norm) does not survive.

    ========================  ===========  ==================================
    optimiser                 param_scale  beside parameters and gradients
    ========================  ===========  ==================================
    SGD                       2, 3         with momentum: its buffer
    Adam, AdamW               4, 5         two moments; with amsgrad a third
    RMSprop                   3 to 5       a mean; a buffer; a second mean
    Adagrad, Adadelta         3, 4         a sum; two means
    ========================  ===========  ==================================

    Args:
        partitions: how many.
        module: the layers, as a ``Sequential`` or a `GPipe`.
        input: a mini-batch as it is to be trained, as `GPipe` takes it as its only argument.
        chunks: micro-batches per mini-batch; the first, the largest, is measured.
        param_scale: how many times the optimiser needs the memory of the parameters, themselves included.
        device: where to measure; by default CUDA if there is any, else the CPU.

    Returns:
        Layers per partition, as `GPipe` takes it.

    Raises:
        TypeError: ``module`` is neither a ``Sequential`` nor a `GPipe`, or there is no tensor in ``input``.
        ValueError: there are fewer layers than partitions; a parameter is not there yet; ``chunks`` is not
            positive, or ``param_scale`` is no number.
        RuntimeError: a layer fails; the message names it.
    """
    check_layers(module)
    check_partitions(partitions, len(module))
    if not isinstance(param_scale, (int, float)) or not math.isfinite(param_scale):
        raise ValueError(f"param_scale must be a finite number, got {param_scale!r}")
    profiles = profile_layers(module, input, device=device, timeout=None, chunks=chunks)
    return balance_by_cost(
        partitions, [each.activation_bytes + each.parameter_bytes * param_scale for each in profiles]
    )


def balance_automatically(
    partitions: int,
    module: nn.Sequential | LayerSequence,
    microbatch: Any,
    *,
    timeout: float = 0.5,
    threads: int | None = None,
    device: Device | None = None,
) -> list[int]:
    """A balance where none is given: that of `balance_by_time`, of at most as many partitions as layers.

    Args:
        partitions: at most so many, at least 1.
        module: the layers; of none the balance is empty.
        microbatch: what the first layer takes, also as a `structure.Call`.
        timeout: seconds to go on measuring for.
        threads: intra-op threads of a stage; by default those of the caller are divided.
        device: where to measure; by default CUDA if there is any, else the CPU.

    Raises:
        TypeError: as `balance_by_time`.
        ValueError: likewise.
        RuntimeError: likewise.
    """
    check_layers(module)
    if not len(module):
        return []
    partitions = min(partitions, len(module))
    check_partitions(partitions, len(module))
    with _threads_of_a_stage(partitions, threads):
        return _by_time(partitions, profile(module, microbatch, device, timeout=timeout))


def _by_time(partitions: int, profiles: list[LayerProfile]) -> list[int]:
    return balance_by_cost(partitions, [each.forward_seconds + each.backward_seconds for each in profiles])


@contextlib.contextmanager
def _threads_of_a_stage(partitions: int, threads: int | None = None) -> Iterator[None]:
    """Runs a block on as many intra-op threads as each of several stages has."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or max(1, before // partitions))
    try:
        yield
    finally:
        torch.set_num_threads(before)
