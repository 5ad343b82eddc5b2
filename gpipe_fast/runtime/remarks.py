"""What a call makes worth saying: what runs in Python, and why; what costs more than it has to."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_fast.layers.title import title
from gpipe_fast.runtime.stage import Stage


class Remarks:
    """What is said of a module, each thing once. Refers to no stage.

    Attributes:
        in_python: layers that cannot be traced faithfully, counted in the whole module.
        texts: once for each layer; whoever warns of them takes them out.
        all: of what runs in Python, those, and those that are out.
        costs: what costs more than it has to.
    """

    def __init__(self) -> None:
        self.in_python: set[int] = set()
        self.texts: list[str] = []
        self.all: list[str] = []
        self.costs: list[str] = []
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

    def add_unfused(self, titles: Sequence[str]) -> None:
        """Notes layers whose attention with dropout no fused kernel computes, at the first call with some."""
        if not titles or self.costs:
            return
        more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
        text = (
            f"{titles[0]}{more}: attention with dropout takes no fused kernel on a GPU, since these draw "
            "from PyTorch's own generator; its scores, heads x queries x keys for each sample, are computed "
            "in memory; without dropout in attention, or in eval mode, it is fused"
        )
        self.costs.append(text)
        self.texts.append(text)
