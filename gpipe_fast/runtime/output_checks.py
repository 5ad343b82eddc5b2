"""Checks that the outputs of micro-batches can be concatenated."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from gpipe_fast import _extension
from gpipe_fast.layers.structure import Structure


def check_boundaries(microbatches: Sequence[_extension.Boundary], dim: int, lengths: Sequence[int]) -> None:
    """Checks that outputs can be concatenated, as `check_outputs` does, for the outputs of a run."""
    check_outputs([(m.form.structure, [t.shape for t in m.tensors]) for m in microbatches], dim, lengths)


def check_outputs(
    microbatches: Sequence[tuple[Structure, Sequence[Sequence[int]]]], dim: int, lengths: Sequence[int]
) -> None:
    """Checks that outputs can be concatenated along ``dim``; ``lengths`` are the micro-batches' samples."""
    structure, shapes = microbatches[0]
    for other, _ in microbatches:
        if other != structure:
            raise RuntimeError(
                "the last layer's return value differs between micro-batches in more than its tensors: "
                f"{structure} and {other}; return equal constants and the same nesting for every micro-batch"
            )
    if not shapes:
        value = structure.build([])
        raise TypeError(
            f"expected Tensor, but the last layer returned {reprlib.repr(value)} of type "
            f"{type(value).__name__}, which contains no tensor to concatenate; return a tensor, or tuples, "
            "lists and dicts of tensors, which may also contain None, bools, numbers and strings"
        )
    for index, shape in enumerate(shapes):
        if not len(shape):
            raise RuntimeError(
                f"output {index} of the last layer is 0-dimensional, so the micro-batches' outputs cannot be "
                f"concatenated; return a tensor whose {'first ' if dim == 0 else ''}dimension "
                f"{'' if dim == 0 else f'{dim} '}is the batch"
            )
    if dim != 0:  # along dimension 0, an output's length may differ from its input's, as in a loop
        for (_, each), length in zip(microbatches, lengths, strict=True):
            for index, shape in enumerate(each):
                _check_batched(index, shape, dim, length)


def _check_batched(index: int, shape: Sequence[int], dim: int, length: int) -> None:
    if not -len(shape) <= dim < len(shape) or shape[dim] != length:
        raise RuntimeError(
            f"output {index} of the last layer has shape {list(shape)} for a micro-batch of {length}, so its "
            f"batch is not in dimension {dim}, along which outputs are concatenated (batch_dim); return "
            "a tensor whose batch is in that dimension"
        )
