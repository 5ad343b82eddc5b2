"""A `Program`: the layers of a recorded call, in a pipeline, and how its outputs are put together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.cut import cut
from gpipe_fast.from_model.dataflow import Dataflow
from gpipe_fast.from_model.evaluate import Evaluation
from gpipe_fast.from_model.layer import make_layer
from gpipe_fast.from_model.outputs import outputs_of, put_together
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
        split: Sequence[int],
        blocks: Sequence[nn.Module],
        names: Sequence[str],
        output_names: Sequence[str],
        loss: str,
        make_pipeline: MakePipeline,
    ) -> None:
        self.flow, self.split = flow, frozenset(split)
        found = outputs_of(flow, output_names, split, loss, ())
        self.outputs = list(found.values())
        parts = cut(flow, blocks, list(found))
        dims = {output.ref: output.dim for output in self.outputs}
        made = [*(make_layer(flow, part) for part in parts[:-1]), make_layer(flow, parts[-1], dims)]
        self.layers = [layer for layer, _ in made]
        self._owned = [owned for _, owned in made]
        titles = ["start", *(name.replace(".", "_") for name in names), "end"]
        self.pipeline = make_pipeline(nn.Sequential(OrderedDict(zip(titles, self.layers, strict=True))))
        for owned in self._owned:
            owned.give_back()

    def __call__(self, inputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Any:
        """Runs the pipeline on one mini-batch.

        Args:
            inputs: the input tensors.
            parts: the input tensors of each micro-batch.
            sizes: how many samples each micro-batch has.
        """
        for owned in self._owned:
            owned.take()
        counts = [
            [self._count(output.rule, part, size) for part, size in zip(parts, sizes, strict=True)]
            if output.rule is not None and output.rule.kind == "targets"
            else []
            for output in self.outputs
        ]
        passed = tuple(x if i in self.split else replicate(x) for i, x in enumerate(inputs))
        tensors = self.pipeline(passed)
        return put_together(self.flow.result, self.outputs, tensors, sizes, counts)

    def _count(self, rule: Any, part: Sequence[Tensor], size: int) -> int:
        known = dict(enumerate(part))
        with torch.no_grad():
            targets = Evaluation(self.flow, known, (size,), part[0].device).value(rule.targets)
        return int(rule.count(targets))
