"""Layers that run as they are, in Python: what cannot be traced, and all under ``backend='eager'``."""

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
    """A micro-batch at the first of the layers.

    Attributes:
        tensors: detached; those of skip connections last.
        structure: how the others are nested.
        needs_gradient: which of the others do.
        skips: of skip connections, which do; nothing for those that are None.
        key: draws the mini-batch's key.
        microbatch: its number.
    """

    tensors: Sequence[Tensor]
    structure: Structure
    needs_gradient: Sequence[bool]
    skips: Sequence[bool | None]
    key: Callable[[], int]
    microbatch: int

    def leaves(self) -> list[Tensor]:
        """The tensors, each the root of an autograd graph of its own where it needs a gradient."""
        needs = (*self.needs_gradient, *(skip for skip in self.skips if skip is not None))
        return [t.detach().requires_grad_(need) for t, need in zip(self.tensors, needs, strict=True)]


@dataclass
class _Run:
    """One run of the layers: the leaves and the roots of its autograd graph."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    structure: Structure
    stashed: list[Tensor | None]
    writes_inputs: bool

    def roots(self) -> list[Tensor]:
        """All that leaves."""
        return [*self.outputs, *(tensor for tensor in self.stashed if tensor is not None)]


@dataclass
class _Kept:
    """What a forward keeps for its backward.

    Attributes:
        run: with its graph; None if it is to be recomputed.
        every: parameter.
        parameters: that need gradients.
    The rest is for a recompute:
        arrived: what came in.
        buffers: those that the forward wrote or replaced, as it found them.
        generators: as the forward found those of PyTorch's that the layers bring themselves.
        drawn: from Python's and NumPy's generators.
        data: where the parameters' elements were.
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
    """What one micro-batch's forward returns to C++.

    Attributes:
        outputs: detached, those that are stashed last.
        structure: how the others are nested.
        needs_gradient: which of the others need gradients.
        kept: what `EagerLayers.backward` needs.
        skips: which that are stashed need gradients; nothing for None.
        writes_inputs: whether inputs were changed in place.
        reached: which parameters the outputs depend on, if that was asked for.
    """

    outputs: list[Tensor]
    structure: Structure
    needs_gradient: list[bool]
    kept: _Kept | None
    skips: list[bool | None]
    writes_inputs: bool
    reached: list[bool]


class EagerLayers:
    """A run of layers in Python, called by the worker of their stage for every micro-batch.

    Inputs are cloned, since a layer may write them; the numbers are those of the plain loop, also of sums of
    several contributions to one gradient.
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
        """Makes one.

        Args:
            part: whose layers to call one after the other.
            name: what errors call them.
            modes: PyTorch's global modes to run them under.
            share: of the activations that is kept; less than all means none, and to run them again, but for
                layers whose second run would do something else, such as to count on.
            busy: held while the layers run.
            on_tangents: is told the gradients that come to the outputs.
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
        self._at: int | None = None  # the layer whose forward runs, counted within the run
        self._after = after
        self._checked = False
        self._reentrant = False

    def note(self) -> list[NotedBuffer]:
        """The buffers as they are, and what embeddings with ``max_norm`` shorten in their forward."""
        return buffers_now(self._layers)

    def restore(self, noted: Sequence[NotedBuffer]) -> None:
        """Puts buffers back, after a failure."""
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
        """Runs one micro-batch; `tell_reached` asks for the parameters that its outputs depend on."""
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
        """Goes back through one micro-batch.

        Args:
            kept: by its forward.
            tangents: gradients of its outputs.
            gradients: of the layers' parameters so far, in the order of `parameters_of`.
            retain: whether there may be another backward.
            action: what the engine calls it.

        Returns:
            Gradients of the inputs, and those of the parameters with this micro-batch's added.
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
                    f"a parameter of {self._name} was given other data between forward and backward, which "
                    "runs the forward again"
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
                raise TypeError(f"{self._name} returns what cannot be passed on: {error}") from None
        writes_inputs = versions != [copy._version for copy in copied]
        return _Run(leaves, outputs, structure, stashed, writes_inputs)

    def _key(self, arrived: _Arrived) -> Tensor:
        """Of the micro-batch's draws, where the layers are."""
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
        # A parameter as a root takes in what there is, before its uses add theirs one by one, as autograd
        # does for all micro-batches of a loop. What is added up in more precision is no gradient of its.
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
        """Which parameters the outputs depend on; looks for checkpoints, which hide theirs.

        Raises:
            RuntimeError: they depend on a tensor whose gradient would be lost.
        """
        known = {id(tensor) for tensor in (*run.leaves, *parameters)}
        nodes = _graph_of(run.roots())
        self._reentrant = self._reentrant or any(n.name() == "CheckpointFunctionBackward" for n in nodes)
        leaves = [leaf for n in nodes if isinstance(leaf := getattr(n, "variable", None), Tensor)]
        for leaf in leaves:
            if id(leaf) not in known:
                raise RuntimeError(
                    f"{self._name} uses a tensor of shape {list(leaf.shape)} that needs a gradient and is "
                    "not one of its parameters; make it one, or pass it through the layers"
                )
        self._checked = True
        found = {id(leaf) for leaf in leaves}
        return [self._reentrant or id(parameter) in found for parameter in parameters]

    @contextlib.contextmanager
    def _blamed(self, action: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                # The words of csrc/pipeline/pipeline.cpp: raise.
                microbatch = Action.parse(action).microbatch
                error.add_note(f"in action {action}: {self._at_work()}, micro-batch {microbatch}")
            self._at = None
            raise

    def _at_work(self) -> str:
        """The layer whose forward runs; in a backward nobody knows, so all of them."""
        if self._at is None:
            return self._name
        stage = self._name.partition(", ")[0]
        return f"{stage}, {title(self._part.first_layer + self._at, self._layers[self._at])}"


def _added(total: Tensor | None, gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """A sum in another dtype, with one more gradient."""
    if gradient is None:
        return total
    return gradient.to(dtype) if total is None else total + gradient.to(dtype)


def _graph_of(roots: Iterable[Tensor]) -> set[Node]:
    """All nodes of the graph that leads to these."""
    pending: list[Node] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = {n for n, _ in pending.pop().next_functions if n is not None} - seen
        seen |= following
        pending.extend(following)
    return seen
