"""Checkpointing as one value: the share of its activations that a stage keeps of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

# For the backward, in [0, 1]: of 0 only what crosses into the stage is kept, and the backward recomputes the
# rest; of 1 all that the backward reads.
Share = float

FULL_RECOMPUTE: Share = 0.0
NO_RECOMPUTE: Share = 1.0


@dataclass(frozen=True)
class Checkpoint:
    """The share that each micro-batch of a mini-batch keeps, in every stage.

    Attributes:
        others: of all micro-batches but the last.
        last: of the last one, whose backward comes first.
    """

    others: Share
    last: Share

    def shares(self, num_microbatches: int) -> list[Share]:
        """By micro-batch."""
        return [self.others] * (num_microbatches - 1) + [self.last]


def checkpoint_of(mode: str, training: bool) -> Checkpoint:
    """What torchgpipe's modes mean: ``'always'``, ``'except_last'`` and ``'never'`` recompute in training."""
    others = FULL_RECOMPUTE if training and mode != "never" else NO_RECOMPUTE
    return Checkpoint(others, FULL_RECOMPUTE if training and mode == "always" else NO_RECOMPUTE)


def recomputes(share: Share) -> bool:
    """Whether anything is left for the backward to recompute."""
    return share < NO_RECOMPUTE


def check_share(share: Share) -> None:
    """Refuses what is no share.

    Raises:
        ValueError: it is not within 0 and 1.
    """
    if not FULL_RECOMPUTE <= share <= NO_RECOMPUTE:
        raise ValueError(f"the share of activations to save must be within 0 and 1, got {share}")
