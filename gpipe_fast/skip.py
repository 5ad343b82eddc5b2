"""Skip connections: one layer stashes a tensor and a later one pops it, bypassing the layers between."""

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
    """Distinguishes skip tensors that have the same name (see `Skippable.isolate`). Copies compare equal."""

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)


# The namespace of tensors that the caller gives, and no layer stashes, such as the target of a loss.
GIVEN = Namespace()


class Key(NamedTuple):
    """The identity of a skip tensor.

    Attributes:
        namespace: None is the default namespace, which all layers share.
        name: as declared.
    """

    namespace: Namespace | None
    name: str


class stash:
    """Passes a tensor to the layer that pops it: ``yield stash('name', tensor)``.

    Args:
        name: a name that the layer declares.
        tensor: a tensor of any shape and dtype whose first dimension is the micro-batch; or None.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Takes a tensor that an earlier layer stashed: ``tensor = yield pop('name')``.

    Args:
        name: a name that the layer declares.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _StashedTensors(threading.local):
    """Skip tensors that were stashed and not yet popped, per thread."""

    def __init__(self) -> None:
        self.tensors: dict[Key, Tensor | None] = {}


STASHED = _StashedTensors()


@contextlib.contextmanager
def skip_scope(popped: Mapping[Key, Tensor | None]) -> Iterator[dict[Key, Tensor | None]]:
    """Replaces the calling thread's skip tensors for a block; yields a dictionary that receives new ones."""
    before = STASHED.tensors
    STASHED.tensors = dict(popped)
    try:
        yield STASHED.tensors
    finally:
        STASHED.tensors = before


_Self = TypeVar("_Self", bound="Skippable")


class Skippable(nn.Module):
    """A module that stashes or pops skip tensors; base class of the classes that `skippable` creates.

    Attributes:
        module: an instance of the decorated class.
        namespaces: the namespace of each isolated name.
        module_cls: the decorated class.
        stashable_names: the names that the module may stash.
        poppable_names: the names that the module may pop.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[tuple[str, ...]] = ()
    poppable_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Creates the decorated module from the arguments of its class."""
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        """Returns the decorated module's representation, marked by ``@skippable``."""
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> Key:
        """Returns the key of a name that this module declares."""
        return Key(self.namespaces.get(name), name)

    def stashable(self) -> list[Key]:
        """Returns the keys that this module stashes, in the order of their declaration."""
        return [self.namespaced(name) for name in self.stashable_names]

    def poppable(self) -> list[Key]:
        """Returns the keys that this module pops, in the order of their declaration."""
        return [self.namespaced(name) for name in self.poppable_names]

    def isolate(self: _Self, ns: Namespace, *, only: Iterable[str] | None = None) -> _Self:
        """Puts names of this module into a namespace; equal names in two namespaces denote distinct tensors.

        ::

            ns1, ns2 = Namespace(), Namespace()
            nn.Sequential(
                Down().isolate(ns1), Down().isolate(ns2), Up().isolate(ns2), Up().isolate(ns1)
            )

        Args:
            ns: the namespace.
            only: the names to isolate; by default all that the module declares.

        Returns:
            This module.

        Raises:
            ValueError: the module does not declare one of the names.
        """
        declared = (*self.stashable_names, *self.poppable_names)
        names = declared if only is None else tuple(only)
        unknown = [name for name in names if name not in declared]
        if unknown:
            raise ValueError(f"cannot isolate {_quoted(unknown)}: the module declares {_quoted(declared)}")
        self.namespaces |= dict.fromkeys(names, ns)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the decorated module and executes the `stash` and `pop` commands that it yields.

        Raises:
            RuntimeError: the module stashes or pops an undeclared name, omits a declared one, pops a name
                twice, or pops a tensor that has not been stashed.
            TypeError: the module yields something other than `stash` and `pop`.
        """
        stashed_tensors = STASHED.tensors
        # As in torchgpipe, pops are looked up before the module runs; stashes become visible if it succeeds.
        popped: list[Tensor | None] = []
        for key in self.poppable():
            if key not in stashed_tensors:
                raise RuntimeError(f"'{key.name}' has not been stashed")
            popped.append(stashed_tensors.pop(key))
        output, stashed = self.call_with_skips(args, kwargs, popped)
        for name, tensor in zip(self.stashable_names, stashed, strict=True):
            stashed_tensors[self.namespaced(name)] = tensor
        return output

    def call_with_skips(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], popped_tensors: Sequence[Tensor | None]
    ) -> tuple[Any, tuple[Tensor | None, ...]]:
        """Runs the decorated module without the calling thread's skip tensors.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            popped_tensors: the tensors of `poppable_names`.

        Returns:
            The module's output, and the tensors of `stashable_names`.

        Raises:
            RuntimeError: as for `forward`.
            TypeError: as for `forward`.
        """
        popped = dict(zip(self.poppable_names, popped_tensors, strict=True))
        stashed: dict[str, Tensor | None] = {}
        output = self._run_commands(self.module(*args, **kwargs), stashed, popped)
        missing = [name for name in self.stashable_names if name not in stashed]
        if missing:
            raise RuntimeError(f"{_quoted(missing)} must be stashed but have not")
        if popped:
            raise RuntimeError(f"{_quoted(popped)} must be popped but have not")
        return output, tuple([stashed[name] for name in self.stashable_names])

    def _run_commands(
        self, commands: Any, stashed: dict[str, Tensor | None], popped: dict[str, Tensor | None]
    ) -> Any:
        if not isinstance(commands, Generator):
            return commands  # the forward is not a generator
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
                if not isinstance(command.tensor, Tensor | None):
                    raise TypeError(
                        f"stash({command.name!r}, ...) takes a tensor or None, got a "
                        f"{type(command.tensor).__name__}; stash each tensor under a name of its own"
                    )
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

    In a pipeline, the tensor and its gradient are sent directly between the two stages. Outside of a
    pipeline, the tensor is stored in thread-local storage until it is popped.

    Args:
        stash: the names that the module stashes.
        pop: the names that the module pops.

    Returns:
        A class decorator. Parameters of the decorated modules are named ``module.<name>``.

    Raises:
        TypeError: ``stash`` or ``pop`` is not a list of names.
    """
    stashable_names, poppable_names = _names("stash", stash), _names("pop", pop)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        skippable_cls = type(
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
        # Pickling finds the class here: its own name now denotes the Skippable subclass.
        module_cls.__qualname__ += ".module_cls"
        return skippable_cls

    return decorate


def _names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names that a skippable declares. Rejects a single string, an iterable of letters."""
    if not isinstance(names, str) and isinstance(names, Iterable):
        found = tuple(names)
        if all(isinstance(name, str) for name in found):
            return found
    raise TypeError(f"{argument} must be a list of names, such as {argument}=['skip'], got {names!r}")


def verify_skippables(module: nn.Module) -> None:
    """Checks that each skip tensor is stashed by one layer and popped by one later layer.

    Raises:
        TypeError: a stash or pop has no match; the message has a line for each mismatch.
    """
    stashed: set[Key] = set()
    popped: set[Key] = set()
    mismatches: list[str] = []
    for name, layer in module.named_children():
        stashes, pops = outer_skips(layer)
        # Submodules of a layer may pass tensors to each other; a single module cannot pass one to itself.
        own = (layer.stashable_names, layer.poppable_names) if isinstance(layer, Skippable) else ((), ())
        for both in (each for each in own[0] if each in own[1]):
            mismatches.append(f"'{name}' declared '{both}' both as stashable and as poppable")
        for key in stashes:
            if key in stashed:
                mismatches.append(
                    f"'{name}' redeclared '{key.name}' as stashable but not isolated by namespace"
                )
            stashed.add(key)
        for key in pops:
            if key in popped:
                mismatches.append(
                    f"'{name}' redeclared '{key.name}' as poppable but not isolated by namespace"
                )
            elif key not in stashed and key.namespace != GIVEN:
                mismatches.append(f"'{name}' declared '{key.name}' as poppable but it was not stashed")
            else:
                popped.add(key)
    left = sorted(key.name for key in stashed - popped)
    mismatches += [f"no module declared '{each}' as poppable but stashed" for each in left]
    if mismatches:
        raise TypeError(
            "one or more pairs of stash and pop do not match:\n\n" + "\n".join(f"* {f}" for f in mismatches)
        )


def declared(layer: nn.Module) -> tuple[list[Key], list[Key]]:
    """Returns the keys that a layer, including its submodules, stashes and pops, in order."""
    parts = [module for module in layer.modules() if isinstance(module, Skippable)]
    return [key for p in parts for key in p.stashable()], [key for p in parts for key in p.poppable()]


def outer_skips(layer: nn.Module) -> tuple[list[Key], list[Key]]:
    """Returns the keys that a layer stashes for other layers, and those that it pops from others."""
    stashes, pops = declared(layer)
    inner = set(stashes) & set(pops)
    return [key for key in stashes if key not in inner], [key for key in pops if key not in inner]


@dataclass(frozen=True)
class Skip:
    """A skip connection between two layers of a sequence.

    Attributes:
        key: the identity of its tensor.
        source: index of the layer that stashes the tensor; -1 if the caller gives it.
        target: index of the layer that pops the tensor.
        stash_order: position in the order of all stashes.
    """

    key: Key
    source: int
    target: int
    stash_order: int


def skips_of(layers: Iterable[nn.Module]) -> list[Skip]:
    """Returns the skip connections between layers, in the order of their pops.

    Connections within a layer are omitted. The layers must pass `verify_skippables`.
    """
    sources: dict[Key, tuple[int, int]] = {}
    found: list[Skip] = []
    order = itertools.count()
    for index, layer in enumerate(layers):
        stashes, pops = outer_skips(layer)
        for key in pops:
            source, stash_order = (-1, -1) if key.namespace == GIVEN else sources[key]
            found.append(Skip(key, source, index, stash_order))
        sources |= {key: (index, next(order)) for key in stashes}
    return found


def take_stashed(stashed_tensors: dict[Key, Tensor | None], keys: Sequence[Key]) -> list[Tensor | None]:
    """Removes and returns the skip tensors with these keys.

    Raises:
        RuntimeError: a tensor has not been stashed.
    """
    missing = [key.name for key in keys if key not in stashed_tensors]
    if missing:
        raise RuntimeError(f"{_quoted(missing)} must be stashed but have not")
    return [stashed_tensors.pop(key) for key in keys]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
