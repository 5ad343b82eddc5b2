"""The calls of a pipelined model: finds, or makes, the program for each kind of call."""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipe_fast.from_model.batch import Differs, batch_dims, probe_sizes, unify
from gpipe_fast.from_model.blocks import Blocks, check_calls, find_blocks, named_blocks, opened_for
from gpipe_fast.from_model.dataflow import Dataflow, Nested, Refused
from gpipe_fast.from_model.evaluate import Evaluation, Unknown
from gpipe_fast.from_model.losses import cross_entropies, uses
from gpipe_fast.from_model.outputs import leaf_names
from gpipe_fast.from_model.program import Program
from gpipe_fast.from_model.record import Recorder, open_dataclass, place, record, surroundings
from gpipe_fast.from_model.watch import attributes_of
from gpipe_fast.layers.structure import Inputs, arguments_of
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.user_warning import warn_user

# Makes a pipeline of layers with a balance: `GPipe`, with the user's other options.
MakePipeline = Callable[[nn.Sequential, list[int] | None], Any]

# The maximum numbers of kinds of calls, and of programs, that are kept.
_MAX_KINDS = 256
_MAX_PROGRAMS = 32
_NUM_ITEMS = "num_items_in_batch"


class Kind:
    """A kind of call: everything but the elements of tensors is the same.

    Attributes:
        split: the inputs that are split into micro-batches.
        counts_items: whether the number of targets is an input, the last one.
        paths: records by what forward decided, and their programs.
    """

    def __init__(self, split: frozenset[int], counts_items: bool) -> None:
        self.split, self.counts_items = split, counts_items
        self.paths: list[tuple[Dataflow, Program]] = []


class Calls:
    """Runs the calls of a pipelined model.

    Args:
        model: the plain model.
        blocks: the blocks that the user names, or None.
        balance: the number of blocks, or of layers, of each partition; None to measure it.
        num_devices: how many devices there are; None for the CPU.
        loss: ``'exact'`` or ``'per-microbatch'``.
        chunks: the number of micro-batches.
        checkpoint: which micro-batches recompute.
        make_pipeline: makes a pipeline of layers.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks | None,
        balance: list[int] | None,
        num_devices: int | None,
        loss: str,
        chunks: int | Literal["auto"],
        checkpoint: str,
        make_pipeline: MakePipeline,
    ) -> None:
        self.loss, self.chunks, self.checkpoint = loss, chunks, checkpoint
        self.threads_per_stage: int | None = None
        self.blocks: list[nn.Module] = [] if blocks is None else named_blocks(model, blocks)
        self._opened = opened_for(model, self.blocks)
        self._needed = len(balance) if balance is not None else num_devices or 2
        self._balance = balance
        self._make_pipeline = make_pipeline
        self._takes_items: bool | None = None
        self._settled = False
        self._forget()

    def _forget(self) -> None:
        self._kinds: OrderedDict[Any, Kind] = OrderedDict()
        self._programs: list[Program] = []

    @property
    def program(self) -> Program:
        """The program of the latest call."""
        return self._programs[-1]

    @property
    def num_stages(self) -> int:
        """The number of stages, as far as it is known."""
        return len(self._programs[-1].pipeline.balance) if self._programs else self._needed

    def new_pipeline(self, layers: nn.Sequential) -> Any:
        """Returns a pipeline of layers, with the balance of the first one."""
        balance, blocks = self._balance, len(layers) - 2
        if balance is not None and sum(balance) == blocks:
            balance = list(balance)
            balance[0] += 1
            balance[-1] += 1
        elif balance is not None and sum(balance) != len(layers):
            raise ValueError(
                f"balance must add up to the {blocks} blocks, or to {len(layers)} with the layer before and the "
                f"layer after them; got {balance}, which adds up to {sum(balance)}"
            )
        return self._make_pipeline(layers, balance)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to copy or pickle: without programs, which are made on demand."""
        return {k: v for k, v in vars(self).items() if k not in ("_kinds", "_programs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a mini-batch.

        Args:
            model: the plain model.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        inputs = _inputs(model, args, kwargs)
        call = _CallOf(self, model, inputs)
        with TRACING_LOCK:
            kind, program, parts = call.find()
        pipeline = program.pipeline
        pipeline.chunks, pipeline.checkpoint = self.chunks, self.checkpoint
        pipeline.threads_per_stage = self.threads_per_stage
        pipeline.training = model.training
        if self._settled and pipeline.balance != self._balance:
            pipeline.balance = self._balance
        tensors = list(inputs.tensors)
        if kind.counts_items:
            tensors.append(parts[0][-1])
        returned = program(tensors, parts, call.sizes)
        if not self._settled:  # the first call measures the layers
            self._balance, self._settled = pipeline.balance, True
        return returned

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the program of a call, and finds the blocks if the user names none."""
        inputs = _inputs(model, args, kwargs)
        with TRACING_LOCK:
            _CallOf(self, model, inputs).find()


def _inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Returns the arguments of a call, without a cache and with the number of targets as a tensor."""
    kwargs = dict(kwargs)
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) and kwargs.get("use_cache") is None:
        kwargs["use_cache"] = False
    number = kwargs.get(_NUM_ITEMS)
    if type(number) is int:  # a constant would lead to a new program for each number
        kwargs[_NUM_ITEMS] = torch.tensor(number)
    return Inputs.of(args, kwargs, 0)


class _CallOf:
    """One call: its micro-batches, and what is known about its kind."""

    def __init__(self, calls: Calls, model: nn.Module, inputs: Inputs) -> None:
        self._calls, self._model, self._inputs = calls, model, inputs
        self._names = {module: name for name, module in model.named_modules()}
        self._whole = frozenset(i for i, dim in enumerate(inputs.dims.inputs) if dim is None)
        self._device = inputs.tensors[0].device if inputs.tensors else torch.device("cpu")
        self._output: Any = None
        self._items: Tensor | None = None
        self.sizes: list[int] = []

    def find(self) -> tuple[Kind, Program, list[list[Tensor]]]:
        """Returns the kind of the call, its program, and the inputs of each micro-batch."""
        calls, key = self._calls, self._key()
        kind = calls._kinds.get(key)
        if kind is None:
            kind = self._new_kind()
            calls._kinds[key] = kind
            while len(calls._kinds) > _MAX_KINDS:
                calls._kinds.popitem(last=False)
        parts = self._parts(kind)
        program = self._program(kind, parts)
        calls._programs.remove(program)
        calls._programs.append(program)
        return kind, program, parts

    def _key(self) -> Any:
        tensors = tuple(
            (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) for x in self._inputs.tensors
        )
        modes = surroundings(self._device), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        attributes = attributes_of(self._calls._opened)
        return self._inputs.structure, tensors, self._whole, modes, attributes, self._calls.chunks

    # What kind of call it is.

    def _new_kind(self) -> Kind:
        calls, tensors = self._calls, self._inputs.tensors
        self._check_hooks()
        if not calls.blocks:
            calls.blocks, calls._opened = find_blocks(self._model, self._record_whole, calls._needed)
        first_error: Exception | None = None
        for split in self._possible_splits():
            try:
                return self._kind_of(split)
            except Refused:
                raise
            except Exception as error:  # the model's own, for inputs of shapes that do not fit together
                first_error = first_error or error
        if first_error is None:
            raise ValueError(
                "a call needs at least one tensor with a batch dimension, got "
                f"{[list(x.shape) for x in tensors]}"
            )
        if isinstance(first_error, Differs):
            raise Refused(f"for another batch size, forward {first_error}") from None
        raise first_error

    def _possible_splits(self) -> Iterator[frozenset[int]]:
        """Returns which inputs may be split: those whose first dimension is the batch, if not by chance."""
        tensors = self._inputs.tensors
        open_ = [i for i, x in enumerate(tensors) if i not in self._whole and x.dim()]
        for batch in dict.fromkeys(tensors[i].shape[0] for i in open_):
            split = [i for i in open_ if tensors[i].shape[0] == batch]
            yield frozenset(split)
            doubtful = [i for i in split if batch in tensors[i].shape[1:]]
            others = [i for i in reversed(split) if i not in doubtful]
            if len(doubtful) > 1:
                yield frozenset(split) - frozenset(doubtful)
            for index in [*doubtful, *others]:
                if len(split) > 1:
                    yield frozenset(split) - {index}

    def _kind_of(self, split: frozenset[int]) -> Kind:
        kind = Kind(split, False)
        first = self._parts(kind)[0]
        flow = self._flow(kind, first, self.sizes[0])
        output = self._output
        with_items = self._kind_with_items(kind, flow, first)
        if with_items is not None:
            return with_items
        self._output = output
        self._add_path(kind, flow)
        return kind

    def _kind_with_items(self, kind: Kind, flow: Dataflow, first: list[Tensor]) -> Kind | None:
        """Returns the kind of call that also gets the number of targets, if the model's loss uses it."""
        if self._calls._takes_items is False or not self._takes_argument(_NUM_ITEMS):
            return None
        if not any(cross_entropies(flow, ref) for ref in self._scalars(flow)):
            return None
        found = Kind(kind.split, True)
        items = len(first)
        try:
            counted = self._flow(found, [*first, torch.tensor(1)], self.sizes[0])
        except TypeError:  # forward does not take it
            self._calls._takes_items = False
            return None
        if not any(uses(counted, ref, [items]) for ref in self._scalars(counted)):
            return None
        self._add_path(found, counted)
        return found

    def _takes_argument(self, name: str) -> bool:
        if name in self._inputs_kwargs():
            return False
        parameters = inspect.signature(self._model.forward).parameters.values()
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)

    def _inputs_kwargs(self) -> dict[str, Any]:
        return arguments_of(self._inputs.structure.build(self._inputs.tensors))[1]

    @staticmethod
    def _scalars(flow: Dataflow) -> list[int]:
        """Returns the values without a batch dimension that the model returns."""
        refs = dict.fromkeys(flow.result.refs())
        return [ref for ref in refs if not batch_dims(flow.values[ref])]

    # Micro-batches.

    def _parts(self, kind: Kind) -> list[list[Tensor]]:
        tensors, calls = self._inputs.tensors, self._calls
        batch = tensors[min(kind.split)].shape[0]
        chunks = calls.chunks
        if chunks == "auto":
            chunks = max(1, min(4 * calls.num_stages, batch))
        self.sizes = [len(part) for part in torch.empty(batch, 0).chunk(chunks)]
        split = {i: tensors[i].chunk(chunks) for i in kind.split}
        parts = [
            [split[i][m] if i in split else x for i, x in enumerate(tensors)] for m in range(len(self.sizes))
        ]
        if kind.counts_items and kind.paths:
            items = torch.tensor(self._count_items(kind, parts), device=self._device)
            parts = [[*part, items] for part in parts]
        return parts

    def _count_items(self, kind: Kind, parts: Sequence[Sequence[Tensor]]) -> int:
        """Returns how many targets of the whole mini-batch count, by the rule of the model's loss."""
        flow = kind.paths[0][0]
        mean = next(mean for ref in self._scalars(flow) for mean in cross_entropies(flow, ref))
        with torch.no_grad():
            return sum(
                int((evaluation.value(mean.targets) != mean.ignored).sum())
                for part, size in zip(parts, self.sizes, strict=True)
                for evaluation in [Evaluation(flow, dict(enumerate(part)), (size,), self._device)]
            )

    # Programs.

    def _program(self, kind: Kind, parts: Sequence[Sequence[Tensor]]) -> Program:
        """Returns the program for what forward decides for these micro-batches."""
        found = [self._path(kind, part, size) for part, size in zip(parts, self.sizes, strict=True)]
        if all(program is found[0] for program in found):
            return found[0]
        warn_user(
            "forward reads numbers from its input tensors, and does something else for some micro-batches than "
            "for others; all micro-batches now do what the whole mini-batch does"
        )
        whole = [*self._inputs.tensors, *parts[0][len(self._inputs.tensors) :]]
        return self._path(kind, whole, sum(self.sizes))

    def _path(self, kind: Kind, tensors: Sequence[Tensor], size: int) -> Program:
        for flow, program in kind.paths:
            if self._holds(flow, tensors, size):
                return program
        return self._add_path(kind, self._flow(kind, tensors, size))

    def _holds(self, flow: Dataflow, tensors: Sequence[Tensor], size: int) -> bool:
        if not flow.decisions:
            return True
        evaluation = Evaluation(flow, dict(enumerate(map(_with_data, tensors))), (size,), self._device)
        with torch.no_grad():
            return all(evaluation.call(each.target, each.arguments) == each.answer for each in flow.decisions)

    def _add_path(self, kind: Kind, flow: Dataflow) -> Program:
        calls = self._calls
        known = (p for p in calls._programs if p.split == kind.split)
        unconditional = dataclasses.replace(flow, decisions=()).pruned()
        program = next((p for p in known if _same(p.flow, unconditional)), None)
        if program is None:
            names = [self._names[block] for block in calls.blocks]
            outputs = leaf_names(open_dataclass(self._output))
            program = Program(
                unconditional, kind.split, calls.blocks, names, outputs, calls.loss, calls.new_pipeline
            )
            calls._programs.append(program)
            del calls._programs[:-_MAX_PROGRAMS]
        kind.paths.append((flow, program))
        return program

    # Records.

    def _flow(self, kind: Kind, tensors: Sequence[Tensor], size: int) -> Dataflow:
        """Records a call with these tensors, and with other batch sizes; returns what all have in common."""
        decide = _decide_by(tensors, self._device)
        flow, self._output = self._record(tensors, decide, self._calls._opened, self._calls.blocks)
        check_calls(flow, self._calls.blocks, self._names)
        answers = [each.answer for each in flow.decisions]
        taken = {size for x in (*tensors, *self._model.parameters()) for size in x.shape}
        probes = probe_sizes(taken | set(self.sizes), 2)
        others = [*probes, *(each for each in dict.fromkeys(self.sizes) if each != size)]
        flows = [flow.pruned()]
        for other in others:
            resized = [_resized(x, other) if i in kind.split else x for i, x in enumerate(tensors)]
            again, _ = self._record(resized, _repeat(answers), self._calls._opened, self._calls.blocks)
            flows.append(again.pruned())
        return unify(flows, [(size,), *((other,) for other in others)])

    def _record_whole(self, opened: Any, blocks: Any) -> Dataflow:
        tensors = self._inputs.tensors
        return self._record(tensors, _decide_by(tensors, self._device), opened, blocks)[0]

    def _record(self, tensors: Sequence[Tensor], decide: Any, opened: Any, blocks: Any) -> tuple[Dataflow, Any]:
        count = len(self._inputs.tensors)

        def build(inputs: Sequence[Tensor]) -> tuple[Any, Any]:
            args, kwargs = arguments_of(self._inputs.structure.build(inputs[:count]))
            if len(inputs) > count:
                kwargs = {**kwargs, _NUM_ITEMS: inputs[count]}
            return args, kwargs

        return record(
            self._model, self._model.forward, build, tensors, set(opened), set(blocks), self._device, decide
        )

    def _check_hooks(self) -> None:
        """Refuses hooks on modules that contain blocks, because such modules are not called as a whole."""
        for module in self._calls._opened:
            if module is not self._model and (module._forward_hooks or module._forward_pre_hooks):
                raise Refused(
                    f"{self._names.get(module)} ({type(module).__name__}) contains blocks and has hooks, which "
                    "would not be called; register them on its blocks or on the model"
                )


def _with_data(tensor: Tensor) -> Tensor:
    """Returns a tensor that has elements: ones in place of a meta tensor."""
    return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


def _resized(tensor: Tensor, size: int) -> Tensor:
    """Returns a tensor on the meta device with another batch size, and dimensions in the same order."""
    shape = [size, *tensor.shape[1:]]
    strides, span = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (tensor.stride(d), -d)):
        if tensor.stride(dim) or tensor.shape[dim] == 1:
            strides[dim] = span
            span *= shape[dim]
    found = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    return found.requires_grad_(tensor.requires_grad)


def _decide_by(tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Returns a function that reads from tensors what forward reads from its inputs."""

    def decide(target: Any, arguments: Nested, recorder: Recorder) -> Any:
        flow = Dataflow(
            recorder.num_inputs, tuple(recorder.values), tuple(recorder.calls), arguments, (), _NO_SURROUNDINGS
        )
        known = dict(enumerate(map(_with_data, tensors)))

        def answer(draw: Any) -> Any:
            evaluation = Evaluation(flow, known, (), known_device, draw=draw, read=recorder.tensors)
            return evaluation.call(target, arguments)

        known_device = device if device.type != "meta" else torch.device("cpu")
        with torch.no_grad():
            try:
                return answer(None)
            except Unknown as unknown:
                reason = unknown
            try:  # a random number in [0, 1) that is compared with 0, as by layerdrop
                extremes = [answer(_constant_draw(flow, number)) for number in (0.0, 1 - 2**-24)]
            except Unknown:
                extremes = []
        if len(extremes) == 2 and extremes[0] == extremes[1]:
            return extremes[0]
        raise Refused(f"forward branches on a tensor at {place()}, which depends on {reason}")

    return decide


_NO_SURROUNDINGS = surroundings(torch.device("cpu"))


def _constant_draw(flow: Dataflow, number: float) -> Any:
    def draw(call: Any) -> Tensor:
        if call.target is not torch.rand:
            raise Unknown("random numbers")
        value = flow.values[next(call.result.refs())]
        return torch.full(value.shape, number, dtype=value.dtype)

    return draw


def _repeat(answers: Sequence[Any]) -> Any:
    left = iter(answers)

    def decide(target: Any, arguments: Nested, recorder: Recorder) -> Any:
        try:
            return next(left)
        except StopIteration:
            raise Differs(f"reads another number from a tensor at {place()}") from None

    return decide


def _same(a: Dataflow, b: Dataflow) -> bool:
    """Returns whether two records make the same calls."""
    try:
        unify([a, b], [(), ()])
    except Differs:
        return False
    return a.num_inputs == b.num_inputs and a.surroundings == b.surroundings
