"""A `Program`: the layers of a recorded call, in a pipeline, and how its outputs are put together."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode

from gpipe_fast.from_model.cut import cut
from gpipe_fast.from_model.dataflow import Call, Dataflow, Ref
from gpipe_fast.from_model.evaluate import Evaluation
from gpipe_fast.from_model.graph_reader import open_dataclass
from gpipe_fast.from_model.layer import make_layer
from gpipe_fast.from_model.outputs import model_outputs, put_together
from gpipe_fast.from_model.shares import with_shares
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
        is_distributed: bool = False,
    ) -> None:
        self.output_class = output_class
        self.plain_flow, self.split = flow, split
        self._shares = with_shares(flow, split, lengths, loss == "per-microbatch")
        self.flow = flow = self._shares.flow
        found = model_outputs(self._shares, output_names, loss)
        self.outputs = list(found.values())
        self._is_distributed = is_distributed
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
            "numbers of targets": [x for each in self._measures(given) for x in each.tolist() if x],
            "layers of hash": hashlib.sha256(code.encode()).hexdigest()[:8],
        }
        return json.dumps(found)

    def _in_place_of_outputs(self, token: Tensor) -> Any:
        """Returns what the model returns, in a process without it: the token runs the backward."""
        values = self.flow.values
        found = {each.ref: token for each in self.outputs if values[each.ref].requires_grad}
        result = self.flow.result.build(lambda leaf: found.get(leaf.index) if _is_ref(leaf) else leaf)
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
        updates: StageUpdates | None = None,
    ) -> tuple[Losses, Any]:
        """Runs forward and backward of one mini-batch; arguments as of `run_step`.

        If gradients are disabled, it runs the forward and the loss alone.

        Returns:
            The shares of micro-batches in the loss, and what the model returns, or None.

        Raises:
            ValueError: the model does not return one loss.
        """
        objective = Objective(Loss(functools.partial(_element, self._loss())), None, keeps_output)
        args = (self.argument(given),)
        each, found = run_step(self.runner, args, {}, training, objective, scaler, updates)
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
        rows, measures = [], self._measures(given)
        places = {
            leaf.index: i for i, leaf in reversed([*enumerate(self.flow.result.leaves)]) if _is_ref(leaf)
        }
        for part, sizes in zip(given.parts, given.sizes, strict=True):
            with SourcesOf(self.flow, self._shares.sources) as sources:
                leaves = pytree.tree_leaves(open_dataclass(run(part)))
            known = dict(enumerate([*part, *measures])) | sources.values
            own = Evaluation(self.flow, known, sizes, part[0].device)
            rows.append(
                [own.value(each.ref) if each.kind else leaves[places[each.ref]] for each in self.outputs]
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
                self._calls.setdefault(call.target, deque()).append(call if index in wanted else None)
        # The model may change these in place.
        copies = (call for call in flow.calls if call.target is Tensor.clone)
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


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, Ref)
