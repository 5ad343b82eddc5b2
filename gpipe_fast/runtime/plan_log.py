"""Messages to the logger ``gpipe_fast``: which graphs of a plan were traced, and which were reused."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpipe_fast.runtime.stage import Stage, TensorSpec
from gpipe_fast.trace.tensor_metadata import AnyTensor

_log = logging.getLogger("gpipe_fast")


def log_graph(part: Stage, found: str, inputs: Sequence[TensorSpec | AnyTensor] | None = None) -> None:
    """Logs at level ``DEBUG`` how the graph of layers was found, and for inputs of which shapes."""
    if _log.isEnabledFor(logging.DEBUG):
        shapes = "" if inputs is None else f", for {', '.join(str(list(x.shape)) for x in inputs)}"
        _log.debug("%s: %s%s", layers_title(part), found, shapes)


def layers_title(part: Stage) -> str:
    """Returns the layers of a stage or part of a stage as ``layer 3`` or ``layers 4 to 7``."""
    first, last = part.first_layer, part.first_layer + len(part.layers) - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"
