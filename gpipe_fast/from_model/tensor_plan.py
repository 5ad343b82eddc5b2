"""Tensor parallelism by the plan of a model of transformers, with the styles of PyTorch.

A plan names a style for modules: ``{"model.layers.*.mlp.down_proj": "rowwise"}``. What transformers itself
does for a style calls `torch.distributed.all_reduce` without gradients, and changes gradients in hooks; no
trace contains these. PyTorch's styles compute the same by functional collectives.

Where the projections of queries, keys and values, or the two of an MLP, read the same input, each would sum
its gradient over the processes. So the module around them makes the input a DTensor once, and autograd adds
its gradients before they are summed::

    x ── DTensor ──┬── q_proj ──         backward, without:  all_reduce + all_reduce + all_reduce
                   ├── k_proj ──                   with:     all_reduce(a + b + c)
                   └── v_proj ──
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Collection
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
        ValueError: the plan has a style that PyTorch lacks, or processes cannot have equally many heads.
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
    if any(style == "colwise" and "att" in name for name, style in chosen.items()):
        _check_heads(model, mesh.size())
    for name, module in modules.items():
        _remove_functions(module)
        is_shared = any(uses[id(x)] > 1 for x in module._parameters.values() if x is not None)
        if chosen[name] is not None and not is_shared:
            parallelize_module(module, mesh, made[chosen[name]])
    for name, module in modules.items():
        columns = {n for n, _ in module.named_children() if chosen.get(f"{name}.{n}") == "colwise"}
        if len(columns) > 1 and (argument := _input_of(type(module), columns)) is not None:
            _join_gradients(module, argument, mesh)


def _check_heads(model: nn.Module, size: int) -> None:
    """Checks that a number of processes divides the heads of a model."""
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    for name in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % size:
            raise ValueError(
                f"{type(model).__name__} has {name}={number}, which {size} processes along 'tp' cannot "
                f"divide; make a mesh whose dimension 'tp' divides {number}, with more processes along 'pp'"
            )


def _input_of(cls: type[nn.Module], columns: Collection[str]) -> str | None:
    """Returns the first argument of a forward, if only these modules read its elements; else None."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    names = list(inspect.signature(cls.forward).parameters)[1:2]
    allowed = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"self.{n}" for n in columns}:
            allowed.update(node.args)
        if isinstance(node, ast.Attribute) and node.attr == "shape":
            allowed.add(node.value)
    uses = {node for node in ast.walk(tree) if isinstance(node, ast.Name) and [node.id] == names}
    return names[0] if uses and uses <= allowed else None


def _join_gradients(module: nn.Module, argument: str, mesh: DeviceMesh) -> None:
    """Makes an argument of a module's forward, which all processes have, a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    def join(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs[argument]
        joined = DTensor.from_local(given, mesh, [Replicate()], run_check=False)
        return ((joined, *args[1:]), kwargs) if args else (args, {**kwargs, argument: joined})

    module.register_forward_pre_hook(join, with_kwargs=True)


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
