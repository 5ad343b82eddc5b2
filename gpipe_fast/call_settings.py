"""The settings of a pipeline that may change between calls, as properties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gpipe_fast.arguments import (
    checked_batch_dim,
    checked_checkpoint,
    checked_chunks,
    checked_threads_per_stage,
)
from gpipe_fast.layers.structure import BatchDim


class CallSettings:
    """Settings that the next call reads. An invalid value is refused on assignment."""

    @property
    def chunks(self) -> int | Literal["auto"]:
        """The number of micro-batches, or 'auto': four per stage, at most one per sample. May be set.

        Raises:
            ValueError: On assignment, the value is invalid. The old value is kept.
        """
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int | Literal["auto"]) -> None:
        self._chunks = checked_chunks(chunks)

    @property
    def batch_dim(self) -> BatchDim:
        """The batch dimension, of all inputs or of each input that is split; may be set between calls.

        Raises:
            TypeError: On assignment, the value is not made of integers. The old value is kept.
            ValueError: On assignment, the value is empty. The old value is kept.
        """
        return self._batch_dim

    @batch_dim.setter
    def batch_dim(self, batch_dim: int | Iterable[int]) -> None:
        self._batch_dim = checked_batch_dim(batch_dim)

    @property
    def checkpoint(self) -> str:
        """Which micro-batches recompute: 'always', 'except_last' or 'never'; may be set between calls.

        Raises:
            ValueError: On assignment, the value is invalid. The old value is kept.
        """
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        self._checkpoint = checked_checkpoint(checkpoint)

    @property
    def threads_per_stage(self) -> int | None:
        """The number of intra-op threads of each stage; may be set between calls.

        None, the default, divides the caller's threads (``torch.get_num_threads()``) among the stages.

        Raises:
            ValueError: On assignment, the value is invalid. The old value is kept.
        """
        return self._threads_per_stage

    @threads_per_stage.setter
    def threads_per_stage(self, threads: int | None) -> None:
        self._threads_per_stage = checked_threads_per_stage(threads)
