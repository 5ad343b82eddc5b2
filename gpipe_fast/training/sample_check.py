"""Checks, operator by operator, that what is computed for a sample follows from this sample alone.

Each operator runs by itself on random numbers, for a few samples; then the numbers of one sample after the
other are replaced. An element of the result may change with one sample only, to which it then belongs. So an
operator that mixes samples is found although its result may not matter to the loss of random numbers. Last,
it runs on the numbers of fewer samples, as in a micro-batch, which must give the same for these.

The position of a sample is another one in a micro-batch. So it may choose the sample's own elements, as in
``x[torch.arange(len(x)), labels]``, but it may not be a number to compute with.

In the end, losses of random numbers, and their gradients, are compared with the sums of their shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, fx

from gpipe_fast.torch_private import pytree

# How many samples there are, and how often random numbers are drawn.
_NUM_SAMPLES, _NUM_DRAWS = 3, 3
# The samples of micro-batches.
_PARTS = (0, 1), (1, 2)
# How many samples a mini-batch has that is compared with its shares: more, which show what an operator does
# to few alone. Of each micro-batch, its first sample and how many it has; and the error that sums may have.
NUM_IN_ALL = 9
_UNEQUAL = (0, 2), (2, 4), (6, 3)
_TOLERANCE = 1e-4
# Kinds of random numbers. Integers are 0 and 1; for losses that divide by a count of others, up to 4, or near
# those of the graph.
_KINDS = "positive", "normal", "ones", "zeros", "larger", "mentioned"
_NO_SUM = (
    "on random numbers, what it gives for parts of a mini-batch does not add up to what it gives for the "
    "whole"
)
# The maximum number of elements of an operand.
_MAX_ELEMENTS = 2**22

# For each index along the batch dimension of a value, the sample it belongs to; -1 for none.
Owners = Tensor


def owners_of(number: int) -> Owners:
    """Returns the owners of a number of elements, as many of each sample after those of the one before."""
    return torch.arange(_NUM_SAMPLES).repeat_interleave(number // _NUM_SAMPLES)


class Mixed(Exception):
    """Raised where an operator mixes samples. The message says how."""


class SampleCheck:
    """Runs operators on random numbers.

    Args:
        batch: the symbol of the batch size.
        sizes: the other symbols, with numbers to take for them.
        device: the device to run on.
    """

    def __init__(self, batch: sympy.Symbol, sizes: Mapping[sympy.Symbol, int], device: torch.device) -> None:
        self._numbers = {batch: _NUM_SAMPLES, **sizes}
        self._part_numbers = {**self._numbers, batch: len(_PARTS[0])}
        self._batch, self._device = batch, device
        self._owners: dict[fx.Node, list[Owners | None]] = {}
        self._of_sizes: dict[fx.Node, Tensor] = {}  # what is computed from sizes alone
        self._positions: set[fx.Node] = set()
        self._mentioned = torch.zeros(
            1, dtype=torch.int64
        )  # the integers of the graph, and those beside them

    def add_input(self, node: fx.Node) -> None:
        """Adds an input that has a batch dimension, such as that of the tokens of one sample after the other.

        Raises:
            Mixed: it has two, or not as many elements for each sample.
        """
        self._check_number(node)
        size = next(size for size in node.meta["value"].shape if self._follows(size))
        self._owners[node] = [owners_of(self._number(size))]

    def _check_number(self, node: fx.Node) -> None:
        """Checks that a value has one dimension of samples, with as many elements for each.

        Raises:
            Mixed: it has not.
        """
        for value in _values(node):
            sizes = [size for size in value.shape if self._follows(size)]
            numbers = [(self._number(size), self._number(size, self._part_numbers)) for size in sizes]
            if len(sizes) > 1 or any(a * len(_PARTS[0]) != b * _NUM_SAMPLES for a, b in numbers):
                raise Mixed(f"a tensor of shape {list(value.shape)} has not as many for each sample")

    def owners(self, node: fx.Node) -> Owners | None:
        """Returns the owners along the batch dimension of a value; None if they are unknown."""
        return self._owners[node][0]

    def add_selection(self, node: fx.Node) -> None:
        """Adds a value with as many elements as data select, or one that is computed from such values.

        Raises:
            Mixed: it depends on the positions of samples.
        """
        self.check_positions(node)
        self._owners[node] = [None]

    def check_positions(self, node: fx.Node) -> None:
        """Checks that an operator uses positions of samples only to choose elements of the same sample.

        Raises:
            Mixed: it computes with them.
        """
        if not self._chooses(node) and not self._positions.isdisjoint(node.all_input_nodes):
            raise Mixed("it computes with the positions of samples in the mini-batch")

    def _chooses(self, node: fx.Node) -> bool:
        """Returns whether an operator uses positions, if any, only as an index."""
        name = getattr(node.target, "__name__", node.target)
        if name not in ("getitem", "with_item", "index_put"):
            return False
        others: set[fx.Node] = set()
        fx.node.map_arg((node.args[0], node.args[2:]), others.add)
        return self._positions.isdisjoint(others)

    def add(self, node: fx.Node, of_whole: bool) -> None:
        """Adds a value with a batch dimension, which an operator computes.

        Args:
            node: its node.
            of_whole: whether the operator is given sizes of the mini-batch, instead of a micro-batch.

        Raises:
            Mixed: it mixes samples, or depends on their positions.
        """
        if self._add_of_sizes(node, of_whole):
            return
        self.check_positions(node)
        first: Any = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and isinstance(first.meta["value"], (tuple, list)):
            index: Any = node.args[1]
            self._owners[node] = [self._owners[first][index]]
            return
        self._check_number(node)
        dims = [self._dim_of(result) for result in _values(node)]
        found: list[Tensor | None] = [None] * len(dims)
        for draw in range(_NUM_DRAWS):
            before, *changed = self._run(node, draw, [(sample,) for sample in range(_NUM_SAMPLES)])
            for i, dim in enumerate(dims):
                if dim is None:
                    continue
                rows = torch.stack([_differ(before[i], each[i], dim) for each in changed]).cpu()
                if (rows.sum(0) > 1).any():
                    raise Mixed("it mixes samples")
                owners = torch.where(rows.any(0), rows.long().argmax(0), -1)
                known = found[i]
                if known is not None and ((known != owners) & (known >= 0) & (owners >= 0)).any():
                    raise Mixed("it mixes samples")
                found[i] = owners if known is None else torch.maximum(known, owners)
        known_inputs = [self._owners[each][0] for each in node.all_input_nodes if each in self._owners]
        inherited = [each for each in known_inputs if each is not None]
        self._owners[node] = [own if own is None else _completed(own, inherited) for own in found]
        for samples in _PARTS:
            self._check_part(node, samples, of_whole)

    def _check_part(self, node: fx.Node, samples: tuple[int, ...], of_whole: bool) -> None:
        """Checks that an operator computes the same for some samples by themselves.

        Raises:
            Mixed: it does not.
        """
        uses_positions = not self._positions.isdisjoint(node.all_input_nodes)
        whole, part = self._run(node, 0, replaced=(), part=(samples, of_whole))
        for own, value, a, b in zip(self._owners[node], _values(node), whole, part, strict=True):
            dim = self._dim_of(value)
            if own is None or dim is None:
                continue
            rows = torch.isin(own, torch.tensor(samples))
            number, unknown = int(rows.sum()), int((own < 0).sum())
            if number < b.shape[dim] <= number + unknown and not uses_positions:
                continue
            own_rows = a.movedim(dim, 0)[rows.to(a.device)]
            if number != b.shape[dim] or not _are_close(own_rows, b.movedim(dim, 0)):
                raise Mixed("what it computes for a sample depends on its position, or on their number")

    def _add_of_sizes(self, node: fx.Node, of_whole: bool) -> bool:
        """Adds a value that is computed from sizes alone; returns whether it is one."""
        value, inputs = node.meta["value"], node.all_input_nodes
        read = [each for each in inputs if any(map(_is_tensor, pytree.tree_leaves(each.meta["value"])))]
        if not isinstance(value, Tensor) or not all(each in self._of_sizes for each in read):
            return False
        given = {each: self._of_sizes.get(each, self._number(each.meta["value"])) for each in inputs}
        try:
            (found,) = _call(node, given)
            (part,) = _call(node, {n: self._part_of(n, x, _PARTS[0], of_whole) for n, x in given.items()})
        except Exception as error:  # sizes that do not fit, such as negative ones
            raise Mixed(f"it could not be checked on few samples: {error}") from None
        if str(getattr(node.target, "__name__", node.target)).startswith("empty"):
            found.zero_()
            part.zero_()
        dim = self._dim_of(value)
        assert dim is not None
        rows = found.movedim(dim, 0)
        if (rows != rows[:1]).any() or not self._positions.isdisjoint(inputs):
            order = torch.arange(_NUM_SAMPLES).to(rows).view([-1] + [1] * (rows.dim() - 1))
            if len(rows) != len(order) or (rows != order).any():
                raise Mixed("it computes with the positions of samples in the mini-batch")
            self._positions.add(node)
        if not torch.equal(rows[: part.shape[dim]], part.movedim(dim, 0)):
            raise Mixed("it computes with the number of samples")
        self._of_sizes[node], self._owners[node] = found, [torch.full((len(rows),), -1)]
        return True

    def check_sum(self, node: fx.Node) -> None:
        """Checks that what an operator computes of all samples adds up over them.

        Raises:
            Mixed: it does not.
        """
        before, *changed = self._run(node, 0, replaced=[(0,), (1,), (0, 1)])
        one, other, both = (each[0].double() for each in changed)
        whole = before[0].double()
        scale = sum(each.abs().max() for each in (whole, one, other, both)) + 1e-30
        if (whole - one - other + both).abs().max() > 1e-6 * scale:
            raise Mixed("it multiplies samples with each other")

    def mismatched(
        self,
        kinds: Mapping[int, str],
        inputs: Sequence[fx.Node],
        losses: Callable[[Sequence[Any]], Sequence[Any]],
        shares: Callable[[Sequence[Tensor], Sequence[Any]], Sequence[Any]],
        is_variable: Callable[[fx.Node], bool],
    ) -> dict[int, str]:
        """Returns why the losses of random numbers, or their gradients, are not what the shares add up to.

        Args:
            kinds: the kind of each loss to compare, by number: ``'share'``, or another one for a loss that
                is the same in every micro-batch.
            inputs: the inputs of the losses.
            losses: returns the losses of a mini-batch, given all inputs.
            shares: returns those of a micro-batch, given its tensors and the inputs of the mini-batch.
            is_variable: whether a gradient may reach an input.

        Returns:
            The reasons, by the numbers of such losses.
        """
        wrong, left, failure = dict[int, str](), set(kinds), ""
        numbers = {**self._numbers, self._batch: NUM_IN_ALL}
        found = {x for node in inputs[0].graph.nodes for x in pytree.tree_leaves(node.args) if type(x) is int}
        near = sorted({x + i for x in found for i in (-1, 0, 1) if abs(x) < 2**31})
        self._mentioned = torch.tensor(near or [0], device=self._device)
        dtypes = {x.dtype for node in inputs for x in _values(node) if x.is_floating_point()}
        # The error that sums in the dtypes of the inputs may have.
        exact_tolerance = 16 * max([_TOLERANCE / 16, *(torch.finfo(dtype).eps for dtype in dtypes)])
        kinds_of_numbers = itertools.product((False, True), _KINDS)
        for seed, (is_exact, kind) in enumerate(kinds_of_numbers):
            if not left and (is_exact or kind != "normal"):
                continue
            generator = torch.Generator(self._device).manual_seed(seed)
            try:
                given = {node: self._random(node, kind, generator, numbers, is_exact) for node in inputs}
                variables = [x for n, x in given.items() if _is_tensor(x) and is_variable(n)]
                variables = [x.requires_grad_() for x in variables if x.is_floating_point() or x.is_complex()]
                whole = losses([*given.values()])
                parts = [shares(self._samples_of(given, *each), [*given.values()]) for each in _UNEQUAL]
                for i, each in kinds.items():
                    total = sum(part[i] for part in parts) / (1 if each == "share" else len(parts))
                    pairs = _with_gradients(total, whole[i], variables)
                    if all(torch.isfinite(own).all() for _, own in pairs):
                        left.discard(i)
                        tolerance = exact_tolerance if is_exact else _TOLERANCE
                        if not all(torch.allclose(*pair, tolerance, tolerance) for pair in pairs):
                            wrong[i] = _NO_SUM
            except Exception as error:  # numbers that do not fit, such as logarithms of negative ones
                failure = f": {error}"
        return dict.fromkeys(left, f"on random numbers it gives no finite number{failure}") | wrong

    def _samples_of(self, given: Mapping[fx.Node, Any], first: int, number: int) -> list[Tensor]:
        """Returns the tensors among inputs, with the elements of some samples."""
        found = []
        for node, x in given.items():
            dim = self._dim_of(node.meta["value"]) if _is_tensor(x) else None
            if dim is not None:
                each = x.shape[dim] // NUM_IN_ALL
                x = x.narrow(dim, first * each, number * each)
            found += [x] if _is_tensor(x) else []
        return found

    def _run(
        self,
        node: fx.Node,
        draw: int,
        replaced: Sequence[tuple[int, ...]],
        part: tuple[tuple[int, ...], bool] | None = None,
    ) -> list[list[Tensor]]:
        """Returns the results for random numbers, and with those of some samples replaced; and for a part.

        The part is given by its samples, and whether the operator is given sizes of the mini-batch.
        """
        failure: Exception | None = None
        for kind in ("normal", "positive", "zeros"):
            generator = torch.Generator(self._device).manual_seed(draw)
            first, second = (
                {n: self._random(n, kind, generator, self._numbers) for n in node.all_input_nodes}
                for _ in "ab"
            )
            if draw == _NUM_DRAWS - 1:  # in which each integer is another one, so that none is of no sample
                second = {n: pytree.tree_map(_another, x, second[n]) for n, x in first.items()}
            try:
                found = [_call(node, first)]
                for samples in replaced:
                    mixed = {n: self._mixed(n, first[n], second[n], samples) for n in first}
                    found.append(_call(node, mixed))
                if part is not None:
                    found.append(_call(node, {n: self._part_of(n, first[n], *part) for n in first}))
                return found
            except Mixed:
                raise
            except Exception as error:  # numbers that do not fit, such as negative ones
                failure = error
        raise Mixed(f"it could not be checked on random numbers: {failure}")

    def _random(
        self,
        node: fx.Node,
        kind: str,
        generator: torch.Generator,
        sizes: Mapping[sympy.Symbol, int],
        is_exact: bool = False,
    ) -> Any:
        """Returns random numbers of a kind for a value; floating ones in float64, unless `is_exact`."""
        if node in self._of_sizes:
            return self._of_sizes[node]

        def drawn(leaf: Any) -> Any:
            found = self._drawn(leaf, kind, generator, sizes)
            return found.to(leaf.dtype) if is_exact and _is_tensor(leaf) else found

        return pytree.tree_map(drawn, node.meta["value"])

    def _drawn(
        self, value: Any, kind: str, generator: torch.Generator, sizes: Mapping[sympy.Symbol, int]
    ) -> Any:
        if not isinstance(value, Tensor):
            return self._number(value, sizes)
        shape = [self._number(size, sizes) for size in value.shape]
        if torch.Size(shape).numel() > _MAX_ELEMENTS * sizes[self._batch] // _NUM_SAMPLES:
            raise Mixed("its operands are too large to be checked on random numbers")
        if not (value.is_floating_point() or value.is_complex()):
            low, high = int(kind == "ones"), {"zeros": 1, "larger": 5}.get(kind, 2)
            high = len(self._mentioned) if kind == "mentioned" else high
            drawn = torch.randint(low, high, shape, generator=generator, device=self._device)
            return (self._mentioned[drawn] if kind == "mentioned" else drawn).to(value.dtype)
        dtype = torch.complex128 if value.is_complex() else torch.float64
        if kind == "normal":
            return torch.randn(shape, generator=generator, dtype=dtype, device=self._device)
        return torch.rand(shape, generator=generator, dtype=dtype, device=self._device) * 0.9 + 0.05

    def _mixed(self, node: fx.Node, first: Any, second: Any, samples: Sequence[int]) -> Any:
        """Returns numbers, with others for some samples."""

        def mixed(own: Owners, _: Tensor, dim: int, x: Tensor, other: Tensor) -> Tensor:
            rows = torch.isin(own, torch.tensor(samples)).to(x.device)
            return torch.where(rows.view([-1] + [1] * (x.dim() - dim - 1)), other, x)

        return self._of_owners(node, mixed, first, second)

    def _part_of(self, node: fx.Node, numbers: Any, samples: tuple[int, ...], of_whole: bool) -> Any:
        """Returns the numbers of some samples."""
        if not any(map(_is_tensor, pytree.tree_leaves(node.meta["value"]))):
            return numbers if of_whole else self._number(node.meta["value"], self._part_numbers)

        def part(own: Owners, fake: Tensor, dim: int, x: Tensor) -> Tensor:
            number, rows = self._number(fake.shape[dim], self._part_numbers), torch.arange(x.shape[dim])
            own_rows = rows[torch.isin(own, torch.tensor(samples))]
            rows = own_rows if len(own_rows) == number else rows[:number]  # equal ones, or of no sample
            return x.index_select(dim, rows.to(x.device))

        return self._of_owners(node, part, numbers)

    def _of_owners(self, node: fx.Node, function: Callable[..., Tensor], *numbers: Any) -> Any:
        """Returns numbers, with a function's result for each tensor whose owners are known."""
        owners = self._owners.get(node)
        if owners is None:
            return numbers[0]

        def found(own: Owners | None, fake: Any, x: Any, *others: Any) -> Any:
            dim = self._dim_of(fake) if _is_tensor(x) else None
            return x if own is None or dim is None else function(own, fake, dim, x, *others)

        leaves = map(pytree.tree_leaves, (node.meta["value"], *numbers))
        spec = pytree.tree_flatten(numbers[0])[1]
        return pytree.tree_unflatten([found(*each) for each in zip(owners, *leaves, strict=True)], spec)

    def _dim_of(self, value: Tensor) -> int | None:
        """Returns the batch dimension of a value."""
        return next((dim for dim, size in enumerate(value.shape) if self._follows(size)), None)

    def _follows(self, size: Any) -> bool:
        """Returns whether a size follows from the batch size."""
        return isinstance(size, torch.SymInt) and self._batch in size.node.expr.free_symbols

    def _number(self, value: Any, numbers: Mapping[sympy.Symbol, int] | None = None) -> Any:
        """Returns a size, or several, with numbers in the place of symbols."""
        known = self._numbers if numbers is None else numbers

        def number(size: Any) -> Any:
            if isinstance(size, torch.SymInt):
                return int(size.node.expr.subs(known))
            return float(size.node.expr.subs(known)) if isinstance(size, torch.SymFloat) else size

        return pytree.tree_map(number, value)


def _another(x: Any, other: Any) -> Any:
    """Returns the integers 0 and 1 in the place of 1 and 0; of other numbers, the other ones."""
    is_integer = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex())
    return (x == 0).to(x.dtype) if is_integer else other


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _call(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[Tensor]:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    found = (
        getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
    )
    return tensors_in(found)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in a nested value."""
    return [leaf for leaf in pytree.tree_leaves(value) if _is_tensor(leaf)]


def _values(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta["value"])


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Returns whether the numbers differ by no more than their order in sums may make a difference."""
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = 64 * torch.finfo(a.dtype).eps
    scale = float(a.nan_to_num(0, 0, 0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, tolerance, tolerance * scale, equal_nan=True)


def _differ(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Returns which indices along a dimension have elements that differ."""
    if a.shape != b.shape:
        raise Mixed("the number of its elements depends on data")
    same = (a == b) | ((a != a) & (b != b))
    return ~same.movedim(dim, 0).flatten(1).all(1) if same.dim() > 1 else ~same


def _completed(owners: Owners, inherited: Iterable[Owners]) -> Owners:
    """Returns the owners; where no sample made a difference, those of an operand of the same size."""
    for other in inherited:
        if other.shape == owners.shape:
            owners = torch.where(owners < 0, other, owners)
    return owners


def _with_gradients(total: Tensor, loss: Tensor, variables: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of what shares add up to and a loss, and of the gradients of both."""
    pairs: list[tuple[Any, Any]] = [(total.detach(), loss.detach())]
    if loss.requires_grad and variables:
        gradients = [
            torch.autograd.grad(
                each.sum().real, variables, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            if each.requires_grad
            else map(torch.zeros_like, variables)
            for each in (total, loss)
        ]
        pairs += zip(*gradients, strict=True)
    return [(part.to(torch.complex128), whole.to(torch.complex128)) for part, whole in pairs]
