"""The calls of a pipelined model: finds, or makes, the program for each kind of call."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast.arguments import check_module, enough_chunks
from gpipe_fast.devices import Device
from gpipe_fast.from_model.blocks import Blocks, check_calls, find_blocks, named_blocks, opened_for
from gpipe_fast.from_model.capture import (
    CapturedCall,
    Given,
    Modules,
    capture_call,
    has_gaps,
    surroundings,
)
from gpipe_fast.from_model.dataflow import CannotCut, Dataflow, Differs, at_sizes, batch_dims
from gpipe_fast.from_model.evaluate import decide_by, repeated
from gpipe_fast.from_model.graph_reader import open_dataclass
from gpipe_fast.from_model.program import CallKind, Group, Path, Program, SplitInputs, leaf_names
from gpipe_fast.from_model.shares import reducing_modules, small_lengths, uses_number
from gpipe_fast.from_model.stand_ins import PLAIN
from gpipe_fast.layers.structure import Inputs, arguments_of, changing_number
from gpipe_fast.lower.checkpoint import CheckpointChoice
from gpipe_fast.randomness.random import keyed_rng
from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.module_warnings import changing_number_text
from gpipe_fast.runtime.placement import Placement
from gpipe_fast.runtime.processes import ONE_PROCESS, Processes
from gpipe_fast.runtime.runner import Runner
from gpipe_fast.runtime.settings import Settings
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.strides import bits_of
from gpipe_fast.trace.layer_states import LayerState
from gpipe_fast.training.step import Losses
from gpipe_fast.user_warning import warn_user

_log = logging.getLogger("gpipe_fast")

# The maximum numbers of kinds of calls, of paths of a kind, and of programs, that are kept.
_MAX_KINDS = 256
_MAX_PATHS = 16
_MAX_PROGRAMS = 32
_NUM_ITEMS = "num_items_in_batch"


def page(name: str) -> str:
    """Returns the path of a page of the documentation, which an installed package has, too."""
    return os.path.join(os.path.dirname(os.path.dirname(__file__)), "docs", name)


_GUIDE = f"see 'A model that is not a Sequential', {page('guide/not_sequential.md')}"

# The input tensors of each micro-batch.
Parts = list[list[Tensor]]


@dataclass(frozen=True)
class Making:
    """How a model becomes a pipeline, besides by the settings of its runners.

    Attributes:
        face: returns the `GPipe` over a runner.
        blocks: the blocks that the user names, or None.
        balance: the number of blocks, or of layers, of each partition; None to measure it.
        devices: as for `GPipe`.
        num_devices: how many devices there are; None for the CPU.
        loss: ``'exact'`` or ``'per-microbatch'``.
        processes: the processes of the stages.
    """

    face: Callable[[Runner], Any]
    blocks: Blocks | None = None
    balance: Sequence[int] | None = None
    devices: Iterable[Device] | Device | None = None
    num_devices: int | None = None
    loss: str = "exact"
    processes: Processes = ONE_PROCESS


class Calls:
    """Runs the calls of a pipelined model.

    Args:
        model: the plain model.
        how: how it becomes a pipeline.
        settings: the settings of all runners.

    Attributes:
        how: as above.
        settings: as above; other ones hold from the next call on.
        processes: the processes of the stages.
        checkpoint_before: the checkpoint mode that gradient checkpointing has replaced, or None.
    """

    def __init__(self, model: nn.Module, how: Making, settings: Settings) -> None:
        self.how, self.settings, self.processes = how, settings, how.processes
        self._settled = False
        self.blocks: list[nn.Module] = []
        self._opened: set[nn.Module] = set()  # without the model itself
        if how.blocks is not None:
            self.set_blocks(model, named_blocks(model, how.blocks))
        self._balance = None if how.balance is None else list(how.balance)
        self._needed = how.num_devices or 2 if self._balance is None else len(self._balance)
        # The modules that return values of all samples, and whether they can be opened.
        self._reducing: dict[nn.Module, bool] = {}
        self.checkpoint_before: CheckpointChoice | None = None
        self._warned_of_numbers = False
        self._forget()

    def _forget(self) -> None:
        # By all but sizes: the shapes of the latest new kind of call, dimensions that vary, and the kinds.
        self._kinds: Cache[Any, tuple[list[torch.Size], list[Group], list[CallKind]]] = Cache(_MAX_KINDS)
        self._programs: list[Program] = []

    def set_blocks(
        self, model: nn.Module, blocks: list[nn.Module], opened: set[nn.Module] | None = None
    ) -> None:
        """Sets the blocks, and the modules that are recorded by what they call."""
        if self.how.balance is None:  # for other blocks
            self._balance, self._settled = None, False
        self.blocks = blocks
        self._opened = (opened_for(model, blocks) if opened is None else opened) - {model}

    @property
    def program(self) -> Program:
        """The program of the latest call."""
        return self._programs[-1]

    @property
    def num_stages(self) -> int:
        """The number of stages, as far as it is known."""
        return len(self._programs[-1].runner.stages) if self._programs else self._needed

    def configure(self, **changes: Any) -> None:
        """Changes settings; the next call reads them.

        Raises:
            TypeError: a value has a wrong type.
            ValueError: a value is invalid.
        """
        self.settings = dataclasses.replace(self.settings, **changes)

    def new_runner(self, layers: nn.Sequential) -> Runner:
        """Returns a runner of layers, with the balance of the first one."""
        balance, blocks = self._balance, len(layers) - 2
        if balance is not None and sum(balance) == blocks:
            balance = list(balance)
            balance[0] += 1
            balance[-1] += 1
        elif balance is not None and sum(balance) != len(layers):
            raise ValueError(
                f"balance must add up to the {blocks} blocks, or to {len(layers)} with the layers before and "
                f"after them, got {balance}, which adds up to {sum(balance)}"
            )
        check_module(layers)
        children = dict(layers.named_children())
        placement = Placement.checked(children, balance, self.how.devices, self.processes)
        runner = Runner(children, placement, self.settings, self.processes)
        runner.warns_of_inputs = False  # which inputs are split is known
        if self.processes.is_mesh:
            self._balance, self._settled = runner.placement.balance, True  # nothing is measured
            if self._programs:
                runner.share_pipeline(self.program.runner)
        return runner

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to copy or pickle: without programs, which are made on demand."""
        if self.processes.is_mesh:
            raise TypeError(
                "a model with a mesh cannot be copied or pickled, because its processes make it together; "
                "save model.state_dict(), which has the tensors of the own stages"
            )
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
        return self._run(model, args, kwargs, lambda program, given: program.call(given, model.training))

    def step(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *how: Any
    ) -> tuple[Losses, Any]:
        """Runs a step of a mini-batch: `Program.step` with the arguments ``how``; others as of `run`."""
        found: tuple[Losses, Any] = self._run(
            model, args, kwargs, lambda program, given: program.step(given, model.training, *how)
        )
        return found

    def _run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        with self.processes.reporting():
            program, given = self.begin(model, args, kwargs)
            self.processes.check_inputs(lambda: program.readings(given))
            returned = run(program, given)
        self.end(program)
        return returned

    def runners(self) -> list[Runner]:
        """Returns the runners of all programs, with the tensors that the user's modules have now."""
        for program in self._programs:
            program.take()
        return [program.runner for program in self._programs]

    def move_to_devices(self) -> None:
        """Moves what was assigned to the devices of the stages."""
        for runner, program in zip(self.runners(), self._programs, strict=True):
            runner.move_layers()
            program.give_back()

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Program, SplitInputs]:
        """Returns the program of a mini-batch, with the present settings, and the arguments of its call."""
        _, program, given = self._find(model, args, kwargs)
        runner = program.runner
        if runner.settings is not self.settings:
            runner.apply(self.settings)
        if self._settled and self._balance is not None and runner.placement.balance != self._balance:
            runner.place(self._balance, runner.placement.choice)
        return program, given

    def end(self, program: Program) -> None:
        """Keeps the balance that the first call has measured."""
        if not self._settled:
            self._balance, self._settled = list(program.runner.placement.balance), True

    def loop(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the micro-batches by the plain model, one after the other, and returns what `run` does."""
        self.processes.refuse("the plain loop", "make the model without mesh to compare with it")
        call, program, given = self._find(model, args, kwargs)
        with keyed_rng(model):  # type: ignore[arg-type]
            return program.plain_loop(call.plain, given)

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes the program of a call, and finds the blocks if the user names none."""
        if getattr(getattr(model, "config", None), "use_cache", False):
            _log.info(
                "%s: a pipeline keeps no cache of earlier tokens, so use_cache is off", type(model).__name__
            )
        self._find(model, args, kwargs)

    def batch_size(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Returns the number of samples of a mini-batch; arguments as of `run`."""
        _, _, given = self._find(model, args, kwargs)
        return sum(sizes[0] for sizes in given.sizes)

    def _find(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_CallOf, Program, SplitInputs]:
        """Returns a call, its program, and its inputs; arguments as of `run`."""
        call = _CallOf(self, model, _inputs(model, args, kwargs))
        try:
            # No block may run in Python while the model is recorded, because its parameters are away then. A
            # running block may itself wait for the tracing lock, so the tracing lock is acquired last.
            with contextlib.ExitStack() as held, _caches_off(call.modules):
                for program in list(self._programs):
                    for lock in program.runner.locks():
                        held.enter_context(lock)
                held.enter_context(TRACING_LOCK)
                return call, *call.find()
        except (CannotCut, Differs) as refused:
            otherwise = "for another batch size, forward " if isinstance(refused, Differs) else ""
            raise RuntimeError(
                f"{call.title} cannot be cut into layers: {otherwise}{refused}; name others with blocks=..., "
                f"{call.advice_on_inner()}or write the layers yourself ({_GUIDE})"
            ) from None
        except (TypeError, AttributeError) as error:
            advice = call.advice_on_nested_arguments()
            if not advice:
                raise
            raise TypeError(f"{error}; {advice}") from error


def caches_in(kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the names of arguments that are caches of earlier tokens."""
    names = ("past_key_values", "cache", "cache_params")  # of transformers before and since 5.24, and Mamba's
    return [x for x in names if kwargs.get(x) is not None and not isinstance(kwargs[x], Tensor)]


def wants_cache(kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the keyword arguments of a call ask for a cache of earlier tokens."""
    return kwargs.get("use_cache") is True or bool(caches_in(kwargs))


def _inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Returns the arguments of a call, without a cache and with the number of targets as a tensor."""
    kwargs = dict(kwargs)
    if kwargs.get("use_cache"):
        warn_user("a pipeline keeps no cache of earlier tokens: use_cache=True becomes use_cache=False")
    if getattr(getattr(model, "config", None), "use_cache", False) or kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    for name in caches_in(kwargs):
        raise ValueError(
            f"a pipeline keeps no cache of earlier tokens, got {name}; disable gradients to run the plain "
            "model, as model.generate(...) does, or call model.plain()"
        )
    number = kwargs.get(_NUM_ITEMS)
    if type(number) is int:  # a constant would lead to a new program for each number
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        kwargs[_NUM_ITEMS] = torch.tensor(number, device=next((x.device for x in tensors), "cpu"))
    return Inputs.of(args, kwargs, 0)


@contextlib.contextmanager
def _caches_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Sets ``use_cache=False`` in the configurations of modules, in a block."""
    configs = {id(config): config for m in modules if (config := getattr(m, "config", None)) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        for config in on:
            config.use_cache = True


class _CallOf:
    """One call: its micro-batches, and what is known about its kind.

    Attributes:
        title: the class of the model.
        modules: the modules of the model.
    """

    def __init__(self, calls: Calls, model: nn.Module, inputs: Inputs) -> None:
        self._calls, self._model, self._inputs = calls, model, inputs
        self.title = type(model).__name__
        self._names = {module: name for name, module in model.named_modules()}
        self.modules = list(self._names)
        self._whole = frozenset(i for i, dim in enumerate(inputs.dims.inputs) if dim is None)
        found = inputs.tensors[0].device if inputs.tensors else torch.device("cpu")
        self._device = torch.device("cpu") if found.type == "meta" else found
        self._may_read = not calls.processes.is_mesh  # the tensors of all modules
        self._found: dict[Any, CapturedCall] = {}  # to find the blocks

    def find(self) -> tuple[Program, SplitInputs]:
        """Returns the program of the call, and its inputs and those of its micro-batches."""
        calls, shapes = self._calls, [x.shape for x in self._inputs.tensors]
        _, _, kinds = calls._kinds.lookup(self._key()) or ([], [], [])
        kind = next((each for each in kinds if each.includes(shapes)), None)
        if kind is None:
            number, num_others = changing_number(self._inputs.structure, (own for own, *_ in calls._kinds))
            if num_others > 1 and not calls._warned_of_numbers:
                calls._warned_of_numbers = True
                warn_user(changing_number_text(number))
            kind = self._new_kind()
        parts = self._parts(kind)
        program = self._program(kind, parts)
        calls._programs = [*(each for each in calls._programs if each is not program), program]
        return program, SplitInputs(self._inputs.tensors, parts, self.sizes(kind, parts))

    def advice_on_nested_arguments(self) -> str:
        """Returns how to pass the tensors of the first list, tuple or dict among the arguments, if any."""
        args, kwargs = arguments_of(self._inputs.structure.build(self._inputs.tensors))
        for name, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, (list, tuple, dict)):
                unpacked = "**tensors" if isinstance(value, dict) else "*tensors"
                return (
                    f"argument {name!r} is a {type(value).__name__} of {len(value)}, and forward gets it as "
                    f"one argument; pass one for each tensor, model({unpacked}), or one batched tensor"
                )
        return ""

    def advice_on_inner(self) -> str:
        """Returns which module has the most blocks, and could be a pipeline in the model, if there is one."""
        inner = max(
            (each for each in self.modules if any(isinstance(x, nn.ModuleList) for x in each.children())),
            key=lambda each: max(len(list(x)) for x in each.children() if isinstance(x, nn.ModuleList)),
            default=self._model,
        )
        name = self._names[inner]
        return name and f"pipeline {name} alone, as for vision-language models, "

    def _key(self) -> Any:
        """Returns what the kind of a call depends on besides sizes."""
        tensors = tuple((*_order(x), x.dtype, x.requires_grad, bits_of(x)) for x in self._inputs.tensors)
        modes = surroundings(self._device), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        modules = self.modules
        model = (
            # By identity, because programs keep them alive; the plain model is another object in each call.
            tuple((id(module), module.training) for module in modules if module is not self._model),
            self._model.training,
            tuple(
                (type(x), x.dtype, x.requires_grad, tuple(x.shape))
                for module in modules
                for table in (module._parameters, module._buffers)
                for x in table.values()
                if x is not None
            ),
        )
        called = tuple(map(_attributes_of, self._called()))
        # Of these, PyTorch 2.11 guards the code alone, and not the default arguments.
        values = [x for m in (self._model, *self._calls._opened) for x in vars(m).values()]
        functions = tuple(x for x in values if isinstance(x, FunctionType))
        more = self._device, self._whole, modes, model, called, functions
        return self._inputs.structure, tensors, more

    def _called(self) -> Iterator[nn.Module]:
        """Returns the modules besides blocks that are called as a whole: their results may depend on them."""
        blocks, opened = set(self._calls.blocks), self._calls._opened
        for module in [self._model, *opened] if blocks else []:
            yield from (each for each in module.children() if each not in opened and each not in blocks)

    # What kind of call it is.

    def _new_kind(self) -> CallKind:
        calls, tensors = self._calls, self._inputs.tensors
        self._check_hooks()
        splits = list(self._possible_splits())
        if not splits:
            raise ValueError(
                "a call needs at least one tensor with a batch dimension, got "
                f"{[list(x.shape) for x in tensors]}; pass a batch of samples"
            )
        if not calls.blocks or not self._names.keys() >= set(calls.blocks):
            if calls.how.blocks is not None:
                calls.set_blocks(self._model, named_blocks(self._model, calls.how.blocks))
            else:
                found = find_blocks(self._model, self._record_whole, calls._needed)
                calls.set_blocks(self._model, *found)
        lengths, known = self._length_groups()
        first_error: Exception | None = None
        for split in splits:
            for groups in (lengths, []) if lengths else ([],):
                try:
                    known.append(self._kind_of(split, groups))
                    return known[-1]
                except CannotCut as refused:
                    if not groups:
                        raise
                    first_error = first_error or refused  # lengths as numbers may do
                except Exception as error:  # the model's own, for inputs of shapes that do not fit together
                    first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _length_groups(self) -> tuple[list[Group], list[CallKind]]:
        """Returns the dimensions that vary between calls that are otherwise equal, and their kinds."""
        key, shapes = self._key(), [x.shape for x in self._inputs.tensors]
        before, known, kinds = self._calls._kinds.get(key, (shapes, self._likely_lengths(), []))
        group_of = {dim: index for index, group in enumerate(known) for dim in group}
        groups: dict[Any, list[tuple[int, int]]] = {}
        for index, (old, new) in enumerate(zip(before, shapes, strict=True)):
            for dim in range(1, len(new)):
                group = group_of.get((index, dim))
                if group is not None or old[dim] != new[dim]:
                    groups.setdefault((group, old[dim], new[dim]), []).append((index, dim))
        found = [tuple(group) for group in groups.values()]
        self._calls._kinds[key] = shapes, found, kinds
        return found, kinds

    def _likely_lengths(self) -> list[Group]:
        """Returns the dimensions that are probably lengths: the second ones of tokens, masks and labels."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for index, tensor in enumerate(self._inputs.tensors):
            if tensor.dim() == 2 and not tensor.is_floating_point() and index not in self._whole:
                groups.setdefault(tensor.shape[1], []).append((index, 1))
        return [tuple(group) for group in groups.values()]

    def _possible_splits(self) -> Iterator[dict[int, int]]:
        """Returns which inputs may be split, and where: along the first dimension, if not by chance."""
        tensors = self._inputs.tensors
        candidates = [i for i, x in enumerate(tensors) if i not in self._whole and x.dim()]
        for batch in dict.fromkeys(tensors[i].shape[0] for i in candidates):
            split = {i: 0 for i in candidates if tensors[i].shape[0] == batch}
            yield split
            # As of three kinds of positions for each sample.
            inner = {
                i: tensors[i].shape.index(batch)
                for i in candidates
                if i not in split and tuple(tensors[i].shape).count(batch) == 1
            }
            if inner:
                yield split | inner
            doubtful = [i for i in split if batch in tensors[i].shape[1:]]
            if len(doubtful) > 1:
                yield {i: 0 for i in split if i not in doubtful}
            for index in [*doubtful, *(i for i in reversed(split) if i not in doubtful)]:
                if len(split) > 1:
                    yield {i: 0 for i in split if i != index}

    def _kind_of(self, split: Mapping[int, int], lengths: Sequence[Group]) -> CallKind:
        kind = CallKind(split, lengths, [x.shape for x in self._inputs.tensors])
        parts = self._parts(kind)
        fixed = self._fixed(kind, parts[0])
        # The call of the first micro-batch may have been captured to find the blocks.
        key = self._likely_key(kind, parts, self._calls._opened | {self._model}, self._calls.blocks)
        captured = self._found.get(key) or self._captured(kind, parts[0], fixed)
        blocks = [call for call in captured.flow.calls if call.target in self._calls.blocks]
        if not any(captured.flow.depends_on(call.arguments.refs(), kind.split) for call in blocks):
            # Each micro-batch would compute the whole mini-batch.
            raise Differs("passes the same inputs to its blocks")
        self._add_captured(kind, captured, fixed, parts)
        return kind

    @staticmethod
    def _likely_key(
        kind: CallKind, parts: Parts, opened: Iterable[nn.Module], blocks: Iterable[nn.Module]
    ) -> Any:
        sizes = tuple(kind.split.items()), tuple(kind.lengths)
        return *sizes, len(parts[0]), frozenset(opened), frozenset(blocks)

    # Micro-batches.

    def _parts(self, kind: CallKind) -> Parts:
        tensors, calls = self._inputs.tensors, self._calls
        chunks = calls.settings.chunks
        if chunks == "auto":
            first, dim = next(iter(kind.split.items()))
            chunks = enough_chunks(calls.num_stages, tensors[first].shape[dim])
        split = {i: tensors[i].chunk(int(chunks), dim) for i, dim in kind.split.items()}
        count = min(map(len, split.values()))
        parts = [[split[i][m] if i in split else x for i, x in enumerate(tensors)] for m in range(count)]
        return parts

    @staticmethod
    def sizes(kind: CallKind, parts: Sequence[Sequence[Tensor]]) -> list[tuple[int, ...]]:
        """Returns the sizes of each micro-batch that numbers of a record follow: batch size and lengths."""
        first, dim = next(iter(kind.split.items()))
        lengths = tuple(parts[0][group[0][0]].shape[group[0][1]] for group in kind.lengths)
        return [(part[first].shape[dim], *lengths) for part in parts]

    def plain(self, part: Sequence[Tensor]) -> Any:
        """Returns what the plain model returns for a micro-batch."""
        args, kwargs = self._build(part)
        return self._model(*args, **kwargs)

    def _build(self, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        return arguments_of(self._inputs.structure.build(inputs))

    # Programs.

    def _program(self, kind: CallKind, parts: Parts) -> Program:
        """Returns the program for what forward decides for these micro-batches."""
        held: dict[LayerState, bool] = {}
        found = [self._path(kind, part, parts, held) for part in parts]
        if all(path.program is found[0].program for path in found):
            return found[0].program
        whole = self._path(kind, self._inputs.tensors, parts, held)
        if not all(self._serves(kind, whole, part) for part in parts):
            raise Differs("does something else")
        warn_user(
            "forward does something else for some micro-batches than for others, as transformers does for a "
            "mask that masks nothing; now all do what the whole mini-batch does, and last bits may differ "
            "from the plain loop's"
        )
        return whole.program

    def _path(
        self, kind: CallKind, tensors: Sequence[Tensor], parts: Parts, held: dict[LayerState, bool]
    ) -> Path:
        """Returns what forward does for the tensors of a micro-batch.

        Args:
            kind: the kind of call.
            tensors: the tensors.
            parts: the tensors of all micro-batches.
            held: whether the model is in a state, as far as that is known.
        """
        for path in reversed(kind.paths):
            if path.state not in held:
                held[path.state] = path.state.holds(self._model)
            serves = held[path.state] and self._serves(kind, path, tensors)
            if serves and path.decides_alike(tensors, self._may_read):
                return path
        fixed = self._fixed(kind, tensors)
        path = self._add_captured(kind, self._captured(kind, tensors, fixed), fixed, parts)
        held[path.state] = True
        return path

    def _serves(self, kind: CallKind, path: Path, tensors: Sequence[Tensor]) -> bool:
        """Returns whether forward does what it did in a capture, as far as the sizes of tensors decide."""
        sizes = self.sizes(kind, [tensors])[0]
        if sizes[0] < 2 and sizes[0] not in path.small and path.has_lengths(sizes):
            self._add_small(kind, path, tensors)
        return path.is_for(sizes)

    def _program_of(self, kind: CallKind, flow: Dataflow, returned: Any) -> Program:
        calls, opened = self._calls, open_dataclass(returned)
        output_class = None if opened is returned else type(returned)
        known = (p for p in calls._programs if p.split == kind.split and p.output_class is output_class)
        unconditional = dataclasses.replace(flow, decisions=(), conditions=()).pruned()
        self._check_numbers(kind, flow)
        program = next((p for p in known if p.plain_flow == unconditional), None)
        if program is None:
            program = Program(
                unconditional,
                kind.split,
                small_lengths(flow.conditions, self.sizes(kind, [self._inputs.tensors])[0][1:]),
                calls.blocks,
                leaf_names(opened),
                calls.how.loss,
                output_class,
                calls.new_runner,
                calls.processes.is_mesh,
            )
            calls._programs.append(program)
            del calls._programs[:-_MAX_PROGRAMS]
        return program

    def _check_numbers(self, kind: CallKind, flow: Dataflow) -> None:
        """Refuses a loss of a number that forward reads from a micro-batch, where another one counts.

        Raises:
            CannotCut: there is one.
        """
        refs = dict.fromkeys(flow.result.refs())
        scalars = [ref for ref in refs if not batch_dims(flow.values[ref])]
        for decision in flow.decisions if self._calls.how.loss == "exact" else ():
            is_number = type(decision.answer) in (int, float)
            is_split = is_number and flow.depends_on(decision.arguments.refs(), kind.split)
            if is_split and any(uses_number(flow, ref, decision.answer) for ref in scalars):
                raise CannotCut(
                    f"a loss is computed with a number that is read from a tensor at {decision.place}; "
                    "compute with the tensor, without item(), or pass loss='per-microbatch' to "
                    "GPipe.from_model"
                )

    # Captures.

    def _fixed(self, kind: CallKind, tensors: Sequence[Tensor]) -> dict[int, int]:
        """Returns the lengths that are no symbols, because PyTorch assumes that symbols are at least 2."""
        sizes = self.sizes(kind, [tensors])[0]
        return {index: size for index, size in enumerate(sizes) if index and size < 2}

    def _add_captured(
        self, kind: CallKind, found: CapturedCall, fixed: Mapping[int, int], parts: Parts
    ) -> Path:
        """Adds the path of a captured call.

        Raises:
            CannotCut: its blocks are not called in their order, or it has no shares.
            Differs: forward does something else for some of the micro-batches because of their sizes.
        """
        check_calls(found.flow, self._calls.blocks, self._names)
        answers = [decision.answer for decision in found.flow.decisions]
        path = Path(found.flow.pruned(), found.state, fixed, answers)
        for (batch, *_), part in dict(zip(self.sizes(kind, parts), parts, strict=True)).items():
            if batch < 2:
                self._add_small(kind, path, part)
                if batch not in path.small:
                    raise Differs(f"does something else for a size of {batch}")
        path.program = self._program_of(kind, path.flow, found.returned)
        kind.paths.append(path)
        del kind.paths[:-_MAX_PATHS]
        return path

    def _add_small(self, kind: CallKind, path: Path, tensors: Sequence[Tensor]) -> None:
        """Notes under which conditions on sizes forward makes the same calls for 0 or 1 samples, if it does.

        Args:
            kind: the kind of call.
            path: the path for more samples; what forward has read from tensors there, it reads here as well.
            tensors: the tensors of a micro-batch of 0 or 1 samples.
        """
        few = {0: self.sizes(kind, [tensors])[0][0], **path.fixed}
        with contextlib.suppress(Differs):
            found = self._captured(kind, tensors, few, path.answers).flow.pruned()
            if _comparable(found) == _comparable(path.flow.at(lambda leaf: at_sizes(leaf, few))):
                path.small[few[0]] = found.conditions

    def _captured(
        self,
        kind: CallKind,
        tensors: Sequence[Tensor],
        fixed: Mapping[int, int],
        answers: Sequence[Any] | None = None,
        modules: Modules | None = None,
    ) -> CapturedCall:
        sizes = self.sizes(kind, [tensors])[0]
        modules = modules or Modules({self._model, *self._calls._opened}, set(self._calls.blocks))
        opens = {module for module, opens in self._calls._reducing.items() if opens}
        modules = modules._replace(opened=modules.opened | opens)
        given = Given(tensors, kind.symbols(), sizes, fixed.keys(), self._build)
        own = decide_by(tensors, self._may_read, modules.opened)
        decide = own if answers is None else repeated(answers)
        found = capture_call(self._model, given, modules, self._device, decide)
        # Modules of losses are captured by what they call.
        known = self._calls._reducing
        reducing = set() if 0 in fixed else reducing_modules(found.flow, kind.split)
        reducing -= modules.blocks | known.keys()
        if reducing:
            known |= dict.fromkeys(reducing, True)
            try:
                return self._captured(kind, tensors, fixed, answers, modules)
            except Exception:  # it cannot be captured otherwise
                known |= dict.fromkeys(reducing, False)
        return found

    def _record_whole(self, opened: Any, blocks: Any) -> Dataflow:
        """Captures the first micro-batch, as it will probably be split; the mini-batch if that fails."""
        kind = CallKind(
            next(self._possible_splits()),
            self._likely_lengths(),
            [x.shape for x in self._inputs.tensors],
        )
        modules = Modules({self._model, *opened}, set(blocks))
        parts = self._parts(kind)
        try:
            found = self._captured(kind, parts[0], self._fixed(kind, parts[0]), modules=modules)
        except Exception:
            tensors = self._inputs.tensors
            given = Given(tensors, {}, (), (), self._build)
            decide = decide_by(tensors, self._may_read, modules.opened)
            return capture_call(self._model, given, modules, self._device, decide).flow
        self._found[self._likely_key(kind, parts, modules.opened, blocks)] = found
        return found.flow

    def _check_hooks(self) -> None:
        """Refuses hooks on modules that contain blocks, because such modules are not called as a whole."""
        for module in self._calls._opened:
            tables = module._forward_hooks, module._forward_pre_hooks
            if any(tables) or module._backward_hooks or module._backward_pre_hooks:
                raise CannotCut(
                    f"{self._names.get(module)} ({type(module).__name__}) contains blocks and has hooks, "
                    "which would not be called; register them on its blocks or on the model"
                )


def _attributes_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the plain attributes of a module, and its hooks."""
    plain = ((name, type(x), x) for name, x in vars(module).items() if isinstance(x, PLAIN))
    return tuple(plain), *module._forward_hooks, *module._forward_pre_hooks


def _comparable(flow: Dataflow) -> Dataflow:
    """Returns a capture without what follows from sizes: which results share memory, and the conditions."""
    values = tuple(dataclasses.replace(each, storage=0) for each in flow.values)
    return dataclasses.replace(flow, values=values, conditions=())


def _order(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the order of dimensions in memory, which repeat elements, and whether there are gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], -dim))
    return tuple(order), tuple(stride == 0 for stride in strides), has_gaps(tensor)
