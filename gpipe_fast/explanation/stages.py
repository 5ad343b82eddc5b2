"""Explanations of stages as data: what fused kernels compute in each direction, and what they save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedGroup:
    """Operators that kernels compute together, in one place or in several places alike.

    Attributes:
        operators: the operators, in order, as ``native_layer_norm``; or words for a family, as ``rotary``.
        kernels: the names of the kernels, in the order of their launches.
        layers: for each place, the indices of its layers in the model.
        saved_bytes: how many bytes less are read and written, in all places.
    """

    operators: tuple[str, ...]
    kernels: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]
    saved_bytes: int


@dataclass(frozen=True)
class LeftGroup:
    """Operators of one name that are left to PyTorch for one reason.

    Attributes:
        operator: the operator, as ``addmm``.
        count: how many there are.
        layers: the indices of their layers in the model.
        bytes: the bytes that they read and write; 0 for products and fused attention, which are not counted.
        reason: why they are left.
    """

    operator: str
    count: int
    layers: tuple[int, ...]
    bytes: int
    reason: str


@dataclass(frozen=True)
class ProgramExplanation:
    """One direction of a stage, for the micro-batches that checkpoint alike.

    Attributes:
        direction: ``forward``, ``backward``, or ``backward with recompute``.
        microbatches: the number of micro-batches for which it runs in a mini-batch.
        bytes_before: the bytes that PyTorch's operators read and write for one micro-batch, except products,
            convolutions and fused attention.
        bytes_after: the bytes with fused kernels.
        launches_before: PyTorch's operators that launch kernels; each counts as one launch.
        launches_after: operators and kernels that are launched with fused kernels.
        fused: what kernels compute, most saved bytes first.
        left: what is left, most bytes first.
    """

    direction: str
    microbatches: int
    bytes_before: int
    bytes_after: int
    launches_before: int
    launches_after: int
    fused: tuple[FusedGroup, ...]
    left: tuple[LeftGroup, ...]


@dataclass(frozen=True)
class StageExplanation:
    """One stage.

    Attributes:
        index: the stage's index.
        layers: the class name of each layer.
        first_layer: the index of the first layer in the model.
        device: the device.
        note: why nothing is fused, or why layers run in Python; else "".
        programs: the forward and the backward; empty if the stage is not traced.
    """

    index: int
    layers: tuple[str, ...]
    first_layer: int
    device: str
    note: str
    programs: tuple[ProgramExplanation, ...]
