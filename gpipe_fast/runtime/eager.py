"""Layers that run in Python: the untraceable ones, and under ``backend='eager'`` all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gpipe_fast.layers import phase
from gpipe_fast.layers.batchnorm import deferring
from gpipe_fast.layers.skip import carrying, take
from gpipe_fast.layers.structure import Structure, call, flatten, shared
from gpipe_fast.layers.title import title
from gpipe_fast.lower.accumulation import sum_dtype
from gpipe_fast.lower.checkpoint import Share, recomputes
from gpipe_fast.randomness.random import GeneratorStates, KeyedRandomMode, make_key
from gpipe_fast.runtime.buffers import NotedBuffer, as_they_were, buffers_now
from gpipe_fast.runtime.copied import copied_for_writing
from gpipe_fast.runtime.differentiate import differentiate, without_hooks
from gpipe_fast.runtime.draws import Drawn, Draws
from gpipe_fast.runtime.stage import Modes, Stage, under
from gpipe_fast.schedule import Action
from gpipe_fast.trace.reads import are_repeatable
from gpipe_fast.trace.trace import parameters_of


@dataclass(frozen=True)
class _Arrived:
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
class _Run:
    """One run of the layers: the leaves and the outputs of its autograd graph."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    structure: Structure
    stashed: list[Tensor | None]
    writes_inputs: bool

    def roots(self) -> list[Tensor]:
        """Returns all tensors that leave the layers: the outputs, then the stashed skip tensors."""
        return [*self.outputs, *(tensor for tensor in self.stashed if tensor is not None)]


@dataclass
class _Kept:
    """State that a forward saves for its backward.

    Attributes:
        run: the run with its autograd graph; None if the backward recomputes it.
        every: all parameters of the layers.
        parameters: the parameters that need gradients.
    Only a recompute needs the rest:
        arrived: the input.
        buffers: snapshots, from before the forward, of the buffers that the forward wrote or replaced.
        generators: states, from before the forward, of the layers' own PyTorch generators.
        drawn: states of Python's and NumPy's generators.
        data: the addresses of the parameters' elements.
    """

    run: _Run | None
    every: list[nn.Parameter]
    parameters: list[nn.Parameter]
    arrived: _Arrived
    buffers: list[NotedBuffer]
    generators: GeneratorStates
    drawn: Drawn
    data: list[int]


class Result(NamedTuple):
    """The result of one micro-batch's forward, for C++.

    Attributes:
        outputs: the detached outputs; stashed skip tensors last.
        structure: how the outputs other than skip tensors are nested.
        needs_gradient: which of the outputs other than skip tensors need gradients.
        kept: the state that `EagerLayers.backward` needs.
        skips: whether each stashed tensor needs a gradient; None if None was stashed.
        writes_inputs: whether the layers wrote their inputs in place.
        reached: which parameters the outputs depend on, if requested.
    """

    outputs: list[Tensor]
    structure: Structure
    needs_gradient: list[bool]
    kept: _Kept | None
    skips: list[bool | None]
    writes_inputs: bool
    reached: list[bool]


class EagerLayers:
    """A run of layers in Python, called by their stage's worker for every micro-batch.

    Inputs are copied, because a layer may write them. The results are bitwise equal to a sequential
    micro-batch loop's, including the order of additions to a gradient.
    """

    def __init__(
        self,
        part: Stage,
        name: str,
        modes: Modes,
        share: Share,
        busy: threading.RLock,
        on_tangents: Callable[[Sequence[Tensor | None]], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Makes a run of layers.

        Args:
            part: the layers, called in order.
            name: the layers' name in error messages.
            modes: PyTorch's modes to run the layers under.
            share: the fraction of activations to save. Less than 1 saves none, and recomputes the forward,
                unless a second run of the layers would have other effects, such as incrementing a counter.
            busy: a lock held while the layers run.
            on_tangents: called with the gradients of the outputs.
            after: called when a forward has succeeded.
        """
        self._part = part
        self._layers = part.layers
        self._name = name
        self._modes = modes
        self._recompute = recomputes(share) and modes.grad and are_repeatable(part.layers)
        self._busy = busy
        self._on_tangents = on_tangents
        self._draws = Draws(self._layers)
        self._at: int | None = None  # index of the layer whose forward is running
        self._after = after
        self._checked = False
        self._reentrant = False

    def note(self) -> list[NotedBuffer]:
        """Takes snapshots of all buffers, and of the tables that embeddings with ``max_norm`` renormalize."""
        return buffers_now(self._layers)

    def restore(self, noted: Sequence[NotedBuffer]) -> None:
        """Restores buffers from their snapshots, after a failure."""
        for buffer in noted:
            if buffer.is_changed():
                buffer.put_back()

    def forward(
        self,
        tensors: Sequence[Tensor],
        structure: Structure,
        needs_gradient: Sequence[bool],
        skips: Sequence[bool | None],
        key: Callable[[], int],
        microbatch: int,
        action: str,
        tell_reached: bool,
    ) -> Result:
        """Runs one micro-batch; `tell_reached` requests the parameters that the outputs depend on."""
        arrived = _Arrived(tensors, structure, needs_gradient, skips, key, microbatch)
        with self._busy, self._blamed(action), phase.entered(checkpointing=self._recompute):
            before = self.note() if self._recompute else []
            generators = GeneratorStates(self._recompute)
            with self._draws.forward(self._recompute) as drawn:
                run = self._run(arrived, generators)
            kept: _Kept | None = None
            reached: list[bool] = []
            if any(root.requires_grad for root in run.roots()):
                if tell_reached or not self._checked:
                    reached = self._reached(run, parameters_of(self._layers))
                written = [noted for noted in before if noted.is_changed()]
                kept = self._kept(run, arrived, written, generators, drawn)
            if self._after is not None:
                self._after()
            return Result(
                [root.detach() for root in run.roots()],
                shared(run.structure),
                [output.requires_grad for output in run.outputs],
                kept,
                [None if tensor is None else tensor.requires_grad for tensor in run.stashed],
                run.writes_inputs,
                reached,
            )

    def _kept(
        self,
        run: _Run,
        arrived: _Arrived,
        written: list[NotedBuffer],
        generators: GeneratorStates,
        drawn: Drawn,
    ) -> _Kept:
        every = parameters_of(self._layers)
        parameters = [p for p in every if p.requires_grad]
        data = [p.data_ptr() for p in parameters]
        kept_run = None if self._recompute and drawn.repeatable else run
        return _Kept(kept_run, every, parameters, arrived, written, generators, drawn, data)

    def backward(
        self,
        kept: _Kept | None,
        tangents: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        retain: bool,
        action: str,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Runs the backward of one micro-batch.

        Args:
            kept: the state that the forward saved.
            tangents: gradients of the outputs.
            gradients: the parameters' accumulated gradients so far, in the order of `parameters_of`.
            retain: whether to keep the graph for another backward.
            action: the engine's name of the action.

        Returns:
            Gradients of the inputs, and the parameters' gradients with this micro-batch's added.
        """
        if self._on_tangents is not None:
            self._on_tangents(tangents)
        if kept is None or all(tangent is None for tangent in tangents):
            return [], list(gradients)
        with self._busy, self._blamed(action):
            if kept.run is not None:
                return self._differentiate(kept, kept.run, tangents, gradients, retain)
            if [p.data_ptr() for p in kept.parameters] != kept.data:
                raise RuntimeError(
                    f"the data of a parameter of {self._name} was replaced between forward and backward, but "
                    "the backward recomputes the forward; replace the data after the backward"
                )
            again = self._draws.repeated(kept.drawn, self._name)
            with phase.entered(recomputing=True), as_they_were(kept.buffers), again:
                run = self._run(kept.arrived, kept.generators.replayed())
                return self._differentiate(kept, run, tangents, gradients, False)

    def _run(self, arrived: _Arrived, generators: GeneratorStates) -> _Run:
        mode = KeyedRandomMode(lambda: self._key(arrived), generators)
        with torch.set_grad_enabled(self._modes.grad), under(self._modes.autocast):
            leaves = arrived.leaves()
            copied = [copied_for_writing(leaf) for leaf in leaves]
            versions = [copy._version for copy in copied]
            copies = iter(copied)
            value = arrived.structure.build([next(copies) for _ in arrived.needs_gradient])
            popped = [None if needs is None else next(copies) for needs in arrived.skips]
            with (
                carrying(dict(zip(self._part.keys(self._part.pops), popped, strict=True))) as carried,
                mode,
                deferring(self._part.deferred),
            ):
                for index, layer in enumerate(self._layers):
                    mode.enter_layer(index)
                    self._at = index
                    value = call(layer, value)
                self._at = None
                stashed = take(carried, self._part.keys(self._part.stashes))
            try:
                outputs, structure = flatten(value, once=True)
            except TypeError as error:
                raise TypeError(f"{self._name} returns a value that cannot be passed on: {error}") from None
        writes_inputs = versions != [copy._version for copy in copied]
        return _Run(leaves, outputs, structure, stashed, writes_inputs)

    def _key(self, arrived: _Arrived) -> Tensor:
        """Returns the micro-batch's random key, on the layers' device."""
        key = make_key(arrived.key(), arrived.microbatch, self._part.first_layer)
        device = self._part.device
        return key if device.type == "cpu" else key.pin_memory().to(device, non_blocking=True)

    def _differentiate(
        self,
        kept: _Kept,
        run: _Run,
        tangents: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        retain: bool,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        so_far = {id(p): g for p, g in zip(kept.every, gradients, strict=True)}
        dtype = self._part.grad_dtype
        sums = {id(p): so_far.pop(id(p)) for p in kept.parameters if sum_dtype(p.dtype, dtype) != p.dtype}
        # A parameter with an accumulated gradient is a root, too: its uses then add their contributions to
        # that gradient one by one, in the order in which autograd adds them in a loop over micro-batches. A
        # sum in another dtype cannot be a root's gradient; this micro-batch's gradient is added to it below.
        begun = [(p, so_far.get(id(p))) for p in kept.parameters]
        roots = [
            (root, gradient)
            for root, gradient in (*zip(run.roots(), tangents, strict=False), *begun)
            if gradient is not None and root.requires_grad
        ]
        sources = [*(leaf for leaf in run.leaves if leaf.requires_grad), *kept.parameters]
        with without_hooks(kept.parameters):
            found = differentiate(roots, sources, retain, self._reentrant)
        of = {id(source): gradient for source, gradient in zip(sources, found, strict=True)}
        of_inputs = [of.get(id(leaf)) for leaf in run.leaves]
        of |= {p: _added(total, of[p], dtype) for p, total in sums.items()}
        return of_inputs, [of.get(id(p), so_far.get(id(p))) for p in kept.every]

    def _reached(self, run: _Run, parameters: Sequence[Tensor]) -> list[bool]:
        """Returns which parameters the outputs depend on: all, if a reentrant checkpoint hides its own.

        Raises:
            RuntimeError: the outputs depend on a tensor whose gradient would be lost.
        """
        known = {id(tensor) for tensor in (*run.leaves, *parameters)}
        nodes = _graph_of(run.roots())
        self._reentrant = self._reentrant or any(n.name() == "CheckpointFunctionBackward" for n in nodes)
        leaves = [leaf for n in nodes if isinstance(leaf := getattr(n, "variable", None), Tensor)]
        for leaf in leaves:
            if id(leaf) not in known:
                raise RuntimeError(
                    f"{self._name} uses a tensor of shape {list(leaf.shape)} that needs a gradient and is "
                    "not one of its parameters; make it a parameter, or pass it through the layers"
                )
        self._checked = True
        found = {id(leaf) for leaf in leaves}
        return [self._reentrant or id(parameter) in found for parameter in parameters]

    @contextlib.contextmanager
    def _blamed(self, action: str) -> Iterator[None]:
        """Adds a note with the action, the layer and the micro-batch to an error raised in the block."""
        try:
            yield
        except BaseException as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                # The same text as in csrc/pipeline/pipeline.cpp, raise().
                microbatch = Action.parse(action).microbatch
                error.add_note(f"in action {action}: {self._at_work()}, micro-batch {microbatch}")
            self._at = None
            raise

    def _at_work(self) -> str:
        """Returns the name of the layer whose forward is running; in a backward, the name of all layers."""
        if self._at is None:
            return self._name
        stage = self._name.partition(", ")[0]
        return f"{stage}, {title(self._part.first_layer + self._at, self._layers[self._at])}"


def _added(total: Tensor | None, gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Returns a sum with one more gradient added, in the sum's dtype."""
    if gradient is None:
        return total
    return gradient.to(dtype) if total is None else total + gradient.to(dtype)


def _graph_of(roots: Iterable[Tensor]) -> set[Node]:
    """Returns all nodes of the autograd graph of the roots."""
    pending: list[Node] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = {n for n, _ in pending.pop().next_functions if n is not None} - seen
        seen |= following
        pending.extend(following)
    return seen
