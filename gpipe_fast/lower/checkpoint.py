"""Checkpointing as one number: the fraction of its activations that a stage saves for the backward."""

from __future__ import annotations

from dataclasses import dataclass

# In [0, 1]. With 0 a stage saves only its boundary inputs, and the backward recomputes every activation; with
# 1 it saves every activation that the backward reads.
SavedFraction = float

FULL_RECOMPUTE: SavedFraction = 0.0
NO_RECOMPUTE: SavedFraction = 1.0


@dataclass(frozen=True)
class Checkpoint:
    """The saved fraction of each micro-batch of a mini-batch, the same in every stage.

    Attributes:
        others: the saved fraction of all micro-batches but the last.
        last: the saved fraction of the last micro-batch, whose backward runs first.
    """

    others: SavedFraction
    last: SavedFraction

    def saved_fractions(self, num_microbatches: int) -> list[SavedFraction]:
        """Returns the saved fraction of each micro-batch."""
        return [self.others] * (num_microbatches - 1) + [self.last]


def checkpoint_policy(mode: str, training: bool) -> Checkpoint:
    """Returns the policy for torchgpipe's mode ``'always'``, ``'except_last'`` or ``'never'``.

    Without training, no mode recomputes.
    """
    others = FULL_RECOMPUTE if training and mode != "never" else NO_RECOMPUTE
    return Checkpoint(others, FULL_RECOMPUTE if training and mode == "always" else NO_RECOMPUTE)


def has_recompute(saved_fraction: SavedFraction) -> bool:
    """Returns whether the backward recomputes any activation."""
    return saved_fraction < NO_RECOMPUTE


def check_saved_fraction(saved_fraction: SavedFraction) -> None:
    """Checks a saved fraction.

    Raises:
        ValueError: ``saved_fraction`` is not within 0 and 1.
    """
    if not FULL_RECOMPUTE <= saved_fraction <= NO_RECOMPUTE:
        raise ValueError(f"the fraction of activations to save must be within 0 and 1, got {saved_fraction}")
