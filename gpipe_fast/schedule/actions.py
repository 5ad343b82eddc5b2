"""Actions: single steps of one stage on one micro-batch, in torch.distributed.pipelining's notation."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """The kind of an action. torch.distributed.pipelining uses the same names, except R.

    Attributes:
        F: forward.
        R: recompute, the part of a backward that needs no boundary gradient.
        B: full backward; after an R, the rest of it.
        I: input gradient, the part of a B up to its SEND_B.
        W: weight gradients, the rest of a B after an I.
        SEND_F: sends a boundary activation to the next stage.
        RECV_F: receives a boundary activation from the previous stage.
        SEND_B: sends a boundary gradient to the previous stage.
        RECV_B: receives a boundary gradient from the next stage.
    """

    F = "F"
    R = "R"
    B = "B"
    I = "I"  # noqa: E741 the field's name
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


RECEIVES = (Kind.RECV_F, Kind.RECV_B)
TRANSFERS = (Kind.SEND_F, Kind.SEND_B, *RECEIVES)
"""The kinds of actions that move a boundary tensor."""

BACKWARD = (Kind.R, Kind.RECV_B, Kind.B, Kind.I, Kind.SEND_B, Kind.W)
"""The kinds of actions that run after the loss."""

COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
"""The kinds of actions that a schedule puts in order; the others follow from them."""

_ACTION = re.compile(r"([0-9]+)(SEND_F|RECV_F|SEND_B|RECV_B|[FRBIW])([0-9]+)")


# The micro-batches that recompute in all stages, or pairs of a stage and a micro-batch.
Recomputed = Collection[int | tuple[int, int]]


class Action(NamedTuple):
    """One step of one stage; ``str`` gives ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses an action such as ``2F0`` or ``1SEND_F3``.

        Raises:
            ValueError: the text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not an action; expected a form like 2F0, 1SEND_F3 or 2RECV_F3")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


# Cells of torch.distributed.pipelining without a counterpart here: actions of FSDP, and several that overlap.
_OF_FSDP = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def parse_cell(text: str) -> list[Action]:
    """Parses a cell of a CSV of torch.distributed.pipelining: no action, one, or some that overlap.

    Raises:
        ValueError: the text is not a cell.
    """
    if not text or _OF_FSDP.fullmatch(text):
        return []
    overlap = _OVERLAP.fullmatch(text)
    return [Action.parse(part) for part in (overlap[1].split(";") if overlap else [text])]


def tick(action: Action) -> float:
    """Returns a nominal duration: 1 for a forward, a backward or a part of a backward, 0 for a transfer."""
    return 0.0 if action.kind in TRANSFERS else 1.0


def forward_steps(stage: int, num_stages: int) -> list[Kind]:
    """Returns the kinds of a stage's forward actions for one micro-batch, in order."""
    return [Kind.RECV_F] * (stage > 0) + [Kind.F] + [Kind.SEND_F] * (stage < num_stages - 1)


def backward_steps(stage: int, num_stages: int, *, recompute: bool, split: bool) -> list[Kind]:
    """Returns the kinds of a stage's backward actions for one micro-batch, in order."""
    before = [Kind.R] * recompute + [Kind.RECV_B] * (stage < num_stages - 1)
    send = [Kind.SEND_B] * (stage > 0)
    return [*before, Kind.I, *send, Kind.W] if split else [*before, Kind.B, *send]


def with_transfers(action: Action, last: int, splits: bool, recomputed: Recomputed) -> list[Action]:
    """Returns a forward or backward together with the actions that it needs just before and after it.

    Args:
        action: an F, B, I or W.
        last: the last stage.
        splits: whether a B that sends a boundary gradient becomes an I and a W.
        recomputed: the micro-batches that recompute.
    """
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.F:
        kinds = forward_steps(stage, last + 1)
    elif action.kind is Kind.W:
        kinds = [Kind.W]
    else:
        is_input = action.kind is Kind.I
        split = is_input or (splits and stage > 0)
        recompute = m in recomputed or (stage, m) in recomputed
        kinds = backward_steps(stage, last + 1, recompute=recompute, split=split)
        if is_input:
            kinds.remove(Kind.W)
    return [Action(stage, kind, m) for kind in kinds]
