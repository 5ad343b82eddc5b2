"""Splits the graph of a loss of a mini-batch into the shares of its micro-batches, which add up to it.

The graph has a symbol for the batch size, so each value is one of these::

    cross_entropy(y, t) + 0.1 * y.square().mean() + scale        y, t: outputs and targets of n of N samples

    of samples   has the batch dimension: y, t, y.square()           computed for the samples at hand
    share        has none, follows from outputs: the losses          adds up over the micro-batches
    whole        has none, follows from no output: scale, 0.1        the same in every micro-batch

A number that follows from targets alone, such as how many of them count, is a *measure*: it is computed for
the whole mini-batch before the step, and given to every micro-batch. The first measure is N. A sum over
samples is a share; a mean over samples becomes a share by a division by N / n, and so does a whole value that
is added to a share. Everything else that is computed from shares must be linear in them. A loss that combines
samples in another way is refused.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode, enable_python_dispatcher
from gpipe_fast.trace.fake import depends_on_data, hint
from gpipe_fast.training.sample_check import NUM_IN_ALL, Mixed, SampleCheck, owners_of, tensors_in

# The maximum number of elements of all measures.
MAX_MEASURES = 64


def fill_measures(vector: Tensor, batch_size: int, others: Sequence[Tensor]) -> None:
    """Writes the measures of a mini-batch into a vector, as shares read it.

    Args:
        vector: zeros of float64, `MAX_MEASURES` of them.
        batch_size: the number of samples.
        others: the other measures.
    """
    vector[0] = batch_size
    if others:
        values = torch.cat([each.detach().reshape(-1).to(vector) for each in others])
        vector[1 : 1 + len(values)] = values


class MixesSamples(Exception):
    """Raised where the loss of a mini-batch is no sum of shares. The message says what stands in the way."""


@dataclass(frozen=True)
class SplitLoss:
    """The shares of a micro-batch in the losses of a mini-batch.

    New nodes of the graphs have the node of which they come as ``meta["origin"]``.

    Attributes:
        share: returns them, given the inputs of the graph and a vector of measures; None for a refused one.
        measures: returns the measures but the number of samples, given the inputs of a mini-batch. Of outputs
            it reads shapes and dtypes alone.
        are_sums: for each measure, whether those of replicas add up.
        values: the fake value of each loss.
        kinds: the kind of each loss: ``'share'``, ``'whole'``, which does not add up, or ``'of samples'``; or
            ``'in order'``, which is of samples, as many elements of each one after those of the one before.
        refused: why losses are no sums of shares, by their numbers.
    """

    share: fx.GraphModule
    measures: fx.GraphModule
    are_sums: tuple[bool, ...]
    values: tuple[Any, ...]
    kinds: tuple[str | None, ...]
    refused: Mapping[int, MixesSamples]


@dataclass(frozen=True)
class Input:
    """An input of the graph of a loss.

    Attributes:
        value: a fake tensor, or for a size of another input a symbol or number, or a device.
        is_output: whether it is an output of the last layer.
        why: why it is not known how it follows from the samples, if it is not.
    """

    value: Any
    is_output: bool = False
    why: str | None = None

    @property
    def is_size(self) -> bool:
        """Whether it is a size of another input."""
        return not isinstance(self.value, Tensor)


def split_loss(
    module: fx.GraphModule,
    inputs: Sequence[Input],
    batch: int | torch.SymInt,
    mode: FakeTensorMode,
    device: torch.device,
    divides: bool = True,
) -> SplitLoss:
    """Splits the graph of losses.

    Args:
        module: the graph, of calls of PyTorch's functions and methods, which returns the losses.
        inputs: its inputs, in order.
        batch: the batch size, a symbol.
        mode: the mode of the fake inputs.
        device: the device to check operators on.
        divides: whether a whole value is divided among the micro-batches, too, so that it adds up.

    Raises:
        MixesSamples: it changes an input in place, or needs the number of samples as a constant.
    """
    splitter = _Splitter(module, inputs, batch, device)
    with mode, enable_python_dispatcher():
        splitter.compute_values()
    return splitter.checked(module, splitter.split(divides), divides)


def out_of_place(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph without operators that change a tensor in place: others read their results.

    Raises:
        MixesSamples: it changes an input, or a tensor that may share its memory with another one.
    """
    graph, copies, now = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    # By node, the nodes that may share its memory.
    views: dict[fx.Node, set[fx.Node]] = {}

    def present(node: fx.Node) -> fx.Node:
        while node in now:
            node = now[node]
        return copies[node]

    for node in module.graph.nodes:
        changed = changed_by(node)
        if changed is None:
            copies[node] = graph.node_copy(node, present)
            base = node.args[0] if node.args else None
            if _name(node) in _VIEWS and isinstance(base, fx.Node):
                views[node] = views.setdefault(base, {base})
                views[node].add(node)
            continue
        is_own = changed.op not in ("placeholder", "get_attr") and len(views.get(changed, ())) <= 1
        if not is_own or (node.op == "call_method" and not hasattr(Tensor, str(node.target)[:-1])):
            raise MixesSamples(
                f"{_name(node)} at {_place(node)}: it changes a tensor in place that may share its memory "
                "with another one; change a clone, or use an operator that returns its result"
            )
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), present)
        if _name(node) == "setitem":
            copies[node] = graph.call_function(with_item, args)
        elif _name(node) in _IN_PLACE:
            copies[node] = graph.call_function(_IN_PLACE[_name(node)], args, kwargs)
        else:
            copies[node] = graph.call_method(str(node.target)[:-1], args, kwargs)
        copies[node].meta = dict(node.meta)
        now[changed] = node
    return fx.GraphModule(module, graph)


def changed_by(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that an operator changes in place; None if it changes none."""
    name = _name(node)
    is_method = node.op == "call_method" and name.endswith("_")
    if not (is_method or name == "setitem" or name in _IN_PLACE) or node.op == "output":
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def with_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Returns a copy of a tensor with other elements at an index."""
    found = tensor.clone()
    found[index] = value
    return found


# Kinds of values, as above; sizes are numbers that may follow from the batch size.
_OF_SAMPLES, _SHARE, _WHOLE, _SIZE = "of samples", "share", "whole", "size"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ADD = _names("add sub subtract rsub radd")
_JOIN = _names("stack cat concat concatenate hstack vstack")
_PRODUCTS = _names("dot mv mm matmul inner tensordot einsum")
_TIMES = _names("mul multiply rmul") | _PRODUCTS
_OVER = _names("div truediv divide true_divide")
_CASTS = _names("float double half bfloat16 to type type_as contiguous clone detach alias")
_MOVES = _names(
    """view view_as reshape reshape_as squeeze unsqueeze flatten unflatten ravel expand expand_as broadcast_to
    t transpose permute movedim swapaxes getitem select narrow unbind split chunk diagonal"""
)
# What is linear in its first operand.
_LINEAR = (
    _CASTS
    | _MOVES
    | _names("neg negative positive sum mean trace cumsum diff repeat tile index_select roll flip")
)
# What may return a view.
_VIEWS = (_CASTS - {"clone"}) | _MOVES | _names("T mT tensor_split real imag unfold getattr")
# Operators of one element of each operand, beside those that PyTorch marks.
_POINTWISE = _CASTS | {"truediv"}
# What takes the sizes of its result.
_SHAPED = _MOVES | _names(
    "repeat pad one_hot zeros ones full empty arange eye new_zeros new_ones new_full new_empty"
)
# What makes tensors like another one, whose elements it does not read.
_MAKES = _names("new_ones new_zeros new_full new_tensor zeros_like ones_like full_like")
_SUMS = {"sum", "bmm"} | _PRODUCTS
_SUMS_OF_TARGETS = _names("sum count_nonzero bincount histc")
# Operators of Python that change a tensor in place, with those that return their result.
_IN_PLACE = {"iadd": operator.add, "isub": operator.sub, "imul": operator.mul, "itruediv": operator.truediv}
_IN_PLACE |= {"iand": operator.and_, "ior": operator.or_, "ipow": operator.pow}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# What sizes are computed by, as SymPy and PyTorch name it.
_ARITHMETIC = {"Add": operator.add, "Mul": operator.mul, "Pow": operator.pow, "PowByNatural": operator.pow}
_ARITHMETIC |= {"FloatPow": operator.pow, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv}
_ARITHMETIC |= {"IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv}
# Losses of PyTorch whose mean is that over elements, and those whose mean is over the sum of their weights.
_OF_ELEMENTS = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.soft_margin_loss),
)
_WEIGHTED = (F.mse_loss, F.l1_loss)
# Losses that read elements, so that they cannot run on fake tensors.
_READING = (F.ctc_loss, F.gaussian_nll_loss)


@dataclass(frozen=True)
class _Measure:
    """A measure, or several.

    Attributes:
        function: computes them of the arguments; None if they are the first argument.
        arguments: nodes of the graph, and constants.
        number: how many.
        is_sum: whether those of replicas add up.
    """

    function: Callable[..., Tensor] | None
    arguments: tuple[Any, ...]
    number: int
    is_sum: bool


class _Splitter:
    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Input], batch: int | torch.SymInt, device: torch.device
    ) -> None:
        self._module, self._inputs, self._device = out_of_place(module), inputs, device
        self._batch_size = batch
        self._new, self._copies = fx.Graph(), dict[fx.Node, Any]()
        self._kinds: dict[fx.Node, str] = {}
        self._refused: dict[fx.Node, MixesSamples] = {}
        self._reads: set[fx.Node] = set()  # nodes that follow from outputs
        self._selected: dict[Any, fx.Node] = {}  # by the symbol of a number of selected elements, their mask
        self._of_whole: set[fx.Node] = set()  # nodes that follow from measures, or from the number of samples
        self._measured: list[_Measure] = []
        self._num_measures = 1
        self._times: fx.Node | None = None  # how many times more samples a mini-batch has

    def compute_values(self) -> None:
        """Computes the fake value of each node."""
        for node, value in values_of(self._module, [each.value for each in self._inputs]):
            node.meta["value"] = value

    def split(self, divides: bool) -> SplitLoss:
        self._batch = expression(self._batch_size)  # which running the graph may have made a number
        *inner, output = self._module.graph.nodes
        placeholders = [node for node in inner if node.op == "placeholder"]
        inputs = list(zip(placeholders, self._inputs, strict=True))
        for node, each in inputs:
            self._add_input(node, each)
        self._vector = self._new.placeholder("measures")
        self._check = SampleCheck(self._batch, self._find_sizes(inputs), self._device)
        for node, each in inputs:
            if each.is_size:
                self._copies[node] = self._number(expression(each.value))
            elif self._kinds[node] == _OF_SAMPLES:
                try:
                    self._check.add_input(node)
                except Mixed as mixed:
                    self._refused[node] = MixesSamples(str(mixed))
        for new in self._new.nodes:
            new.meta["origin"] = None
        for node in inner:
            if node.op != "placeholder":
                self._try(node)
        return self._finish(pytree.tree_leaves(output.args), divides)

    def checked(self, module: fx.GraphModule, split: SplitLoss, divides: bool) -> SplitLoss:
        """Returns the split losses, of which those are refused that random numbers show to be wrong."""
        kinds = {
            i: "share" if divides else kind
            for i, kind in enumerate(split.kinds)
            if kind in (_SHARE, _WHOLE) and i not in split.refused
        }
        placeholders = self._module.graph.find_nodes(op="placeholder")

        def shares(tensors: Sequence[Tensor], whole: Sequence[Any]) -> Any:
            # Of outputs, only shapes and dtypes are read.
            known = [
                torch.zeros_like(x) if each.is_output else x
                for x, each in zip(whole, self._inputs, strict=True)
            ]
            vector = torch.zeros(MAX_MEASURES, dtype=torch.float64, device=self._device)
            fill_measures(vector, NUM_IN_ALL, split.measures.forward(*known))
            return split.share.forward(*tensors, vector)

        wrong = self._check.mismatched(
            kinds, placeholders, lambda x: module.forward(*x), shares, self._reads.__contains__
        )
        refused = {i: MixesSamples(why) for i, why in wrong.items()}
        return replace(split, refused=refused | dict(split.refused))

    def _add_input(self, node: fx.Node, given: Input) -> None:
        if given.is_size:
            self._kinds[node] = _SIZE
            return
        self._copies[node] = self._new.placeholder(node.name)
        is_of_samples = self._batch in _symbols(given.value.shape)
        self._kinds[node] = _OF_SAMPLES if is_of_samples else _WHOLE
        if given.is_output or given.value.requires_grad:
            self._reads.add(node)
        if given.why is not None:
            self._refused[node] = MixesSamples(given.why)

    def _find_sizes(self, inputs: Sequence[tuple[fx.Node, Input]]) -> dict[Any, int]:
        """Finds the symbols of the sizes of inputs; returns those but the batch size with their numbers."""
        tensors = [(node, each) for node, each in inputs if not each.is_size]
        found: dict[Any, tuple[fx.Node, int, int]] = {}
        for node, each in tensors:
            for dim, size in enumerate(each.value.shape):
                if isinstance(expression(size), sympy.Symbol):
                    found.setdefault(expression(size), (node, dim, hint(size)))
        if self._batch not in found:
            raise MixesSamples("it needs the number of samples as a constant, as torch.linspace does")
        self._sizes = {
            symbol: self._new.call_method("size", (self._copies[node], dim))
            for symbol, (node, dim, _) in found.items()
        }
        self._constant_sizes = self._sizes.keys() - {self._batch}
        targets = [each.value.shape for _, each in tensors if not each.is_output]
        self._output_sizes = self._constant_sizes - _symbols(size for shape in targets for size in shape)
        return {symbol: found[symbol][2] for symbol in self._constant_sizes}

    def _finish(self, losses: Sequence[Any], divides: bool) -> SplitLoss:
        nodes = [each if isinstance(each, fx.Node) else None for each in losses]
        copies = [None if node is None or node in self._refused else self._copies[node] for node in nodes]
        for i, node in enumerate(nodes if divides else ()):
            if node is not None and copies[i] is not None and self._kinds[node] == _WHOLE:
                copies[i] = self._shared(node, node)
        self._new.output(tuple(copies))
        self._new.eliminate_dead_code()
        return SplitLoss(
            fx.GraphModule(self._module, self._new),
            self._graph_of_measures(),
            (True, *(each.is_sum for each in self._measured for _ in range(each.number))),
            tuple(None if node is None else node.meta["value"] for node in nodes),
            tuple(None if node is None else self._kind(node) for node in nodes),
            {i: self._refused[node] for i, node in enumerate(nodes) if node in self._refused},
        )

    def _kind(self, node: fx.Node) -> str | None:
        kind = self._kinds.get(node)
        owners = self._check.owners(node) if kind == _OF_SAMPLES and node not in self._refused else None
        if owners is None or not torch.equal(owners, owners_of(len(owners))):
            return kind
        return "in order"

    def _graph_of_measures(self) -> fx.GraphModule:
        """Returns what computes the measures of a mini-batch from its targets."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.graph_copy(self._module.graph, copies)
        found = []
        for each in self._measured:
            arguments = fx.node.map_arg(each.arguments, copies.__getitem__)
            found.append(graph.call_function(each.function, arguments) if each.function else arguments[0])
        graph.output(tuple(found))
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        return fx.GraphModule(self._module, graph)

    # One node.

    def _try(self, node: fx.Node) -> None:
        """Adds a node, or notes why it is refused: because it, or what it follows from, combines samples."""
        refused = next((self._refused[each] for each in node.all_input_nodes if each in self._refused), None)
        try:
            if refused is None:
                self._add(node)
        except MixesSamples as error:
            refused = error
        if refused is not None:
            self._refused[node] = refused
        for new in reversed(self._new.nodes):
            if new.meta:
                break
            new.meta["origin"] = node

    def _add(self, node: fx.Node) -> None:
        arguments, value = node.all_input_nodes, node.meta["value"]
        if _name(node) in ("to", "type_as"):
            arguments = arguments[:1]  # of another one, as in `x.to(y)`, the dtype alone is read
        kinds = {self._kinds[each] for each in arguments}
        tensors = tensors_in(value)
        makes = _name(node) in _MAKES
        if tensors and not makes and not self._reads.isdisjoint(arguments):
            self._reads.add(node)
        if not self._of_whole.isdisjoint(arguments):
            self._of_whole.add(node)
        if node.op == "get_attr":
            self._kinds[node], self._copies[node] = _SIZE, self._new.node_copy(node)
        elif not tensors:
            self._add_size(node, value)
        elif any(_symbols(tensor.shape) - self._constant_sizes for tensor in tensors):
            self._add_of_samples(node, tensors)
        elif _OF_SAMPLES in kinds and not makes:
            if node in self._reads:
                self._checked(self._check.check_positions, node)
            self._kinds[node] = _SHARE if node in self._reads else _WHOLE
            self._copies[node] = self._reduced(node) if node in self._reads else self._measure(node)
        elif _SHARE in kinds:
            self._kinds[node], self._copies[node] = _SHARE, self._linear(node)
        else:
            self._kinds[node], self._copies[node] = _WHOLE, self._copy(node, of_whole=True)

    def _add_size(self, node: fx.Node, value: Any) -> None:
        known = _symbols(pytree.tree_leaves(value)) <= self._sizes.keys()
        if not known:
            self._refuse(node, "it is a number that follows from the elements of a tensor")
        self._kinds[node], self._copies[node] = _SIZE, self._copy(node)

    def _add_of_samples(self, node: fx.Node, tensors: Sequence[Tensor]) -> None:
        for each in node.all_input_nodes:
            if self._kinds[each] == _SHARE:
                self._refuse(node, "it combines each sample with a value of all samples")
        for tensor in tensors:
            if sum(bool(_symbols([size]) - self._constant_sizes) for size in tensor.shape) > 1:
                self._refuse(node, "it compares samples with each other")
        self._kinds[node] = _OF_SAMPLES
        # Sizes in arithmetic are those of the mini-batch; others, as in a view, those at hand.
        is_arithmetic = _name(node) in (_ADD | _TIMES | _OVER | {"pow"})
        if is_arithmetic and any(map(self._varies, node.all_input_nodes)):
            self._of_whole.add(node)
        if not is_arithmetic and _name(node) not in _SHAPED and any(map(self._varies, node.all_input_nodes)):
            self._refuse(node, "it computes each sample with the number of all samples")
        self._copies[node] = self._copy(node, of_whole=is_arithmetic)
        self._select(node, tensors)
        selections = self._selections_of([node, *node.all_input_nodes])
        if not selections:
            self._checked(functools.partial(self._check.add, of_whole=is_arithmetic), node)
        elif _is_pointwise(node) or selections - self._selections_of(node.all_input_nodes):
            self._checked(self._check.add_selection, node)
        else:
            self._refuse(node, "it is not known to compute each selected element by itself")

    def _checked(self, check: Callable[[fx.Node], None], node: fx.Node) -> None:
        """Checks a node on random numbers.

        Raises:
            MixesSamples: it mixes samples.
        """
        try:
            check(node)
        except Mixed as mixed:
            self._refuse(node, str(mixed))

    def _select(self, node: fx.Node, tensors: Sequence[Tensor]) -> None:
        """Notes the mask by which a node selects elements, if it does."""
        for dim, size in enumerate(tensors[0].shape):
            for symbol in _symbols([size]) - self._sizes.keys():
                values = ((each, each.meta["value"]) for each in node.all_input_nodes)
                masks = [each for each, x in values if isinstance(x, Tensor) and x.dtype == torch.bool]
                if len(masks) != 1 or len(tensors) > 1 or not isinstance(expression(size), sympy.Symbol):
                    self._refuse(node, "the number of its elements depends on data")
                self._selected[symbol] = masks[0]
                self._sizes[symbol] = self._new.call_method("size", (self._copies[node], dim))

    def _reduced(self, node: fx.Node) -> fx.Node:
        """Adds what reduces the samples to a share."""
        name = _name(node)
        if any(self._kinds[each] == _SHARE for each in node.all_input_nodes):
            self._refuse(node, "it combines each sample with a value of all samples")
        if name in _SUMS:
            if name != "sum":
                self._checked(self._check.check_sum, node)
            return self._copy(node)
        if name == "mean":
            return self._mean(node)
        bound = _bound_loss(node.target, node.args, node.kwargs)
        if bound is None:
            self._refuse(node, "it combines samples otherwise than by a sum or a mean")
        self._check_shapes(node, bound)
        reduction = bound.arguments["reduction"]
        if reduction == "sum":
            return self._copy(node)
        weight = bound.arguments.get("weight")
        if "ignore_index" in bound.arguments:
            target, ignored = bound.arguments["target"], bound.arguments["ignore_index"]
            if not target.meta["value"].is_floating_point():
                ignored = -100 if ignored is None else ignored
                return self._divided(node, bound, counted_targets, target, weight, ignored)
        elif node.target in _WEIGHTED and weight is not None:
            return self._divided(node, bound, torch.sum, weight)
        if self._selections_of(node.all_input_nodes):
            if node.target not in _OF_ELEMENTS:
                self._refuse(
                    node, "it is a mean over elements that are selected; divide a sum by their number"
                )
            size = next(iter(bound.arguments.values())).meta["value"].numel()
            return self._over(node, self._total(node, bound), self._number(expression(size), of_whole=True))
        return self._part(node, self._copy(node))

    def _mean(self, node: fx.Node) -> fx.Node:
        """Adds a mean over samples, or over elements of them that are selected by targets."""
        reduced = node.all_input_nodes[0]
        selections = self._selections_of([reduced])
        if not selections:
            return self._part(node, self._copy(node))
        rest = reduced.meta["value"].shape[1:]
        if len(node.args) > 1 or node.kwargs or len(selections) > 1 or self._selections_in(rest):
            self._refuse(node, "it is a mean over selected elements along some dimensions")
        total = self._new.call_method("sum", (self._copies[reduced],))
        expression_of = expression(reduced.meta["value"].numel())
        return self._over(node, total, self._number(expression_of, of_whole=True))

    def _selections_in(self, sizes: Iterable[Any]) -> set[Any]:
        """Returns the symbols of the numbers of selected elements among sizes."""
        return _symbols(sizes) & self._selected.keys()

    def _selections_of(self, nodes: Iterable[fx.Node]) -> set[Any]:
        values = [node.meta["value"] for node in nodes]
        return self._selections_in(size for x in values if isinstance(x, Tensor) for size in x.shape)

    def _check_shapes(self, node: fx.Node, bound: inspect.BoundArguments) -> None:
        if node.target not in _OF_ELEMENTS:
            return
        first, second = (each.meta["value"] for each in list(bound.arguments.values())[:2])
        is_one = [[expression(size) == 1 for size in each.shape] for each in (first, second)]
        if is_one[0] != is_one[1]:
            self._refuse(
                node,
                f"the output of shape {list(first.shape)} and the target of shape {list(second.shape)} "
                "differ, and it would compare all pairs; reshape one of them",
            )

    def _divided(
        self, node: fx.Node, bound: inspect.BoundArguments, function: Callable[..., Tensor], *arguments: Any
    ) -> fx.Node:
        """Adds a mean as a sum over what the mean of the mini-batch is divided by, a function of targets."""
        return self._over(
            node, self._total(node, bound), self._new_measure(node, function, arguments, 1, True)
        )

    def _total(self, node: fx.Node, bound: inspect.BoundArguments) -> fx.Node:
        """Adds the sum whose mean a loss of PyTorch is."""
        others = {"reduction": "sum", "size_average": None, "reduce": None}
        kwargs = bound.arguments | {name: value for name, value in others.items() if name in bound.arguments}
        kwargs = dict(fx.node.map_arg(kwargs, self._copies.__getitem__))
        if node.meta["value"].dtype == torch.float16:  # in which a mean fits, and a sum may not
            first = next(iter(bound.arguments))
            kwargs[first] = self._new.call_method("float", (kwargs[first],))
        return self._new.create_node("call_function", node.target, (), kwargs)

    def _over(self, node: fx.Node, total: fx.Node, count: fx.Node) -> fx.Node:
        return self._new.call_function(operator.truediv, (total, self._for(node, count)))

    def _measure(self, node: fx.Node) -> fx.Node:
        """Adds what follows from targets alone: the value for the mini-batch."""
        value = node.meta["value"]
        if not isinstance(value, Tensor):
            self._refuse(node, "it has several results that follow from all targets")
        if value.is_complex():
            self._refuse(node, "it is a complex number of all targets")
        arguments = node.all_input_nodes
        is_sum = _name(node) in _SUMS_OF_TARGETS and self._of_whole.isdisjoint(arguments)
        found = self._new_measure(node, None, (node,), value.numel(), is_sum, list(value.shape))
        return self._new.call_method("to", (found, value.dtype))

    def _new_measure(
        self,
        node: fx.Node,
        function: Callable[..., Tensor] | None,
        arguments: tuple[Any, ...],
        number: Any,
        is_sum: bool,
        shape: Sequence[int] = (),
    ) -> fx.Node:
        nodes: list[fx.Node] = []
        fx.node.map_arg(arguments, nodes.append)
        if not self._reads.isdisjoint(nodes):
            self._refuse(node, "what it is divided by follows from outputs")
        if self._sizes_in(nodes) & self._output_sizes:
            self._refuse(
                node,
                "it computes a number of all targets with a size of outputs, which is unknown until they are "
                "computed; take it from a target, such as a mask",
            )
        is_sum = is_sum and self._of_whole.isdisjoint(nodes) and not any(map(self._varies, nodes))
        if function is None:
            self._of_whole.add(node)
        first = self._num_measures
        if not isinstance(number, int) or first + number > MAX_MEASURES:
            self._refuse(
                node,
                f"it computes more than {MAX_MEASURES - 1} numbers of all targets, or as many as a size says",
            )
        self._num_measures += number
        self._measured.append(_Measure(function, arguments, number, is_sum))
        part = self._new.call_function(operator.getitem, (self._vector, slice(first, first + number)))
        return self._new.call_method("view", (part, list(shape)))

    def _linear(self, node: fx.Node) -> fx.Node:
        """Adds what is computed from shares."""
        name = _name(node)
        own = [each for each in node.all_input_nodes if self._kinds[each] == _SHARE]
        if name in _ADD or (name in _JOIN and node.op == "call_function"):
            return self._sum(node)
        values = tensors_in(node.meta["value"])
        if not all(value.is_floating_point() or value.is_complex() for value in values):
            self._refuse(node, "it rounds what is added up over samples")
        leaves = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if leaf in own]
        is_first = bool(node.args) and node.args[0] in own
        if len(leaves) == 1 and (
            name in _TIMES
            or (is_first and (name in _OVER and "rounding_mode" not in node.kwargs))
            or (is_first and name in _LINEAR)
        ):
            return self._copy(node, of_whole=name in _TIMES | _OVER)
        self._refuse(node, "it is not linear in what is added up over samples")

    def _sum(self, node: fx.Node) -> fx.Node:
        """Adds a sum of shares and whole values, of which each share has its part."""

        def part(each: Any) -> Any:
            if isinstance(each, fx.Node):
                return self._copies[each] if self._kinds[each] == _SHARE else self._shared(each, node)
            return self._part(node, each)

        operands, rest = node.args, dict(node.kwargs)
        if _name(node) in _JOIN:
            parts: Any = (fx.node.map_aggregate(operands[0], lambda a: part(a) if a is not None else a),)
            parts += tuple(operands[1:])
        else:
            parts = tuple(part(each) for each in operands[:2])
            if len(operands) > 2 or set(rest) - {"alpha"}:
                self._refuse(node, "its arguments are unknown")
        return self._new.create_node(node.op, node.target, parts, rest)

    # Helpers.

    def _sizes_in(self, nodes: Iterable[fx.Node]) -> set[Any]:
        """Returns the symbols of the sizes of nodes, and of what they follow from."""
        found, seen, wanted = set[Any](), set[fx.Node](), list(nodes)
        while wanted:
            node = wanted.pop()
            if node not in seen:
                seen.add(node)
                wanted += node.all_input_nodes if node not in self._reads else ()
                leaves = pytree.tree_leaves(node.meta["value"])
                found |= _symbols(leaves).union(*(_symbols(x.shape) for x in leaves if isinstance(x, Tensor)))
        return found

    def _copy(self, node: fx.Node, of_whole: bool = False) -> fx.Node:
        """Adds a copy of a node; with sizes of the whole mini-batch, if `of_whole`."""

        def argument(each: fx.Node) -> Any:
            return self._whole_size(each, node) if of_whole and self._varies(each) else self._copies[each]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
        return self._new.create_node(node.op, node.target, args, kwargs)

    def _varies(self, node: fx.Node) -> bool:
        """Returns whether a node is a size that follows from the number of samples."""
        sizes = pytree.tree_leaves(node.meta["value"]) if self._kinds[node] == _SIZE else []
        return bool(_symbols(sizes) - self._constant_sizes)

    def _number(self, expression: Any, of_whole: bool = False) -> Any:
        """Adds a number, given as an expression of sizes: those at hand, or of the mini-batch."""
        if not isinstance(expression, sympy.Basic):
            return expression
        if isinstance(expression, sympy.Number):
            return int(expression) if isinstance(expression, sympy.Integer) else float(expression)
        if isinstance(expression, sympy.Symbol):
            if not of_whole or expression in self._constant_sizes:
                return self._sizes[expression]
            if expression == self._batch:
                return self._new.call_function(operator.getitem, (self._vector, 0))
            mask = self._selected[expression]
            return self._new_measure(mask, torch.sum, (mask,), 1, True)
        first, *others = (self._number(each, of_whole) for each in expression.args)
        name = type(expression).__name__
        if name == "ToFloat":
            return first
        if name not in _ARITHMETIC:
            raise MixesSamples(f"it computes with the size {expression}")
        for other in others:
            first = self._new.call_function(_ARITHMETIC[name], (first, other))
        return first

    def _part(self, node: fx.Node, value: Any) -> fx.Node:
        """Adds a value times the part of the samples that a micro-batch has, in the precision of a node."""
        if self._times is None:
            both = self._number(self._batch, of_whole=True), self._sizes[self._batch]
            self._times = self._new.call_function(operator.truediv, both)
        return self._new.call_function(operator.truediv, (value, self._for(node, self._times)))

    def _for(self, node: fx.Node, number: fx.Node) -> fx.Node:
        """Adds a number without dimensions in the dtype of a node's value, or float32 for a narrower one."""
        tensors = tensors_in(node.meta["value"])
        return self._new.call_method("to", (number, precise(tensors[0].dtype)))

    def _shared(self, node: fx.Node, of: fx.Node) -> fx.Node:
        """Adds the part of a whole value, or of a size of the mini-batch, that a micro-batch has."""
        is_tensor = isinstance(node.meta["value"], Tensor)
        return self._part(of, self._copies[node] if is_tensor else self._whole_size(node, of))

    def _whole_size(self, size: fx.Node, node: fx.Node) -> Any:
        """Adds a size of the mini-batch, in the precision of a node."""
        number = self._number(expression(size.meta["value"]), of_whole=True)
        return self._for(node, number) if isinstance(number, fx.Node) else number

    def _refuse(self, node: fx.Node, why: str) -> NoReturn:
        raise MixesSamples(f"{_name(node)} at {_place(node)}: {why}")


def precise(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of numbers that are multiplied with values of a dtype: at least float32."""
    return dtype if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 2) else torch.float32


def counted_targets(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Returns the number of targets that count, or the sum of their classes' weights."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    classes = target.where(counts, 0).long()
    return torch.where(counts, weight.to(target.device)[classes], 0).sum()


def _bound_loss(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    """Returns the arguments of a loss of PyTorch; None for another function."""
    name = str(getattr(function, "__name__", ""))
    known: Callable[..., Any] | None = vars(F).get(name)
    if known is None or known is not function:
        return None
    bound = inspect.signature(known).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound if "reduction" in bound.arguments else None


def values_of(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterable[tuple[fx.Node, Any]]:
    """Returns each node of a graph and its value for fake inputs."""
    found: list[tuple[fx.Node, Any]] = []

    class Values(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            try:
                value = super().run_node(n)
            except Exception:
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                value = reduced_like(n.target, args, kwargs)
                if value is None:
                    raise
            found.append((n, value))
            return value

    Values(module).run(*inputs)
    return found


def reduced_like(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns a fake tensor like the result of a function that reads elements; None for another function.

    Also of one that reduces as many elements as data select, whose fake result PyTorch may not know.
    """
    name = str(getattr(target, "__name__", target))
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not (target in _READING or any(map(depends_on_data, first.shape))):
        return None
    if name in ("sum", "mean") and len(args) == 1 and not kwargs:
        return first.new_empty(())
    bound = _bound_loss(target, args, kwargs)
    if bound is None:
        return None
    if bound.arguments["reduction"] != "none":
        return first.new_empty(())
    shape = first.shape[1:2] if target is F.ctc_loss else first.shape
    return first.new_empty(shape) if target in _READING else None


def _is_pointwise(node: fx.Node) -> bool:
    """Returns whether an operator computes each element of its result from one element of each operand."""
    packet = getattr(torch.ops.aten, _name(node), None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return _name(node) in _POINTWISE or any(torch.Tag.pointwise in each.tags for each in overloads)


def expression(size: Any) -> Any:
    """Returns a size as an expression of symbols, or as a number."""
    return size.node.expr if isinstance(size, _SYMBOLIC) else size


def _symbols(sizes: Iterable[Any]) -> set[Any]:
    found = (size for size in sizes if isinstance(size, _SYMBOLIC))
    return {symbol for size in found for symbol in size.node.expr.free_symbols}


def _name(node: fx.Node) -> str:
    name = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
    return name.strip("_") if name.startswith("__") else name


def _place(node: fx.Node) -> str:
    """Returns the line of the user's code that a node is from."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines() if line.strip()]
    at = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not at:
        return "an unknown line"
    file, line = lines[at[-1]].removeprefix("File ").split(", in ")[0].split(", line ")
    code = " ".join(lines[at[-1] + 1 :][:1])
    return f"{file.strip(chr(34))}:{line}" + (f", `{code}`" if code else "")
