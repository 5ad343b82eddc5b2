"""A `Program`: the layers of a recorded call, in a pipeline, and how its outputs are put together."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gpipe_fast.from_model.cut import cut
from gpipe_fast.from_model.dataflow import CannotCut, Dataflow, Owned, Ref
from gpipe_fast.from_model.evaluate import Evaluation, refuse_reading
from gpipe_fast.from_model.graph_reader import open_dataclass
from gpipe_fast.from_model.layer import make_layer
from gpipe_fast.from_model.loss_rules import Rule
from gpipe_fast.from_model.outputs import Output, model_outputs, put_together
from gpipe_fast.layers.structure import replicate
from gpipe_fast.runtime.runner import Runner
from gpipe_fast.torch_private import pytree
from gpipe_fast.training.losses import Loss
from gpipe_fast.training.step import Losses, Objective, run_step
from gpipe_fast.training.update import StageUpdates


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
        flow: the record.
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
        is_distributed: bool = False,
    ) -> None:
        self.output_class = output_class
        self.flow, self.split = flow, split
        found = model_outputs(flow, output_names, self.split, loss, lengths)
        self.outputs = list(found.values())
        self._is_distributed = is_distributed
        if is_distributed:
            _check_known_everywhere(self.outputs)
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
        self._check_divisors(given)
        found = self.runner.call((self.argument(given),), {}, training)
        if self._is_distributed:
            if isinstance(found, Tensor):  # the last stage is in another process
                return self._in_place_of_outputs(found)
            found = _with_all_gradients(found)
        return self.combined(found, given)

    def readings(self, given: SplitInputs) -> str:
        """Returns what a call finds in the elements of its inputs before it runs."""
        code = "".join(layer.source for layer in self.layers)
        found = {
            "numbers": [x.item() for x in given.inputs if not x.dim()],
            "weights of micro-batches": [self._weights(each, given) for each in self.outputs],
            "layers of hash": hashlib.sha256(code.encode()).hexdigest()[:8],
        }
        return json.dumps(found)

    def _in_place_of_outputs(self, token: Tensor) -> Any:
        """Returns what the model returns, in a process without it: the token runs the backward."""
        values = self.flow.values
        found = {each.ref: token for each in self.outputs if values[each.ref].requires_grad}
        result = self.flow.result.build(lambda leaf: found.get(leaf.index) if _is_ref(leaf) else leaf)
        return self._in_class(result)

    def _check_divisors(self, given: SplitInputs) -> None:
        """Checks that no micro-batch divides by 0 what the mini-batch divides by another number.

        Its gradients would be NaN. Without gradients, its value does not count.
        """
        for output in self.outputs:
            needs_gradient = torch.is_grad_enabled() and self.flow.values[output.ref].requires_grad
            if not needs_gradient or output.rule is None or output.rule.kind != "quotient":
                continue
            weights = self._weights(output, given)
            if 0.0 in weights and any(weights):
                raise ValueError(
                    f"in micro-batch {weights.index(0.0)} of {len(weights)}, nothing counts for a loss that "
                    "is divided by a number of its inputs, which is 0 there; use fewer chunks, or batches in "
                    "which each micro-batch has something that counts"
                )

    def argument(self, given: SplitInputs) -> tuple[Any, ...]:
        """Returns the pipeline's argument for the inputs of a call, which must follow at once."""
        self.take()
        return tuple(
            x.movedim(self.split[i], 0) if i in self.split else replicate(x)
            for i, x in enumerate(given.inputs)
        )

    def step(
        self,
        given: SplitInputs,
        training: bool,
        keeps_output: bool,
        scaler: GradScaler | None = None,
        updates: StageUpdates | None = None,
    ) -> tuple[Losses, Any]:
        """Runs forward and backward of one mini-batch; arguments as of `run_step`.

        If gradients are disabled, it runs the forward and the loss alone.

        Returns:
            The losses, multiplied by weights, and what the model returns, or None.

        Raises:
            ValueError: the model does not return one loss.
        """
        index, output = self._loss()
        self._check_divisors(given)
        weights = self._weights(output, given)
        total = functools.partial(_element, index)
        objective = Objective(Loss(total), None, keeps_output, weights)
        args = (self.argument(given),)
        each, found = run_step(self.runner, args, {}, training, objective, scaler, updates)
        return each, None if found is None else self.combined(found, given)

    def _loss(self) -> tuple[int, Output]:
        """Returns the only output that is a loss, and its index among the outputs."""
        values, has_gradients = self.flow.values, torch.is_grad_enabled()
        found = [
            (index, each)
            for index, each in enumerate(self.outputs)
            if each.rule and (values[each.ref].requires_grad or not has_gradients)
        ]
        if len(found) != 1:
            what = "numbers with a gradient" if has_gradients else "numbers"
            raise ValueError(
                f"a step needs one loss, but the model returns {len(found)} {what}; pass the labels, or "
                "compute the loss from the model's output"
            )
        return found[0]

    def put_together(self, returned: Sequence[Any], given: SplitInputs) -> Any:
        """Returns what the pipeline returns, from what the plain model returns for each micro-batch."""
        leaves = [pytree.tree_leaves(open_dataclass(each)) for each in returned]
        places = {
            leaf.index: i for i, leaf in reversed([*enumerate(self.flow.result.leaves)]) if _is_ref(leaf)
        }
        columns = [[each[places[output.ref]] for each in leaves] for output in self.outputs]
        tensors = [
            torch.stack(column)
            if output.dim is None
            else torch.cat([x.movedim(output.dim, 0) for x in column])
            for output, column in zip(self.outputs, columns, strict=True)
        ]
        return self.combined(tensors, given)

    def combined(self, tensors: Sequence[Tensor], given: SplitInputs) -> Any:
        """Returns what the model returns, from the outputs of the pipeline."""
        weights = [self._weights(output, given) for output in self.outputs]
        whole = sum(each[0] for each in given.sizes), *given.sizes[0][1:]
        return self._in_class(put_together(self.flow.result, self.outputs, tensors, weights, whole))

    def _in_class(self, found: Any) -> Any:
        """Returns what the model returns, from what PyTorch flattens."""
        if self.output_class is None:
            return found
        output: Any = object.__new__(self.output_class)  # which was initialised when its parts were made
        for name, value in found.items():
            object.__setattr__(output, name, value)
        return output

    def _weights(self, output: Output, given: SplitInputs) -> list[float]:
        """Returns the weight of each micro-batch in an output; empty if they are concatenated."""
        rule = output.rule
        if rule is None:
            return []
        inputs, parts, sizes = given
        batch_sizes = [each[0] for each in sizes]
        measured = [*zip(parts, sizes, strict=True), (inputs, (sum(batch_sizes), *sizes[0][1:]))]
        measures = [0.0] * len(measured)
        if rule.ref is not None:
            measures = [self._measure(rule, rule.ref, *each) for each in measured]
        return rule.weights(batch_sizes, measures[:-1], measures[-1])

    def _measure(self, rule: Rule, ref: int, inputs: Sequence[Tensor], sizes: Sequence[int]) -> float:
        with torch.no_grad():
            read = refuse_reading if self._is_distributed else Owned.read
            evaluation = Evaluation(self.flow, dict(enumerate(inputs)), sizes, inputs[0].device, read=read)
            return rule.measure(evaluation.value(ref))


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


def _check_known_everywhere(outputs: Sequence[Output]) -> None:
    """Checks that each process can compute the weights of micro-batches.

    Raises:
        CannotCut: they depend on weights of classes.
    """
    if any(output.rule is not None and output.rule.weight() is not None for output in outputs):
        raise CannotCut(
            "its loss has weights of classes, which with a mesh only the process of the last stage has; "
            "leave out the labels, and compute the loss from the model's output"
        )


def _element(index: int, outputs: Sequence[Tensor]) -> Tensor:
    return outputs[index]


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, Ref)
