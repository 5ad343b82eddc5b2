"""What a model returns of all samples, such as its loss, as the sum of shares of micro-batches.

The calls that lead to such values become a graph, which `split_loss` rewrites to the shares; their calls take
the place of the model's own. What they need to know of the whole mini-batch is one more input::

    loss = cross_entropy(head(x), y)          v5 = m(v3); v6 = cross_entropy(v5, v1)
    share and measures                        v6 = cross_entropy(v5, v1, reduction='sum') / measures[1]
    measures of the mini-batch                [N, (y != -100).sum()]

The sources of a share are inputs, what modules return, random numbers and tensors that modules have.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, fx, nn

from gpipe_fast.from_model.dataflow import (
    Call,
    CannotCut,
    Counted,
    Dataflow,
    Device,
    Nested,
    Owned,
    Place,
    RecordedTensor,
    Ref,
    Size,
    Slice,
    at_sizes,
    batch_dims,
    hold,
    symbol_of,
)
from gpipe_fast.from_model.graph_reader import plain
from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.fake_tensors import ShapeEnv, enable_python_dispatcher, logging_disabled
from gpipe_fast.trace.fake import RealLayouts
from gpipe_fast.trace.symbols import evaluated, symbolic_size
from gpipe_fast.training.loss_graph import (
    MAX_MEASURES,
    Input,
    MixesSamples,
    changed_by,
    expression,
    fill_measures,
    precise,
    split_loss,
    values_of,
)
from gpipe_fast.training.losses import undisturbed

_CPU = torch.device("cpu")
# The batch size of the tensors on which shares are found, and likely lengths.
_BATCH, _LENGTHS = 11, (5, 7, 13, 17, 19, 23)
_OTHER_SIZES = object()
# What may be an input of a graph.
_INPUTS = Ref, Owned, Size, Device
# What stands for larger sizes, such as the number of words.
_LARGE_HINTS = 29, 31, 37, 41, 43, 47, 53, 59, 61


@dataclass(frozen=True)
class ModelShares:
    """The shares of micro-batches in what a model returns.

    Attributes:
        flow: the model's calls, which return shares.
        kinds: of what it returns of all samples, by number: ``'share'``, which adds up; ``'whole'``, which is
            the same in every micro-batch; or ``'in order'``, which has a multiple of the batch size.
        refused: why others are none of these, by number.
        measures: what the shares need to know of the mini-batch; None if nothing.
    """

    flow: Dataflow
    kinds: Mapping[int, str]
    refused: Mapping[int, str]
    measures: Measures | None

    def at(self, sizes: Mapping[int, int]) -> ModelShares:
        """Returns them with numbers in the place of some sizes."""
        leaf = functools.partial(at_sizes, sizes=sizes)
        measures = self.measures and self.measures.at(leaf)
        return dataclasses.replace(self, flow=self.flow.at(leaf), measures=measures)

    @property
    def sources(self) -> list[int]:
        """The numbers of what modules and random numbers have to give for the shares."""
        wanted = (ref for ref, kind in self.kinds.items() if kind in ("share", "whole"))
        found = self.flow.behind(wanted, lambda _, call: _is_source(call))
        return sorted(ref for ref, call in found if call is not None and _is_source(call))


@dataclass(frozen=True)
class Measures:
    """What shares need to know of a mini-batch: the number of samples, and numbers of its targets.

    Attributes:
        graph: computes the measures but the first; None if there are no others.
        inputs: its inputs; None for one that it does not use.
        outputs: what is known of the inputs whose elements do not matter, by the numbers of their values.
    """

    graph: fx.GraphModule | None
    inputs: tuple[Any, ...] = ()
    outputs: Mapping[int, RecordedTensor] = field(default_factory=dict)

    def at(self, leaf: Callable[[Any], Any]) -> Measures:
        """Returns them with each input, and each size of a shape, replaced by a function's result."""
        shapes = {ref: tuple(map(leaf, each.shape)) for ref, each in self.outputs.items()}
        outputs = {ref: dataclasses.replace(self.outputs[ref], shape=shape) for ref, shape in shapes.items()}
        return Measures(self.graph, tuple(map(leaf, self.inputs)), outputs)

    def check_known_everywhere(self) -> None:
        """Checks that each process can compute the measures.

        Raises:
            CannotCut: they depend on tensors of modules.
        """
        if any(isinstance(each, Owned) for each in self.inputs):
            raise CannotCut(
                "its loss has weights of classes, which with a mesh only the process of the last stage "
                "has; leave out the labels, and compute the loss from the model's output"
            )

    def of(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Returns the measures of a mini-batch, as shares read them, given its inputs and its sizes."""
        device = inputs[0].device

        def value(leaf: Any) -> Any:
            leaf = at_sizes(leaf, sizes)
            if isinstance(leaf, Ref) and leaf.index in self.outputs:
                known = self.outputs[leaf.index]
                shape = [at_sizes(size, sizes) for size in known.shape]
                return torch.zeros((), dtype=known.dtype, device=device).expand(shape)
            if isinstance(leaf, (Ref, Owned)):
                return inputs[leaf.index] if isinstance(leaf, Ref) else leaf.read().to(device)
            return device if isinstance(leaf, Device) else leaf

        vector = torch.zeros(MAX_MEASURES, dtype=torch.float64, device=device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            others = () if self.graph is None else self.graph.forward(*map(value, self.inputs))
            fill_measures(vector, sizes[0], others)
        return vector


def with_shares(flow: Dataflow, split: Iterable[int], lengths: Sequence[int], averages: bool) -> ModelShares:
    """Returns a model's calls with the shares in place of what it returns of all samples.

    Args:
        flow: the calls.
        split: the inputs that are split into micro-batches.
        lengths: the sizes besides the batch size that numbers follow.
        averages: whether what is no sum of shares becomes the mean over samples of what it is for
            micro-batches.
    """
    split = list(split)
    wanted = [
        ref
        for ref in dict.fromkeys(flow.result.refs())
        if not _is_concatenated(flow, ref) and flow.depends_on([ref], split)
    ]
    sizes = {ref: size for ref in wanted if (size := _counted(flow, ref)) is not None}
    refused = {
        ref: f"it is computed from a tensor whose size depends on elements, at {size.place}; compute with "
        "masks, as in (x * mask).sum() / mask.sum()"
        for ref, size in sizes.items()
    }
    wanted = [ref for ref in wanted if ref not in refused]
    if not wanted and not (refused and averages):
        return ModelShares(flow, {}, refused, None)
    large = _large_sizes(flow, 1 + len(lengths))
    if large and not refused:  # with them, operators would run on many random numbers
        hints = [*lengths, *_LARGE_HINTS[: len(large)]]
        abstract = flow.at(functools.partial(_abstract, large))
        found = _Splitting(abstract, split, hints, wanted, large, {}).shares(averages=False)
        if not found.refused:
            return found.at({index: size for size, index in large.items()})
    return _Splitting(flow, split, lengths, wanted, {}, refused).shares(averages)


def _counted(flow: Dataflow, ref: int) -> Counted | None:
    """Returns a size on which a value depends by functions alone, and which depends on elements, if any."""
    calls = [flow.calls[index] for index in flow.calls_for([ref], stops=lambda call: call.is_module)]
    refs = {ref, *(x for call in calls for x in (*call.arguments.refs(), *call.result.refs()))}
    sizes = (size for x in sorted(refs, reverse=True) for size in flow.values[x].shape)
    return next((size for size in sizes if isinstance(size, Counted)), None)


def _large_sizes(flow: Dataflow, first: int) -> dict[int, int]:
    """Returns the large sizes, each with the index of a symbol in its place, from a first one on."""
    sizes = {size for value in flow.values for size in value.shape if type(size) is int}
    large = sorted((size for size in sizes if size > _LARGE_HINTS[-1]), reverse=True)
    return {size: first + i for i, size in enumerate(large[: len(_LARGE_HINTS)])}


def _abstract(large: Mapping[int, int], leaf: Any) -> Any:
    return Size(symbol_of(large[leaf])) if type(leaf) is int and leaf in large else leaf


def _is_concatenated(flow: Dataflow, ref: int) -> bool:
    sizes = [flow.values[ref].shape[dim] for dim in batch_dims(flow.values[ref])]
    return len(sizes) > 1 or sizes == [Size(symbol_of(0))]


def small_lengths(conditions: Sequence[Any], lengths: Sequence[int]) -> Sequence[int]:
    """Returns small lengths for which conditions on sizes hold; these lengths if there are none."""
    small = [min(each) for each in zip(_LENGTHS, lengths, strict=False)]
    return small if len(small) == len(lengths) and hold(conditions, (_BATCH, *small)) else lengths


def reducing_modules(flow: Dataflow, split: Container[int]) -> set[nn.Module]:
    """Returns the modules whose values of all samples lead to what the model returns of all samples."""
    wanted = [ref for ref in flow.result.refs() if not batch_dims(flow.values[ref])]
    return {
        call.target
        for ref, call in flow.behind(wanted, lambda _, call: call.is_module)
        if call is not None and call.is_module and not batch_dims(flow.values[ref])
        if flow.depends_on(call.arguments.refs(), split)
    }


def uses_number(flow: Dataflow, ref: int, number: int | float) -> bool:
    """Returns whether a value is computed with a number after the last value with a batch."""
    found = flow.behind([ref], lambda ref, _: bool(batch_dims(flow.values[ref])))
    calls = (call for ref, call in found if call is not None and not batch_dims(flow.values[ref]))
    return any(type(x) is type(number) and x == number for call in calls for x in call.arguments.leaves)


class _Splitting:
    """The shares of some values of all samples; ``large`` are sizes with the indices of their symbols, and
    ``refused`` says why other values have none.
    """

    def __init__(
        self,
        flow: Dataflow,
        split: Sequence[int],
        lengths: Sequence[int],
        wanted: Sequence[int],
        large: Mapping[int, int],
        refused: Mapping[int, str],
    ) -> None:
        self._flow, self._inputs, self._wanted, self._large = flow, split, wanted, large
        self._mode = RealLayouts(ShapeEnv())
        self._sizes = [symbolic_size(self._mode, i, size) for i, size in enumerate((_BATCH, *lengths))]
        self._symbols = {expression(size): symbol_of(i) for i, size in enumerate(self._sizes)}
        self._values = list(flow.values)
        self._measures = self._new_value((MAX_MEASURES,), torch.float64, False)
        self._producers = flow.producers()
        self._mutated = {flow.values[ref].storage for call in flow.calls for ref in call.mutates}
        # By the position of a call of the model, what is called after it.
        self._added: dict[int, list[Call]] = {}
        self._found: dict[int, Any] = {}
        self._kinds: dict[int, str] = {}
        self._refused = dict(refused)
        self._counting: Measures | None = None

    def shares(self, averages: bool) -> ModelShares:
        """Returns the shares."""
        with undisturbed(_CPU), logging_disabled(), _CPU:
            try:
                if self._wanted:
                    self._split()
            except Exception as error:  # as of an operator that random numbers do not fit
                self._added, self._found, self._kinds, self._counting = {}, {}, {}, None
                self._refused |= dict.fromkeys(self._wanted, str(error))
            for ref in [*self._refused] if averages else ():
                if not batch_dims(self._flow.values[ref]):
                    self._average(ref)
        number, leaves = self._flow.num_inputs, self._flow.result.leaves
        calls = list(self._added.get(-1, ()))
        for position, call in enumerate(self._flow.calls):
            calls += [call, *self._added.get(position, ())]
        result = self._flow.result.map(lambda x: self._found.get(x.index, x) if isinstance(x, Ref) else x)
        flow = dataclasses.replace(self._flow, values=tuple(self._values), result=result)
        others = [i for i in range(number, len(self._values)) if i != self._measures]
        flow = flow.renumbered(calls, (), [*range(number), self._measures, *others])
        flow = dataclasses.replace(flow, num_inputs=number + (self._counting is not None)).pruned()
        pairs = zip(leaves, flow.result.leaves, strict=True)
        new = {old.index: leaf.index for old, leaf in pairs if isinstance(old, Ref)}
        kinds = {new[ref]: kind for ref, kind in self._kinds.items()}
        refused = {new[ref]: why for ref, why in self._refused.items()}
        return ModelShares(flow, kinds, refused, self._counting)

    def _split(self) -> None:
        graph, leaves = self._graph()
        inputs = [self._input(leaf) for leaf in leaves]
        split = split_loss(graph, inputs, self._sizes[0], self._mode, _CPU, divides=False)
        tensors = [leaf for leaf in leaves if not isinstance(leaf, (Size, Device))]
        outputs = self._converted(split.share, [*tensors, Ref(self._measures)])
        if any(node.users for node in split.share.graph.nodes if node.target == "measures"):
            used = [bool(x.users) for x in split.measures.graph.find_nodes(op="placeholder")]
            leaves = [leaf if is_used else None for leaf, is_used in zip(leaves, used, strict=True)]
            known = {x.index: self._flow.values[x.index] for x in leaves if self._is_output(x)}
            self._counting = Measures(split.measures, tuple(leaves), known)
        for i, (ref, kind) in enumerate(zip(self._wanted, split.kinds, strict=True)):
            if i in split.refused:
                self._refused[ref] = str(split.refused[i])
            elif kind == "of samples":
                self._refused[ref] = "its elements are in another order than the samples"
            elif kind is not None:
                self._kinds[ref], self._found[ref] = kind, outputs[i]

    def _average(self, ref: int) -> None:
        """Lets a value be the mean over samples of what it is for micro-batches."""
        dtype = precise(self._flow.values[ref].dtype)

        def mean(value: Any, batch: Any, measures: Any) -> Any:
            return (value / (measures[0] / batch).to(dtype),)

        module = fx.symbolic_trace(mean)
        for node in module.graph.nodes:
            node.meta = {"origin": None, "position": self._producers[ref]}
        leaves = [Ref(ref), Size(symbol_of(0)), Ref(self._measures)]
        (found,) = self._converted(module, leaves)
        self._found[ref], self._kinds[ref] = found, "share"
        del self._refused[ref]
        self._counting = self._counting or Measures(None)

    # The graph.

    def _graph(self) -> tuple[fx.GraphModule, list[Any]]:
        """Returns the calls as a graph, and its inputs: values, tensors of modules and sizes."""
        graph, positions = fx.Graph(), self._flow.calls_for(self._wanted, stops=_is_source)
        calls = [self._flow.calls[i] for i in positions]
        made = {Ref(ref) for ref, position in self._producers.items() if position in positions}
        # The inputs of the call have the batch size, and another one has every other size.
        leaves: dict[Any, Any] = dict.fromkeys([*map(Ref, range(self._flow.num_inputs)), _OTHER_SIZES])
        parts = (*(x for call in calls for x in call.arguments.parts()), *map(Ref, self._wanted))
        leaves |= dict.fromkeys(x for x in parts if isinstance(x, _INPUTS) and x not in made)
        nodes = {leaf: graph.placeholder(f"x{i}") for i, leaf in enumerate(leaves)}
        for leaf in leaves:
            if isinstance(leaf, Ref) and self._flow.values[leaf.index].storage in self._mutated:
                nodes[leaf] = graph.call_method("clone", (nodes[leaf],))
                nodes[leaf].meta["position"] = self._producers[leaf.index]
        for position, call in zip(positions, calls, strict=True):
            node = self._node(graph, call, nodes)
            node.meta |= {"position": position, "stack_trace": _stack_trace(call.place)}
            if call.mutates and changed_by(node) is None:
                raise MixesSamples(f"{node.target} at {call.place}: it changes a tensor in place")
            is_one = call.result.build(lambda leaf: leaf) == call.result.leaves[0]
            for index, leaf in enumerate(call.result.leaves):
                if isinstance(leaf, Ref) and leaf not in nodes:
                    nodes[leaf] = node if is_one else graph.call_function(operator.getitem, (node, index))
                    nodes[leaf].meta |= node.meta
        graph.output(tuple(nodes[Ref(ref)] for ref in self._wanted))
        return fx.GraphModule(nn.Module(), graph), list(leaves)

    @staticmethod
    def _node(graph: fx.Graph, call: Call, nodes: Mapping[Any, fx.Node]) -> fx.Node:
        args, kwargs = call.arguments.build(lambda leaf: nodes[leaf] if isinstance(leaf, _INPUTS) else leaf)
        kind = "call_method" if isinstance(call.target, str) else "call_function"
        return graph.create_node(kind, call.target, args, kwargs)

    def _is_output(self, leaf: Any) -> bool:
        return isinstance(leaf, Ref) and leaf.index >= self._flow.num_inputs

    def _input(self, leaf: Any) -> Input:
        call = self._flow.calls[self._producers[leaf.index]] if self._is_output(leaf) else None
        is_of_all = call is not None and call.is_module and not batch_dims(self._flow.values[leaf.index])
        why = None
        if call is not None and is_of_all and self._flow.depends_on(call.arguments.refs(), self._inputs):
            why = f"{type(call.target).__name__} at {call.place}: it returns a value of all samples"
        return Input(self._fake(leaf), call is not None, why)

    def _fake(self, leaf: Any) -> Any:
        if isinstance(leaf, (Size, Device)):
            return self._size(leaf) if isinstance(leaf, Size) else _CPU
        if leaf is _OTHER_SIZES:
            value: Any = RecordedTensor(tuple(self._sizes[1:]), torch.bool, False, 0)
        else:
            value = self._values[leaf.index] if isinstance(leaf, Ref) else leaf.read()
        with self._mode:
            fake = torch.empty(list(map(self._size, value.shape)), dtype=value.dtype, device=_CPU)
        return fake.requires_grad_(value.requires_grad)

    def _size(self, size: Any) -> Any:
        size = _abstract(self._large, size)
        numbers = {symbol_of(i): number for i, number in enumerate(self._sizes)}
        return evaluated(size.expression, numbers) if isinstance(size, Size) else size

    # Calls of a graph.

    def _converted(self, module: fx.GraphModule, leaves: Sequence[Any]) -> list[Any]:
        """Returns what a graph returns, and adds its calls, unless the model makes them itself.

        Args:
            module: the graph.
            leaves: its inputs.
        """
        of_node, several = dict[Any, Any](), set[Any]()
        with self._mode, enable_python_dispatcher():
            values = list(values_of(module, list(map(self._fake, leaves))))
        for node, value in values:
            if node.op == "placeholder":
                of_node[node] = leaves[len(of_node)]
            elif node.op == "output":
                continue
            elif not any(isinstance(each, Tensor) for each in pytree.tree_leaves(value)):
                of_node[node] = pytree.tree_map(self._leaf, value)
            elif node.target is operator.getitem and node.args[0] in several:
                of_node[node] = of_node[node.args[0]][node.args[1]]
            else:
                of_node[node] = self._call(node, value, of_node)
                several |= set() if isinstance(value, Tensor) else {node}
        (output,) = module.graph.find_nodes(op="output")
        return [of_node[each] if isinstance(each, fx.Node) else each for each in output.args[0]]

    def _call(self, node: fx.Node, value: Any, of_node: Mapping[fx.Node, Any]) -> Any:
        origin: Any = node.meta.get("origin") or node
        position = origin.meta.get("position", len(self._flow.calls) - 1)
        own = self._flow.calls[position]

        def leaf_of(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return of_node[leaf]
            if isinstance(leaf, slice):
                return Slice((leaf_of(leaf.start), leaf_of(leaf.stop), leaf_of(leaf.step)))
            if isinstance(leaf, torch.device) and any(isinstance(x, Device) for x in own.arguments.leaves):
                return Device()
            return leaf

        leaves, spec = pytree.tree_flatten(plain((node.args, node.kwargs), lambda leaf: leaf))
        arguments = Nested(tuple(map(leaf_of, leaves)), spec)
        is_same = (node.op, node.target) == (origin.op, origin.target) and arguments == own.arguments
        if is_same and not any(self._values[ref].storage in self._mutated for ref in own.result.refs()):
            return own.result.build(lambda leaf: leaf)
        grad = own.surroundings.grad and any(
            self._values[x.index].requires_grad if isinstance(x, Ref) else x.read().requires_grad
            for x in arguments.leaves
            if isinstance(x, (Ref, Owned))
        )

        def result(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return self._leaf(leaf)
            shape = tuple(map(self._leaf, leaf.shape))
            return Ref(self._new_value(shape, leaf.dtype, grad and leaf.requires_grad))

        found = pytree.tree_map(result, value)
        leaves, spec = pytree.tree_flatten(found)
        returned = Nested(tuple(leaves), spec)
        call = Call(node.target, arguments, returned, False, (), own.surroundings, own.place)
        self._added.setdefault(position, []).append(call)
        return found

    def _new_value(self, shape: tuple[Any, ...], dtype: torch.dtype, requires_grad: bool) -> int:
        storage = max(value.storage for value in self._values) + 1
        self._values.append(RecordedTensor(shape, dtype, requires_grad, storage))
        return len(self._values) - 1

    def _leaf(self, leaf: Any) -> Any:
        """Returns a number, or what it is computed by from sizes."""
        found = expression(leaf)
        if not isinstance(found, sympy.Expr):
            return leaf
        found = found.xreplace(self._symbols)
        return Size(found) if found.free_symbols else (int(found) if found.is_Integer else float(found))


def _is_source(call: Call) -> bool:
    """Returns whether it is not known how the result of a call follows from the samples."""
    return call.is_module or call.draws


def _stack_trace(place: Place) -> str:
    code = linecache.getline(place.file, place.line).strip()
    return f'File "{place.file}", line {place.line}, in {place.function}\n    {code}'
