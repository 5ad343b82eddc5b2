"""Checkpointing: which of its activations a stage saves for the backward of a micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

# In [0, 1], of the bytes that 1 saves. With 0 a stage saves only its boundary inputs, and the backward
# recomputes every activation; with 1 it saves every activation that the backward reads. Or `SAVE_ATTENTION`:
# the results of fused attention are saved, whatever their share, and everything else is recomputed.
SavedFraction = float | Literal["attention"]

FULL_RECOMPUTE: Final = 0.0
NO_RECOMPUTE: Final = 1.0
SAVE_ATTENTION: Final = "attention"

# A mode of torchgpipe, a saved fraction, or one of these for each stage: as checked, and as users pass it.
CheckpointSetting = str | float | tuple[str | float, ...]
CheckpointChoice = str | float | Sequence[str | float]

# The fractions of the last micro-batches; earlier ones have the first of these.
_ROWS: dict[str, tuple[SavedFraction, ...]] = {
    "always": (FULL_RECOMPUTE,),
    "except_attention": (SAVE_ATTENTION,),
    "except_last": (FULL_RECOMPUTE, NO_RECOMPUTE),
    "never": (NO_RECOMPUTE,),
}
CHECKPOINT_MODES = tuple(_ROWS)


@dataclass(frozen=True)
class Checkpoint:
    """The saved fraction of each micro-batch in each stage.

    A stage has the fractions of its last micro-batches; earlier ones have the first of these::

                          micro-batch   0    1    2    3
        (0.0, 1.0)                     0.0  0.0  0.0  1.0     'except_last'
        (0.5,)                         0.5  0.5  0.5  0.5
        (0.0, 0.25, 0.5, 1.0)          0.0  0.25 0.5  1.0
        (SAVE_ATTENTION,)                   the results of fused attention: 'except_attention'

    Attributes:
        stages: the fractions of each stage.
    """

    stages: tuple[tuple[SavedFraction, ...], ...]

    def saved_fractions(self, stage: int, num_microbatches: int) -> list[SavedFraction]:
        """Returns the saved fraction of each micro-batch in a stage."""
        row = self.stages[stage]
        return [row[max(0, len(row) - num_microbatches + m)] for m in range(num_microbatches)]

    def recomputed(self, num_microbatches: int) -> frozenset[tuple[int, int]]:
        """Returns the stages and micro-batches that recompute, as pairs."""
        return frozenset(
            (stage, m)
            for stage in range(len(self.stages))
            for m, fraction in enumerate(self.saved_fractions(stage, num_microbatches))
            if has_recompute(fraction)
        )


@functools.lru_cache(maxsize=64)  # a step makes as few Python calls with many stages as with few
def checkpoint_policy(setting: CheckpointSetting, num_stages: int, training: bool) -> Checkpoint:
    """Returns the policy for a mode, a saved fraction, or one of these for each stage.

    Without training, nothing is recomputed.

    Raises:
        ValueError: there is not one for each stage.
    """
    each = list(setting) if isinstance(setting, tuple) else [setting] * num_stages
    if len(each) != num_stages:
        raise ValueError(
            f"checkpoint has {len(each)} values, but the model has {num_stages} stages; pass one value for "
            "all, or one for each stage"
        )
    if not training:
        each = ["never"] * num_stages
    return Checkpoint(tuple(_ROWS[one] if isinstance(one, str) else (one,) for one in each))


def has_recompute(saved_fraction: SavedFraction) -> bool:
    """Returns whether the backward recomputes any activation."""
    return saved_fraction != NO_RECOMPUTE


def check_saved_fraction(saved_fraction: SavedFraction) -> None:
    """Checks a saved fraction.

    Raises:
        ValueError: ``saved_fraction`` is neither within 0 and 1 nor `SAVE_ATTENTION`.
    """
    if saved_fraction != SAVE_ATTENTION and not FULL_RECOMPUTE <= saved_fraction <= NO_RECOMPUTE:
        raise ValueError(f"the fraction of activations to save must be within 0 and 1, got {saved_fraction}")
