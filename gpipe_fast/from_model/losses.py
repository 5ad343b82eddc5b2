"""How a value without a batch dimension, such as a loss, follows from its values for the micro-batches.

A rule is found from the record, and then checked: on random numbers, the value for a batch must be the
combination of the values for its parts. So a rule is exact, or there is none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast.from_model.batch import batch_dims
from gpipe_fast.from_model.dataflow import Call, Dataflow, Ref
from gpipe_fast.from_model.evaluate import Evaluation

# Batch sizes of the parts on which a rule is checked, and the error that sums in float32 may have.
_PARTS = (1, 3, 2)
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Rule:
    """How values of micro-batches are combined.

    Attributes:
        kind: ``'sum'``; ``'samples'``, the mean over samples; ``'targets'``, the mean over the targets of a
            cross-entropy that count; or ``'quotient'``, a sum that is divided by a value of the inputs.
        ref: the number of the value that has the targets, or by which is divided; else None.
        ignored: the target that does not count.
    """

    kind: str
    ref: int | None = None
    ignored: int = -100

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
        """Returns how many targets count, or by what is divided."""
        return float(value) if self.kind == "quotient" else int((value != self.ignored).sum())


@dataclass(frozen=True)
class CrossEntropy:
    """A cross-entropy in a record.

    Attributes:
        call: the call.
        logits: the number of the value that has the logits.
        targets: the number of the value that has the classes.
        ignored: the class that does not count.
    """

    call: Call
    logits: int
    targets: int
    ignored: int


def cross_entropies(flow: Dataflow, ref: int) -> list[CrossEntropy]:
    """Returns the cross-entropies with classes as targets from which a value without batch follows."""
    found = []
    for call in _calls_without_batch(flow, ref):
        arguments = _cross_entropy_arguments(call)
        if arguments is None:
            continue
        logits, targets, ignored = arguments
        are_values = isinstance(logits, Ref) and isinstance(targets, Ref)
        if are_values and not flow.values[targets.index].dtype.is_floating_point:
            found.append(CrossEntropy(call, logits.index, targets.index, ignored))
    return found


def _divisors(flow: Dataflow, ref: int) -> Iterator[int]:
    """Returns the values by which is divided on the way to a value without batch."""
    for call in _calls_without_batch(flow, ref):
        if call.target in _DIVISIONS:
            divisor = call.arguments.leaves[1]
            if isinstance(divisor, Ref) and not flow.values[divisor.index].requires_grad:
                yield divisor.index


_DIVISIONS = (Tensor.__truediv__, Tensor.div, Tensor.divide, Tensor.true_divide, torch.div, torch.true_divide)
_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_SIGNATURES = {function: inspect.signature(function) for function in _FUNCTIONS}


def _cross_entropy_arguments(call: Call) -> tuple[Any, Any, int] | None:
    args, kwargs = call.arguments.build(lambda leaf: leaf)
    if isinstance(call.target, (nn.CrossEntropyLoss, nn.NLLLoss)):
        given = inspect.signature(call.target.forward).bind(*args, **kwargs).arguments
        return given["input"], given["target"], call.target.ignore_index
    if call.target in _FUNCTIONS:
        bound = _SIGNATURES[call.target].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        return given["input"], given["target"], given["ignore_index"]
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


def find_rule(flow: Dataflow, ref: int, static_sizes: Sequence[int]) -> Rule | None:
    """Returns the rule for a value without a batch dimension; None if it cannot be combined.

    Args:
        flow: the record, with numbers that follow the batch size.
        ref: the value's number.
        static_sizes: the other sizes that numbers follow.
    """
    means = cross_entropies(flow, ref)
    rules = [Rule("sum"), Rule("samples")]
    if len(means) == 1:
        rules.append(Rule("targets", means[0].targets, means[0].ignored))
    rules += [Rule("quotient", divisor) for divisor in _divisors(flow, ref)]
    try:
        checks = [_Check(flow, ref, means, static_sizes, seed) for seed in range(2)]
    except Exception:  # what the random numbers stand for is unknown, so no rule can be checked
        return None
    fitting = [rule for rule in rules if all(check.holds(rule) for check in checks)]
    return fitting[0] if fitting else None


class _Check:
    """Values for the parts of a random batch, and for the whole."""

    def __init__(
        self, flow: Dataflow, ref: int, means: Sequence[CrossEntropy], static_sizes: Sequence[int], seed: int
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        calls = _calls_without_batch(flow, ref)
        first = sorted({r for call in calls for r in call.arguments.refs()} - set(_made(calls)))
        classes = {mean.targets: mean for mean in means}
        columns: dict[int, list[Tensor]] = {}
        for r in first:
            if not batch_dims(flow.values[r]):
                columns[r] = [self._random(flow, r, (1, *static_sizes), None)] * len(_PARTS)
                continue
            columns[r] = [self._random(flow, r, (part, *static_sizes), classes.get(r)) for part in _PARTS]
        wholes = {
            r: torch.cat(parts, batch_dims(flow.values[r])[0]) if batch_dims(flow.values[r]) else parts[0]
            for r, parts in columns.items()
        }
        known = [{r: column[i] for r, column in columns.items()} for i in range(len(_PARTS))]
        evaluations = [
            Evaluation(flow, values, (size, *static_sizes), torch.device("cpu"), modules=True)
            for values, size in zip([*known, wholes], [*_PARTS, sum(_PARTS)], strict=True)
        ]
        with torch.no_grad():
            *self.parts, self.whole = (each.value(ref).double() for each in evaluations)
        self._evaluations = evaluations

    def _random(self, flow: Dataflow, ref: int, sizes: Sequence[int], mean: CrossEntropy | None) -> Tensor:
        value = flow.values[ref]
        shape = [size if isinstance(size, int) else size.at(sizes) for size in value.shape]
        if value.dtype.is_floating_point:
            dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
            return torch.rand(shape, generator=self._generator, dtype=dtype) * 0.9 + 0.05
        if mean is None:
            return torch.randint(0, 2, shape, generator=self._generator).to(value.dtype)
        count = flow.values[mean.logits].shape[1 if len(flow.values[mean.logits].shape) > 1 else 0]
        classes = torch.randint(0, count, shape, generator=self._generator)
        dropped = torch.rand(shape, generator=self._generator) < 0.4
        dropped.view(-1)[0] = False  # so that no part is without targets
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


def _made(calls: Sequence[Call]) -> Iterator[int]:
    for call in calls:
        yield from call.result.refs()


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
