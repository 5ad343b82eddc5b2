"""What runs in Python, and why."""

from __future__ import annotations

from gpipe_fast.layers.title import title
from gpipe_fast.runtime.stage import Stage


class Remarks:
    """What runs in Python, and why. Refers to no stage.

    Attributes:
        in_python: layers that cannot be traced faithfully, counted in the whole module.
        texts: once for each layer; whoever warns of them takes them out.
        all: those, and those that are out.
    """

    def __init__(self) -> None:
        self.in_python: set[int] = set()
        self.texts: list[str] = []
        self.all: list[str] = []
        self._seen: set[tuple[int, int | None]] = set()

    def add(self, index: int, stage: Stage | None, layer: int | None, reason: str) -> None:
        """Notes that a layer of a stage, or all for what they are called with, runs in Python."""
        if (index, layer) in self._seen:
            return
        self._seen.add((index, layer))
        if stage is None or layer is None:
            where = "the module" if stage is None else f"stage {index}"
            text = (
                f"{where} runs in Python where it meets something new: {reason}, and no one trace serves "
                "all; pad inputs to fewer shapes"
            )
        else:
            self.in_python.add(stage.first_layer + layer)
            where = f"stage {index}, {title(stage.first_layer + layer, stage.layers[layer])}"
            text = f"{where} runs in Python: {reason}; other layers do not"
        self.texts.append(text)
        self.all.append(text)
