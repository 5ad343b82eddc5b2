"""A `Program`: the layers of a recorded call, in a pipeline, and how its outputs are put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe_fast.from_model.cut import cut
from gpipe_fast.from_model.dataflow import Dataflow, Ref
from gpipe_fast.from_model.evaluate import Evaluation
from gpipe_fast.from_model.layer import make_layer
from gpipe_fast.from_model.losses import Rule
from gpipe_fast.from_model.outputs import outputs_of, put_together
from gpipe_fast.from_model.record import open_dataclass
from gpipe_fast.layers.structure import replicate

# Makes a pipeline of layers: `GPipe`, with the user's options.
MakePipeline = Callable[[nn.Sequential], Any]


class Program:
    """The layers of a recorded call of a model, in a pipeline.

    Attributes:
        flow: the record.
        split: the numbers of the inputs that are split into micro-batches.
        outputs: the tensors that the model returns.
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
        self._output_class = output_class
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
        for owned in self._owned:
            owned.take()
        passed = tuple(x if i in self.split else replicate(x) for i, x in enumerate(inputs))
        return self._combined(self.pipeline(passed), inputs, parts, sizes)

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
        return self._combined(tensors, inputs, parts, sizes)

    def _combined(
        self,
        tensors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        sizes: Sequence[tuple[int, ...]],
    ) -> Any:
        batch_sizes = [each[0] for each in sizes]
        whole = sum(batch_sizes), *sizes[0][1:]
        given = [*zip(parts, sizes, strict=True), (inputs, whole)]
        weights = []
        for output in self.outputs:
            rule, measures = output.rule, [0.0] * len(given)
            if rule is not None and rule.ref is not None:
                measures = [self._measure(rule, rule.ref, *each) for each in given]
            weights.append([] if rule is None else rule.weights(batch_sizes, measures[:-1], measures[-1]))
        found = put_together(self.flow.result, self.outputs, tensors, weights)
        return found if self._output_class is None else self._output_class(**found)

    def _measure(self, rule: Rule, ref: int, inputs: Sequence[Tensor], sizes: Sequence[int]) -> float:
        with torch.no_grad():
            evaluation = Evaluation(self.flow, dict(enumerate(inputs)), sizes, inputs[0].device)
            return rule.measure(evaluation.value(ref))


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, Ref)
