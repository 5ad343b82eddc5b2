"""Tensor parallelism by the plan of a model of transformers, with the styles of PyTorch.

A plan names a style for modules: ``{"model.layers.*.mlp.down_proj": "rowwise"}``. What transformers itself
does for a style calls `torch.distributed.all_reduce` without gradients, and changes gradients in hooks; no
trace contains these. PyTorch's styles compute the same by functional collectives.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

from gpipe_fast.layers.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The functions of transformers around a forward, and after a backward, that styles take the place of.
_AROUND = re.compile(r"(TensorParallelLayer|ReplicatedWithGradAllReduce)\.install_forward\.")


def apply_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divides the parameters of a model over a mesh by the model's plan, if it has one.

    A parameter that several modules share, such as a tied embedding, stays whole. A model that transformers
    has divided, in ``from_pretrained``, keeps its parameters. One that the user has divided stays as it is.

    Args:
        model: the model; its modules get other parameters and hooks.
        mesh: the processes that get a part each.

    Raises:
        ValueError: the plan has a style that PyTorch lacks.
    """
    plan = getattr(model, "tp_plan", None) or {}
    modules = dict(model.named_modules())
    parameters = [x for module in modules.values() for x in module._parameters.values() if x is not None]
    divided = [x for x in parameters if is_sharded(x)]
    if divided and not any(map(_is_divided_by_transformers, modules.values())):
        return
    uses = Counter(map(id, parameters))
    chosen = {name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in modules}
    made = {style: _style(style) for style in dict.fromkeys(chosen.values()) if style is not None}
    unknown = sorted({str(style) for style, found in made.items() if found is None})
    if unknown:
        where = next(name for name, style in chosen.items() if style in unknown)
        raise ValueError(
            f"the plan of {type(model).__name__} for tensor parallelism has the styles {unknown}, as for "
            f"{where}, whose collectives PyTorch cannot trace; divide the model by parallelize_module"
            "(model, mesh['tp'], plan) with styles of PyTorch, or pass a mesh without 'tp'"
        )
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = divided[0].device_mesh if divided else mesh
    for name, module in modules.items():
        _remove_functions(module)
        is_shared = any(uses[id(x)] > 1 for x in module._parameters.values() if x is not None)
        if chosen[name] is not None and not is_shared:
            parallelize_module(module, mesh, made[chosen[name]])


def _is_of_plan(function: Any) -> bool:
    """Returns whether a function is what transformers has put around a forward, or after a backward."""
    return _AROUND.match(getattr(function, "__qualname__", "")) is not None


def _is_divided_by_transformers(module: nn.Module) -> bool:
    return _is_of_plan(vars(module).get("forward"))


def _remove_functions(module: nn.Module) -> None:
    """Removes from a module what transformers has added for its plan."""
    if _is_divided_by_transformers(module):
        del vars(module)["forward"]
    for key, hook in list(module._backward_hooks.items()):
        if _is_of_plan(hook):
            del module._backward_hooks[key]


def _style(name: str) -> Any:
    """Returns PyTorch's style for one of transformers; None if there is none."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole = Replicate()
    if name in ("colwise", "rowwise"):
        return ColwiseParallel() if name == "colwise" else RowwiseParallel()
    if name in ("colwise_gather_output", "colwise_rep"):
        return ColwiseParallel(output_layouts=whole)
    if name in ("rowwise_split_input", "rowwise_rep", "embedding_rowwise"):
        return RowwiseParallel(input_layouts=whole)
    if name in ("sequence_parallel", "replicated_with_grad_allreduce"):
        # The latter is a norm of a part of the heads: as for a part of the sequence, its gradient is a term.
        return SequenceParallel(use_local_output=True)
    if name == "all_reduce":
        return PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=whole)
    return None
