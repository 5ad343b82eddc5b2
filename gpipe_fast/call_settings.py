"""The settings of a pipeline that may change between calls, as properties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from gpipe_fast._extension import Pipeline
from gpipe_fast.arguments import (
    MemoryLimit,
    checked_batch_dim,
    checked_checkpoint,
    checked_chunks,
    checked_memory,
    checked_schedule,
    checked_threads_per_stage,
)
from gpipe_fast.layers.structure import BatchDim
from gpipe_fast.lower.checkpoint import CheckpointChoice, CheckpointSetting
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.schedule import ScheduleChoice


class CallSettings:
    """Settings that the next call reads. An invalid value is refused on assignment."""

    _pipeline: Pipeline
    _fuse: bool
    _capture: bool
    _devices: list[torch.device]
    _ranks: Any

    def _rebuild_stages(self) -> None:
        """Makes the stages anew, because a setting has changed that they are compiled for."""

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
    def schedule(self) -> ScheduleChoice:
        """The order of forwards and backwards in `step`; may be set between calls.

        Raises:
            TypeError: On assignment, as for `GPipe`. The old value is kept.
            ValueError: On assignment, the name is unknown. The old value is kept.
        """
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: ScheduleChoice) -> None:
        self._schedule = checked_schedule(schedule)

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
    def checkpoint(self) -> CheckpointSetting:
        """Which micro-batches recompute, or the share of activations to save; may be set between calls.

        As for `GPipe`; a list is returned as a tuple.

        Raises:
            ValueError: On assignment, the value is invalid. The old value is kept.
        """
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointChoice) -> None:
        self._checkpoint = checked_checkpoint(checkpoint, len(getattr(self, "_balance", ())) or None)

    @property
    def memory_limit(self) -> MemoryLimit:
        """The bytes that a step may take on each device, as for `GPipe`; may be set between calls.

        Raises:
            ValueError: On assignment, the value is invalid, there is not one for each device, or there is a
                mesh. The old value is kept.
        """
        return self._memory

    @memory_limit.setter
    def memory_limit(self, memory: MemoryLimit) -> None:
        if memory is not None and self._ranks is not None:
            raise ValueError(
                f"memory={memory!r} with a mesh is not possible yet, because each process would measure "
                "other times, and choose something else; pass checkpoint, a number for each stage"
            )
        self._memory_limits = checked_memory(memory, self._devices)
        self._memory = memory

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

    @property
    def capture(self) -> bool:
        """Whether mini-batches on GPUs are captured and replayed as CUDA graphs; may be set between calls.

        False with a mesh, whose processes exchange tensors during a mini-batch.

        Raises:
            ValueError: On assignment of True, there is a mesh. The old value is kept.
        """
        return self._capture and self._ranks is None

    @capture.setter
    def capture(self, capture: bool) -> None:
        if capture and self._ranks is not None:
            raise ValueError(
                f"capture={capture!r} with a mesh is not possible, because processes exchange tensors during "
                "a mini-batch; leave it, or make the model without mesh"
            )
        self._capture = bool(capture)
        self._pipeline.set_capture(self._capture)

    @property
    def fuse(self) -> bool:
        """Whether stages on GPUs use fused kernels; may be set between calls; the next call compiles."""
        return self._fuse

    @fuse.setter
    def fuse(self, fuse: bool) -> None:
        with TRACING_LOCK:
            if bool(fuse) != self._fuse:
                self._fuse = bool(fuse)
                self._rebuild_stages()
