"""Python layers: layers that run in Python because they are untraceable, or because of backend='eager'."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gpipe_fast.layers import phase
from gpipe_fast.layers.batchnorm import deferring
from gpipe_fast.layers.structure import Structure, call_unpacked, canonical, flatten, layer_title
from gpipe_fast.lower.accumulation import sum_dtype
from gpipe_fast.lower.checkpoint import SavedFraction, has_recompute
from gpipe_fast.randomness.random import KeyedRandomMode, SavedGeneratorStates, make_key
from gpipe_fast.runtime.python_state import (
    BufferSnapshot,
    PythonGenerators,
    run_and_undo,
    run_with_buffers,
    snapshot_buffers,
    writable_copy,
)
from gpipe_fast.runtime.stage import Lock, Stage, TorchModes, exact_autocast
from gpipe_fast.schedule import Action
from gpipe_fast.skip import skip_scope, take_stashed
from gpipe_fast.torch_private.autograd import is_multithreading_enabled
from gpipe_fast.torch_private.modes import num_dispatch_modes, pop_dispatch_mode
from gpipe_fast.trace.joint_graph import parameters_of
from gpipe_fast.trace.repeatable import LayersState

Gradients = Sequence[Tensor | None]


class LayerTime(NamedTuple):
    """The time that layers in Python took in an action, a forward or a backward.

    Attributes:
        stage: the stage.
        action: the engine's name of the action.
        layer: the index of the first layer in the whole model.
        name: what the layers are called.
        seconds: their time.
        operators: the part of it in which operators ran; the rest is the interpreter's.
        recompute: the part of a backward in which the forward ran again.
    """

    stage: Stage
    action: str
    layer: int
    name: str
    seconds: float
    operators: float
    recompute: float


_sinks: dict[int, list[LayerTime]] = {}


@contextlib.contextmanager
def timing_layers() -> Iterator[list[LayerTime]]:
    """Yields a list that gets the times of all Python layers of this process that run inside the block."""
    found: list[LayerTime] = []
    _sinks[id(found)] = found
    try:
        yield found
    finally:
        del _sinks[id(found)]


@dataclass(frozen=True)
class _MicroBatchInput:
    """The input of the layers for one micro-batch.

    Attributes:
        tensors: the detached boundary tensors; skip tensors last.
        structure: how the tensors other than skip tensors are nested.
        needs_gradient: which of the tensors other than skip tensors need gradients.
        skips: whether each skip tensor needs a gradient; None if the skip connection carries None.
        key: draws the mini-batch's key.
        microbatch: the micro-batch's number.
    """

    tensors: Sequence[Tensor]
    structure: Structure
    needs_gradient: Sequence[bool]
    skips: Sequence[bool | None]
    key: Callable[[], int]
    microbatch: int

    def leaves(self) -> list[Tensor]:
        """Returns the tensors as new leaves of autograd graphs."""
        needs = (*self.needs_gradient, *(skip for skip in self.skips if skip is not None))
        return [t.detach().requires_grad_(need) for t, need in zip(self.tensors, needs, strict=True)]


@dataclass
class _LayersRun:
    """One run of the layers: the leaves and the outputs of its autograd graph."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    structure: Structure
    stashed: list[Tensor | None]
    written_inputs: list[int]

    def roots(self) -> list[Tensor]:
        """Returns all tensors that leave the layers: the outputs, then the stashed skip tensors."""
        return [*self.outputs, *(tensor for tensor in self.stashed if tensor is not None)]


class _ForRecompute(NamedTuple):
    """State that a forward saves for its recompute.

    Attributes:
        microbatch_input: the input.
        buffers: snapshots, from before the forward, of the buffers that the forward wrote or replaced.
        generators: states, from before the forward, of the layers' own PyTorch generators.
        data_ptrs: the addresses of the elements of the parameters that need gradients.
        state: the layers' Python state.
    """

    microbatch_input: _MicroBatchInput
    buffers: list[BufferSnapshot]
    generators: SavedGeneratorStates
    data_ptrs: list[int]
    state: LayersState


class _SavedForBackward(NamedTuple):
    """State that a forward saves for its backward.

    Attributes:
        run: the run with its autograd graph, or what a recompute of it needs.
        all_parameters: all parameters of the layers.
        parameters: the parameters that need gradients.
    """

    run: _LayersRun | _ForRecompute
    all_parameters: list[nn.Parameter]
    parameters: list[nn.Parameter]


class Result(NamedTuple):
    """The result of one micro-batch's forward, for C++.

    Attributes:
        outputs: the detached outputs; stashed skip tensors last.
        structure: how the outputs other than skip tensors are nested.
        needs_gradient: which of the outputs other than skip tensors need gradients.
        saved: the state that `PythonLayers.backward` needs.
        skips: whether each stashed tensor needs a gradient; None if None was stashed.
        written_inputs: the inputs that the layers changed in place.
        reached: which parameters the outputs depend on, if requested.
    """

    outputs: list[Tensor]
    structure: Structure
    needs_gradient: list[bool]
    saved: _SavedForBackward | None
    skips: list[bool | None]
    written_inputs: list[int]
    reached: list[bool]


# The number of forwards whose graphs are checked for tensors whose gradients would be lost; two, since a
# layer may carry a tensor from one micro-batch to the next.
_NUM_CHECKED = 2


class _Inputs:
    """Refuses gradients of the inputs of layers that do not come from the pipeline's backward.

    The inputs' hooks have a reference to it, so it has none to the layers: a tensor that a layer keeps would
    keep the layer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._accumulates = False

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Lets a backward accumulate gradients in the inputs, as one with reentrant checkpoints does."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def refuse_gradient(self, leaf: Tensor) -> None:
        """Called if a gradient is accumulated in an input.

        Raises:
            RuntimeError: it is by another backward than the pipeline's, so it would be lost.
        """
        if not self._accumulates:
            raise RuntimeError(
                f"a backward reached an input of {self._name} from a tensor that a layer or a hook has kept, "
                "as in an attribute, and not from the output; its gradient would not get to earlier layers; "
                "return the tensor from the layers, and compute the loss from the output"
            )


class PythonLayers:
    """A run of Python layers, called by their stage's worker for every micro-batch.

    Inputs are copied, because a layer may write them. The results are bitwise equal to a sequential
    micro-batch loop's, including the order of additions to a gradient.
    """

    def __init__(
        self,
        part: Stage,
        name: str,
        modes: TorchModes,
        saved_fraction: SavedFraction,
        lock: Lock,
        num_parameters: int,
        on_tangents: Callable[[Sequence[Tensor | None]], object] | None,
        on_success: Callable[[], object] | None,
    ) -> None:
        """Makes a run of layers.

        Args:
            part: the layers, called in order.
            name: the layers' name in error messages.
            modes: PyTorch's modes to run the layers under.
            saved_fraction: the fraction of activations to save. All but 1 save none, and recompute the
                forward, unless a second run of the layers may have other effects, such as incrementing a
                counter.
            lock: a lock held while the layers run.
            num_parameters: the number of the layers' parameters.
            on_tangents: called with the gradients of the outputs.
            on_success: called when a forward has succeeded.
        """
        self._part = part
        self._name = name
        self._modes = modes
        self._recomputes = has_recompute(saved_fraction) and modes.grad
        self._state: LayersState | None = None
        self._lock = lock
        self._num_parameters = num_parameters
        self._on_tangents = on_tangents
        self._python_generators = PythonGenerators(())
        self._running = name  # the layer whose forward is running; in a backward, all layers
        self._on_success = on_success
        self._checks_left = _NUM_CHECKED
        self._inputs = _Inputs(name)
        self._reentrant = False
        self._operator_seconds = self._recompute_seconds = 0.0

    def snapshot(self) -> list[BufferSnapshot]:
        """Takes snapshots of all buffers, and of the tables that embeddings with ``max_norm`` renormalize."""
        return snapshot_buffers(self._part.layers)

    def restore(self, snapshots: Sequence[BufferSnapshot]) -> None:
        """Restores buffers from their snapshots, after a failure."""
        for snapshot in snapshots:
            if snapshot.is_changed():
                snapshot.restore()

    def forward(
        self,
        tensors: Sequence[Tensor],
        structure: Structure,
        needs_gradient: Sequence[bool],
        skips: Sequence[bool | None],
        key: Callable[[], int],
        microbatch: int,
        action: str,
        want_reached: bool,
    ) -> Result:
        """Runs one micro-batch; `want_reached` requests the parameters that the outputs depend on."""
        microbatch_input = _MicroBatchInput(tensors, structure, needs_gradient, skips, key, microbatch)
        with self._lock, self._annotated_errors(action), self._timed(action):
            state = self._repeatable_state() if self._recomputes else None
            before = [] if state is None else self.snapshot()
            states = self._python_generators.states()
            generators = SavedGeneratorStates(state is not None)
            with phase.phase_scope(checkpointing=state is not None):
                run = self._run(microbatch_input, generators)
            saved: _SavedForBackward | None = None
            reached: list[bool] = []
            if any(map(self._needs_gradient, run.roots())):
                all_parameters = parameters_of(self._part.layers)
                if len(all_parameters) != self._num_parameters:
                    raise RuntimeError(
                        f"{self._name} had {self._num_parameters} parameters, and has {len(all_parameters)} "
                        "after its forward; register parameters before the call, such as in __init__"
                    )
                if want_reached or self._checks_left:
                    reached = self._reached_parameters(run, all_parameters)
                parameters = [p for p in all_parameters if p.requires_grad]
                saved = _SavedForBackward(run, all_parameters, parameters)
                # Both states also tell whether this run had effects after all.
                if state is not None and state.is_unchanged() and self._python_generators.states() == states:
                    written = [snapshot for snapshot in before if snapshot.is_changed()]
                    data_ptrs = [p.data_ptr() for p in parameters]
                    saved_for_recompute = _ForRecompute(
                        microbatch_input, written, generators, data_ptrs, state
                    )
                    saved = saved._replace(run=saved_for_recompute)
            if self._on_success is not None:
                self._on_success()
            return Result(
                [root.detach() for root in run.roots()],
                canonical(run.structure),
                [self._needs_gradient(output) for output in run.outputs],
                saved,
                [None if tensor is None else self._needs_gradient(tensor) for tensor in run.stashed],
                run.written_inputs,
                reached,
            )

    @contextlib.contextmanager
    def _timed(self, action: str) -> Iterator[None]:
        """Passes the time of the block to those who asked for it."""
        begun = perf_counter()
        self._operator_seconds = self._recompute_seconds = 0.0
        yield
        parts = perf_counter() - begun, self._operator_seconds, self._recompute_seconds
        name = self._name.partition(", ")[2]
        for sink in tuple(_sinks.values()):
            sink.append(LayerTime(self._part.whole, action, self._part.first_layer, name, *parts))

    def _needs_gradient(self, root: Tensor) -> bool:
        # PyTorch's views of parameters require gradients under no_grad, too.
        return self._modes.grad and root.requires_grad

    def _repeatable_state(self) -> LayersState | None:
        """Returns the layers' state; None if a second run of the layers may have other effects."""
        if self._state is None or not self._state.is_unchanged():
            self._state = LayersState(self._part.layers)
            self._python_generators = PythonGenerators(self._state.asking)
        return self._state if self._state.is_repeatable else None

    def backward(
        self,
        saved: _SavedForBackward | None,
        tangents: Gradients,
        gradients: Gradients,
        retain: bool,
        action: str,
    ) -> tuple[Gradients, Gradients]:
        """Runs the backward of one micro-batch.

        Args:
            saved: the state that the forward saved.
            tangents: gradients of the outputs.
            gradients: the parameters' accumulated gradients so far, in the order of `parameters_of`.
            retain: whether to keep the graph for another backward.
            action: the engine's name of the action.

        Returns:
            Gradients of the inputs, and the parameters' gradients with this micro-batch's added.
        """
        if self._on_tangents is not None:
            self._on_tangents(tangents)
        if saved is None or all(tangent is None for tangent in tangents):
            return [], gradients
        differentiate = functools.partial(self._differentiate, saved, tangents, gradients)
        with self._lock, self._annotated_errors(action), self._timed(action):
            if isinstance(saved.run, _LayersRun):
                return differentiate(saved.run, retain)
            start = saved.run
            if [p.data_ptr() for p in saved.parameters] != start.data_ptrs:
                raise RuntimeError(
                    f"the data of a parameter of {self._name} was replaced between forward and backward, but "
                    "the backward recomputes the forward; replace the data after the backward"
                )
            if not start.state.is_unchanged():
                raise RuntimeError(
                    f"{self._name} was changed between its forward and its recompute in the backward: an "
                    "attribute, a variable or a function that it uses; change it after the backward, or pass "
                    "checkpoint='never' to GPipe"
                )

            def recompute() -> tuple[Gradients, Gradients]:
                with phase.phase_scope(recomputing=True):
                    begun = perf_counter()
                    run = self._run(start.microbatch_input, start.generators.for_recompute())
                    self._recompute_seconds += perf_counter() - begun
                    return differentiate(run, False)

            return run_with_buffers(self._part.layers, start.buffers, recompute)

    def _run(self, microbatch_input: _MicroBatchInput, generators: SavedGeneratorStates) -> _LayersRun:
        _leave_interrupted_modes()
        mode = KeyedRandomMode(lambda: self._key(microbatch_input), generators)
        mode.clock = perf_counter if _sinks else None
        stage = self._name.partition(", ")[0]
        with torch.set_grad_enabled(self._modes.grad), exact_autocast(self._modes.autocast):
            leaves = microbatch_input.leaves()
            for leaf in leaves:
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(self._inputs.refuse_gradient)
            copied = [writable_copy(leaf) for leaf in leaves]
            versions = [copy._version for copy in copied]
            copies = iter(copied)
            value = microbatch_input.structure.build([next(copies) for _ in microbatch_input.needs_gradient])
            popped = [None if needs is None else next(copies) for needs in microbatch_input.skips]
            with (
                skip_scope(
                    dict(zip(self._part.keys(self._part.pops), popped, strict=True))
                ) as stashed_so_far,
                mode,
                deferring(self._part.options.deferred),
            ):
                for index, layer in enumerate(self._part.layers):
                    mode.enter_layer(index)
                    self._running = f"{stage}, {layer_title(self._part.first_layer + index, layer)}"
                    value = call_unpacked(layer, value)
                self._operator_seconds += mode.seconds
                self._running = self._name
                stashed = take_stashed(stashed_so_far, self._part.keys(self._part.stashes))
            try:
                outputs, structure = flatten(value, deduplicate=True)
            except TypeError as error:
                raise TypeError(f"{self._name} returns a value that cannot be passed on: {error}") from None
        written_inputs = [i for i, copy in enumerate(copied) if copy._version != versions[i]]
        return _LayersRun(leaves, outputs, structure, stashed, written_inputs)

    def _key(self, microbatch_input: _MicroBatchInput) -> Tensor:
        """Returns the micro-batch's random key, on the layers' device."""
        key = make_key(microbatch_input.key(), microbatch_input.microbatch, self._part.first_layer)
        device = self._part.device
        return key if device.type == "cpu" else key.pin_memory().to(device, non_blocking=True)

    def _differentiate(
        self,
        saved: _SavedForBackward,
        tangents: Gradients,
        gradients: Gradients,
        run: _LayersRun,
        retain: bool,
    ) -> tuple[Gradients, Gradients]:
        accumulated = {id(p): g for p, g in zip(saved.all_parameters, gradients, strict=True)}
        dtype = self._part.options.grad_dtype
        sums = {
            id(p): accumulated.pop(id(p)) for p in saved.parameters if sum_dtype(p.dtype, dtype) != p.dtype
        }
        # A parameter with an accumulated gradient is a root, too: its uses then add their contributions to
        # that gradient one by one, in the order in which autograd adds them in a loop over micro-batches. A
        # sum in another dtype cannot be a root's gradient; this micro-batch's gradient is added to it below.
        accumulated_roots = [(p, accumulated.get(id(p))) for p in saved.parameters]
        roots = [
            (root, gradient)
            for root, gradient in (*zip(run.roots(), tangents, strict=False), *accumulated_roots)
            if gradient is not None and root.requires_grad
        ]
        sources = [*(leaf for leaf in run.leaves if leaf.requires_grad), *saved.parameters]
        begun = perf_counter()
        with self._inputs.accumulating():
            found = _grad(roots, sources, retain, self._reentrant)
        self._operator_seconds += perf_counter() - begun
        gradient_of = {id(source): gradient for source, gradient in zip(sources, found, strict=True)}
        input_gradients = [gradient_of.get(id(leaf)) for leaf in run.leaves]
        gradient_of |= {p: _accumulate(total, gradient_of[p], dtype) for p, total in sums.items()}
        return input_gradients, [gradient_of.get(id(p), accumulated.get(id(p))) for p in saved.all_parameters]

    def _reached_parameters(self, run: _LayersRun, parameters: Sequence[Tensor]) -> list[bool]:
        """Returns which parameters the outputs depend on; all, if a reentrant checkpoint hides parameters.

        Raises:
            RuntimeError: the outputs depend on a tensor whose gradient would be lost.
        """
        known = {id(tensor) for tensor in (*run.leaves, *parameters)}
        nodes = _graph_nodes(run.roots())
        self._reentrant = self._reentrant or any(n.name() == "CheckpointFunctionBackward" for n in nodes)
        leaves = [leaf for n in nodes if isinstance(leaf := getattr(n, "variable", None), Tensor)]
        leaves += [root for root in run.roots() if root.is_leaf and root.requires_grad]  # without a node
        for leaf in leaves:
            if id(leaf) not in known:
                raise RuntimeError(
                    f"{self._name} uses a tensor of shape {list(leaf.shape)} that needs a gradient and is "
                    "not one of its parameters; make it a parameter, or pass it through the layers"
                )
        self._checks_left = max(0, self._checks_left - 1)
        found = {id(leaf) for leaf in leaves}
        return [self._reentrant or id(parameter) in found for parameter in parameters]

    @contextlib.contextmanager
    def _annotated_errors(self, action: str) -> Iterator[None]:
        """Adds a note with the action, the layer and the micro-batch to an error raised in the block."""
        try:
            yield
        except BaseException as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                # The same text as in csrc/pipeline/pipeline.cpp, raise().
                microbatch = Action.parse(action).microbatch
                error.add_note(f"in action {action}: {self._running}, micro-batch {microbatch}")
            self._running = self._name
            raise


def _leave_interrupted_modes() -> None:
    """Leaves the dispatch modes that a ``KeyboardInterrupt`` has kept this worker from leaving."""
    while num_dispatch_modes():
        pop_dispatch_mode()


def _grad(
    roots: Sequence[tuple[Tensor, Tensor]], sources: list[Tensor], retain: bool, reentrant: bool
) -> Gradients:
    """Returns the gradients of the sources; None for a source that the roots do not depend on.

    No hook of a source runs: parameters' hooks are for the mini-batch's gradient.

    Args:
        roots: tensors and their gradients.
        sources: tensors with respect to which to differentiate.
        retain: whether to keep the graph for another backward.
        reentrant: whether the graph contains reentrant checkpoints, which need ``backward()``.
    """
    outputs, gradients = [root for root, _ in roots], [gradient for _, gradient in roots]
    names = ("_backward_hooks", "grad") if reentrant else ("_backward_hooks",)
    before = [(source, name, getattr(source, name)) for source in sources for name in names]
    # Autograd's threads for GPUs may be waiting in the pipeline's backward.
    threads = is_multithreading_enabled() and all(root.device.type == "cpu" for root in outputs)

    def run() -> Gradients:
        for source, name, value in before:
            if value is not None:
                setattr(source, name, None)
        with torch.autograd.set_multithreading_enabled(threads):
            if not reentrant:
                return torch.autograd.grad(
                    outputs, sources, gradients, retain_graph=retain, allow_unused=True
                )
            torch.autograd.backward(outputs, gradients, retain_graph=retain)
            return [source.grad for source in sources]

    def undo() -> None:
        for source, name, value in before:
            if getattr(source, name) is not value:
                setattr(source, name, value)

    return run_and_undo(run, undo)


def _accumulate(total: Tensor | None, gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Returns a sum with one more gradient added, in the sum's dtype."""
    if gradient is None:
        return total
    return gradient.to(dtype) if total is None else total + gradient.to(dtype)


def _graph_nodes(roots: Iterable[Tensor]) -> set[Node]:
    """Returns all nodes of the autograd graph of the roots."""
    pending: list[Node] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = {n for n, _ in pending.pop().next_functions if n is not None} - seen
        seen |= following
        pending.extend(following)
    return seen
