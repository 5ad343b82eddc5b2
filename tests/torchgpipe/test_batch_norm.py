"""Batch norm: gpipe_fast is correct, and torchgpipe is shown to be wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.torchgpipe.libraries import Library, both_libraries, numbered_samples

pytestmark = pytest.mark.usefixtures("one_thread")


@both_libraries
def test_batch_norm_counts_a_recomputed_micro_batch_once(library: Library) -> None:
    module, x = nn.Sequential(nn.BatchNorm1d(6)), numbered_samples()
    plain = copy.deepcopy(module)
    library.make(module, [1], chunks=4, checkpoint="always")(x).sum().backward()
    with library.torchgpipe_raises(AssertionError):
        assert module[0].num_batches_tracked == 4
        torch.cat([plain(part) for part in x.chunk(4)])
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


def sequences(batch: int) -> Tensor:
    """Returns samples with several values per channel, so that a micro-batch of one can be normalised."""
    return torch.randn(batch, 6, 5, generator=torch.Generator().manual_seed(batch))


def deferred_statistics(library: Library, momentum: float | None, *batches: int) -> list[Tensor]:
    """Returns the deferred batch norm's statistics after training on these mini-batches in 4 chunks."""
    module = nn.Sequential(nn.Identity(), nn.BatchNorm1d(6, momentum=momentum))
    pipe = library.make(module, [1, 1], chunks=4, checkpoint="always", deferred_batch_norm=True)
    for batch in batches:
        pipe(sequences(batch)).sum().backward()
    return statistics(pipe[1])


def statistics(norm: nn.Module) -> list[Tensor]:
    return [norm.get_buffer(name) for name in ("running_mean", "running_var", "num_batches_tracked")]


def plain_statistics(momentum: float | None, *batches: int) -> list[Tensor]:
    """Returns the statistics of plain batch norm after these mini-batches."""
    norm = nn.BatchNorm1d(6, momentum=momentum)
    for batch in batches:
        norm(sequences(batch))
    return statistics(norm)


every_momentum = pytest.mark.parametrize("momentum", [0.1, None])


@both_libraries
@every_momentum
def test_deferred_batch_norm_equals_plain_batch_norm_on_the_mini_batch(
    momentum: float | None, library: Library
) -> None:
    """Both have the right mean and count; torchgpipe has the biased variance."""
    actual, expected = deferred_statistics(library, momentum, 8), plain_statistics(momentum, 8)
    torch.testing.assert_close(actual[::2], expected[::2])
    with library.torchgpipe_raises(AssertionError):
        torch.testing.assert_close(actual[1], expected[1])


@both_libraries
@every_momentum
def test_deferred_batch_norm_updates_with_fewer_samples_than_chunks(
    momentum: float | None, library: Library
) -> None:
    """Torchgpipe waits for a fourth micro-batch, which never comes."""
    actual, expected = deferred_statistics(library, momentum, 3), plain_statistics(momentum, 3)
    with library.torchgpipe_raises(AssertionError):
        assert actual[2] == 1
        torch.testing.assert_close(actual, expected)


@both_libraries
@every_momentum
def test_deferred_batch_norm_leaks_nothing_into_the_next_call(
    momentum: float | None, library: Library
) -> None:
    """Torchgpipe updates in the middle of the second mini-batch, and includes the first one."""
    actual, expected = deferred_statistics(library, momentum, 3, 8), plain_statistics(momentum, 3, 8)
    with library.torchgpipe_raises(AssertionError):
        torch.testing.assert_close(actual[0], expected[0])
