"""PyTorch's tracer of Python code, Dynamo: captures a layer's forward as a graph, with guards.

The guards are conditions under which the graph holds: on the layer's attributes, on global variables, and on
everything else that forward has read. Conditions on the layer's arguments are left out, because callers
compare those themselves. `gpipe_fast.torch_private.dynamo` has the parts of Dynamo that are used here.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import functools
import inspect
import logging
import os
import random
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import sympy  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import Tensor, fx, nn

from gpipe_fast.layers.phase import ASKS_PHASE
from gpipe_fast.layers.quantized import parts_of
from gpipe_fast.layers.sharded import is_mesh, is_sharded
from gpipe_fast.skip import STASHED, Skippable, outer_skips, skip_scope
from gpipe_fast.torch_private import dynamo, graphs, modes
from gpipe_fast.torch_private.dynamo import Guard, Source, get_local_source_name
from gpipe_fast.torch_private.fake_tensors import ShapeEnv
from gpipe_fast.torch_private.modes import DisableTransforms
from gpipe_fast.trace.fake import FakeLayouts, RealLayouts
from gpipe_fast.trace.symbols import CannotExpressError, evaluated
from gpipe_fast.trace.unguarded import Read, is_attribute, is_immutable

_log = logging.getLogger("gpipe_fast")

# The user's settings of Dynamo, or its later defaults, must not change what is captured.
_CONFIG: dict[str, Any] = {
    "side_effect_replay_policy": "error",
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,  # else, tied parameters pass as untied
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "allow_rnn": True,
    "verbose": False,
    "trace_numpy": False,
    "enable_dynamo_decompositions": False,
    "use_recursive_dict_tags_for_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "install_free_tensors": False,
    "caching_precompile": False,
    "suppress_errors": False,
    "inline_inbuilt_nn_modules": True,
}
# Layers log once with these methods. The first call, in Python or not, need not log.
_LOG_ONCE = ("warning_once", "info_once", "warning_advice")
_LOG = ("debug", "info", "warning", "error", "critical", "exception", "log")

# Questions to which a layer must get the answers of eager mode: whether it is being compiled.
_ANSWERS = {function: False for function, answer in dynamo.tracing_questions.items() if answer is True}

Scope = Mapping[str, Any]
Check = Callable[[Scope], bool]


class Refused(Exception):
    """Raised where a layer cannot be captured. The message is the reason."""


@dataclass(frozen=True)
class Guards:
    """The conditions under which a graph holds.

    Attributes:
        layer: checks the layer's attributes, given ``scope_of(layer)``.
        layer_follows: whether the layer's attributes pass as long as those of its modules are the same, and
            the items of their tables.
        ambient: checks everything else, such as global variables.
        conditions: the conditions as text.
        classes: the classes of the objects that forward has read.
        code: the code objects that forward has run.
        reads_environment: whether forward has read environment variables.
        reads: the places that the conditions are about.
        functions: the functions that forward has read.
    """

    layer: Check
    layer_follows: bool
    ambient: Check
    conditions: frozenset[str]
    classes: tuple[type, ...]
    code: frozenset[types.CodeType]
    reads_environment: bool
    reads: tuple[Read, ...]
    functions: frozenset[types.FunctionType]

    def follows_from(self, other: Guards) -> bool:
        """Returns whether these guards hold wherever some other guards hold."""
        return (
            self.conditions <= other.conditions
            and set(self.classes) <= set(other.classes)
            and self.code <= other.code
            and self.reads_environment <= other.reads_environment
        )


# The names by which code asks for a device or names one, and how the strings begin that do so.
_DEVICE_NAMES = frozenset({"device", "get_device", "current_device", "is_cuda", "cuda"})
_DEVICE = "cuda"


def asks_for_device(guards: Guards) -> bool:
    """Returns whether a captured forward may have asked for the device of a tensor, or named a device.

    Its graph then contains the answer for the device of the capture, where ``to`` may have made no copy. The
    code of PyTorch itself does not count: it only passes devices on. A device that is a bare number, as in
    ``x.to(0)``, is not seen.
    """
    return any(_DEVICE in each for each in guards.conditions) or any(
        not _DEVICE_NAMES.isdisjoint(each.co_names) or any(map(_names_device, each.co_consts))
        for each in guards.code
        if not each.co_filename.startswith(_TORCH)
    )


def _names_device(constant: object) -> bool:
    if isinstance(constant, tuple):  # also the names of keyword arguments
        return any(map(_names_device, constant))
    return isinstance(constant, str) and (constant in _DEVICE_NAMES or constant.startswith(_DEVICE))


ReplaceConstant = Callable[[Tensor], Tensor]


class Captured:
    """A captured forward.

    Attributes:
        guards: the guards.
        constants: functions that return, for a layer, each tensor that the graph uses besides arguments,
            parameters and buffers.
        graph: the graph; None if forward computes nothing.
        inputs: how Python names each input of the graph, such as ``L['args'][0]``, with `scope_of`.
    """

    def __init__(
        self,
        guards: Guards,
        constants: Mapping[int, Callable[[nn.Module], Tensor]],
        found: Any,
        entry: types.FunctionType,
        inputs: Sequence[str] = (),
    ) -> None:
        self.guards = guards
        self.constants = tuple(constants.values())
        self.inputs = tuple(inputs)
        self._replaced_inputs = frozenset(constants) | {
            index for index, name in enumerate(inputs) if _PART.fullmatch(name)
        }
        self._replace: ReplaceConstant | None = None
        self._outputs: Any = None
        self._device = modes.default_device()
        environment = found.graph_capture_output.get_runtime_env()
        self.graph, backend_id = None, "_none"
        self._conditions: list[sympy.Basic] = []
        if found.backend_input is not None:
            self.graph, backend_id = found.backend_input.graph_module, found.backend_input.backend_id
            shape_env = found.graph_capture_output.output_graph.shape_env
            self._conditions = _size_conditions(shape_env)
            self._sizes = {
                symbol: compile(shape_env.var_to_sources[symbol][0].name, "<size>", "eval")
                for condition in self._conditions
                for symbol in condition.free_symbols
                if symbol in shape_env.var_to_sources
            }
        self._function = environment.forward_callable(
            backend_id, self._run_graph, extra_globals={**vars(builtins), **entry.__globals__}
        )

    def run(
        self,
        layer: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        popped: Sequence[Tensor | None] = (),
        replace: ReplaceConstant | None = None,
    ) -> tuple[Any, tuple[Tensor | None, ...]]:
        """Runs the graph for a layer that passes the guards.

        Args:
            layer: the layer.
            args: positional arguments.
            kwargs: keyword arguments.
            popped: the skip tensors that the layer pops.
            replace: returns the tensor to compute with in place of a constant, or of a part of a parameter.

        Returns:
            What the layer's forward would return, and the skip tensors that it stashes.

        Raises:
            Refused: a condition on sizes does not hold.
        """
        self.check_sizes(layer, args, kwargs, popped)
        self._replace = replace
        # A backward in a function mode runs without it.
        default_device = contextlib.nullcontext() if self._device is None else torch.device(self._device)
        try:
            with default_device:
                found: tuple[Any, tuple[Tensor | None, ...]] = self._function(
                    layer, tuple(args), dict(kwargs), tuple(popped)
                )
            return found
        finally:
            self._replace = None

    def as_captured(self, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what forward returned in the capture, fake tensors included, and has its side effects."""
        assert self.graph is not None
        outputs = self.graph.graph.output_node().args[0]
        self._outputs = fx.node.map_arg(outputs, lambda node: node.meta["example_value"])
        try:
            return self._function(layer, tuple(args), dict(kwargs), ())
        finally:
            self._outputs = None

    def check_sizes(
        self,
        layer: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        popped: Sequence[Tensor | None] = (),
    ) -> None:
        """Checks that the graph holds for the sizes of arguments, or guards on these; arguments as of `run`.

        Raises:
            Refused: a condition does not hold.
        """
        if self._conditions:
            scope = {"layer": layer, "args": tuple(args), "kwargs": dict(kwargs), "popped": tuple(popped)}
            sizes = {symbol: eval(code, {"L": scope}) for symbol, code in self._sizes.items()}
            _assume(self._conditions, sizes)

    def _run_graph(self, *loaded: Any) -> Any:
        assert self.graph is not None
        if self._outputs is not None:
            return self._outputs
        if self._replace is not None and self._replaced_inputs:
            loaded = tuple(
                self._replace(value) if index in self._replaced_inputs and not is_mesh(value) else value
                for index, value in enumerate(loaded)
            )
        return _annotated(self.graph)(*loaded)


def _annotated(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph whose nested graphs, those of custom functions, have the annotations of the caller.

    PyTorch gives the operators of nested graphs the annotations that their nodes had in Dynamo.
    """
    nested = {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
    if not nested:
        return module
    backward = {
        str(node.args[1].target)
        for node in module.graph.nodes
        if node.target is dynamo.autograd_function_apply and isinstance(node.args[1], fx.Node)
    }
    copy = fx.GraphModule(module, module.graph)
    for name, child in nested.items():
        graph = fx.Graph()
        graph.output(graph.graph_copy(child.graph, {}))
        for node in graph.nodes:
            node.meta["custom"] = graphs.current_annotations()
            if name in backward:
                node.meta["partitioner_tag"] = "is_backward"
        setattr(copy, name, _annotated(fx.GraphModule(child, graph)))
    return copy


def _new_entry(layer: nn.Module) -> types.FunctionType:
    """Returns a function that calls a layer, with a code object and globals of its own.

    The function takes the skip tensors that the layer pops, and also returns those that it stashes.
    """

    def gpipe_layer(layer: Any, args: Any, kwargs: Any, popped: Any) -> Any:
        return layer(*args, **kwargs), ()

    def gpipe_skippable(layer: Any, args: Any, kwargs: Any, popped: Any) -> Any:
        return layer.call_with_skips(args, kwargs, popped)

    def gpipe_layer_with_skips(layer: Any, args: Any, kwargs: Any, popped: Any) -> Any:
        for key, tensor in zip(POPS, popped):  # type: ignore[name-defined] # noqa: F821, B905
            SKIPS.tensors[key] = tensor  # type: ignore[name-defined] # noqa: F821
        value = layer(*args, **kwargs)
        return value, tuple([SKIPS.tensors.pop(key) for key in STASHES])  # type: ignore[name-defined] # noqa: F821

    stashes, pops = outer_skips(layer)
    function = gpipe_layer
    if stashes or pops:
        # Without the keys, so that layers in other namespaces share the graph.
        own = sum(isinstance(module, Skippable) for module in layer.modules()) == 1
        function = gpipe_skippable if own and isinstance(layer, Skippable) else gpipe_layer_with_skips
    namespace = {"__builtins__": builtins, "SKIPS": STASHED, "POPS": pops, "STASHES": stashes}
    return types.FunctionType(function.__code__.replace(), namespace, function.__name__)


def capture(
    layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], popped: Sequence[Tensor | None] = ()
) -> Captured:
    """Captures the forward of a layer, without calling it.

    Args:
        layer: the layer; its parameters may be fake tensors.
        args: positional arguments; tensors may be fake, with symbols for sizes.
        kwargs: keyword arguments.
        popped: the skip tensors that the layer pops.

    Raises:
        Refused: the layer cannot be captured faithfully.
    """
    entry = _new_entry(layer)
    with skip_scope({}):
        arguments = args, kwargs, popped
        is_own = functools.partial(_is_own_tensor, layer=layer)
        found, module, sources, guards, _ = captured_graph(layer, entry, arguments, is_own)
    if module is not None:
        _check_operators(module)
        _check_custom_functions(module, found.graph_capture_output.traced_code, layer)
    if any(source.name.endswith("()") for source in sources):
        raise Refused("it reads a tensor through a weak reference")
    constants = {
        index: _reader(source, entry)
        for index, source in enumerate(sources)
        if not is_own(source) and not dynamo.is_size(source)
    }
    _check_constants(constants.values(), layer)
    _check_unchanged(module, constants)
    captured = Captured(guards, constants, found, entry, [source.name for source in sources])
    for node in module.graph.nodes if module is not None else ():
        node.meta.pop("example_value", None)  # fake tensors, with their mode
    return captured


def captured_graph(
    layer: nn.Module,
    entry: types.FunctionType,
    arguments: tuple[Sequence[Any], Mapping[str, Any], Sequence[Tensor | None]],
    is_own: Callable[[Source], bool],
    shown: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> tuple[Any, fx.GraphModule | None, list[Source], Guards, list[str]]:
    """Captures a function of a layer and of arguments; arguments as of `capture`.

    Args:
        layer: the layer.
        entry: the function, with a code object and globals of its own.
        arguments: the positional arguments, the keyword arguments and the skip tensors.
        is_own: returns whether a source is a tensor whose metadata callers compare.
        shown: surrounds the capture, and leaves Python's side effects to the first run; or None.

    Returns:
        What Dynamo has found, the graph, the source of each input of the graph, the guards, and the names of
        what the function changes.

    Raises:
        Refused: the layer cannot be captured faithfully.
    """
    args, kwargs, popped = arguments
    scope = (layer, tuple(args), dict(kwargs), tuple(popped))
    with _capturing(shown) as observed, _without_views_as_gradients(layer):
        try:
            found = dynamo.capture_whole(entry, scope)
            output = found.graph_capture_output
            sources = _sources(output)
            module = None if found.backend_input is None else found.backend_input.graph_module
            guards = _guards(output, module, entry, layer, is_own, observed.cached_calls)
            # The garbage collector cannot see two cycles. One leads through autograd's graph of a fake
            # argument. The other leads through the guards in C++, which keep the variables of the entry, and
            # so the graph, which may refer to the layer.
            output.output_graph.shape_env.tracked_fakes = None
            if found.backend_input is not None:
                entry.__globals__.pop(found.backend_input.backend_id, None)
        except Refused:
            raise
        except Exception as error:
            _log.debug("%s cannot be captured", type(layer).__name__, exc_info=error)
            try:
                raise _refusal(error, observed.changes) from None
            finally:  # a frame of PyTorch refers to the error: the cycle would keep the locals of all callers
                traceback.clear_frames(error.__traceback__)
    return found, module, sources, guards, list(map(_readable, dict.fromkeys(observed.changes)))


@contextlib.contextmanager
def _without_views_as_gradients(layer: nn.Module) -> Iterator[None]:
    """Replaces gradients that are views by tensors of the same memory that are none, in a block.

    Dynamo names the sizes of their bases, which a fake parameter's gradient does not have.
    """
    views = [(p, p.grad) for p in layer.parameters() if p.grad is not None and p.grad._is_view()]
    try:
        for parameter, grad in views:
            same = grad.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride()
            parameter.grad = grad.detach().new_empty(0).set_(*same)
        yield
    finally:
        for parameter, grad in views:
            parameter.grad = grad


def _check_constants(readers: Iterable[Callable[[nn.Module], Tensor]], layer: nn.Module) -> None:
    """Checks that the tensors that a graph uses besides the layer's own can be found again."""
    try:
        are_known = all(isinstance(each := read(layer), Tensor) or is_mesh(each) for read in readers)
    except Exception:  # no plain Python expression, as for a number of NumPy
        are_known = False
    if not are_known:
        raise Refused("it computes with a number or tensor that PyTorch's guards cannot name")


def _check_operators(module: fx.GraphModule) -> None:
    """Checks that a graph calls no functions that Dynamo has not looked into."""
    own = ("torch", "gpipe_fast")
    is_foreign = any(function.__module__.split(".")[0] not in own for function in _functions(module))
    if is_foreign or any(str(node.target) == "flat_apply" for node in module.graph.nodes):
        raise Refused("it calls a function that torch.compiler was told not to trace")
    names = {str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes}
    if names & _UNSAFE_SPLITS:
        raise Refused(f"it calls {min(names & _UNSAFE_SPLITS)}, whose results share memory unnoticed")


# A change of their results would not reach their argument.
_UNSAFE_SPLITS = frozenset({"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})


def _check_unchanged(module: fx.GraphModule | None, constants: Iterable[int]) -> None:
    """Checks that the graph does not change a constant in place."""
    inputs = [] if module is None else list(module.graph.find_nodes(op="placeholder"))
    for index in constants:
        if getattr(inputs[index].meta.get("example_value"), "_version", 0):
            raise Refused(
                "its forward changes a tensor that is neither a parameter nor a buffer, a side effect"
            )


# Answers that may differ for the gradients that a custom function receives: Dynamo assumes the layouts of its
# outputs, and a gradient for each.
_UNKNOWN_OF_GRADIENTS = frozenset(
    {"is_contiguous", "stride", "storage_offset", "data_ptr", "dim_order", "set_materialize_grads"}
)


def _check_custom_functions(module: fx.GraphModule, code: Iterable[types.CodeType], layer: nn.Module) -> None:
    """Checks that no custom function's backward may depend on the layout of its gradients.

    Which code belongs to the backward is not known; the modules' own forward does not.
    """
    if not any(isinstance(child, fx.GraphModule) for child in module.children()):
        return
    own = {function.__code__ for each in layer.modules() if (function := _forward_of(each)) is not None}
    for each in code:
        names = _UNKNOWN_OF_GRADIENTS.intersection(each.co_names)
        if names and each not in own and not each.co_filename.startswith(_TORCH):
            raise Refused(f"the backward of a custom function may depend on {min(names)}() of its gradients")


_TORCH = os.path.dirname(torch.__file__)


def _forward_of(module: nn.Module) -> types.FunctionType | None:
    function = getattr(module.forward, "__func__", None)
    return function if isinstance(function, types.FunctionType) else None


@dataclass
class _Observed:
    """What a capture has shown besides its graph.

    Attributes:
        changes: Dynamo's names of what forward changes.
        cached_calls: the calls of functions with a cache.
    """

    changes: list[str] = field(default_factory=list)
    cached_calls: list[_CachedCall] = field(default_factory=list)


class _CachedCall(NamedTuple):
    """A call of a function with a cache, whose result is a constant of the graph.

    The guard is the same call, which gives what a forward in Python would get.
    """

    source: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def check_in(self, namespace: dict[str, Any]) -> Check:
        """Returns a check that the call has the same result."""
        code = compile(self.source, "<source>", "eval")
        known = repr(self.result)

        def check(scope: Scope) -> bool:
            try:
                found = eval(code, {"G": namespace})(*self.args, **self.kwargs)
            except Exception:
                return False
            return found is self.result or (type(found) is type(self.result) and repr(found) == known)

        return check


@contextlib.contextmanager
def _capturing(
    shown: Callable[[], contextlib.AbstractContextManager[None]] | None,
) -> Iterator[_Observed]:
    """Prepares a capture in a block, and observes it."""
    config = _CONFIG | ({"side_effect_replay_policy": "silent"} if shown is not None else {})
    observed = _Observed()
    dynamo.forget_imports()
    random_state = random.getstate()  # a capture draws from `random` where the layer does
    with (
        dynamo.compile_lock,
        DisableTransforms(),
        mock.patch.dict(dynamo.tracing_questions, _ANSWERS),
        _dynamo_completed(),
        dynamo.effective_changes_only(observed.changes),
        _caught_lookups_refused(),
        dynamo.cached_calls_answered(functools.partial(_answer_cached_call, observed.cached_calls)),
        dynamo.tensor_attributes_shown(_check_attribute),
        dynamo.settings(config, _logging_functions(shown is not None)),
        dynamo.fake_mode_of(RealLayouts if shown is None else FakeLayouts),
        dynamo.get_metrics_context(),
        dynamo.dynamo_timed("gpipe_capture"),
        dynamo.function_modes_cleared(),
        shown() if shown is not None else contextlib.nullcontext(),
        # A refused layer runs in Python, which is not an error.
        mock.patch.object(dynamo.logger, "disabled", True),
    ):
        try:
            yield observed
        finally:
            random.setstate(random_state)


@contextlib.contextmanager
def _dynamo_completed() -> Iterator[None]:
    """Adds to Dynamo what it lacks, in a block; CPython compiles at most 20 blocks in one another."""
    with (
        dynamo.triton_kernels_known(),
        dynamo.sent_values_replace_yields(),
        dynamo.stream_questions_answered(),
        dynamo.messages_of_checks_left_out(),
        dynamo.shown_keys_guarded(),
        dynamo.asked_attributes_guarded(),
    ):
        yield


def _caught_lookups_refused() -> contextlib.AbstractContextManager[None]:
    """Refuses layers that catch errors of lookups in a block, unless guards notice that one would succeed."""
    known = (_TORCH, inspect.__file__)  # their lookups are of classes and functions

    def look(error: type, code: types.CodeType, is_guarded: bool) -> None:
        is_lookup = issubclass(error, (AttributeError, LookupError, NameError, ImportError))
        if is_lookup and not is_guarded and not code.co_filename.startswith(known):
            raise Refused(f"its forward may catch {error.__name__}, whose cause PyTorch does not guard")

    return dynamo.caught_exceptions_shown(look)


def _answer_cached_call(
    calls: list[_CachedCall],
    source: Source | None,
    function: Any,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Calls a cached function, and records the call.

    Raises:
        Refused: the result cannot be compared before each call, or is not immutable.
    """
    if not _is_users(function):
        return NotImplemented
    name = function.__name__ if source is None else source.name
    is_global = source is not None and get_local_source_name(source) is None
    if is_global and args is not None and is_immutable((*args, *kwargs.values())):
        result = function(*args, **kwargs)
        if is_immutable(result):
            calls.append(_CachedCall(name, function, args, kwargs, result))
            return result
    raise Refused(f"its forward reads a cache, {_readable(name)}")


# A trace does not know of which tensor another is a view, which result of an operator, and how often changed.
_UNTRACED_ATTRIBUTES = frozenset({"_base", "output_nr", "_version"})
_HOOKS_OF_TENSORS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})


def _check_attribute(name: str, source: Source | None) -> None:
    """Checks that an attribute of a tensor has its value, or its effect, in a trace."""
    if name in _UNTRACED_ATTRIBUTES or (name == "grad" and source is None):
        raise Refused(f"it reads {name} of a tensor, which a trace does not know")
    # The gradient of a computed tensor or of an argument is that of one micro-batch, as in eager mode.
    if name in _HOOKS_OF_TENSORS and source is not None and not _is_argument(source):
        raise Refused("its forward registers a hook on a parameter, a side effect")


def _logging_functions(is_model: bool) -> set[Any]:
    """Returns functions whose calls are left out of captures: of a model, everything that logs or prints."""
    methods = (*_LOG_ONCE, *(_LOG if is_model else ()))
    found = {vars(logging.Logger)[name] for name in methods if name in vars(logging.Logger)}
    return found | ({print, warnings.warn, *(getattr(logging, name) for name in _LOG)} if is_model else set())


def _sources(output: Any) -> list[Source]:
    """Returns the source of each input of the graph."""
    found = dynamo.input_sources(output)
    if any(map(dynamo.is_random_value, found)):
        raise Refused("it draws from Python's random numbers")
    return found


def _is_own_tensor(source: Source, layer: nn.Module) -> bool:
    """Returns whether a source is an argument, a parameter, a part of one, or a buffer of the layer."""
    if _is_argument(source) or _REGISTERED.fullmatch(source.name):
        return True
    part = _PART.fullmatch(source.name)
    if part is None:
        return False
    parameter = eval(part["parameter"], {"L": {"layer": layer}})
    if is_sharded(parameter):
        return part["path"] == "._local_tensor"
    return _IN_DICT.sub(r".\1", part["path"]) in parts_of(parameter)


def _is_argument(source: Source) -> bool:
    return get_local_source_name(source) in ("args", "kwargs", "popped")


_ITEM = r"\['[^']*'\]"
_REGISTERED = re.compile(rf"L\['layer'\](\._modules{_ITEM})*\._(parameters|buffers){_ITEM}")
_PART = re.compile(
    rf"(?P<parameter>L\['layer'\](\._modules{_ITEM})*\._parameters{_ITEM})"
    rf"(?P<path>(\.\w+|\.__dict__{_ITEM})+)"
)
_IN_DICT = re.compile(r"\.__dict__\['(\w+)'\]")


def _reader(source: Source, entry: types.FunctionType) -> Callable[[nn.Module], Tensor]:
    code = compile(source.name, "<source>", "eval")
    namespace = entry.__globals__

    def read(layer: nn.Module) -> Tensor:
        found: Tensor = eval(code, {"L": {"layer": layer}, "G": namespace})
        return found

    return read


# Sizes of arguments, and PyTorch's modes. Of function modes, callers leave that of the default device alone.
_COMPARED_BY_CALLERS = (
    *("SHAPE_ENV", "GLOBAL_STATE", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE"),
)


def _is_compared_by_callers(guard: Guard) -> bool:
    name = guard.originating_source.name
    return guard.create_fn_name() in _COMPARED_BY_CALLERS or "_torch_function_mode_stack" in name


_ENVIRONMENT_CODE = {os.getenv.__code__} | {
    value.__code__ for value in vars(type(os.environ)).values() if isinstance(value, types.FunctionType)
}


def _guards(
    output: Any,
    module: fx.GraphModule | None,
    entry: types.FunctionType,
    layer: nn.Module,
    is_own: Callable[[Source], bool],
    cached_calls: Sequence[_CachedCall],
) -> Guards:
    graph = output.output_graph
    on_layer, ambient = [], []
    for guard in graph.guards:
        root = get_local_source_name(guard.originating_source)
        if root == "layer":
            # Callers compare the metadata of parameters and buffers themselves.
            if guard.create_fn_name() != "TENSOR_MATCH" or not is_own(guard.originating_source):
                on_layer.append(guard)
        elif root is None and not _is_compared_by_callers(guard):
            ambient.append(guard)
    check_layer, check_ambient = (
        dynamo.check_of(graph, entry.__code__, guards) for guards in (on_layer, ambient)
    )
    cached = {repr(call): call.check_in(entry.__globals__) for call in cached_calls}
    functions = [call.function for call in cached_calls]
    reads = _reads([*on_layer, *ambient], output.traced_code, entry, layer, functions)
    followed = {read.name for read in reads if is_attribute(read, layer)}
    classes = {type(module) for module in layer.modules()}
    for guard in (*on_layer, *ambient):
        cls = guard.guarded_class_weakref() if guard.guarded_class_weakref is not None else None
        if cls is not None:
            classes.add(cls)
    attributes = [value for cls in classes for base in cls.__mro__ for value in vars(base).values()]
    properties = [value for value in attributes if isinstance(value, property) and _overrides_ignored(value)]
    if any(getattr(value.fget, "__code__", None) in output.traced_code for value in properties):
        raise Refused("a class overrides how a property is read")
    return Guards(
        check_layer,
        all(guard.originating_source.name in followed for guard in on_layer),
        (lambda scope: check_ambient(scope) and all(check(scope) for check in cached.values()))
        if cached
        else check_ambient,
        _conditions([*on_layer, *ambient]) | cached.keys(),
        tuple(sorted(classes, key=id)),
        frozenset(output.traced_code) | {function.__code__ for function in _functions(module)},
        reads_environment=any("environ" in str(guard.name) for guard in ambient)
        or not _ENVIRONMENT_CODE.isdisjoint(output.traced_code),
        reads=reads,
        functions=frozenset(
            value for read in reads if isinstance(value := read.value(layer), types.FunctionType)
        ),
    )


def _functions(module: fx.GraphModule | None) -> set[types.FunctionType]:
    """Returns the functions in Python that a graph and its nested graphs call, such as ``F.relu``."""
    graphs = [] if module is None else [each for each in module.modules() if isinstance(each, fx.GraphModule)]
    return {
        node.target
        for graph in graphs
        for node in graph.graph.nodes
        if isinstance(node.target, types.FunctionType)
    }


# Functions that take the keys of a dictionary, whose order Dynamo does not guard then; and such instructions.
_TAKE_KEYS = frozenset({"set", "frozenset", "fromkeys", "from_bytes", *dir(set)}) - {
    *dir(object),
    *("add", "clear", "copy", "discard", "pop", "remove"),
}
_EXTEND = frozenset({"LIST_EXTEND", "SET_UPDATE"})
# The global variables of a module without a name.
_SCOPE = re.compile(r"G\['___unnamed_scope_\w+'\]")


def _takes_keys(code: types.CodeType) -> bool:
    return not _TAKE_KEYS.isdisjoint(code.co_names) or any(
        each.opname in _EXTEND for each in dis.get_instructions(code)
    )


def _reads(
    guards: Iterable[Guard],
    code: Iterable[types.CodeType],
    entry: types.FunctionType,
    layer: nn.Module,
    cached_functions: Sequence[Any],
) -> tuple[Read, ...]:
    """Returns the places that guards are about, as far as Python expressions name them.

    Raises:
        Refused: a place holds an object whose changes no guard can see.
    """
    found: list[Read] = []
    guards = list(guards)
    # ``list(table)`` is guarded by the length alone, ``f(*table)`` without the order.
    of_keys = ("SEQUENCE_LENGTH", "DICT_KEYS_MATCH")
    counted = {guard.originating_source.name for guard in guards if guard.create_fn_name() in of_keys}
    own_code = {each for each in code if not each.co_filename.startswith(_TORCH)}
    are_taken = any(map(_takes_keys, own_code))
    names = [*dict.fromkeys(guard.originating_source.name for guard in guards)]
    known = set(names)
    first_reads: dict[types.FunctionType, int] = {}  # by function that holds something: an index in `found`
    while names:
        name = names.pop(0)
        is_default = "defaults__[" in name
        try:
            keys = (are_taken or is_default or name in counted) and not _SCOPE.fullmatch(name)
            read = Read(name, compile(name, "<source>", "eval"), entry.__globals__, keys)
            value = read.value(layer)
        except Exception:  # one of Dynamo's own places
            continue
        if not any(value is function for function in cached_functions):
            _check_guarded(name, value)
        is_own = isinstance(value, types.FunctionType) and value.__code__ in own_code
        held = _held_by(name, value) if is_own else []
        if held and (first := first_reads.setdefault(value, len(found))) < len(found):
            # A function may hold itself. What it holds is read at its first place alone, and the others are
            # compared with that: of a function, Dynamo guards the code, but not the variables around it.
            found[first] = found[first]._replace(is_shared=True)
            read = read._replace(is_shared=True)
        else:
            new = [each for each in held if each not in known]
            names += new
            known.update(new)
        found.append(read)
    return tuple(found)


def _held_by(name: str, function: types.FunctionType) -> list[str]:
    """Returns expressions for what a function holds, of which Dynamo may guard only the number."""
    variables = enumerate(function.__code__.co_freevars)
    return [
        *(f"{name}.__closure__[{index}].cell_contents" for index, own in variables if own != "__class__"),
        *(f"{name}.__defaults__[{index}]" for index in range(len(function.__defaults__ or ()))),
        *(f"{name}.__kwdefaults__[{key!r}]" for key in function.__kwdefaults__ or ()),
    ]


def _check_guarded(name: str, value: Any) -> None:
    module = str(getattr(value, "__module__", ""))
    own = not module.startswith(("torch.", "gpipe_fast."))
    if isinstance(value, getattr(sys.modules.get("numpy"), "ndarray", ())):  # guards compare the class alone
        raise Refused(f"its forward reads an array of NumPy, {_readable(name)}")
    if _overrides_ignored(value):
        raise Refused(
            f"its forward reads an object whose class overrides built-in methods, {_readable(name)}"
        )
    if isinstance(value, Iterator) and own:
        raise Refused(f"its forward reads an iterator, {_readable(name)}")
    if getattr(value, "_dynamo_marked_constant", False) and own:
        raise Refused("it calls a function that torch.compiler was told not to trace")


# Methods that Dynamo does not call, or guard, if a subclass of these or a metaclass overrides them.
_BASES: tuple[type, ...] = (functools.partial, property, dict, set, frozenset, int, float, str)
_IGNORED = ["call", "iter", "missing", "get", "float", "int", "index", "bool", "format"]
_IGNORED_OF_CLASSES = ["instancecheck", "getitem", "iter", "len", "eq", "bool", "float"]


def _overrides_ignored(value: Any) -> bool:
    """Returns whether a value has methods of a user's class in whose place Dynamo takes those of a base."""
    if not isinstance(value, (type, *_BASES)) or isinstance(value, enum.Enum):
        return False
    found = [vars(cls) for cls in type(value).__mro__ if _is_users(cls)]
    # The guards of an empty dictionary do not compare its attributes.
    if found and isinstance(value, dict) and not dict.__len__(value) and hasattr(value, "__dict__"):
        return True
    names = _IGNORED_OF_CLASSES if isinstance(value, type) else _IGNORED
    return any(isinstance(own.get(f"__{name}__"), types.FunctionType) for own in found for name in names)


def _is_users(value: Any) -> bool:
    """Returns whether a class or function is neither of Python's library nor of PyTorch."""
    return value.__module__.partition(".")[0] not in (*sys.stdlib_module_names, "torch", "gpipe_fast")


def _conditions(guards: Sequence[Guard]) -> frozenset[str]:
    return frozenset(
        _NUMBERED_NAME.sub("", text)
        for guard in guards
        for text in (guard.code_list or [f"{guard.create_fn_name()} {guard.name}"])
    )


# Each capture has its own name for the table of built-in functions.
_NUMBERED_NAME = re.compile(r"(?<=__builtins_dict__)_\d+")


def _size_conditions(shape_env: ShapeEnv) -> list[sympy.Basic]:
    return [guard.expr for guard in shape_env.guards if guard.expr.free_symbols]


def _assume(conditions: Sequence[sympy.Basic], sizes: Mapping[sympy.Symbol, Any]) -> None:
    """Makes conditions on a graph's symbols hold for the sizes for which it runs, or guards on them.

    Raises:
        Refused: a condition does not hold.
    """
    with contextlib.suppress(CannotExpressError):
        if all(evaluated(condition, sizes) for condition in conditions):
            return
    raise Refused("a condition on sizes does not hold, or depends on data")


def _refusal(error: Exception, changes: Sequence[str]) -> Refused:
    """Returns the reason in one line.

    Args:
        error: what Dynamo raised.
        changes: Dynamo's names of what the layer's forward changes.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and "side effects happened" in text:
        changed = ", ".join(dict.fromkeys(map(_readable, changes))) or "Python state"
        return Refused(f"its forward changes {changed}, a side effect")
    if ASKS_PHASE in text:
        return Refused(ASKS_PHASE)
    if "data-dependent expression" in text:
        return Refused("it decides by the elements of a tensor, or by a data-dependent size")
    devices = _TWO_DEVICES.search(text)
    if devices is not None:
        return Refused(
            f"it computes with tensors on {devices[1]} and {devices[2]}; make constants on the device of the "
            "inputs, or register them as buffers of the layer, or of a loss that is a module of your own"
        )
    raised = _RAISED.search(text)
    if raised is not None:
        return Refused(f"tracing raised {raised[1]}: {raised[3]}")
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if not isinstance(error, dynamo.Unsupported):
        return Refused(f"tracing raised {type(error).__name__}: {first}")
    if "numpy" in first:
        return Refused("PyTorch cannot trace functions of NumPy faithfully")
    context = text.partition("Developer debug context: ")[2].partition("\n")[0].strip()
    context = _ARGUMENTS.split(context)[0]
    if len(context) > _MAX_CONTEXT:
        context = f"{context[:_MAX_CONTEXT]}..."
    about = f" ({_readable(context)})" if context else ""
    return Refused(f"PyTorch cannot trace it: {first}{about}")


# How PyTorch says that an operator got tensors on two devices.
_TWO_DEVICES = re.compile(r"two (?:different )?devices,? (\w+:?\d*)(?: and|,) (\w+:?\d*)")
# How Dynamo quotes the error of an operator: its class, and the first line of its message.
_RAISED = re.compile(r": got (\w+)\((['\"])(.*?)\.?(?:\\n|\2\))")
# Where Dynamo's own objects begin in what it says about a place.
_ARGUMENTS = re.compile(r",? (?:args: |\[?<class 'torch\._dynamo)")
# The maximum number of characters of what Dynamo says about the place of a failure.
_MAX_CONTEXT = 120


def _readable(places: str) -> str:
    """Returns Dynamo's names for places in Python's words."""
    text = re.sub(r"\b(_modules|_buffers|_parameters|__dict__)\['(\w+)'\]", r"\2", places)
    text = re.sub(r"L\['layer'\]", "self", text)
    text = re.sub(r"G\['__import_(\w+)'\]", lambda match: match[1].replace("_dot_", "."), text)
    return re.sub(r"G\['(\w+)'\]", r"\1", text)
