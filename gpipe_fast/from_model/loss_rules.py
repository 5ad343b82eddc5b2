"""How a value without a batch dimension, such as a loss, follows from its values for the micro-batches.

A rule is found from the record, and then checked: on random numbers, the value for a batch must be the
combination of the values for its parts. So a rule is exact, or there is none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.from_model.dataflow import Call, Dataflow, Owned, Ref
from gpipe_fast.from_model.evaluate import Evaluation
from gpipe_fast.from_model.sizes import batch_dims

# Batch sizes of the parts on which a rule is checked, and the error that sums in float32 may have.
_PARTS = (1, 2)
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Rule:
    """How values of micro-batches are combined.

    Attributes:
        kind: ``'sum'``; ``'samples'``, the mean over samples; ``'targets'``, the mean over the targets of a
            cross-entropy that count; or ``'quotient'``, a sum that is divided by a value of the inputs.
        ref: the number of the value that has the targets, or the divisor; else None.
        ignored: the target that does not count.
        weight: returns the weights of classes, or None.
    """

    kind: str
    ref: int | None = None
    ignored: int = -100
    weight: Callable[[], Tensor | None] = lambda: None

    def weights(self, sizes: Sequence[int], measures: Sequence[float], whole: float) -> list[float]:
        """Returns the weight of each micro-batch.

        Args:
            sizes: how many samples each micro-batch has.
            measures: the measure of each, if the rule has a value.
            whole: that of the mini-batch.
        """
        if self.kind == "sum":
            return [1.0] * len(sizes)
        if self.ref is None:
            measures, whole = sizes, sum(sizes)
        return [measure / whole if whole else 1.0 / len(measures) for measure in measures]

    def measure(self, value: Tensor) -> float:
        """Returns the number of targets that count, their weights' sum, or the divisor."""
        if self.kind == "quotient":
            return float(value)
        counts, weight = value != self.ignored, self.weight()
        if weight is None:
            return int(counts.sum())
        return float(torch.where(counts, weight.to(value.device)[value.where(counts, 0)], 0).sum())


@dataclass(frozen=True)
class CrossEntropy:
    """A cross-entropy in a record.

    Attributes:
        call: the call.
        logits: the number of the value that has the logits.
        targets: the number of the value that has the classes.
        ignored: the class that does not count.
        weight: returns the weights of classes, or None.
        is_mean: whether it is a mean over targets.
    """

    call: Call
    logits: int
    targets: int
    ignored: int
    weight: Callable[[], Tensor | None]
    is_mean: bool


def cross_entropies(flow: Dataflow, ref: int) -> list[CrossEntropy]:
    """Returns the cross-entropies with classes as targets from which a value without batch follows."""
    found = []
    for call in _calls_without_batch(flow, ref):
        given = _cross_entropy_arguments(call)
        if given is None:
            continue
        logits, targets, weight = given["input"], given["target"], given.get("weight")
        are_values = isinstance(logits, Ref) and isinstance(targets, Ref)
        if are_values and not flow.values[targets.index].dtype.is_floating_point:
            module = call.target if call.is_module else None
            if module is not None:
                read: Any = functools.partial(getattr, module, "weight")
            else:
                read = weight.read if isinstance(weight, Owned) else functools.partial(_given, weight)
            is_mean = (given["reduction"] if module is None else module.reduction) == "mean"
            ignored = given["ignore_index"] if module is None else module.ignore_index
            found.append(CrossEntropy(call, logits.index, targets.index, ignored, read, is_mean))
    return found


def _divisors(flow: Dataflow, ref: int) -> Iterator[int]:
    """Returns the divisors of the divisions from which a value without a batch follows."""
    for call in _calls_without_batch(flow, ref):
        if call.target in _DIVISIONS:
            divisor = call.arguments.leaves[1]
            if isinstance(divisor, Ref) and not flow.values[divisor.index].requires_grad:
                yield divisor.index


_DIVISIONS = (Tensor.__truediv__, Tensor.div, Tensor.divide, Tensor.true_divide, torch.div, torch.true_divide)
_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_SIGNATURES = {function: inspect.signature(function) for function in _FUNCTIONS}


def _given(weight: Any) -> Any:
    return weight


def _cross_entropy_arguments(call: Call) -> dict[str, Any] | None:
    args, kwargs = call.arguments.build(lambda leaf: leaf)
    if isinstance(call.target, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return dict(inspect.signature(call.target.forward).bind(*args, **kwargs).arguments)
    if call.target in _FUNCTIONS:
        bound = _SIGNATURES[call.target].bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)
    return None


def _calls_without_batch(flow: Dataflow, ref: int) -> list[Call]:
    """Returns the calls from the last values with a batch dimension to a value without."""
    producers = flow.producers()
    wanted, found = [ref], set[int]()
    while wanted:
        index = producers.get(wanted.pop())
        if index is None or index in found:
            continue
        found.add(index)
        wanted += [r for r in flow.calls[index].arguments.refs() if not batch_dims(flow.values[r])]
    return [flow.calls[index] for index in sorted(found)]


# Functions that add up, or that combine sums linearly. Others, as a square root, do not commute with sums.
_REDUCTIONS = frozenset({"sum", "mean", "dot", "trace", "einsum", "kl_div"})
_REDUCTIONS |= {"binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy"}
_LINEAR = frozenset(
    [
        "sum",
        "mean",
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "true_divide",
        "divide",
        "__radd__",
        "__rsub__",
        "__rmul__",
        "__truediv__",
        "__mul__",
        "__add__",
        "__sub__",
        "add_",
        "sub_",
        "mul_",
        "div_",
        "rsub",
        "multiply",
        "subtract",
        "float",
        "double",
        "half",
        "bfloat16",
        "to",
        "type",
        "type_as",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "flatten",
        "expand",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "stack",
        "cat",
        "unbind",
        "__getitem__",
        "item",
    ]
)


def _is_linear(flow: Dataflow, ref: int) -> bool:
    """Returns whether a value without a batch follows from sums and means over the batch linearly.

    Values of inputs alone, by which may be divided, may follow in any way.
    """
    calls = _calls_without_batch(flow, ref)
    divisors = {index for each in _divisors(flow, ref) for index in _indices_for(flow, each)}
    for call in calls:
        name = getattr(call.target, "__name__", type(call.target).__name__)
        if any(batch_dims(flow.values[r]) for r in call.arguments.refs()):
            if not (name in _REDUCTIONS or name.endswith(("_loss", "Loss"))):
                return False
        elif name not in _LINEAR and not divisors.issuperset(call.result.refs()):
            return False
    return True


def _indices_for(flow: Dataflow, ref: int) -> set[int]:
    """Returns the values without a batch that a value without a batch follows from, and itself."""
    return {r for call in _calls_without_batch(flow, ref) for r in call.result.refs()}


def find_rule(flow: Dataflow, ref: int, static_sizes: Sequence[int]) -> Rule | None:
    """Returns the rule for a value without a batch dimension; None if it cannot be combined.

    Args:
        flow: the record, with numbers that follow the batch size.
        ref: the value's number.
        static_sizes: the other sizes that numbers follow.
    """
    if not _is_linear(flow, ref):
        return None
    means = cross_entropies(flow, ref)
    divisors = list(dict.fromkeys(_divisors(flow, ref)))
    split = [index for index in range(flow.num_inputs) if batch_dims(flow.values[index])]
    varying = [divisor for divisor in divisors if flow.depends_on([divisor], split)]
    # The check would not see the weight of a rare class, nor a divisor that random numbers leave constant.
    is_weighted = any(mean.is_mean and mean.weight() is not None for mean in means)
    rules = [] if varying or is_weighted else [Rule("sum"), Rule("samples")]
    if len(varying) > 1:
        return None
    if not varying and len(means) == 1 and not isinstance(means[0].weight(), Ref):
        rules.append(Rule("targets", means[0].targets, means[0].ignored, means[0].weight))
    rules += [Rule("quotient", divisor) for divisor in varying or divisors]
    try:
        checks = [_Check(flow, ref, means, static_sizes, seed) for seed in range(2)]
        return next((rule for rule in rules if all(check.holds(rule) for check in checks)), None)
    except Exception:  # what the random numbers stand for is unknown, so no rule can be checked
        return None


def concatenates(flow: Dataflow, ref: int, dim: int, static_sizes: Sequence[int]) -> bool:
    """Returns whether a value of a batch is the concatenation of those of its parts, checked as a rule is."""
    try:
        check = _Check(flow, ref, [], static_sizes, seed=0)
    except Exception:
        return False
    found = torch.cat(check.parts, dim)
    return found.shape == check.whole.shape and torch.allclose(found, check.whole, _TOLERANCE, _TOLERANCE)


class _Check:
    """A value for the parts of a random batch, and for the whole.

    What modules return, inputs, random numbers and parameters without data are replaced by random numbers.
    """

    def __init__(
        self, flow: Dataflow, ref: int, means: Sequence[CrossEntropy], static_sizes: Sequence[int], seed: int
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        classes = {mean.targets: mean for mean in means}
        columns: dict[int, list[Tensor]] = {}
        for r in _sources(flow, ref, classes):
            if not batch_dims(flow.values[r]):
                columns[r] = [self._random(flow, r, (1, *static_sizes), None)] * len(_PARTS)
                continue
            columns[r] = [self._random(flow, r, (part, *static_sizes), classes.get(r)) for part in _PARTS]
        wholes = {
            r: torch.cat(parts, batch_dims(flow.values[r])[0]) if batch_dims(flow.values[r]) else parts[0]
            for r, parts in columns.items()
        }
        self._owned: dict[Owned, Tensor] = {}
        known = [{r: column[i] for r, column in columns.items()} for i in range(len(_PARTS))]
        self._evaluations = [
            Evaluation(
                flow, values, (size, *static_sizes), torch.device("cpu"), modules=True, read=self._read
            )
            for values, size in zip([*known, wholes], [*_PARTS, sum(_PARTS)], strict=True)
        ]
        with torch.no_grad():
            *self.parts, self.whole = (each.value(ref).double() for each in self._evaluations)

    def _read(self, owned: Owned) -> Tensor:
        tensor = owned.read()
        if not tensor.is_meta:
            return tensor
        if owned not in self._owned:
            found = torch.rand(tensor.shape, generator=self._generator, device="cpu") * 0.9 + 0.05
            self._owned[owned] = found.to(tensor.dtype)
        return self._owned[owned]

    def _random(self, flow: Dataflow, ref: int, sizes: Sequence[int], mean: CrossEntropy | None) -> Tensor:
        value = flow.values[ref]
        shape = [size if isinstance(size, int) else size.at(sizes) for size in value.shape]
        if value.dtype.is_floating_point:
            dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
            return torch.rand(shape, generator=self._generator, dtype=dtype, device="cpu") * 0.9 + 0.05
        if mean is None:
            return torch.randint(0, 2, shape, generator=self._generator, device="cpu").to(value.dtype)
        count = flow.values[mean.logits].shape[1 if len(flow.values[mean.logits].shape) > 1 else 0]
        classes = torch.randint(0, count, shape, generator=self._generator, device="cpu")
        # So that the numbers of targets that count are not as those of samples, and no part is without.
        dropped = torch.zeros(shape, dtype=torch.bool, device="cpu")
        if sizes[0] > 1:
            dropped.view(-1)[1::2] = True
        return torch.where(dropped, mean.ignored, classes).to(value.dtype)

    def holds(self, rule: Rule) -> bool:
        """Returns whether a rule gives the whole's value from those of the parts."""
        *measures, whole = self._measures(rule)
        combined = combine(torch.stack(self.parts), rule.weights(_PARTS, measures, whole))
        return torch.allclose(combined, self.whole, rtol=_TOLERANCE, atol=_TOLERANCE)

    def _measures(self, rule: Rule) -> list[float]:
        if rule.ref is None:
            return [0.0] * (len(_PARTS) + 1)
        with torch.no_grad():
            return [rule.measure(each.value(rule.ref)) for each in self._evaluations]


def _sources(flow: Dataflow, ref: int, stops: Container[int]) -> list[int]:
    """Returns the values that a value follows from: what modules return, inputs and random numbers.

    Modules that reduce the batch, as those of losses, are passed like functions.
    """
    producers = flow.producers()
    wanted, seen, found = [ref], set[int](), set[int]()
    while wanted:
        each = wanted.pop()
        if each in seen:
            continue
        seen.add(each)
        call = flow.calls[producers[each]] if each in producers else None
        reduces = call is not None and not any(batch_dims(flow.values[r]) for r in call.result.refs())
        if each in stops or call is None or call.draws or (call.is_module and not reduces):
            found.add(each)
        else:
            wanted += call.arguments.refs()
    return sorted(found)


def combine(parts: Tensor, weights: Sequence[float]) -> Tensor:
    """Returns the weighted sum of the values of micro-batches, added up from the first one on."""
    kept = [
        part if weight == 1 else part * weight for part, weight in zip(parts, weights, strict=True) if weight
    ]
    total: Tensor = functools.reduce(torch.add, kept)
    return total


def uses(flow: Dataflow, ref: int, inputs: Sequence[int]) -> bool:
    """Returns whether a value is computed from one of some inputs after the last value with a batch."""
    calls = _calls_without_batch(flow, ref)
    return any(r in inputs for call in calls for r in call.arguments.refs())


def uses_number(flow: Dataflow, ref: int, number: int | float) -> bool:
    """Returns whether a value is computed with a number after the last value with a batch."""
    leaves = (leaf for call in _calls_without_batch(flow, ref) for leaf in call.arguments.leaves)
    return any(type(leaf) is type(number) and leaf == number for leaf in leaves)
