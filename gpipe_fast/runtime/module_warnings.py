"""Warnings about a module: layers in Python, and avoidable costs; and the log of its graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from gpipe_fast.layers.structure import layer_title
from gpipe_fast.runtime.stage import Stage, TensorSpec
from gpipe_fast.trace.tensor_metadata import AnyTensor

log = logging.getLogger("gpipe_fast")


class InPython(NamedTuple):
    """Why layers run in Python; its string says so.

    Attributes:
        where: the layer with its stage, or the whole stage or module.
        reason: the reason, a clause, as `Untraceable.reason`.
        what: the middle of the sentence, which says for which calls, if not for all.
    """

    where: str
    reason: str
    what: str = "runs in Python:"

    @classmethod
    def of(cls, index: int, stage: Stage, layer: int | None, reason: str) -> InPython:
        """Returns why a layer of a stage runs in Python; ``layer`` None means all layers."""
        where = f"stage {index}"
        if layer is not None:
            where += f", {layer_title(stage.first_layer + layer, stage.layers[layer])}"
        return cls(where, reason)

    def __str__(self) -> str:
        return f"{self.where} {self.what} {self.reason}"


class ModuleWarnings:
    """The warnings about a module, each recorded once. Holds no reference to a stage.

    Attributes:
        pending: pending warnings, one per layer; the caller that issues them removes them.
        python_layers: why layers run in Python, by stage and layer; the layer is None for a whole stage.
        costs: all warnings about avoidable costs.
    """

    def __init__(self) -> None:
        self.pending: list[str] = []
        self.python_layers: dict[tuple[int, int | None], InPython] = {}
        self.costs: list[str] = []
        self._number = ""

    def add(self, index: int, stage: Stage | None, layer: int | None, reason: str) -> None:
        """Records that a layer of a stage runs in Python; ``layer`` None means all layers, for new inputs."""
        if (index, layer) in self.python_layers:
            return
        if stage is None or layer is None:
            where = "the module" if stage is None else f"stage {index}"
            advice = _advice_on(self._number) if self._number else "pad inputs to fewer shapes"
            reason += f", and no single trace covers all inputs; {advice}"
            found = InPython(where, reason, "runs in Python for inputs that it was not traced for:")
            text = str(found)
        else:
            found = InPython.of(index, stage, layer, reason)
            text = (
                f"{found}; other layers compute the same, but run in Python in the first call of each "
                "new shape"
            )
        log.debug(text)
        self.pending.append(text)
        self.python_layers[index, layer] = found

    def add_unfused(self, titles: Sequence[str]) -> None:
        """Records, once, the layers whose attention with dropout runs without a fused kernel."""
        if not titles or self.costs:
            return
        more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
        text = (
            f"{titles[0]}{more}: attention with dropout uses no fused kernel on a GPU, because fused kernels "
            "draw from PyTorch's own generator; its scores (heads x queries x keys per sample) are stored in "
            "memory; attention without dropout, or in eval mode, is fused"
        )
        self.costs.append(text)
        self.pending.append(text)

    def add_number(self, number: str) -> None:
        """Records, once, that layers are traced again for each value of a number beside tensors."""
        if not self._number:
            self._number = number
            self.pending.append(changing_number_text(number))


def changing_number_text(number: str) -> str:
    """Returns the warning about a number beside tensors that differs from call to call."""
    return (
        f"the number {number} among the inputs had other values in earlier calls, and layers are traced "
        f"again for each value; {_advice_on(number)}"
    )


def _advice_on(number: str) -> str:
    return f"pass numbers that change as tensors: gpipe_fast.replicate(torch.tensor({number}))"


def log_graph(part: Stage, found: str, inputs: Sequence[TensorSpec | AnyTensor] | None = None) -> None:
    """Logs at level ``DEBUG`` how the graph of layers was found, and for inputs of which shapes."""
    if log.isEnabledFor(logging.DEBUG):
        shapes = "" if inputs is None else f", for {', '.join(str(list(x.shape)) for x in inputs)}"
        log.debug("%s: %s%s", layers_title(part), found, shapes)


def layers_title(part: Stage) -> str:
    """Returns the layers of a stage or part of a stage as ``layer 3`` or ``layers 4 to 7``."""
    first, last = part.first_layer, part.first_layer + len(part.layers) - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"
