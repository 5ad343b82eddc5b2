"""FX graphs: traces by `make_fx`, graph modules whose code is generated lazily, annotations of nodes.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx import traceback
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Returns a graph module whose code is generated lazily, at its first call."""
    with use_lazy_graph_module(True):
        made: fx.GraphModule = _make_graph_module(root, graph)
    return made


def current_annotations() -> dict[str, Any]:
    """Returns what `annotate` gives to the nodes that are made now."""
    found: dict[str, Any] = traceback.current_meta.get("custom", {})
    return found
