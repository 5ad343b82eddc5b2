"""Deferred batch norm: running statistics from the whole mini-batch, once, not from each micro-batch.

Micro-batches are normalised with statistics of their own, as without it. What they add up meanwhile stands in
the buffers that hold the running statistics otherwise (see csrc/pipeline/statistics.h).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_fast.layers.title import title

# Where a stage's buffers have mean, variance and number of mini-batches; and the momentum.
Statistics = tuple[int, int, int, float | None]


class _Deferring(threading.local):
    now = False


_deferring = _Deferring()


@contextlib.contextmanager
def deferring(wanted: bool) -> Iterator[None]:
    """Whether batch norms that this thread calls in a block add up what they meet."""
    before, _deferring.now = _deferring.now, wanted
    try:
        yield
    finally:
        _deferring.now = before


class _Deferred(_BatchNorm):
    """A batch norm as it was, but in the stages of a pipeline that defers."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a micro-batch, of shape (N, C, ...), by its own statistics."""
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        if not (_deferring.now and self.training) or mean is None or variance is None or count is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        own_mean, own_variance = torch.zeros_like(mean), torch.zeros_like(variance)
        output = F.batch_norm(input, own_mean, own_variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            _add_up(mean, variance, count, own_mean, own_variance, input.numel() // input.size(1))
        return output


def _add_up(
    mean: Tensor, variance: Tensor, count: Tensor, own_mean: Tensor, own_variance: Tensor, own_count: int
) -> None:
    """Adds a part's statistics to those so far, in place.

    Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979),
    for the variance itself instead of the sum of squares, which 16-bit buffers could not hold.

    Args:
        mean: of all elements so far, by channel.
        variance: likewise, not that of a sample.
        count: of them.
        own_mean: of the part.
        own_variance: likewise, estimated as from a sample.
        own_count: at least 2, as batch norm itself demands.
    """
    exact = torch.promote_types(mean.dtype, torch.float32)
    share = own_count / (count.to(exact) + own_count)
    apart = own_mean - mean
    of_elements = own_variance * ((own_count - 1) / own_count)
    variance.copy_(variance * (1 - share) + of_elements * share + apart * apart * (share * (1 - share)))
    mean.add_(apart * share)
    count.add_(own_count)


class DeferredBatchNorm1d(_Deferred, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose statistics a pipeline may defer."""


class DeferredBatchNorm2d(_Deferred, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose statistics a pipeline may defer."""


class DeferredBatchNorm3d(_Deferred, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` whose statistics a pipeline may defer."""


_KINDS: dict[type, type[_Deferred]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def check_can_defer(named_layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuses batch norms that do not let their statistics wait.

    Raises:
        ValueError: one is synchronised between processes, or is of a class of its own.
    """
    for layer_name, layer in named_layers:
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{title(name, module)} takes its statistics from several processes for each "
                    "micro-batch; deferred_batch_norm=True goes with BatchNorm1d, 2d and 3d"
                )
            own = isinstance(module, _BatchNorm) and not isinstance(module, _Deferred)
            if own and module.track_running_stats and type(module) not in _KINDS:
                raise ValueError(
                    f"{title(name, module)} is a class of its own: what it computes is not known, so its "
                    "statistics cannot be deferred; those of BatchNorm1d, 2d and 3d can"
                )


def defer(layers: Iterable[nn.Module]) -> None:
    """Lets batch norms add up statistics where they run in a pipeline that defers.

    They stay the objects that they are, as a parametrized module does, with the same parameters and buffers.

    Raises:
        ValueError: as `check_can_defer`.
    """
    layers = list(layers)
    check_can_defer((str(index), layer) for index, layer in enumerate(layers))
    for layer in layers:
        for module in layer.modules():
            module.__class__ = _KINDS.get(type(module), type(module))


def statistics_of(layers: Iterable[nn.Module], buffers: Sequence[Tensor]) -> list[Statistics]:
    """Where those of batch norms in training are among the buffers of a stage."""
    places = {id(buffer): place for place, buffer in enumerate(buffers)}
    found: dict[int, Statistics] = {}
    for layer in layers:
        for _, module in _adding_up(layer):
            mean, variance, count = (places[id(module._buffers[name])] for name in _STATISTICS)
            found[mean] = (mean, variance, count, module.momentum)
    return list(found.values())


def names_of_statistics(module: nn.Module) -> set[str]:
    """What a ``state_dict`` calls those that a pipeline defers in the present modes."""
    return {f"{name}.{own}" for name, _ in _adding_up(module) for own in _STATISTICS}


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _adding_up(module: nn.Module) -> Iterator[tuple[str, _Deferred]]:
    for name, each in module.named_modules():
        if isinstance(each, _Deferred) and each.training and each.running_mean is not None:
            yield name, each
