"""A `Program`: the layers of a recorded call, in a pipeline, and how its outputs are put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree as pytree

from gpipe_fast.from_model.cut import cut
from gpipe_fast.from_model.dataflow import Dataflow, Ref
from gpipe_fast.from_model.evaluate import Evaluation
from gpipe_fast.from_model.layer import make_layer
from gpipe_fast.from_model.losses import Rule
from gpipe_fast.from_model.outputs import Output, outputs_of, put_together
from gpipe_fast.from_model.record import open_dataclass
from gpipe_fast.layers.structure import replicate
from gpipe_fast.training.losses import Loss
from gpipe_fast.training.update import StageUpdates

# Makes a pipeline of layers: `GPipe`, with the user's options.
MakePipeline = Callable[[nn.Sequential], Any]


class Program:
    """The layers of a recorded call of a model, in a pipeline.

    Attributes:
        flow: the record.
        split: the numbers of the inputs that are split into micro-batches.
        outputs: the tensors that the model returns.
        output_class: the class of the object that it returns, if PyTorch does not flatten it; else None.
        layers: the layers.
        pipeline: the `GPipe` of these layers.
    """

    def __init__(
        self,
        flow: Dataflow,
        split: Collection[int],
        lengths: Sequence[int],
        blocks: Sequence[nn.Module],
        output_names: Sequence[str],
        loss: str,
        output_class: type | None,
        make_pipeline: MakePipeline,
    ) -> None:
        self.output_class = output_class
        self.flow, self.split = flow, frozenset(split)
        found = outputs_of(flow, output_names, self.split, loss, lengths)
        self.outputs = list(found.values())
        parts = cut(flow, blocks, list(found))
        dims = {output.ref: output.dim for output in self.outputs}
        made = [*(make_layer(flow, part) for part in parts[:-1]), make_layer(flow, parts[-1], dims)]
        self.layers = [layer for layer, _ in made]
        self._owned = [owned for _, owned in made]
        self.pipeline = make_pipeline(nn.Sequential(*self.layers))
        for owned in self._owned:
            owned.give_back()

    def __call__(
        self,
        inputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        sizes: Sequence[tuple[int, ...]],
    ) -> Any:
        """Runs the pipeline on one mini-batch.

        Args:
            inputs: the input tensors.
            parts: the input tensors of each micro-batch.
            sizes: the sizes of each micro-batch that numbers of the record follow; the batch size first.
        """
        self._check_divisors(inputs, parts, sizes)
        return self.combined(self.pipeline(self.argument(inputs)), inputs, parts, sizes)

    def _check_divisors(
        self, inputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], sizes: Sequence[tuple[int, ...]]
    ) -> None:
        """Checks that no micro-batch divides by 0 what the mini-batch divides by another number.

        Its gradients would be NaN. Without gradients, its value does not count.
        """
        for output in self.outputs:
            needs_gradient = torch.is_grad_enabled() and self.flow.values[output.ref].requires_grad
            if not needs_gradient or output.rule is None or output.rule.kind != "quotient":
                continue
            weights = self._weights(output, inputs, parts, sizes)
            if 0.0 in weights and any(weights):
                raise ValueError(
                    f"in micro-batch {weights.index(0.0)} of {len(weights)}, nothing counts for a loss that "
                    "is divided by a number of its inputs, which is 0 there; use fewer chunks, or batches in "
                    "which each micro-batch has something that counts"
                )

    def argument(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Returns the pipeline's argument for the inputs of a call, which must follow at once."""
        for owned in self._owned:
            owned.take()
        return tuple(x if i in self.split else replicate(x) for i, x in enumerate(inputs))

    def step(
        self,
        inputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        sizes: Sequence[tuple[int, ...]],
        keeps_output: bool,
        scaler: GradScaler | None = None,
        updates: StageUpdates | None = None,
    ) -> tuple[list[Tensor], Any]:
        """Runs forward and backward of one mini-batch; arguments as of a call, and as of `GPipe._step`.

        If gradients are disabled, it runs the forward and the loss alone.

        Returns:
            The loss of each micro-batch, multiplied by its weight, and what the model returns, or None.

        Raises:
            ValueError: the model does not return one loss.
        """
        index, output = self._loss()
        self._check_divisors(inputs, parts, sizes)
        weights = self._weights(output, inputs, parts, sizes)
        total = functools.partial(_element, index)
        loss = Loss(total, (_element, index))
        how = None, keeps_output, weights, scaler, updates
        each, found = self.pipeline._step((self.argument(inputs),), {}, loss, total, *how)
        return each, self.combined(found, inputs, parts, sizes) if keeps_output else None

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

    def put_together(
        self,
        returned: Sequence[Any],
        inputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        sizes: Sequence[tuple[int, ...]],
    ) -> Any:
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
        return self.combined(tensors, inputs, parts, sizes)

    def combined(
        self,
        tensors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        sizes: Sequence[tuple[int, ...]],
    ) -> Any:
        """Returns what the model returns, from the outputs of the pipeline; other arguments as of a call."""
        weights = [self._weights(output, inputs, parts, sizes) for output in self.outputs]
        whole = sum(each[0] for each in sizes), *sizes[0][1:]
        found = put_together(self.flow.result, self.outputs, tensors, weights, whole)
        if self.output_class is None:
            return found
        output: Any = object.__new__(self.output_class)  # which was initialised when its parts were made
        for name, value in found.items():
            object.__setattr__(output, name, value)
        return output

    def _weights(
        self,
        output: Output,
        inputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        sizes: Sequence[tuple[int, ...]],
    ) -> list[float]:
        """Returns the weight of each micro-batch in an output; empty if they are concatenated."""
        rule = output.rule
        if rule is None:
            return []
        batch_sizes = [each[0] for each in sizes]
        given = [*zip(parts, sizes, strict=True), (inputs, (sum(batch_sizes), *sizes[0][1:]))]
        measures = [0.0] * len(given)
        if rule.ref is not None:
            measures = [self._measure(rule, rule.ref, *each) for each in given]
        return rule.weights(batch_sizes, measures[:-1], measures[-1])

    def _measure(self, rule: Rule, ref: int, inputs: Sequence[Tensor], sizes: Sequence[int]) -> float:
        with torch.no_grad():
            evaluation = Evaluation(self.flow, dict(enumerate(inputs)), sizes, inputs[0].device)
            return rule.measure(evaluation.value(ref))


def _element(index: int, outputs: Sequence[Tensor]) -> Tensor:
    return outputs[index]


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, Ref)
