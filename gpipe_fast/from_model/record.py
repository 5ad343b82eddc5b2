"""Records a call of a model on stand-ins: tensors with shapes and dtypes, but without elements.

The model's own forward runs once, as Python code, so its branches are those of a plain call. Blocks, and
other modules that contain no block, are single calls of the record. What runs between them is recorded as
calls of PyTorch's functions, and not as calls of the operators of which these consist.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from gpipe_fast.from_model.dataflow import (
    Call,
    CannotCut,
    Dataflow,
    Decision,
    Device,
    Nested,
    Owned,
    Place,
    RecordedTensor,
    Ref,
    Slice,
    Surroundings,
)
from gpipe_fast.randomness.random import is_random
from gpipe_fast.strides import empty_like
from gpipe_fast.torch_private import pytree
from gpipe_fast.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    logging_disabled,
    make_wrapper_subclass,
)
from gpipe_fast.torch_private.modes import (
    TorchDispatchMode,
    disabled_torch_function,
    pop_function_mode_temporarily,
)

# Values that a recorded call may have beside tensors.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type(...),
    enum.Enum,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
)

# Returns the number that a `Decision` reads, given its function, its arguments, and the calls so far.
Decide = Callable[[Any, Nested, "Recorder"], Any]


class _Hidden(Exception):
    """Raised by an operator that is called by no function that PyTorch shows."""


class StandIn(Tensor):
    """A tensor that forward sees in place of a value. Functions of PyTorch get its fake tensor."""

    fake: Tensor
    number: int

    @staticmethod
    def of(fake: Tensor, number: int) -> StandIn:
        """Returns a stand-in for a value."""
        found: StandIn = make_wrapper_subclass(
            StandIn,
            fake.shape,
            strides=fake.stride(),
            dtype=fake.dtype,
            device=fake.device,
            requires_grad=fake.requires_grad,
        )
        found.fake, found.number = fake, number
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn(<{self.number}>, {tuple(self.shape)})"

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _active.recorder is not None:
            _active.recorder.hidden = f"{func} at {place()}"
        raise _Hidden


class _Spy(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


class Recorder(TorchFunctionMode):
    """Records the calls of PyTorch's functions and of modules.

    Args:
        model: the model; all its tensors are fake.
        names: the names of its modules.
        opened: the modules that are recorded by what they call.
        blocks: the blocks.
        mode: the fake mode.
        device: the device of all fake tensors.
        decide: returns what forward reads from a tensor.
        tensors: returns the tensor whose place a fake tensor of a module has.
    """

    def __init__(
        self,
        names: dict[nn.Module, str],
        opened: Set[nn.Module],
        blocks: Set[nn.Module],
        mode: FakeTensorMode,
        device: torch.device,
        decide: Decide,
        tensors: Callable[[Owned], Tensor],
    ) -> None:
        super().__init__()
        self.tensors = tensors
        self.names, self._opened, self._blocks = names, opened, blocks
        self._mode, self._device, self._decide = mode, device, decide
        self.values: list[RecordedTensor] = []
        self.calls: list[Call] = []
        self.decisions: list[Decision] = []
        self.num_inputs = 0
        self.is_in_module = False
        self.calling: nn.Module | None = None  # whose call is not recorded
        self.hidden = ""  # a call that PyTorch does not show, as in TorchScript
        self._stand_ins: dict[int, StandIn] = {}
        self._storages: dict[int, int] = {}
        self._keep_alive: list[Any] = []
        self._owners: dict[int, Owned] = {}
        self._owned_storages: dict[int, Owned] = {}
        for module in reversed(names):
            for table in (module._parameters, module._buffers, vars(module)):
                for name, tensor in table.items():
                    if isinstance(tensor, Tensor):
                        owned = self._owners[id(tensor)] = Owned(module, name)
                        self._owned_storages[tensor.untyped_storage()._cdata] = owned

    def stand_in(self, fake: Tensor) -> StandIn:
        """Returns the stand-in for a fake tensor; makes one if there is none."""
        found = self._stand_ins.get(id(fake))
        if found is None:
            storage = self._storages.setdefault(fake.untyped_storage()._cdata, len(self._storages))
            self.values.append(RecordedTensor(tuple(fake.shape), fake.dtype, fake.requires_grad, storage))
            found = self._stand_ins[id(fake)] = StandIn.of(fake, len(self.values) - 1)
            self._keep_alive.append(fake)
        return found

    def nested(self, value: Any) -> Nested:
        """Returns a nested value of stand-ins, constants and tensors of modules.

        Raises:
            CannotCut: it contains something else.
        """
        leaves, spec = pytree.tree_flatten(value)
        return Nested(tuple(map(self._leaf, leaves)), spec)

    def _is_nested(self, value: Any) -> bool:
        try:
            self.nested(value)
        except CannotCut:
            return False
        return True

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, StandIn):
            return Ref(leaf.number)
        if isinstance(leaf, Tensor):
            if id(leaf) in self._stand_ins:
                return Ref(self._stand_ins[id(leaf)].number)
            owner = self._owners.get(id(leaf))
            if owner is None:
                raise CannotCut(
                    f"a tensor of shape {list(leaf.shape)} that no module has as an attribute is used at "
                    f"{place()}; register it as a buffer, or, if a function of torch.jit computes it, call "
                    "the plain function"
                )
            return owner
        if isinstance(leaf, slice):
            return Slice(*(self._leaf(each) for each in (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, torch.device):
            return Device() if leaf == self._device else leaf
        if not isinstance(leaf, _CONSTANTS):
            raise CannotCut(f"a {type(leaf).__name__} is passed between modules at {place()}")
        return leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on fake tensors, and records it if it returns or changes a tensor."""
        if func is Tensor.__iter__:
            return iter(self.call(torch.unbind, args, kwargs))
        if func is Tensor.__repr__ or func is Tensor.__format__:
            return repr(args[0])
        fakes, fake_kwargs = self._fakes((args, kwargs))
        tensors = [x for x in pytree.tree_leaves((fakes, fake_kwargs)) if isinstance(x, Tensor)]
        versions = list(map(_version, tensors))
        if getattr(func, "__name__", "") in _CHANGES_OF_SHAPE:
            raise CannotCut(
                f"{func.__name__} is called between blocks at {place()}; use the form without '_'"
            )
        spy = _Spy()
        try:
            with self._mode, spy:
                returned = func(*fakes, **fake_kwargs)
        except DataDependentOutputException:
            return self._decision(func, self.nested((args, kwargs)))
        except DynamicOutputShapeException as error:
            raise CannotCut(f"the shape of a tensor depends on its elements at {place()} ({error})") from None
        changed = self._changed(tensors, versions)
        made = [x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor)]
        if not made and not changed:
            if getattr(func, "__name__", "") in _REFUSED_METHODS:
                raise CannotCut(f"{func.__name__} is called between blocks at {place()}")
            return returned
        arguments = self.nested((args, kwargs))
        if not changed:
            # `x.contiguous()` returns x itself, or another tensor, depending on sizes.
            returned = pytree.tree_map_only(Tensor, self._another, returned)
        return self._record(func, arguments, returned, spy.draws, changed)

    def _changed(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> set[int]:
        """Returns the identities of the tensors that were changed in place since they had these versions.

        Raises:
            CannotCut: one of them shares memory with a tensor of a module.
        """
        changed = [x for x, before in zip(tensors, versions, strict=True) if _version(x) != before]
        for tensor in changed:
            owner = self._owned_storages.get(tensor.untyped_storage()._cdata)
            if owner is not None:
                name = f"{self.names[owner.owner]}.{owner.name}".lstrip(".")
                raise CannotCut(f"{name} is changed in place between blocks, at {place()}")
        return set(map(id, changed))

    def _another(self, fake: Tensor) -> Tensor:
        """Returns a tensor that is not recorded yet: an alias of one that is."""
        if id(fake) not in self._stand_ins and id(fake) not in self._owners:
            return fake
        with self._mode:
            return torch.ops.aten.alias(fake)  # type: ignore[no-any-return]

    def _fakes(self, value: Any) -> Any:
        def fake(leaf: Any) -> Any:
            if isinstance(leaf, slice):
                return slice(*map(fake, (leaf.start, leaf.stop, leaf.step)))
            return leaf.fake if isinstance(leaf, StandIn) else leaf

        return pytree.tree_map(fake, value)

    def _stand_ins_for(self, value: Any) -> Any:
        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) in self._owners:
                return leaf
            return self.stand_in(leaf)

        return pytree.tree_map(stand_in, value)

    def _record(self, target: Any, arguments: Nested, returned: Any, draws: bool, changed: Set[int]) -> Any:
        mutates = [self._stand_ins[identity].number for identity in changed]
        result = self._stand_ins_for(returned)
        keeps_state = isinstance(target, nn.Module) and (
            target in self._blocks or any(True for _ in target.buffers())
        )
        around, where = surroundings(self._device), place()
        mutated = tuple(sorted(mutates))
        self.calls.append(
            Call(target, arguments, self.nested(result), draws, mutated, around, where, keeps_state)
        )
        return result

    def _decision(self, func: Any, arguments: Nested) -> Any:
        self.is_in_module = True
        try:
            answer = self._decide(func, arguments, self)
        finally:
            self.is_in_module = False
        self.decisions.append(Decision(func, arguments, answer, place()))
        return answer

    @contextlib.contextmanager
    def in_module(self) -> Iterator[None]:
        """Records nothing in a block, and leaves Python's generator as it is."""
        state = random.getstate()
        self.is_in_module = True
        try:
            with pop_function_mode_temporarily():
                yield
        finally:
            self.is_in_module = False
            random.setstate(state)

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Records a call of a module, or calls it if it is recorded by what it calls."""
        if module in self._opened:
            return _unrecorded(module)(*args, **kwargs)
        name = self.names.get(module)
        if name is None:
            if any(True for _ in (*module.parameters(), *module.buffers())):
                raise CannotCut(
                    f"a {type(module).__name__} that is no submodule of the model is called at {place()}"
                )
            return _unrecorded(module)(*args, **kwargs)  # as nn.CrossEntropyLoss() in a forward
        _refuse_collectors()
        try:
            arguments = self.nested((args, kwargs))
        except CannotCut as refused:
            odd = next(each for each, value in _named(args, kwargs) if not self._is_nested(value))
            return self._open(
                module, args, kwargs, f"{refused}, as {odd}; it may be a side channel between blocks"
            )
        fakes, fake_kwargs = self._fakes((args, kwargs))
        before = pytree.tree_flatten((fakes, fake_kwargs))
        tensors = [x for x in before[0] if isinstance(x, Tensor)]
        versions = list(map(_version, tensors))
        spy = _Spy()
        with self.in_module():
            returned = self._run(module, spy, fakes, fake_kwargs)
        self._check_channels(name or type(module).__name__, (args, kwargs), before, (fakes, fake_kwargs))
        changed = self._changed(tensors, versions)
        try:
            return self._record(module, arguments, returned, spy.draws, changed)
        except CannotCut as refused:
            return self._open(module, args, kwargs, str(refused))

    def _run(self, module: nn.Module, spy: _Spy, args: Any, kwargs: Any) -> Any:
        """Runs a module on fake tensors; or on zeros, where shapes depend on elements, as by a router."""
        has_own_call = type(module).__call__ is not nn.Module.__call__
        run: Any = functools.partial(type(module).__call__, module) if has_own_call else module.forward
        try:
            with self._mode, spy:
                return run(*args, **kwargs)
        except Exception as error:
            tensors = [t for m in module.modules() for t in self._real_tensors(m)]
            if any(t.is_meta for t in tensors):
                raise
            first_error = error
        try:
            with _real_tensors(module, self.tensors), spy:
                returned = run(*map_tensors(_zeros, args), **map_tensors(_zeros, kwargs))
        except Exception:
            raise first_error from None
        return map_tensors(
            lambda x: _fake(x.detach().requires_grad_(x.requires_grad), self._mode, self._device), returned
        )

    def _real_tensors(self, module: nn.Module) -> list[Tensor]:
        names = [*module._parameters, *module._buffers]
        return [self.tensors(Owned(module, n)) for n in names if getattr(module, n, None) is not None]

    def _open(self, module: nn.Module, args: Any, kwargs: Any, reason: str) -> Any:
        """Records a module that is no block by what it calls, because it cannot be a single call."""
        if module in self._blocks:
            raise CannotCut(f"block {self.names[module]}: {reason}")
        with mock.patch.object(self, "_opened", self._opened | {module}):
            return _unrecorded(module)(*args, **kwargs)

    def _check_channels(self, name: str, arguments: Any, before: Any, after: Any) -> None:
        """Checks that a module has not changed the containers among its arguments."""
        leaves, spec = pytree.tree_flatten(after)
        same = spec == before[1] and all(a is b for a, b in zip(leaves, before[0], strict=True))
        if same:
            return
        was = pytree.tree_unflatten(before[0], before[1])
        pairs = zip(_named(*after), _named(*was), strict=True)
        written = [name for (name, x), (_, y) in pairs if not _same(x, y)]
        raise CannotCut(
            f"{name} writes to {', '.join(written)}, which it gets as an argument: a side channel between "
            "blocks, which may run at the same time"
        )


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns a nested value, with each tensor replaced by a function's result."""
    return pytree.tree_map_only(Tensor, function, value)


def _zeros(tensor: Tensor) -> Tensor:
    """Returns a real tensor like a fake one."""
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return zeros.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _real_tensors(module: nn.Module, tensors: Callable[[Owned], Tensor]) -> Iterator[None]:
    """Puts the real tensors of a module back for a block, with copies of its buffers."""
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for inner in module.modules():
        tables: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for table in tables:
            for name, fake in table.items():
                if fake is not None:
                    before.append((table, name, fake))
                    real = tensors(Owned(inner, name))
                    table[name] = real.clone() if table is inner._buffers else real
    try:
        yield
    finally:
        for table, name, fake in before:
            table[name] = fake


def _named(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments of a call with their names."""
    return [
        *((f"argument {i}", value) for i, value in enumerate(args)),
        *((repr(k), kwargs[k]) for k in kwargs),
    ]


def _same(x: Any, y: Any) -> bool:
    ours, theirs = pytree.tree_flatten(x), pytree.tree_flatten(y)
    return ours[1] == theirs[1] and all(a is b for a, b in zip(ours[0], theirs[0], strict=True))


# Methods that return no tensor, and do something that a record does not repeat.
_REFUSED_METHODS = frozenset({"register_hook", "backward", "retain_grad", "__set__", "numpy", "data_ptr"})

# Methods that change the shape of a tensor, or cut it from the graph, in place.
_CHANGES_OF_SHAPE = frozenset(
    [
        "detach_",
        "transpose_",
        "t_",
        "squeeze_",
        "unsqueeze_",
        "swapaxes_",
        "swapdims_",
        "resize_",
        "resize_as_",
        "set_",
        "as_strided_",
    ]
)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_original_call = nn.Module.__call__


def _original_apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    return _APPLY.__get__(None, function)(*args, **kwargs)


_APPLY = inspect.getattr_static(Function, "apply")


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    recorder = _active.recorder
    if recorder is not None and recorder.is_in_module:
        return module.forward(*args, **kwargs)  # hooks get real tensors only
    if recorder is None or module is recorder.calling:
        return _original_call(module, *args, **kwargs)
    return recorder.call_module(module, args, kwargs)


def _recorded_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``__call__`` of a class, as of checkpointed layers of transformers, that is recorded."""

    @functools.wraps(original)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = _active.recorder
        if recorder is None or recorder.is_in_module or module is recorder.calling:
            return original(module, *args, **kwargs)
        return recorder.call_module(module, args, kwargs)

    return call


def _unrecorded(module: nn.Module) -> Callable[..., Any]:
    """Returns a function that calls a module without recording the call itself."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _active.recorder
        assert recorder is not None
        before, recorder.calling = recorder.calling, module
        try:
            return type(module).__call__(module, *args, **kwargs)
        finally:
            recorder.calling = before

    return call


def _apply_function(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    recorder = _active.recorder
    if recorder is None or recorder.is_in_module:
        return _original_apply(function, *args, **kwargs)
    recorder.nested((args, kwargs))  # refuses modules as arguments, as of a checkpoint
    with recorder.in_module():
        return recorder.call(_APPLY.__get__(None, function), args, kwargs)


def _refuse_collectors() -> None:
    """Refuses outputs that transformers collects inside of blocks."""
    collecting = sys.modules.get("transformers.utils.output_capturing")
    found = collecting and collecting._active_collector.get()
    names = [key for key in found or () if not key.startswith("_")]
    if names:
        raise CannotCut(
            f"{' and '.join(names)} would be collected inside of blocks; leave output_{names[0]} off, or "
            "call model.plain() for such an output"
        )


def place() -> Place:
    """Returns the line of the innermost frame outside of this package and of PyTorch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (
        str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "gpipe_fast", "unittest")
    ):
        frame = frame.f_back
    if frame is None:
        return Place("<unknown>", 0, "")
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def surroundings(device: torch.device) -> Surroundings:
    """Returns the modes of the calling thread."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return Surroundings(torch.is_grad_enabled(), autocast)


def record_call(
    model: nn.Module,
    forward: Callable[..., Any],
    build: Callable[[Sequence[Tensor]], tuple[Any, Any]],
    inputs: Sequence[Tensor],
    opened: Set[nn.Module],
    blocks: Set[nn.Module],
    device: torch.device,
    decide: Decide,
) -> tuple[Dataflow, Any]:
    """Records a call of a model.

    Args:
        model: the model.
        forward: its plain forward.
        build: returns the positional and keyword arguments with these tensors as inputs.
        inputs: the input tensors; only their metadata is read.
        opened: the modules that are recorded by what they call.
        blocks: the blocks.
        device: the device of all tensors.
        decide: returns what forward reads from a tensor.

    Returns:
        The record, and what the model returned, with stand-ins.

    Raises:
        CannotCut: something cannot be recorded.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = {module: name for name, module in model.named_modules()}
    with (
        _fake_tensors(names, mode, device) as tensors,
        _restored_attributes(names) as check,
        _patched({type(module) for module in names}),
        logging_disabled(),  # some of the sizes that are tried do not fit the model
    ):
        recorder = Recorder(names, opened, blocks, mode, device, decide, tensors)
        fakes = [_fake(x, mode, device) for x in inputs]
        args, kwargs = build([recorder.stand_in(x) for x in fakes])
        recorder.num_inputs = len(fakes)
        versions = [x._version for x in fakes]
        before = surroundings(device)
        _active.recorder = recorder
        try:
            with recorder:
                returned = forward(*args, **kwargs)
        except Exception:
            if not recorder.hidden:
                raise
            raise CannotCut(
                f"{recorder.hidden} runs between blocks, where PyTorch shows no call of a function"
            ) from None
        finally:
            _active.recorder = None
        if [x._version for x in fakes] != versions:
            raise CannotCut("forward changes an input tensor in place")
        check(recorder)
    result = recorder.nested(open_dataclass(returned))
    flow = Dataflow(
        recorder.num_inputs,
        tuple(recorder.values),
        tuple(recorder.calls),
        result,
        tuple(recorder.decisions),
        before,
    )
    return flow, returned


def open_dataclass(value: Any) -> Any:
    """Returns the attributes of an object that PyTorch does not flatten, such as of a dataclass."""
    if pytree.tree_leaves(value) == [value] and hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return value


@contextlib.contextmanager
def _patched(classes: Set[type[nn.Module]]) -> Iterator[None]:
    generator, state = torch.get_rng_state(), random.getstate()
    grad = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "__call__", _call_module))
        bases = {base for cls in classes for base in cls.__mro__[: cls.__mro__.index(nn.Module)]}
        for base in bases:
            if "__call__" in vars(base):
                call = _recorded_call(vars(base)["__call__"])
                stack.enter_context(mock.patch.object(base, "__call__", call))
        stack.enter_context(mock.patch.object(Function, "apply", classmethod(_apply_function)))
        for each in _user_functions(Function):
            wrapped = staticmethod(_refusing_bound(each, each.forward))
            stack.enter_context(mock.patch.object(each, "forward", wrapped))
        for owner in (torch, torch.random):
            for name in ("manual_seed", "set_rng_state"):
                stack.enter_context(mock.patch.object(owner, name, _seeding(getattr(owner, name))))
        stack.enter_context(torch.inference_mode(False))  # whose tensors do not count changes in place
        stack.enter_context(torch.set_grad_enabled(grad))
        try:
            yield
            if random.getstate() != state:
                raise CannotCut(
                    "forward draws from Python's random between blocks; later calls would repeat the draw"
                )
        finally:
            torch.set_rng_state(generator)
            random.setstate(state)


def _user_functions(base: type[Function]) -> Iterator[type[Function]]:
    """Yields the functions with a backward of their own that are not PyTorch's."""
    for each in base.__subclasses__():
        if not each.__module__.startswith("torch.") and "forward" in vars(each):
            yield each
        yield from _user_functions(each)


def _refusing_bound(function: type[Function], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that raises between blocks, where a bound `apply` is not recorded."""

    @functools.wraps(forward)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        recorder = _active.recorder
        if recorder is not None and not recorder.is_in_module:
            name = function.__name__
            raise CannotCut(
                f"{name}.apply was bound to a variable before; write {name}.apply(...) in forward"
            )
        return forward(*args, **kwargs)

    return refusing


def _seeding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that seeds PyTorch's generator, unless it is called between blocks."""

    def seed(*args: Any, **kwargs: Any) -> Any:
        recorder = _active.recorder
        if recorder is not None and not recorder.is_in_module:
            raise CannotCut(f"forward seeds PyTorch's generator between blocks, at {place()}")
        return function(*args, **kwargs)

    return seed


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with mode:
        fake = empty_like(tensor, device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _fake_tensors(
    names: dict[nn.Module, str], mode: FakeTensorMode, device: torch.device
) -> Iterator[Callable[[Owned], Tensor]]:
    """Replaces the parameters and buffers of modules, and other tensors that they have, by fake ones.

    Yields a function that returns the real tensor.
    """
    fakes: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in names:
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, Tensor):
                    before.append((table, name, tensor))
    try:
        for table, name, tensor in before:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake(tensor, mode, device)
            table[name] = fakes[id(tensor)]
        real = {(id(table), name): tensor for table, name, tensor in before}

        def read(owned: Owned) -> Tensor:
            own = (owned.owner._parameters, owned.owner._buffers, vars(owned.owner))
            return next(real[id(t), owned.name] for t in own if (id(t), owned.name) in real)

        yield read
    finally:
        for table, name, tensor in before:
            table[name] = tensor


@contextlib.contextmanager
def _restored_attributes(names: dict[nn.Module, str]) -> Iterator[Callable[[Recorder], None]]:
    """Restores the attributes of modules; yields a check that nothing was written that calls would miss."""
    before = {module: dict(vars(module)) for module in names}
    hooks = [(each, dict(each)) for m in names for each in (m._forward_hooks, m._forward_pre_hooks)]
    containers = {
        id(value): (f"{name}.{key}".lstrip("."), value, _contents(value))
        for module, name in names.items()
        for key, value in vars(module).items()
        if key not in _TABLES and isinstance(value, (dict, list, builtins.set))
    }

    def check(recorder: Recorder) -> None:
        for name, value, contents in containers.values():
            if _contents(value) != contents:
                raise CannotCut(
                    f"forward writes to {name}, a side channel between blocks, which may run at the same time"
                )
        for module, name in names.items():
            for key, value in vars(module).items():
                known = before[module].get(key)
                written = value is not known and key not in _TABLES
                if written and (module in recorder._opened or isinstance(value, StandIn)):
                    raise CannotCut(f"forward sets {f'{name}.{key}'.lstrip('.')}, a side effect")

    try:
        yield check
    finally:
        for module, attributes in before.items():
            state = vars(module)
            if any(state.get(key, state) is not value for key, value in attributes.items()) or len(
                state
            ) != len(attributes):
                state.clear()
                state.update(attributes)
        for _, value, contents in containers.values():
            _restore(value, contents)
        for table, entries in hooks:  # transformers adds hooks when it is first asked for hidden states
            if table.keys() != entries.keys():
                table.clear()
                table.update(entries)


_TABLES = frozenset(vars(nn.Module()))


def _contents(container: Any) -> Any:
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]


def _restore(container: Any, contents: Any) -> None:
    if _contents(container) == contents:
        return
    known = set(contents)
    if isinstance(container, dict):
        for key in [key for key, value in container.items() if (key, id(value)) not in known]:
            del container[key]
    elif isinstance(container, list):
        container[:] = [value for value in container if id(value) in known]
    else:
        container.intersection_update([value for value in container if id(value) in known])
