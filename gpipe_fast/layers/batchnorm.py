"""Deferred batch norm: running statistics are updated once per mini-batch instead of once per micro-batch.

Each micro-batch is still normalised by its own statistics. During a mini-batch, the buffers of the running
statistics hold the accumulated statistics of its micro-batches (see csrc/pipeline/statistics.h).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.layers.structure import layer_title
from gpipe_fast.torch_private.modules import AnyBatchNorm

SMALLER_BATCHES = "batch norm normalises by the samples of a micro-batch, so they change what is trained"


def normalises_micro_batches(layers: Iterable[nn.Module]) -> bool:
    """Whether a layer contains batch norm in train mode."""
    return any(isinstance(m, AnyBatchNorm) and m.training for layer in layers for m in layer.modules())


# Indices of mean, variance and number of mini-batches among a stage's buffers; and the momentum.
Statistics = tuple[int, int, int, float | None]


class _DeferringFlag(threading.local):
    now = False


_deferring = _DeferringFlag()


@contextlib.contextmanager
def deferring(wanted: bool) -> Iterator[None]:
    """Sets, for a block, whether batch norms called by this thread accumulate statistics of micro-batches."""
    before, _deferring.now = _deferring.now, wanted
    try:
        yield
    finally:
        _deferring.now = before


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore] # a pipeline's captures hold under its own setting only
def _is_deferring() -> bool:
    return _deferring.now


class _DeferredBatchNorm(AnyBatchNorm):
    """A batch norm that accumulates statistics inside a deferring pipeline and is unchanged elsewhere."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a micro-batch of shape (N, C, ...) by its own statistics."""
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        if not (_is_deferring() and self.training) or mean is None or variance is None or count is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        batch_mean, batch_variance = torch.zeros_like(mean), torch.zeros_like(variance)
        output = F.batch_norm(input, batch_mean, batch_variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            _merge_statistics(
                mean, variance, count, batch_mean, batch_variance, input.numel() // input.size(1)
            )
        return output


def _merge_statistics(
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    batch_mean: Tensor,
    batch_variance: Tensor,
    batch_count: int,
) -> None:
    """Merges the statistics of one micro-batch into the accumulated statistics, in place.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances
    (1979), applied to the variance instead of the sum of squares, which 16-bit buffers could not hold.

    Args:
        mean: accumulated mean of each channel, shape (C,).
        variance: accumulated population variance (biased), shape (C,).
        count: accumulated number of elements per channel.
        batch_mean: the micro-batch's mean, shape (C,).
        batch_variance: the micro-batch's sample variance (unbiased), shape (C,).
        batch_count: the micro-batch's number of elements per channel; at least 2, as batch norm itself
            demands.
    """
    count_dtype = torch.promote_types(mean.dtype, torch.float32)
    fraction = batch_count / (count.to(count_dtype) + batch_count)
    delta = batch_mean - mean
    population_variance = batch_variance * ((batch_count - 1) / batch_count)
    variance.copy_(
        variance * (1 - fraction)
        + population_variance * fraction
        + delta * delta * (fraction * (1 - fraction))
    )
    mean.add_(delta * fraction)
    count.add_(batch_count)


class DeferredBatchNorm1d(_DeferredBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose running statistics a pipeline may defer."""


class DeferredBatchNorm2d(_DeferredBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose running statistics a pipeline may defer."""


class DeferredBatchNorm3d(_DeferredBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` whose running statistics a pipeline may defer."""


_DEFERRED_CLASSES: dict[type, type[_DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def check_can_defer(named_layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Checks that the running statistics of all batch norms can be deferred.

    Raises:
        ValueError: a batch norm is synchronised between processes, or has a custom class.
    """
    for layer_name, layer in named_layers:
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{layer_title(name, module)} synchronises its statistics between processes for each "
                    "micro-batch; deferred_batch_norm=True supports BatchNorm1d, 2d, 3d"
                )
            not_deferred = isinstance(module, AnyBatchNorm) and not isinstance(module, _DeferredBatchNorm)
            if not_deferred and module.track_running_stats and type(module) not in _DEFERRED_CLASSES:
                raise ValueError(
                    f"{layer_title(name, module)} has a custom class, whose statistics cannot be deferred "
                    "because its computation is unknown; deferred_batch_norm=True supports "
                    "BatchNorm1d, 2d, 3d"
                )


def enable_deferral(layers: Iterable[nn.Module]) -> None:
    """Enables batch norms to accumulate their statistics inside a deferring pipeline.

    Changes their class in place, as parametrization does; the objects, parameters and buffers stay the same.

    Raises:
        ValueError: the statistics of a batch norm cannot be deferred (see `check_can_defer`).
    """
    layers = list(layers)
    check_can_defer((str(index), layer) for index, layer in enumerate(layers))
    for layer in layers:
        for module in layer.modules():
            module.__class__ = _DEFERRED_CLASSES.get(type(module), type(module))


def statistics_indices(layers: Iterable[nn.Module], buffers: Sequence[Tensor]) -> list[Statistics]:
    """Returns the indices, among a stage's buffers, of running statistics of batch norms in training mode."""
    indices = {id(buffer): index for index, buffer in enumerate(buffers)}
    found: dict[int, Statistics] = {}
    for layer in layers:
        for _, module in _deferring_modules(layer):
            mean, variance, count = (indices[id(module._buffers[name])] for name in _STATISTICS)
            found[mean] = (mean, variance, count, module.momentum)
    return list(found.values())


def deferred_momentum(module: nn.Module) -> float | None:
    """Returns the momentum that a pipeline applies itself; its captures do not read it."""
    return module.momentum if isinstance(module, _DeferredBatchNorm) else None


def statistics_names(module: nn.Module) -> set[str]:
    """Returns the ``state_dict`` keys of the statistics that a pipeline defers, given the modules' modes."""
    return {f"{name}.{buffer}" for name, _ in _deferring_modules(module) for buffer in _STATISTICS}


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _deferring_modules(module: nn.Module) -> Iterator[tuple[str, _DeferredBatchNorm]]:
    for name, each in module.named_modules():
        if isinstance(each, _DeferredBatchNorm) and each.training and each.running_mean is not None:
            yield name, each
