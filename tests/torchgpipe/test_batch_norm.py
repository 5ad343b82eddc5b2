"""Batch norm where torchgpipe fails: asserted of our library, and shown to be wrong of torchgpipe."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.torchgpipe.libraries import Library, both, numbered

pytestmark = pytest.mark.usefixtures("one_thread")


@both
def test_batch_norm_counts_a_recomputed_micro_batch_once(library: Library) -> None:
    module, x = nn.Sequential(nn.BatchNorm1d(6)), numbered()
    plain = copy.deepcopy(module)
    library.make(module, [1], chunks=4, checkpoint="always")(x).sum().backward()
    with library.fails(AssertionError):
        assert module[0].num_batches_tracked == 4
        torch.cat([plain(part) for part in x.chunk(4)])
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


def signals(batch: int) -> Tensor:
    """Samples of several values for each channel, so that one alone can be normalised."""
    return torch.randn(batch, 6, 5, generator=torch.Generator().manual_seed(batch))


def deferred(library: Library, momentum: float | None, *batches: int) -> list[Tensor]:
    """The statistics that a batch norm has after training forwards in 4 chunks."""
    module = nn.Sequential(nn.Identity(), nn.BatchNorm1d(6, momentum=momentum))
    pipe = library.make(module, [1, 1], chunks=4, checkpoint="always", deferred_batch_norm=True)
    for batch in batches:
        pipe(signals(batch)).sum().backward()
    return statistics(pipe[1])


def statistics(norm: nn.Module) -> list[Tensor]:
    return [norm.get_buffer(name) for name in ("running_mean", "running_var", "num_batches_tracked")]


def whole(momentum: float | None, *batches: int) -> list[Tensor]:
    """What plain batch norm has after these mini-batches."""
    norm = nn.BatchNorm1d(6, momentum=momentum)
    for batch in batches:
        norm(signals(batch))
    return statistics(norm)


every_momentum = pytest.mark.parametrize("momentum", [0.1, None])


@both
@every_momentum
def test_deferred_batch_norm_has_the_statistics_of_the_mini_batch(
    momentum: float | None, library: Library
) -> None:
    """Mean and number are right in both; torchgpipe's variance is the biased one."""
    found, wanted = deferred(library, momentum, 8), whole(momentum, 8)
    torch.testing.assert_close(found[::2], wanted[::2])
    with library.fails(AssertionError):
        torch.testing.assert_close(found[1], wanted[1])


@both
@every_momentum
def test_deferred_batch_norm_with_fewer_samples_than_chunks(momentum: float | None, library: Library) -> None:
    """Torchgpipe waits for a fourth micro-batch."""
    found, wanted = deferred(library, momentum, 3), whole(momentum, 3)
    with library.fails(AssertionError):
        assert found[2] == 1
        torch.testing.assert_close(found, wanted)


@both
@every_momentum
def test_deferred_batch_norm_leaks_nothing_into_the_next_call(
    momentum: float | None, library: Library
) -> None:
    """Torchgpipe commits in the middle of the second mini-batch, with the first one among it."""
    found, wanted = deferred(library, momentum, 3, 8), whole(momentum, 3, 8)
    with library.fails(AssertionError):
        torch.testing.assert_close(found[0], wanted[0])
