"""A call of a model as PyTorch's Dynamo captures it: a graph whose blocks are single nodes, as a `Dataflow`.

Modules that contain no block are single nodes, too. What runs between them is captured as calls of PyTorch's
functions, and not as calls of the operators of which these consist. The batch size and lengths are symbols,
so that one capture holds for all sizes for which the user's code decides alike.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import random
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, fx, nn
from torch.autograd.function import Function

from gpipe_fast.from_model.dataflow import (
    CannotCut,
    Dataflow,
    Decision,
    Differs,
    Nested,
    Place,
    Size,
    Surroundings,
    symbol_of,
)
from gpipe_fast.from_model.evaluate import Unknown
from gpipe_fast.from_model.graph_reader import (
    CONSTANTS,
    GraphReader,
    Run,
    Seen,
    WholeCall,
    open_dataclass,
    place_of,
)
from gpipe_fast.from_model.stand_ins import (
    COLLECTED,
    ReadOwned,
    caches_restored,
    collectors_refused,
    configurations,
    fake_parameters,
    has_own_class,
    owners,
    real_tensors,
    restored_attributes,
    with_own_classes,
)
from gpipe_fast.layers.sharded import are_sharded
from gpipe_fast.randomness.random import is_random
from gpipe_fast.strides import bits_of, with_bits
from gpipe_fast.torch_private import dynamo, pytree
from gpipe_fast.torch_private.dynamo import Source
from gpipe_fast.torch_private.fake_tensors import (
    READS_ELEMENTS,
    ShapeEnv,
    logging_disabled,
)
from gpipe_fast.torch_private.modes import TorchDispatchMode, disable_current_modes
from gpipe_fast.trace.dynamo import Captured, Refused, captured_graph
from gpipe_fast.trace.fake import RealLayouts
from gpipe_fast.trace.layer_states import LayerState, LayerStates
from gpipe_fast.trace.symbols import symbolic_size

# Returns what forward reads from a tensor, given a method such as `item`, its arguments, the calls so far,
# and a function that returns the tensors of modules.
Decide = Callable[[Any, Nested, Dataflow, ReadOwned], Any]

# How many captures of a call may write to a configuration, as a forward does once with a default.
_MAX_EFFECTS = 3


class Given(NamedTuple):
    """The input tensors of a call, and which of their sizes are symbols.

    Attributes:
        tensors: the tensors, whose metadata alone is read.
        symbols: the index of the size that a dimension follows, by the tensor's number and the dimension.
        sizes: the sizes: the batch size, and lengths.
        fixed: the indices of the sizes that are no symbols but numbers.
        build: returns the positional and keyword arguments with other tensors as inputs.
    """

    tensors: Sequence[Tensor]
    symbols: Mapping[tuple[int, int], int]
    sizes: Sequence[int]
    fixed: Collection[int]
    build: Callable[[Sequence[Tensor]], tuple[Any, Any]]


class Modules(NamedTuple):
    """Modules of a model.

    Attributes:
        opened: those that are captured by what they call.
        blocks: the blocks.
        concrete: the classes of modules that run with numbers as sizes, because they make numbers of symbols.
    """

    opened: Set[nn.Module]
    blocks: Set[nn.Module]
    concrete: Set[type] = frozenset()


class CapturedCall(NamedTuple):
    """A captured call.

    Attributes:
        flow: the calls, decisions and sizes.
        returned: what the model returned, with fake tensors.
        state: the state of the model in which it was captured.
    """

    flow: Dataflow
    returned: Any
    state: LayerState


def capture_call(
    model: nn.Module, given: Given, modules: Modules, device: torch.device, decide: Decide
) -> CapturedCall:
    """Captures a call of a model.

    Args:
        model: the model.
        given: the inputs.
        modules: the modules to open, and the blocks.
        device: the device of all tensors.
        decide: returns what forward reads from a tensor, or raises `Unknown`.

    Raises:
        CannotCut: the call cannot be captured.
        Differs: forward decides by the number of samples.
        Exception: forward itself raises.
    """
    effects = 0
    while effects < _MAX_EFFECTS:
        try:
            found = _Attempt(model, given, modules, device, decide).run()
        except _Otherwise as other:
            opened, concrete = modules.opened | other.opened, modules.concrete | other.concrete
            modules = modules._replace(opened=opened, concrete=concrete)
            continue
        if found is not None:
            return found
        effects += 1
    raise CannotCut("forward changes an attribute in each call, a side effect")


class _Otherwise(Exception):
    """Raised where a module has to be captured otherwise, in another attempt.

    Attributes:
        opened: the module, if it cannot be a single node.
        concrete: its class, if it makes a number of a symbol, as functions of TorchScript do.
    """

    def __init__(self, opened: Set[nn.Module] = frozenset(), concrete: Set[type] = frozenset()) -> None:
        super().__init__()
        self.opened, self.concrete = opened, concrete


class _Attempt:
    """One capture; arguments as of `capture_call`."""

    def __init__(
        self,
        model: nn.Module,
        given: Given,
        modules: Modules,
        device: torch.device,
        decide: Decide,
    ) -> None:
        self._model, self._given, self._modules = model, given, modules
        self._device, self._decide = device, decide
        self._names = {module: name for name, module in model.named_modules()}
        self._odd = with_own_classes(self._names)
        self._mode = RealLayouts(ShapeEnv())
        self._env = ShapeEnv()  # later Dynamo's
        self._sizes: dict[int, torch.SymInt] = {}
        self._inputs = [self._input(i, x) for i, x in enumerate(given.tensors)]
        self._args, self._kwargs = given.build([fake for fake, _ in self._inputs])
        self._around = surroundings(device)
        self._runs: dict[fx.Node, Run] = {}
        self._decisions: list[tuple[Any, Any, Any, Place]] = []
        self._error: Exception | None = None

    def _input(self, index: int, tensor: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns a fake input tensor, and its shape."""
        sizes, shape = list[Any](tensor.shape), list[Any](tensor.shape)
        for dim in range(tensor.dim()):
            symbol = self._given.symbols.get((index, dim))
            if symbol is not None:
                is_fixed = symbol in self._given.fixed
                sizes[dim] = self._given.sizes[symbol] if is_fixed else self._size(symbol)
                shape[dim] = sizes[dim] if is_fixed else Size(symbol_of(symbol))
        with self._mode:
            strides = list(tensor.stride()) if has_gaps(tensor) else _strides_like(tensor, sizes)
            fake = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=self._device)
            fake = with_bits(fake, bits_of(tensor)).requires_grad_(tensor.requires_grad)
        return fake, tuple(shape)

    def _size(self, index: int) -> torch.SymInt:
        """Returns a size as an integer that PyTorch follows."""
        if index not in self._sizes:
            self._sizes[index] = symbolic_size(self._mode, index, self._given.sizes[index])
        return self._sizes[index]

    def run(self) -> CapturedCall | None:
        """Captures the call; returns None if it had a side effect, which the next capture does not have.

        Raises:
            CannotCut: it cannot be captured.
        """
        call, entry = (self._args, self._kwargs), _new_entry()
        with (
            fake_parameters(self._names, self._mode, self._device) as self._read,
            restored_attributes(self._names) as check_attributes,
            caches_restored(self._names),
            logging_disabled(),
            collectors_refused() as self._collectors_allowed,
        ):
            self._owners = owners(self._names)
            try:
                found, module, sources, guards, changes = captured_graph(
                    self._model, entry, (*call, ()), self._is_own, self._shown
                )
            except Refused as refused:
                first_error = self._error or self._own_error(str(refused)) or CannotCut(str(refused))
                raise first_error from None
            if module is None:
                raise CannotCut("forward computes nothing")
            self._check_batch()
            captured = Captured(guards, {}, found, entry)
            before = configurations(self._names)
            returned = captured.as_captured(self._model, *call)
            if configurations(self._names) != before:
                return None
            flow = self._flow(module.graph, sources, open_dataclass(returned))
            check_attributes(self._modules.opened)
            if changes:
                raise CannotCut(f"forward changes {', '.join(changes)}, a side effect")
        state = LayerState(LayerStates())
        state.add(self._model, None, captured)
        state.captures.clear()
        return CapturedCall(flow, returned, state)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        with (
            dynamo.calls_as_nodes(self._whole, self._refuse_argument),
            dynamo.elements_answered(self._answer),
            dynamo.nodes_watched(self._watch),
        ):
            yield

    def _own_error(self, reason: str) -> Exception | None:
        """Returns the error that forward raises itself, if it does.

        Args:
            reason: why the call cannot be captured.
        """
        if self._odd:
            return None  # what it lacks may be a method of a tensor
        collects = contextlib.nullcontext if COLLECTED in reason else self._collectors_allowed
        try:
            with self._mode, collects():
                self._model.forward(*self._args, **self._kwargs)
        except (TypeError, ValueError, LookupError, AttributeError, AssertionError, CannotCut) as error:
            return error
        except RuntimeError as error:
            return error if type(error) is RuntimeError and "FakeTensor" not in str(error) else None
        except Exception:  # one of fake tensors
            return None
        return None

    def _fail(self, error: Exception) -> NoReturn:
        """Ends the capture; Dynamo would replace the error by one of its own."""
        self._error = self._error or error
        raise error

    # Sizes.

    def _symbols(self) -> tuple[dict[sympy.Symbol, int], dict[sympy.Symbol, sympy.Integer]]:
        """Returns the index of the size that each of Dynamo's symbols stands for, or its number."""
        own = {size.node.expr: index for index, size in self._sizes.items()}
        found, numbers = {}, {}
        for symbol, sources in self._env.var_to_sources.items():
            size = self._value_of(sources[0])
            if isinstance(size, torch.SymInt):
                found[symbol] = own[size.node.expr]
            elif type(size) is int:  # a stride of a part of another tensor
                numbers[symbol] = sympy.Integer(size)
        return found, numbers

    def _check_batch(self) -> None:
        """Checks that the batch size may be another.

        Raises:
            Differs: forward decides by it, down to one number.
        """
        for symbol, index in self._symbols()[0].items():
            if not index and not isinstance(self._env.replace(symbol), sympy.Symbol):
                raise Differs(f"decides by the number of samples{self._where(symbol)}")

    def _where(self, symbol: sympy.Symbol) -> str:
        for guard in self._env.guards:
            line = getattr(guard.sloc, "user_loc", None)
            if symbol in guard.expr.free_symbols and line is not None:
                return f" at {line}"
        return ""

    def _conditions(self, in_sizes: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Returns the conditions on sizes under which the capture holds."""
        found = [in_sizes(guard.expr) for guard in self._env.guards if guard.expr.free_symbols]
        for symbol, index in self._symbols()[0].items():
            own, bounds = symbol_of(index), self._env.var_to_range[symbol]
            found += [own >= bounds.lower, own <= bounds.upper, sympy.Eq(own, in_sizes(symbol))]
        return tuple(dict.fromkeys(sympy.false if each is None else each for each in found))

    # While Dynamo captures.

    def _whole(self, value: Any) -> WholeCall | None:
        """Returns the target of the node that calls a module or a function; None to capture what it calls."""
        if isinstance(value, type):
            is_torchs = value.__module__.startswith("torch.")
            return None if is_torchs else WholeCall(_apply_of(value), value.__name__, self._run_whole)
        if value in self._modules.opened or value not in self._names:
            return None
        return WholeCall(value, self._names[value], self._run_whole)

    def _run_whole(self, call: WholeCall, named: dict[Any, Any]) -> Any:
        """Runs a module, or a function, on fake tensors, given its arguments by position or name."""
        target, state, has_read = call.target, random.getstate(), False
        tables = {name: dict(named[name]) for name in call.tables}
        before = pytree.tree_flatten(named | tables)
        args = [named[index] for index in range(len(named)) if index in named]
        kwargs = {name: value for name, value in named.items() if isinstance(name, str)}
        is_module = isinstance(target, nn.Module)
        try:
            with self._collectors_allowed():
                if is_module:
                    result, has_read = self._result_of(call, args, kwargs)
                else:
                    result = target(*args, **kwargs)
        finally:
            random.setstate(state)
        name = self._names[target] if is_module else target.__self__.__name__
        for table, items in tables.items():
            call.written[table] = {k: x for k, x in named[table].items() if items.get(k) is not x}
            kept = {k: x for k, x in named[table].items() if k in items}
            tables[table] = {k: items[k] if k in call.written[table] else x for k, x in kept.items()}
        written = _changed_arguments(before, named | tables)
        if written:
            self._fail(
                CannotCut(
                    f"{name} writes to {', '.join(written)}, which it gets as an argument: a side channel "
                    "between blocks, which may run at the same time"
                )
            )
        leaves = pytree.tree_leaves((result, call.written))
        odd = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))), None)
        # Numbers may depend on elements, or on attributes that have no guards.
        has_numbers = any(leaf is not None and not isinstance(leaf, Tensor) for leaf in leaves)
        is_closed = not is_module or target in self._modules.blocks
        if is_closed and (odd is not None or (has_numbers and has_read)):
            what = type(odd).__name__ if odd is not None else "number that it reads from a tensor"
            self._fail(CannotCut(f"block {name} returns a {what}"))
        if not is_closed and (has_numbers or has_read):
            self._fail(_Otherwise(opened={target}))
        return result

    def _result_of(self, call: WholeCall, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Runs a module on fake tensors; or on zeros, where shapes depend on elements, as by a router.

        Returns:
            The result, and whether the module reads elements.
        """
        module = call.target
        has_own_call = type(module).__call__ is not nn.Module.__call__
        # Hooks make tensors DTensors, and DTensors tensors.
        with_hooks = has_own_call or are_sharded([module])
        run: Any = functools.partial(type(module).__call__, module) if with_hooks else module.forward
        odd = self._odd and not self._odd.isdisjoint(module.modules())
        if odd or type(module) in self._modules.concrete:
            return self._result_for_zeros(call, run, args, kwargs), False
        fixed = self._num_fixed()
        try:
            found = run(*args, **kwargs)
            if self._num_fixed() > fixed:
                self._fail(_Otherwise(concrete={type(module)}))
            return found, False
        except _Otherwise:
            raise
        except Exception as error:
            first_error = error
        finally:
            self._env.pending_fresh_unbacked_symbols.clear()  # those inside of the module
        try:
            has_read = isinstance(first_error, READS_ELEMENTS)
            return self._result_for_zeros(call, run, args, kwargs), has_read
        except Exception:
            raise first_error from None

    def _num_fixed(self) -> int:
        """Returns how many of PyTorch's symbols are numbers by now."""
        return sum(isinstance(each, sympy.Integer) for each in self._env.replacements.values())

    def _result_for_zeros(self, call: WholeCall, run: Any, args: Any, kwargs: Any) -> Any:
        """Runs a module on zeros whose sizes tell symbols apart, and returns fake results.

        For other sizes of the arguments, the sizes of the results are only likely: the layer checks them.

        Raises:
            Differs: a size of a result depends on symbols, and is none of the arguments' sizes.
        """
        module, leaves = call.target, pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        sizes: list[Any] = [*(size for x in tensors for size in x.shape), *leaves]
        symbolic = {size.node.expr: size for size in sizes if isinstance(size, torch.SymInt)}
        taken = {size for x in (*tensors, *module.parameters()) for size in x.shape if type(size) is int}
        symbols = sorted({symbol for each in symbolic for symbol in each.free_symbols}, key=str)
        primes = (n for n in range(11, 10_000) if n not in taken and all(n % d for d in range(2, n)))

        def results() -> tuple[Any, list[list[Any]]]:
            """Returns the results for further sizes, and their shapes with symbols."""
            values = {symbol: sympy.Integer(next(primes)) for symbol in symbols}
            known = {int(each.xreplace(values)): size for each, size in symbolic.items()}

            def zeros(x: Any) -> Any:
                if isinstance(x, torch.SymInt):
                    return int(x.node.expr.xreplace(values))
                if not isinstance(x, Tensor):
                    return torch.device("cpu") if isinstance(x, torch.device) else x
                made = torch.zeros([zeros(size) for size in x.shape], dtype=x.dtype, device="cpu")
                return made.requires_grad_(x.requires_grad)

            given, named = pytree.tree_map(zeros, (args, kwargs))
            returned = run(*given, **named)
            shapes = [list(x.shape) for x in pytree.tree_leaves(returned) if isinstance(x, Tensor)]
            return returned, [[known.get(size, size) for size in shape] for shape in shapes]

        with disable_current_modes(), real_tensors(module, self._read):
            returned, shapes = results()
            if symbols and results()[1] != shapes:
                self._fail(Differs(f"gets a size from {self._names[module]} that no argument of it has"))
        call.sizes_are_likely = bool(symbols)
        left = iter(shapes)

        def fake(x: Tensor) -> Tensor:
            shape = next(left)
            made = torch.empty_strided(shape, _strides_like(x, shape), dtype=x.dtype, device=self._device)
            return made.requires_grad_(x.requires_grad).clone() if x.requires_grad else made

        return pytree.tree_map_only(Tensor, fake, returned)

    def _refuse_argument(self, value: Any, name: str, kind: type) -> None:
        """Refuses a block with an argument that no node can have; other modules are opened."""
        if value in self._modules.blocks:
            self._fail(
                CannotCut(
                    f"block {self._names[value]}: a {kind.__name__} is passed between modules, as {name}; it "
                    "may be a side channel between blocks"
                )
            )

    def _watch(self, output: Any, node: fx.Node, arguments: Any, run: Callable[[], Any]) -> Any:
        """Runs a node, and notes what it does."""
        self._env = output.shape_env
        name = getattr(node.target, "__name__", str(node.target))
        if name in _CHANGES_OF_SHAPE:
            self._fail(
                CannotCut(f"{name} is called between blocks at {place_of(node)}; use the form without '_'")
            )
        if getattr(node.target, "__module__", None) == "torch._functorch.predispatch":
            self._fail(CannotCut("torch.vmap is called between blocks; call it inside of one"))
        tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
        versions, spy = list(map(_version, tensors)), _Spy()
        with spy:
            found = run()
        changed = [x for x, before in zip(tensors, versions, strict=True) if _version(x) != before]
        self._runs[node] = Run(spy.draws, changed, surroundings(self._device))
        return found

    def _answer(self, graph: fx.Graph | None, name: str, arguments: Any) -> Any:
        """Returns what forward reads from tensors."""
        where = place_of(next(x for x in pytree.tree_leaves(arguments) if isinstance(x, fx.Node)))
        if graph is None:
            self._fail(CannotCut(f"a function between blocks branches on a tensor at {where}"))
        try:
            reader = GraphReader(graph, self._seen(dynamo.sources_of(graph)))
            answer = self._decide(name, reader.nested(arguments), reader.flow(), self._read)
        except Unknown as reason:
            self._fail(CannotCut(f"forward branches on a tensor at {where}, which depends on {reason}"))
        except Exception as error:
            self._fail(error)
        self._decisions.append((name, arguments, answer, where))
        return answer

    def _value_of(self, source: Source | None) -> Any:
        """Returns what is at a place that Dynamo names; None if it is outside of the model and the call."""
        scope = {"layer": self._model, "args": self._args, "kwargs": self._kwargs, "popped": ()}
        try:
            return None if source is None else eval(source.name, {"L": scope})
        except Exception:  # a global variable, or a place that only Dynamo knows
            return None

    def _is_own(self, source: Source) -> bool:
        """Returns whether a source is a tensor of a module, whose metadata the caller compares."""
        value = self._value_of(source)
        if not isinstance(value, Tensor) or id(value) not in self._owners:
            return False
        owned = self._owners[id(value)][1]
        real = self._read(owned)
        if has_own_class(real):
            name = f"{self._names[owned.owner]}.{owned.name}".lstrip(".")
            self._fail(
                CannotCut(
                    f"forward reads {name} between blocks and may ask for its class, {type(real).__name__}; "
                    "read it inside of a block, or of a module that is called"
                )
            )
        return True

    # The calls.

    def _seen(self, sources: Mapping[fx.Node, Source]) -> Seen:
        sizes, numbers = self._symbols()
        symbols = {symbol: symbol_of(index) for symbol, index in sizes.items()} | numbers

        def in_sizes(expression: Any) -> Any:
            expression = sympy.sympify(self._env.replace(expression))
            return expression.xreplace(symbols) if expression.free_symbols <= symbols.keys() else None

        return Seen(
            self._inputs,
            self._owners,
            self._names,
            self._modules.blocks,
            self._runs,
            lambda node: self._value_of(sources.get(node)),
            in_sizes,
            self._around,
            self._device,
        )

    def _flow(self, graph: fx.Graph, sources: Sequence[Source], returned: Any) -> Dataflow:
        seen = self._seen(dict(zip(graph.find_nodes(op="placeholder"), sources, strict=True)))
        reader = GraphReader(graph, seen)
        decisions = tuple(
            Decision(target, reader.nested(arguments), answer, position, where)
            for (target, arguments, answer, where), position in zip(
                self._decisions, reader.positions, strict=True
            )
        )
        return reader.flow(reader.nested(returned), decisions, self._conditions(seen.in_sizes))


class _Spy(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


# Methods that change the shape of a tensor, or cut it from the graph, in place.
_CHANGES_OF_SHAPE = {"detach_", "transpose_", "t_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_"}
_CHANGES_OF_SHAPE |= {"resize_", "resize_as_", "set_", "as_strided_"}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@functools.lru_cache(maxsize=256)
def _apply_of(function: type[Function]) -> Any:
    """Returns the same object each time, so that layers with equal code share a class."""
    return function.apply


def _new_entry() -> types.FunctionType:
    """Returns a function that calls the forward of a model, with a code object and globals of its own."""

    def gpipe_model(layer: Any, args: Any, kwargs: Any, popped: Any) -> Any:
        return layer.forward(*args, **kwargs)

    return types.FunctionType(gpipe_model.__code__.replace(), {"__builtins__": builtins}, "gpipe_model")


def surroundings(device: torch.device) -> Surroundings:
    """Returns the modes of the calling thread."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return Surroundings(torch.is_grad_enabled(), autocast)


def has_gaps(tensor: Tensor) -> bool:
    """Returns whether a tensor leaves out elements between its own, as a part of another one may."""
    return list(tensor.stride()) != _strides_like(tensor, tensor.shape)


def _strides_like(tensor: Tensor, shape: Sequence[Any]) -> list[Any]:
    """Returns strides for another shape, with dimensions in the same order in memory."""
    strides, span = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (tensor.stride(d), -d)):
        if tensor.stride(dim) or tensor.shape[dim] == 1:
            strides[dim] = span
            span = span * shape[dim]
    return strides


def _changed_arguments(before: Any, after: Mapping[Any, Any]) -> list[str]:
    """Returns the arguments, by position or name, that are not as they were."""
    pairs = [(name, after[name], old) for name, old in pytree.tree_unflatten(*before).items()]
    names = [name for name, x, y in pairs if not _is_same(x, y)]
    return [f"argument {name}" if type(name) is int else repr(name) for name in names]


def _is_same(x: Any, y: Any) -> bool:
    ours, theirs = pytree.tree_flatten(x), pytree.tree_flatten(y)
    return ours[1] == theirs[1] and all(a is b for a, b in zip(ours[0], theirs[0], strict=True))
