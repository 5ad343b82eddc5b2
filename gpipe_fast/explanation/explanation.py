"""The explanation of a call: what fused kernels compute in the stages of a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gpipe_fast.explanation.stages import StageExplanation
from gpipe_fast.explanation.text import html_of, text_of


@dataclass(frozen=True)
class Explanation:
    """What fused kernels compute in the stages of a model; ``print`` it, or show it in a notebook.

    Attributes:
        device: the device for which the model was explained.
        settings: the precision, the number of micro-batches and the checkpoint mode, in words.
        notes: what was assumed about a device that the machine lacks; and other remarks.
        stages: the stages.
    """

    device: str
    settings: str
    notes: tuple[str, ...]
    stages: tuple[StageExplanation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as dicts, lists, strings and numbers, which ``json.dumps`` accepts."""
        found: dict[str, Any] = _plain(dataclasses.asdict(self))
        return found

    def __str__(self) -> str:
        """Returns tables for a terminal; stages that are alike are shown once."""
        return text_of(self._headline(), self.notes, self.stages)

    def _repr_html_(self) -> str:
        """Returns tables for a notebook."""
        return html_of(self._headline(), self.notes, self.stages)

    def _headline(self) -> str:
        return f"What is fused on {self.device}, {self.settings}; bytes are for one micro-batch"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
