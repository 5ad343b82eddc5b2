"""Models with skip connections for other candidates: as checkpointed stages, and translated to torchgpipe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_fast.skip import Key, Skippable, skip_scope, skips_of, stash, take_stashed


class _Stage(nn.Module):
    """A run of layers; skip connections to other stages are arguments and results.

    Attributes:
        incoming: keys that the stage pops and other stages stash.
        outgoing: keys that the stage stashes for other stages.
    """

    def __init__(self, layers: nn.Sequential, incoming: list[Key], outgoing: list[Key]) -> None:
        super().__init__()
        self.layers, self.incoming, self.outgoing = layers, incoming, outgoing

    def forward(self, x: Tensor, *popped: Tensor) -> Any:
        with skip_scope(dict(zip(self.incoming, popped, strict=True))) as held:
            return self.layers(x), *take_stashed(held, self.outgoing)


def checkpointed(model: nn.Sequential, balance: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Returns the sequence of stages, each recomputed as a whole in the backward, as GPipe does."""
    skips, layers = skips_of(model), iter(model)
    stages = []
    for size, end in zip(balance, itertools.accumulate(balance), strict=True):
        incoming = [s.key for s in skips if s.source < end - size <= s.target < end]
        outgoing = [s.key for s in skips if end - size <= s.source < end <= s.target]
        stages.append(_Stage(nn.Sequential(*itertools.islice(layers, size)), incoming, outgoing))

    def forward(x: Tensor) -> Tensor:
        held: dict[Key, Tensor] = {}
        for stage in stages:
            popped = [held.pop(key) for key in stage.incoming]
            x, *stashed = checkpoint(stage, x, *popped, use_reentrant=False)
            held |= dict(zip(stage.outgoing, stashed, strict=True))
        return x

    return forward


class _TranslatedLayer(nn.Module):
    """A layer with skip connections that yields torchgpipe's commands."""

    def __init__(self, layer: Skippable) -> None:
        super().__init__()
        self.layer = layer.module

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        import torchgpipe.skip as theirs

        commands, answer = self.layer(x), None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(command, stash):
                yield theirs.stash(command.name, command.tensor)
                answer = None
            else:
                answer = yield theirs.pop(command.name)


def for_torchgpipe(model: nn.Sequential) -> nn.Sequential:
    """Returns the model translated to torchgpipe's skippable layers; parameters are shared."""
    import torchgpipe.skip as theirs

    namespaces: dict[object, Any] = {}

    def translated(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, Skippable):
            return layer
        decorate = theirs.skippable(layer.stashable_names, layer.poppable_names)
        # Each layer gets its own class, because torchgpipe keeps the stashed and popped names in the class.
        made: Any = decorate(type("Translated", (_TranslatedLayer,), {}))(layer)
        for key in (*layer.stashable(), *layer.poppable()):
            if key.namespace is not None:
                made.isolate(namespaces.setdefault(key.namespace, theirs.Namespace()), only=[key.name])
        translation: nn.Module = made
        return translation

    return nn.Sequential(*map(translated, model))
