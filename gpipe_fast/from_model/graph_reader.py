"""Reads a graph that Dynamo has captured as the calls of a `Dataflow`."""

from __future__ import annotations

import enum
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, fx, nn

from gpipe_fast.from_model.dataflow import (
    Call,
    CannotCut,
    Counted,
    Dataflow,
    Decision,
    Device,
    Nested,
    Owned,
    Place,
    RecordedTensor,
    Ref,
    Size,
    Slice,
    Surroundings,
)
from gpipe_fast.torch_private import dynamo, pytree
from gpipe_fast.torch_private.operators import HigherOrderOperator

# Values that a call may have beside tensors.
CONSTANTS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, type(...), enum.Enum, type),
    *(torch.dtype, torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType),
)
# Functions that change modes, which each call has; and those that log.
_MODES = {"_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"}
_WITHOUT_EFFECT = frozenset({*_MODES, "_set_grad_enabled", "_log_api_usage_once"})
# Checks of sizes that depend on elements, which the function that follows makes as well.
_WITHOUT_EFFECT |= {"_check", "_assert_scalar.default", "sym_constrain_range_for_size.default"}


class WholeCall:
    """The target of nodes that call a module, or a function with a backward of its own, with fake tensors.

    Attributes:
        target: the module, or the function's `apply`.
        result: what it returned, with fake tensors.
        tables: the classes of the dictionaries among its arguments, by position or name.
        written: what it wrote to them, with fake tensors.
        sizes_are_likely: as of `Call`.
    """

    sizes_are_likely = False

    def __init__(self, target: Any, name: str, run: Callable[[WholeCall, dict[Any, Any]], Any]) -> None:
        """Makes a target; ``run`` calls it, given its arguments by position or name."""
        self.target, self.result, self._run = target, None, run
        self.tables: dict[Any, type] = {}
        self.written: dict[Any, dict[Any, Any]] = {}
        self.__name__ = self.__qualname__ = "".join(c if c.isalnum() else "_" for c in f"call_{name}")
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Calls the target, and returns the tensors of its result."""
        args, kwargs = plain((args, kwargs), lambda leaf: leaf)
        named = dict[Any, Any](enumerate(args)) | kwargs
        named |= {name: kind(named[name]) for name, kind in self.tables.items()}
        self.result = self._run(self, named)
        leaves = pytree.tree_leaves((self.result, self.written))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass
class Run:
    """What running a node with fake tensors has shown.

    Attributes:
        draws: whether it draws random numbers.
        changed: the tensors that it changes in place.
        around: the modes around it.
    """

    draws: bool
    changed: list[Tensor]
    around: Surroundings


@dataclass(frozen=True)
class Seen:
    """What is known of a graph besides its nodes.

    Attributes:
        inputs: the fake input tensors of the call, and their shapes.
        owners: the tensors of modules and where they are, by identity.
        names: the modules, with their names.
        blocks: the blocks.
        runs: what running each node has shown.
        value_of: returns the value of an input of the graph, or None.
        in_sizes: returns an expression of PyTorch's symbols in those of sizes; None if it has others.
        around: the modes around the call.
        device: the device of all tensors.
    """

    inputs: Sequence[tuple[Tensor, tuple[Any, ...]]]
    owners: Mapping[int, tuple[Tensor, Owned]]
    names: Mapping[nn.Module, str]
    blocks: Set[nn.Module]
    runs: Mapping[fx.Node, Run]
    value_of: Callable[[fx.Node], Any]
    in_sizes: Callable[[Any], sympy.Expr | None]
    around: Surroundings
    device: torch.device


# What stands for an input of a graph that is no tensor of the call or of a module.
_UNKNOWN = object()


class GraphReader:
    """Reads a graph.

    Attributes:
        positions: for each time that forward reads from a tensor, how many calls come before it.

    Args:
        graph: the graph; a part of one, while it is captured.
        seen: what else is known.
    """

    def __init__(self, graph: fx.Graph, seen: Seen) -> None:
        self._seen = seen
        self.positions: list[int] = []
        self._values: list[RecordedTensor] = []
        self._calls: list[Call] = []
        self._of_node: dict[fx.Node, Any] = {}
        self._refs: dict[int, Ref] = {}
        self._storages: dict[int, int] = {}
        self._owned_storages = {_memory(tensor): owned for tensor, owned in seen.owners.values()}
        for fake, shape in seen.inputs:
            self._add(fake, shape)
        for node in graph.nodes:
            if node.op != "output":
                self._of_node[node] = self._read(node)

    def flow(
        self,
        result: Nested | None = None,
        decisions: tuple[Decision, ...] = (),
        conditions: tuple[Any, ...] = (),
    ) -> Dataflow:
        """Returns the calls; arguments as of `Dataflow`."""
        result = self.nested(()) if result is None else result
        counts = len(self._seen.inputs), tuple(self._values), tuple(self._calls)
        return Dataflow(*counts, result, decisions, self._seen.around, conditions)

    def nested(self, value: Any, where: Place | None = None) -> Nested:
        """Returns a nested value of nodes and fake tensors.

        Raises:
            CannotCut: it contains something else.
        """
        leaves, spec = pytree.tree_flatten(plain(value, self._known))
        return Nested(tuple(self._leaf(each, where) for each in leaves), spec)

    def _known(self, leaf: Any) -> Any:
        """Returns the value, or the tensor of a module, that a node or a fake tensor stands for."""
        if isinstance(leaf, fx.Node):
            return self._of_node[leaf]
        if isinstance(leaf, Tensor):
            owner = self._seen.owners.get(id(leaf))
            return owner[1] if owner is not None else self._refs.get(id(leaf), leaf)
        return leaf

    def _add(self, fake: Tensor, shape: tuple[Any, ...]) -> Ref:
        storage = self._storages.setdefault(_memory(fake), len(self._storages))
        self._values.append(RecordedTensor(shape, fake.dtype, fake.requires_grad, storage))
        self._refs[id(fake)] = Ref(len(self._values) - 1)
        return self._refs[id(fake)]

    def _read(self, node: fx.Node) -> Any:
        """Returns what a node stands for: values, tensors of modules, numbers, or several of them."""
        target, example, where = node.target, node.meta.get("example_value"), place_of(node)
        if node.op == "placeholder":
            return self._input(node, example)
        if node.op == "get_attr":
            return _UNKNOWN
        if target is dynamo.elements_read:
            self.positions.append(len(self._calls))
            return None
        if isinstance(target, type) and hasattr(target, "_fields"):  # a named tuple
            return target(*plain(node.args, self._known))
        if target is operator.getitem and isinstance(node.args[0], fx.Node):
            container = node.args[0].meta.get("example_value")
            if not isinstance(container, Tensor):
                return self._of_node[node.args[0]][node.args[1]]
        run = self._seen.runs.get(node) or Run(False, [], self._seen.around)
        tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor)]
        if not tensors and not run.changed:
            if example is None and getattr(target, "__name__", target) not in _WITHOUT_EFFECT:
                name = getattr(target, "__name__", target)
                raise CannotCut(f"{name} is called between blocks at {where}")
            return pytree.tree_map(lambda leaf: self._size(leaf, where), example)
        if isinstance(target, HigherOrderOperator):
            raise CannotCut(f"{target} is called between blocks at {where}, with functions as arguments")
        for tensor in run.changed:
            self._check_changed(tensor, where)
        mutates = tuple(sorted({self._refs[id(tensor)].index for tensor in run.changed}))
        function: Any = target.target if isinstance(target, WholeCall) else target
        arguments = self.nested((node.args, node.kwargs), where)

        def result(tensor: Tensor) -> Ref:
            is_changed = any(tensor is each for each in run.changed)
            if is_changed and id(tensor) in self._refs:
                return self._refs[id(tensor)]
            return self._add(tensor, tuple(self._size(size, where) for size in tensor.shape))

        tables: dict[Any, type] = {}
        if isinstance(target, WholeCall):
            found: Any = tuple(map(result, tensors))
            left = iter(found)
            tables = {k: x for k, x in target.tables.items() if x is not dict or target.written[k]}
            everything = (target.result, target.written) if tables else target.result
            returned = pytree.tree_map_only(Tensor, lambda _: next(left), everything)
        else:
            returned = found = pytree.tree_map_only(Tensor, result, example)
        keeps_state = isinstance(function, nn.Module) and (
            function in self._seen.blocks or any(True for _ in function.buffers())
        )
        modes = run.around, where, keeps_state
        self._calls.append(
            Call(
                function,
                arguments,
                self.nested(returned, where),
                run.draws,
                mutates,
                *modes,
                tuple(tables.items()),
                isinstance(target, WholeCall) and target.sizes_are_likely,
            )
        )
        return found

    def _input(self, node: fx.Node, example: Any) -> Any:
        if isinstance(example, torch.SymInt):
            return self._leaf(example)
        value = self._seen.value_of(node)
        found = self._known(value) if isinstance(value, Tensor) else None
        if isinstance(found, Ref):
            self._refs[id(example)] = found
        elif isinstance(found, Owned):
            self._owned_storages[_memory(example)] = found
        else:
            return _UNKNOWN
        return found

    def _check_changed(self, tensor: Tensor, where: Place) -> None:
        """Checks that a tensor that is changed in place is no input, and none that the model keeps."""
        owner = self._owned_storages.get(_memory(tensor))
        if owner is not None:
            name = f"{self._seen.names[owner.owner]}.{owner.name}".lstrip(".")
            raise CannotCut(f"{name} is changed in place between blocks, at {where}")
        ref = self._refs.get(id(tensor))
        if ref is None:
            raise CannotCut(f"a tensor that no module has is changed in place, at {where}")
        if self._values[ref.index].storage in {
            self._values[i].storage for i in range(len(self._seen.inputs))
        }:
            raise CannotCut(f"forward changes an input tensor in place, at {where}")

    def _size(self, leaf: Any, where: Place) -> Any:
        """Returns a leaf, which may be a size that depends on elements."""
        is_number = isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))
        is_counted = is_number and self._seen.in_sizes(leaf.node.expr) is None
        return Counted(where) if is_counted else self._leaf(leaf, where)

    def _leaf(self, leaf: Any, where: Place | None = None) -> Any:
        if isinstance(leaf, (Ref, Owned, Size, Device)):
            return leaf
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = self._seen.in_sizes(leaf.node.expr)
            assert expression is not None  # those of results are `Counted`
            if expression.free_symbols:
                return Size(expression)
            number = int if isinstance(leaf, torch.SymInt) else float
            return bool(expression) if isinstance(leaf, torch.SymBool) else number(expression)
        if isinstance(leaf, (slice, Slice)):
            bounds = leaf.bounds if isinstance(leaf, Slice) else (leaf.start, leaf.stop, leaf.step)
            return Slice(tuple(self._leaf(self._known(each), where) for each in bounds))
        if isinstance(leaf, torch.device):
            return Device() if leaf == self._seen.device else leaf
        if isinstance(leaf, Counted):
            raise CannotCut(
                f"forward computes with a size that depends on the elements of a tensor, at {leaf.place}"
            )
        if leaf is _UNKNOWN or isinstance(leaf, Tensor):
            raise CannotCut(
                f"a tensor that no module has as an attribute is used at {where or place()}; register it as "
                "a buffer"
            )
        if not isinstance(leaf, CONSTANTS):
            raise CannotCut(f"a {type(leaf).__name__} is passed between modules at {where or place()}")
        return leaf


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def plain(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns a nested value in Python's own containers, with each leaf replaced by a function's result."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(plain(each, leaf) for each in value))
    if isinstance(value, (fx.immutable_collections.immutable_list, fx.immutable_collections.immutable_dict)):
        value = list(value) if isinstance(value, list) else dict(value)
    if type(value) in (tuple, list, torch.Size):
        return (list if type(value) is list else tuple)(plain(each, leaf) for each in value)
    if type(value) is dict:
        return {key: plain(each, leaf) for key, each in value.items()}
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return leaf(value)
    return pytree.tree_unflatten([plain(each, leaf) for each in leaves], spec)


def place_of(node: fx.Node) -> Place:
    """Returns the line of the user's code that makes a call."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not found:
        return place()
    file, number, function = found[-1]
    return Place(file, int(number), function)


_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*?)\s*$', re.MULTILINE)


def place() -> Place:
    """Returns the line of the innermost frame outside of this package and of PyTorch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (
        str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "gpipe_fast", "unittest")
    ):
        frame = frame.f_back
    if frame is None:
        return Place("<unknown>", 0, "")
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def open_dataclass(value: Any) -> Any:
    """Returns the attributes of an object that PyTorch does not flatten, such as of a dataclass."""
    if pytree.tree_leaves(value) == [value] and hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return value
