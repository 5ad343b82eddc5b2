"""A `Program`: the layers of a recorded call, in a pipeline; how its outputs are put together; its calls."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode

from gpipe_fast.from_model.cut import cut
from gpipe_fast.from_model.dataflow import (
    Call,
    CannotCut,
    Counted,
    Dataflow,
    Device,
    Nested,
    Owned,
    Ref,
    at_sizes,
    batch_dims,
    hold,
)
from gpipe_fast.from_model.evaluate import Function, computes, readers, with_data
from gpipe_fast.from_model.graph_reader import open_dataclass
from gpipe_fast.from_model.layer import make_layer
from gpipe_fast.from_model.shares import ModelShares, with_shares
from gpipe_fast.layers.structure import replicate
from gpipe_fast.runtime.runner import Runner
from gpipe_fast.torch_private import pytree
from gpipe_fast.trace.layer_states import LayerState
from gpipe_fast.training.losses import Loss
from gpipe_fast.training.step import Losses, Objective, run_step


class SplitInputs(NamedTuple):
    """The input tensors of a call, and of its micro-batches.

    Attributes:
        inputs: the input tensors.
        parts: the input tensors of each micro-batch.
        sizes: the sizes of each micro-batch that numbers of the record follow; the batch size first.
    """

    inputs: Sequence[Tensor]
    parts: Sequence[Sequence[Tensor]]
    sizes: Sequence[tuple[int, ...]]


class Program:
    """The layers of a recorded call of a model, in a pipeline.

    Attributes:
        plain_flow: the record.
        flow: the record, which returns shares of micro-batches.
        split: the numbers of the inputs that are split into micro-batches, with their batch dimensions.
        outputs: the tensors that the model returns.
        output_class: the class of the object that it returns, if PyTorch does not flatten it; else None.
        layers: the layers.
        runner: the runner of these layers.
        pipeline: the `GPipe` over it, once one is asked for.
    """

    def __init__(
        self,
        flow: Dataflow,
        split: Mapping[int, int],
        lengths: Sequence[int],
        blocks: Sequence[nn.Module],
        output_names: Sequence[str],
        loss: str,
        output_class: type | None,
        make_runner: Callable[[nn.Sequential], Runner],
        is_distributed: bool,
    ) -> None:
        self.output_class = output_class
        self.plain_flow, self.split = flow, split
        self._shares = with_shares(flow, split, lengths, loss == "per-microbatch")
        self.flow = flow = self._shares.flow
        found = model_outputs(self._shares, output_names, loss)
        self.outputs = list(found.values())
        if is_distributed and self._shares.measures is not None:
            self._shares.measures.check_known_everywhere()
        parts = cut(flow, blocks, list(found))
        dims = {output.ref: output.dim for output in self.outputs}
        made = [make_layer(flow, parts[0], given_dims=split)]
        made += [*(make_layer(flow, part) for part in parts[1:-1]), make_layer(flow, parts[-1], dims)]
        self.layers = [layer for layer, _ in made]
        self._owned = [owned for _, owned in made]
        self.runner = make_runner(nn.Sequential(*self.layers))
        self.pipeline: Any = None
        self.give_back()

    def take(self) -> None:
        """Gives the layers the tensors that the user's modules have now."""
        for owned in self._owned:
            owned.take()

    def give_back(self) -> None:
        """Gives the user's modules the tensors that the layers have now, which may be on other devices."""
        for owned in self._owned:
            owned.give_back()

    def call(self, given: SplitInputs, training: bool) -> Any:
        """Runs the layers on one mini-batch."""
        found = self.runner.call((self.argument(given),), {}, training)
        if self.runner.processes.is_mesh:
            if isinstance(found, Tensor):  # the last stage is in another process
                return self._in_place_of_outputs(found)
            found = _with_all_gradients(found)
        return self.combined(found, given)

    def readings(self, given: SplitInputs) -> str:
        """Returns what a call finds in the elements of its inputs before it runs."""
        code = "".join(layer.source for layer in self.layers)
        found = {
            "numbers": [x.item() for x in given.inputs if not x.dim()],
            "numbers of targets": [x for each in self._measures(given) for x in each.tolist() if x],
            "layers of hash": hashlib.sha256(code.encode()).hexdigest()[:8],
        }
        return json.dumps(found)

    def _in_place_of_outputs(self, token: Tensor) -> Any:
        """Returns what the model returns, in a process without it: the token runs the backward."""
        values = self.flow.values
        found = {each.ref: token for each in self.outputs if values[each.ref].requires_grad}
        result = self.flow.result.build(lambda x: found.get(x.index) if isinstance(x, Ref) else x)
        return self._in_class(result)

    def argument(self, given: SplitInputs) -> tuple[Any, ...]:
        """Returns the pipeline's argument for the inputs of a call, which must follow at once."""
        self.take()
        return tuple(
            x.movedim(self.split[i], 0) if i in self.split else replicate(x)
            for i, x in enumerate([*given.inputs, *self._measures(given)])
        )

    def _measures(self, given: SplitInputs) -> list[Tensor]:
        """Returns what shares need to know of a mini-batch, which is the last input of the layers, if any."""
        measures = self._shares.measures
        if measures is None:
            return []
        return [measures.of(given.inputs, _whole(given))]

    def step(
        self,
        given: SplitInputs,
        training: bool,
        keeps_output: bool,
        scaler: GradScaler | None = None,
    ) -> tuple[Losses, Any]:
        """Runs forward and backward of one mini-batch; arguments as of `run_step`.

        If gradients are disabled, it runs the forward and the loss alone.

        Returns:
            The shares of micro-batches in the loss, and what the model returns, or None.

        Raises:
            ValueError: the model does not return one loss.
        """
        # Each replica counts as one, as in a backward: the model's loss need not be a mean of its samples.
        divisor = None if self.runner.processes.num_replicas == 1 else lambda target: 1.0
        objective = Objective(Loss(functools.partial(_element, self._loss()), divisor), None, keeps_output)
        args = (self.argument(given),)
        each, found = run_step(self.runner, args, {}, training, objective, scaler)
        return each, None if found is None else self.combined(found, given)

    def _loss(self) -> int:
        """Returns the index of the only output that is a loss."""
        values, has_gradients = self.flow.values, torch.is_grad_enabled()
        found = [
            index
            for index, each in enumerate(self.outputs)
            if each.kind == "share" and (values[each.ref].requires_grad or not has_gradients)
        ]
        if len(found) != 1:
            what = "numbers with a gradient" if has_gradients else "numbers"
            raise ValueError(
                f"a step needs one loss, but the model returns {len(found)} {what}; pass the labels, or "
                "compute the loss from the model's output"
            )
        return found[0]

    def plain_loop(self, run: Callable[[Sequence[Tensor]], Any], given: SplitInputs) -> Any:
        """Returns what the pipeline returns, from what the plain model computes for each micro-batch.

        Args:
            run: runs the plain model on the inputs of a micro-batch.
            given: the inputs.
        """
        rows, measures, own = [], self._measures(given), self._shares.sources
        sums = [each.ref for each in self.outputs if each.kind]
        compute = computes(self.flow, [*range(self.flow.num_inputs), *own], sums)
        results = reversed([*enumerate(self.flow.result.leaves)])
        places = {leaf.index: i for i, leaf in results if isinstance(leaf, Ref)}
        for part in given.parts:
            with SourcesOf(self.flow, own) as sources:
                leaves = pytree.tree_leaves(open_dataclass(run(part)))
            found = compute([*part, *measures, *(sources.values[ref] for ref in own)])
            shares = dict(zip(sums, found, strict=True))
            rows.append(
                [shares[each.ref] if each.kind else leaves[places[each.ref]] for each in self.outputs]
            )
        tensors = [
            torch.stack(column)
            if output.dim is None
            else torch.cat([x.movedim(output.dim, 0) for x in column])
            for output, column in zip(self.outputs, zip(*rows, strict=True), strict=True)
        ]
        return self.combined(tensors, given)

    def combined(self, tensors: Sequence[Tensor], given: SplitInputs) -> Any:
        """Returns what the model returns, from the outputs of the pipeline."""
        return self._in_class(put_together(self.flow.result, self.outputs, tensors, _whole(given)))

    def _in_class(self, found: Any) -> Any:
        """Returns what the model returns, from what PyTorch flattens."""
        if self.output_class is None:
            return found
        output: Any = object.__new__(self.output_class)  # which was initialised when its parts were made
        for name, value in found.items():
            object.__setattr__(output, name, value)
        return output


class SourcesOf(TorchFunctionMode):
    """Collects what modules return, and the random numbers that are drawn between them, in a block.

    Attributes:
        values: what was collected, by number.

    Args:
        flow: the calls of the block.
        refs: the numbers of the values to collect.
    """

    def __init__(self, flow: Dataflow, refs: Sequence[int]) -> None:
        super().__init__()
        producers = flow.producers()
        wanted = {producers[ref] for ref in refs}
        self.values: dict[int, Tensor] = {}
        # By function or module, its calls that are still to come; None for one that is not wanted.
        self._calls: dict[Any, deque[Call | None]] = {}
        for index, call in enumerate(flow.calls):
            if call.is_module or call.draws:
                target = getattr(Tensor, call.target) if isinstance(call.target, str) else call.target
                self._calls.setdefault(target, deque()).append(call if index in wanted else None)
        # The model may change these in place.
        copies = (call for call in flow.calls if call.target == "clone")
        self._cloned = {ref for call in copies for ref in call.arguments.refs()}
        self._hooks = contextlib.ExitStack()
        self._depth = 0

    def __enter__(self) -> SourcesOf:
        for target in self._calls:
            if isinstance(target, nn.Module):
                self._hooks.callback(target.register_forward_pre_hook(self._begin).remove)
                self._hooks.callback(target.register_forward_hook(self._end, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _begin(self, *_: Any) -> None:
        self._depth += 1

    def _end(self, module: nn.Module, _: Any, result: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._collect(module, result)

    def _collect(self, target: Any, result: Any) -> None:
        call = self._calls[target].popleft() if self._calls.get(target) else None
        leaves = [] if call is None else zip(call.result.leaves, pytree.tree_leaves(result), strict=True)
        for leaf, value in leaves:
            if isinstance(leaf, Ref):
                self.values[leaf.index] = value.clone() if leaf.index in self._cloned else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._depth and func in self._calls:
            self._collect(func, result)
        return result


class _AllGradients(torch.autograd.Function):
    """Returns tensors; in the backward, the gradients of all of them are there, some of them zeros."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _with_all_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs of the last stage, of which a loss may then leave out some.

    The other processes receive the gradients of all that require one.
    """
    found = iter(_AllGradients.apply(*(x for x in outputs if x.requires_grad)))
    return [next(found) if x.requires_grad else x for x in outputs]


def _whole(given: SplitInputs) -> tuple[int, ...]:
    """Returns the sizes of a mini-batch that numbers of the record follow."""
    return sum(each[0] for each in given.sizes), *given.sizes[0][1:]


def _element(index: int, outputs: Sequence[Tensor]) -> Tensor:
    return outputs[index]


@dataclass(frozen=True)
class Output:
    """A tensor that a model returns.

    Attributes:
        ref: the number of the value.
        dim: the dimension along which micro-batches are concatenated; None if there is none.
        kind: of a value without one, ``'share'`` if those of micro-batches add up, ``'whole'`` if each
            micro-batch computes that of the mini-batch; None if all micro-batches have the same.
    """

    ref: int
    dim: int | None
    kind: str | None


def model_outputs(shares: ModelShares, names: Sequence[str], loss: str) -> dict[int, Output]:
    """Returns the tensors that a model returns, by the numbers of their values.

    Args:
        shares: the calls of the model.
        names: the name of each leaf of what the model returns.
        loss: ``'exact'``, or ``'per-microbatch'`` to average values over micro-batches.

    Raises:
        CannotCut: a tensor follows from micro-batches in no known way.
    """
    found: dict[int, Output] = {}
    for name, leaf in zip(names, shares.flow.result.leaves, strict=True):
        if isinstance(leaf, Ref) and leaf.index not in found:
            output = _output(shares, name, leaf.index, loss)
            if output is not None:
                found[leaf.index] = output
        elif isinstance(leaf, Owned):
            raise CannotCut(f"output {name} is a parameter or buffer of the model; read it from the model")
    return found


def _output(shares: ModelShares, name: str, ref: int, loss: str) -> Output | None:
    value, why = shares.flow.values[ref], shares.refused.get(ref)
    for size in value.shape:
        if isinstance(size, Counted):
            raise CannotCut(f"output {name} has a size that depends on elements, at {size.place}")
    dims = batch_dims(value)
    if len(dims) == 1 and why is None:
        return Output(ref, dims[0], None)
    if dims and loss == "per-microbatch":
        return None
    if len(dims) > 1:
        raise CannotCut(
            f"output {name} compares samples: its dimensions {dims} follow the batch size, so no micro-batch "
            "has all of it; pass loss='per-microbatch' to GPipe.from_model to get None in its place, and "
            "compute it from the model's other outputs"
        )
    if dims:
        raise CannotCut(
            f"output {name} has a dimension of size {value.shape[dims[0]]}, where B is the batch size, and "
            f"{why}; return a dimension for the batch alone, or pass loss='per-microbatch' to "
            "GPipe.from_model to get None in its place"
        )
    if why is not None:
        raise CannotCut(
            f"output {name} of a batch does not follow from those of its micro-batches: {why}. Pass "
            "loss='per-microbatch' to GPipe.from_model to average it over micro-batches, or compute it from "
            "the model's other outputs"
        )
    return Output(ref, None, shares.kinds.get(ref))


def put_together(
    result: Nested,
    outputs: Sequence[Output],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> Any:
    """Returns what the model returns for the whole mini-batch.

    Args:
        result: what the model returned when it was recorded.
        outputs: the tensors in it.
        tensors: each of them, concatenated over micro-batches along the first dimension.
        sizes: the sizes of the mini-batch that numbers of the record follow.
    """
    found: dict[int, Tensor] = {}
    for output, tensor in zip(outputs, tensors, strict=True):
        if output.dim is not None:
            found[output.ref] = tensor.movedim(0, output.dim) if output.dim else tensor
        else:
            found[output.ref] = functools.reduce(torch.add, tensor) if output.kind == "share" else tensor[0]
    device = tensors[0].device if tensors else torch.device("cpu")

    def leaf_of(leaf: Any) -> Any:
        leaf = at_sizes(leaf, sizes)
        if isinstance(leaf, Ref):
            return found.get(leaf.index)
        return device if isinstance(leaf, Device) else leaf

    return result.build(leaf_of)


def leaf_names(value: Any) -> list[str]:
    """Returns a name for each leaf of a nested value, as ``loss`` or ``[0]``."""
    return [name or "tensor" for name in _names(value)]


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) or hasattr(value, "_fields"):
        items = value.items() if isinstance(value, Mapping) else zip(value._fields, value, strict=True)
        yield from (f"{key}{name}" for key, each in items for name in _names(each))
    elif isinstance(value, (tuple, list)):
        yield from (f"[{i}]{name}" for i, each in enumerate(value) for name in _names(each))
    else:
        yield from ([""] if pytree.tree_leaves(value) == [value] else map(str, pytree.tree_leaves(value)))


# Dimensions of inputs that have the same size: the numbers of the inputs, and their dimensions.
Group = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class Path:
    """What forward does in a state of the model, and for what it decides by sizes and elements.

    Attributes:
        flow: the calls that it makes.
        state: the state of the model.
        fixed: the lengths that are numbers, 0 or 1, by their indices.
        answers: what forward has read from tensors.
        program: the program that makes the calls, once it is known.
        small: for micro-batches of 0 or 1 samples, the conditions on sizes.
    """

    flow: Dataflow
    state: LayerState
    fixed: Mapping[int, int]
    answers: Sequence[Any]
    program: Program = field(init=False)
    small: dict[int, Sequence[Any]] = field(default_factory=dict)
    _known: set[tuple[int, ...]] = field(default_factory=set)
    _readers: list[Function] | None = None

    def has_lengths(self, sizes: tuple[int, ...]) -> bool:
        """Returns whether lengths are 0 and 1 where they were in the capture, and larger elsewhere."""
        lengths = list(enumerate(sizes))[1:]
        return all(size == self.fixed[i] if i in self.fixed else size > 1 for i, size in lengths)

    def decides_alike(self, tensors: Sequence[Tensor], may_read: bool) -> bool:
        """Returns whether forward decides by the elements of tensors as it did in the capture.

        Args:
            tensors: the input tensors of a micro-batch.
            may_read: whether all tensors of modules are in this process.
        """
        if self._readers is None:
            self._readers = readers(self.flow, may_read)
        if not self._readers:
            return True
        given = [with_data(x) for x in tensors]
        pairs = zip(self._readers, self.flow.decisions, strict=True)
        with torch.no_grad():
            return all(bool(read(given)[0] == decision.answer) for read, decision in pairs)

    def is_for(self, sizes: tuple[int, ...]) -> bool:
        """Returns whether forward does this for micro-batches of some sizes, as far as sizes decide."""
        if sizes not in self._known:
            conditions = self.flow.conditions if sizes[0] > 1 else self.small.get(sizes[0])
            if conditions is None or not self.has_lengths(sizes) or not hold(conditions, sizes):
                return False
            self._known.add(sizes)
        return True


@dataclass(eq=False)
class CallKind:
    """A kind of call: everything but sizes that are symbols, and the elements of tensors, is the same.

    Attributes:
        split: the inputs that are split into micro-batches, with their batch dimensions.
        lengths: the dimensions of inputs, other than the batch, whose sizes differ between calls; those in a
            group have the same size.
        shapes: the shapes of the inputs of the first call.
        paths: what forward does.
    """

    split: Mapping[int, int]
    lengths: Sequence[Group]
    shapes: Sequence[Sequence[int]]
    paths: list[Path] = field(default_factory=list)

    def symbols(self) -> dict[tuple[int, int], int]:
        """Returns the index of the size that a dimension follows, by the input and the dimension."""
        lengths = {dim: i for i, group in enumerate(self.lengths, 1) for dim in group}
        return dict.fromkeys(self.split.items(), 0) | lengths

    def includes(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Returns whether a call with inputs of these shapes is of this kind."""
        symbols, sizes = self.symbols(), dict[int, int]()
        for index, (own, other) in enumerate(zip(self.shapes, shapes, strict=True)):
            for dim, size in enumerate(other):
                symbol = symbols.get((index, dim))
                if size != (own[dim] if symbol is None else sizes.setdefault(symbol, size)):
                    return False
        return True
