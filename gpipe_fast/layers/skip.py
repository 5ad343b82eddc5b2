"""Skip connections: a layer stashes a tensor, a later one pops it; those between know nothing of it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]


@dataclass(frozen=True, order=True)
class Namespace:
    """Keeps skip tensors of equal names apart (see `Skippable.isolate`). Copies are equal to it."""

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)


class Key(NamedTuple):
    """What a skip tensor is known by.

    Attributes:
        namespace: None is the one that all share.
        name: as declared.
    """

    namespace: Namespace | None
    name: str


class stash:
    """Hands a tensor to the layer that pops it: ``yield stash('name', tensor)``.

    Args:
        name: as the layer declares it.
        tensor: of any shape and dtype, its first dimension the micro-batch; or None.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Takes what an earlier layer stashed: ``tensor = yield pop('name')``.

    Args:
        name: as the layer declares it.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Held(threading.local):
    """What was stashed and not popped yet, by thread."""

    def __init__(self) -> None:
        self.tensors: dict[Key, Tensor | None] = {}


_held = _Held()


@contextlib.contextmanager
def carrying(popped: Mapping[Key, Tensor | None]) -> Iterator[dict[Key, Tensor | None]]:
    """Lets layers that run in this thread pop these alone; what they leave stashed is in the dictionary."""
    before = _held.tensors
    _held.tensors = dict(popped)
    try:
        yield _held.tensors
    finally:
        _held.tensors = before


_Self = TypeVar("_Self", bound="Skippable")


class Skippable(nn.Module):
    """A module that stashes or pops; `skippable` makes classes of these.

    Attributes:
        module: an instance of the decorated class.
        namespaces: of the names that are isolated.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[tuple[str, ...]] = ()
    poppable_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Makes the decorated class's module, with its own arguments."""
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        """As of the decorated class, marked."""
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> Key:
        """The key of a name here."""
        return Key(self.namespaces.get(name), name)

    def stashable(self) -> list[Key]:
        """What it stashes, in the order declared."""
        return [self.namespaced(name) for name in self.stashable_names]

    def poppable(self) -> list[Key]:
        """What it pops, in the order declared."""
        return [self.namespaced(name) for name in self.poppable_names]

    def isolate(self: _Self, ns: Namespace, *, only: Iterable[str] | None = None) -> _Self:
        """Puts names of this module into a namespace, in which the same name is another tensor's.

        ::

            ns1, ns2 = Namespace(), Namespace()
            nn.Sequential(
                Down().isolate(ns1), Down().isolate(ns2), Up().isolate(ns2), Up().isolate(ns1)
            )

        Args:
            ns: the namespace.
            only: these names; by default all that the module declares.

        Returns:
            This module.

        Raises:
            ValueError: it declares no such name.
        """
        declared = (*self.stashable_names, *self.poppable_names)
        names = declared if only is None else tuple(only)
        unknown = [name for name in names if name not in declared]
        if unknown:
            raise ValueError(f"cannot isolate {_quoted(unknown)}: the module declares {_quoted(declared)}")
        self.namespaces |= dict.fromkeys(names, ns)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the decorated module, and does what it yields.

        Raises:
            RuntimeError: it stashes or pops something else than it declares, or what is not there.
            TypeError: it yields something else than `stash` and `pop`.
        """
        held = _held.tensors
        # As torchgpipe: what is popped is looked for first, and what is stashed shows when all has gone well.
        popped: dict[str, Tensor | None] = {}
        for key in self.poppable():
            if key not in held:
                raise RuntimeError(f"'{key.name}' has not been stashed")
            popped[key.name] = held.pop(key)
        stashed: dict[str, Tensor | None] = {}
        output = self._drive(self.module(*args, **kwargs), stashed, popped)
        missing = [name for name in self.stashable_names if name not in stashed]
        if missing:
            raise RuntimeError(f"{_quoted(missing)} must be stashed but have not")
        if popped:
            raise RuntimeError(f"{_quoted(popped)} must be popped but have not")
        for name, tensor in stashed.items():
            held[self.namespaced(name)] = tensor
        return output

    def _drive(
        self, commands: Any, stashed: dict[str, Tensor | None], popped: dict[str, Tensor | None]
    ) -> Any:
        if not isinstance(commands, Generator):
            return commands  # a forward that never yields
        answer: Tensor | None = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None
            if isinstance(command, stash):
                if command.name not in self.stashable_names:
                    raise RuntimeError(f"'{command.name}' has not been declared as stashable")
                stashed[command.name] = command.tensor
            elif isinstance(command, pop):
                if command.name not in self.poppable_names:
                    raise RuntimeError(f"'{command.name}' has not been declared as poppable")
                if command.name not in popped:
                    raise RuntimeError(f"'{command.name}' has been popped already")
                answer = popped.pop(command.name)
            else:
                raise TypeError(f"{command!r} is not a command from @skippable")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorates a module class whose ``forward`` stashes or pops tensors.

    ::

        @skippable(stash=["1to3"])
        class Layer1(nn.Module):
            def forward(self, x):
                yield stash("1to3", x)
                return f1(x)

        @skippable(pop=["1to3"])
        class Layer3(nn.Module):
            def forward(self, x):
                return f3(x) + (yield pop("1to3"))

        model = nn.Sequential(Layer1(), Layer2(), Layer3())

    In a pipeline the tensor, and its gradient, go straight from the one stage to the other. Elsewhere it
    waits in the thread that stashed it.

    Args:
        stash: names of what it stashes.
        pop: names of what it pops.

    Returns:
        A decorator; parameters of what it makes are called ``module.<name>``.

    Raises:
        TypeError: ``stash`` or ``pop`` is no list of names.
    """
    stashable_names, poppable_names = _names("stash", stash), _names("pop", pop)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        made = type(
            module_cls.__name__,
            (Skippable,),
            {
                "__module__": module_cls.__module__,
                "__qualname__": module_cls.__qualname__,
                "__doc__": module_cls.__doc__,
                "module_cls": module_cls,
                "stashable_names": stashable_names,
                "poppable_names": poppable_names,
            },
        )
        # Where pickling finds it, now that its own name stands for what is made of it.
        module_cls.__qualname__ += ".module_cls"
        return made

    return decorate


def _names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a skippable declares; a text alone would be taken for a list of letters."""
    if not isinstance(names, str) and isinstance(names, Iterable):
        found = tuple(names)
        if all(isinstance(name, str) for name in found):
            return found
    raise TypeError(f"{argument} must be a list of names, such as {argument}=['skip'], got {names!r}")


def verify_skippables(module: nn.Module) -> None:
    """Checks that each skip tensor is stashed by one layer and popped by one later layer.

    Raises:
        TypeError: it is not so; with a line for each that does not match.
    """
    stashed: set[Key] = set()
    popped: set[Key] = set()
    faults: list[str] = []
    for name, layer in module.named_children():
        stashes, pops = declared(layer)
        # Modules deeper within a layer may pass some among themselves; one alone cannot.
        within = set(stashes) & set(pops)
        own = (layer.stashable_names, layer.poppable_names) if isinstance(layer, Skippable) else ((), ())
        for both in (each for each in own[0] if each in own[1]):
            faults.append(f"'{name}' declared '{both}' both as stashable and as poppable")
        for key in (key for key in stashes if key not in within):
            if key in stashed:
                faults.append(f"'{name}' redeclared '{key.name}' as stashable but not isolated by namespace")
            stashed.add(key)
        for key in (key for key in pops if key not in within):
            if key in popped:
                faults.append(f"'{name}' redeclared '{key.name}' as poppable but not isolated by namespace")
            elif key not in stashed:
                faults.append(f"'{name}' declared '{key.name}' as poppable but it was not stashed")
            else:
                popped.add(key)
    left = sorted(key.name for key in stashed - popped)
    faults += [f"no module declared '{each}' as poppable but stashed" for each in left]
    if faults:
        raise TypeError(
            "one or more pairs of stash and pop do not match:\n\n" + "\n".join(f"* {f}" for f in faults)
        )


def declared(layer: nn.Module) -> tuple[list[Key], list[Key]]:
    """What a layer, with all in it, stashes and pops, in order."""
    parts = [module for module in layer.modules() if isinstance(module, Skippable)]
    return [key for p in parts for key in p.stashable()], [key for p in parts for key in p.poppable()]


@dataclass(frozen=True)
class Skip:
    """One skip connection of a sequence of layers.

    Attributes:
        key: its own.
        source: the layer that stashes it.
        target: the layer that pops it.
        stash_order: its place among all that are stashed.
    """

    key: Key
    source: int
    target: int
    stash_order: int


def skips_of(layers: Iterable[nn.Module]) -> list[Skip]:
    """The skip connections from one layer to another, in the order in which they are popped.

    Those within a layer do not show. The layers are as `verify_skippables` wants them.
    """
    sources: dict[Key, tuple[int, int]] = {}
    found: list[Skip] = []
    order = itertools.count()
    for index, layer in enumerate(layers):
        stashes, pops = declared(layer)
        within = set(stashes) & set(pops)
        for key in (key for key in pops if key not in within):
            source, place = sources[key]
            found.append(Skip(key, source, index, place))
        sources |= {key: (index, next(order)) for key in stashes if key not in within}
    return found


def take(held: dict[Key, Tensor | None], keys: Sequence[Key]) -> list[Tensor | None]:
    """Takes what layers have left for later ones.

    Raises:
        RuntimeError: there is something else.
    """
    missing = [key.name for key in keys if key not in held]
    if missing:
        raise RuntimeError(f"{_quoted(missing)} must be stashed but have not")
    return [held.pop(key) for key in keys]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
