"""Dynamo: the capture of a function, what it records of side effects, its guards, and its settings.

Read in PyTorch 2.11.0 and 2.14.1, which differ where a comment says so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import sys
import types
import warnings
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._dynamo.utils as dynamo_utils
import torch._dynamo.variables.builtin as dynamo_builtin
import torch._dynamo.variables.dicts as dynamo_dicts
import torch._dynamo.variables.torch as dynamo_torch
import torch.utils._triton as torch_triton
from torch._dynamo import convert_frame
from torch._dynamo import source as sources
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import ObservedAttributeError, ObservedKeyError, Unsupported
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import get_local_source_name
from torch._dynamo.utils import dynamo_timed, get_metrics_context, set_torch_function_mode_stack
from torch._dynamo.variables import functions, misc, torch_function
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import SourcelessBuilder, wrap_fx_proxy
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import Guard, GuardsSet, Source
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.torch_version import TorchVersion
from torch.utils._ordered_set import OrderedSet

from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.torch_private.modes import function_modes

logger = logging.getLogger("torch._dynamo")

# Functions such as `torch.compiler.is_compiling`, with the answers that Dynamo gives.
tracing_questions: dict[Any, Any] = dynamo_torch.tracing_state_functions()


def capture_whole(function: types.FunctionType, arguments: tuple[Any, ...]) -> Any:
    """Captures a call of a function as one graph."""
    return convert_frame.preserve_global_state(convert_frame.fullgraph_capture)(function, arguments)


def forget_imports() -> None:
    """Makes Dynamo look up the modules that guards refer to, since one may have been imported anew."""
    symbolic_convert._import_module.cache_clear()


def triton_kernels_known() -> contextlib.AbstractContextManager[Any]:
    """Makes Dynamo know users' Triton kernels in a block; it does so itself only where there is a GPU."""
    return mock.patch.object(torch_triton, "has_triton", torch_triton.has_triton_package)


def sent_values_replace_yields() -> contextlib.AbstractContextManager[Any]:
    """Makes a generator get only what is sent to it, in a block.

    In PyTorch 2.11 and 2.12 the stack has a None below it, which is what the yield returns without ``send``:
    ``return x, (yield name)`` returned the None in place of ``x``.
    """
    if TorchVersion(torch.__version__) >= "2.13":
        return contextlib.nullcontext()
    original = functions.LocalGeneratorObjectVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        tracer = self.inline_tracer
        if name == "send" and tracer.generated_items and not tracer.generator_exhausted:
            tracer.pop()
        return original(self, tx, name, args, kwargs)

    return mock.patch.object(functions.LocalGeneratorObjectVariable, "call_method", call_method)


def stream_questions_answered() -> contextlib.AbstractContextManager[Any]:
    """Lets captured code ask whether a stream is being captured, in a block; Dynamo refuses it for XPUs."""
    questions = [getattr(of, "is_current_stream_capturing", None) for of in (torch.cuda, torch.xpu)]
    original = functions.SkipFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if any(self.value is question for question in questions):
            return SourcelessBuilder.create(tx, False)
        return original(self, tx, args, kwargs)

    return mock.patch.object(functions.SkipFunctionVariable, "call_function", call_function)


def messages_of_checks_left_out() -> contextlib.AbstractContextManager[Any]:
    """Makes Dynamo leave out messages of ``torch._check`` and its like that are functions, in a block.

    It refuses those that read a tensor. Whoever runs the code itself gets the message.
    """
    original = TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self.value, "__name__", "").startswith("_check") and self.value.__module__ == "torch":
            args = [
                each for each in args if not isinstance(each.realize(), functions.BaseUserFunctionVariable)
            ]
            kwargs = {name: each for name, each in kwargs.items() if name != "message"}
        return original(self, tx, args, kwargs)

    return mock.patch.object(TorchInGraphFunctionVariable, "call_function", call_function)


def fake_mode_of(kind: type[FakeTensorMode]) -> contextlib.AbstractContextManager[Any]:
    """Makes the fake mode of each capture one of a given class, in a block."""
    original = OutputGraph.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.tracing_context.fake_mode.__class__ = kind

    return mock.patch.object(OutputGraph, "__init__", init)


def results_given(
    result: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any],
) -> contextlib.AbstractContextManager[Any]:
    """Takes fake results from a function, where a call reads elements or has a size that follows from them.

    Args:
        result: returns the fake result of a function for arguments; None if it has none.
    """

    def watch(tracer: Any, node: Any, arguments: Any, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception:
            found = result(node.target, *arguments)
            if found is None:
                raise
            found.fake_mode.shape_env.pending_fresh_unbacked_symbols.clear()
            return found

    return nodes_watched(watch)


def shown_keys_guarded() -> contextlib.AbstractContextManager[Any]:
    """Makes Dynamo guard the keys of a dictionary whose text is read, ``str(table)``, in a block."""
    original = getattr(ConstDictVariable, "tp_repr_impl", None)  # since 2.14

    def tp_repr_impl(self: Any, tx: Any) -> Any:
        self.install_dict_keys_match_guard()
        return original(self, tx)  # type: ignore[misc]

    if original is None:
        return contextlib.nullcontext()
    return mock.patch.object(ConstDictVariable, "tp_repr_impl", tp_repr_impl)


@contextlib.contextmanager
def function_modes_cleared() -> Iterator[None]:
    """Clears the stack of function modes in a block, such as a default device's."""
    modes = function_modes()
    try:
        with torch_function.torch_function_mode_stack_state_mgr:
            yield
    finally:
        # In PyTorch 2.11 a capture enters the manager, too, which then forgets what to restore.
        set_torch_function_mode_stack(modes)


@contextlib.contextmanager
def settings(wanted: Mapping[str, Any], ignored_logging: set[Any]) -> Iterator[None]:
    """Sets Dynamo's configuration in a block; some versions warn about settings that will go.

    Captured code may ask for loggers by name.

    Args:
        wanted: the settings; those that a version lacks are left out.
        ignored_logging: functions that log, whose calls Dynamo leaves out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known: dict[str, Any] = dynamo_config._config  # type: ignore[attr-defined]
        ignored = set(dynamo_config.ignore_logging_functions) | ignored_logging
        patched = dynamo_config.patch(
            **{name: value for name, value in wanted.items() if name in known},
            ignore_logging_functions=ignored,
        )
        with patched, _loggers_found():
            yield


def _loggers_found() -> contextlib.AbstractContextManager[Any]:
    """Lets captured code ask for a logger by name, which is always the same one, in a block."""
    original = functions.UserFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        is_named = self.fn is logging.getLogger and not kwargs
        if is_named and all(each.is_python_constant() for each in args):
            return misc.LoggingLoggerVariable(
                logging.getLogger(*(each.as_python_constant() for each in args))
            )
        return original(self, tx, args, kwargs)

    return mock.patch.object(functions.UserFunctionVariable, "call_function", call_function)


@contextlib.contextmanager
def caught_exceptions_shown(look: Callable[[type, types.CodeType, bool], None]) -> Iterator[None]:
    """Shows each exception that the captured code raises where a handler may catch it, in a block.

    Adds guards on absent keys of dictionaries and on absent attributes, where a lookup fails.

    Args:
        look: called with the class of the exception, the code that may catch it, and whether guards notice
            when it would not be raised. They do if a ``raise`` of the captured code raises it, since they
            cover what leads there.
    """
    translator = symbolic_convert.InstructionTranslatorBase
    original = translator.exception_handler
    guarded: list[Any] = []  # by identity

    def exception_handler(self: Any, raised: Any) -> None:
        is_311 = sys.version_info >= (3, 11)
        handler = self.current_instruction.exn_tab_entry if is_311 else self.block_stack
        error = _current_exception(self)
        is_lookup = self.f_code.co_name == "__getattr__" and not _LOOK_UP_ATTRIBUTES
        if self.current_instruction.opname == "RAISE_VARARGS" and not is_lookup:
            guarded.append(error)
        if handler:
            look(error.python_type(), self.f_code, any(error is each for each in guarded))
        original(self, raised)

    with (
        mock.patch.object(translator, "exception_handler", exception_handler),
        _absent_keys_guarded(guarded),
        _absent_attributes_guarded(guarded),
    ):
        yield


@contextlib.contextmanager
def calls_as_nodes(
    function_of: Callable[[Any], Any], opened: Callable[[Any, str, type], None]
) -> Iterator[None]:
    """Makes calls of some modules, and of functions with a backward of their own, single nodes in a block.

    A checkpoint calls its function, because whoever runs the nodes decides what to keep.

    Args:
        function_of: returns the target of the node for a module or a subclass of `Function`; None to capture
            what it calls. The target is called with fake tensors, and returns the tensors of its result, and
            of what it writes to dictionaries among its arguments. These are then its attributes ``result``
            and ``written``; its attribute ``tables`` has the classes of the dictionaries before.
        opened: called with the module, and with the name and the class of an argument that no node can have;
            then what the module calls is captured.
    """

    def as_node(original: Any, value_of: Callable[[Any], Any]) -> Any:
        def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            function = function_of(value_of(self))
            if function is None:
                return original(self, tx, args, kwargs)
            named = dict[Any, Any](enumerate(args)) | kwargs
            tables = {name: table for name, table in named.items() if _is_table(table)}
            shown = named | {name: _getattr(tx, x, "data") for name, x in tables.items() if not _has_proxy(x)}
            are_one = len({id(table.realize()) for table in tables.values()}) < len(tables)
            for name, argument in shown.items():
                if not _has_proxy(argument) or (are_one and name in tables):
                    opened(value_of(self), repr(name), named[name].python_type())
                    return original(self, tx, args, kwargs)
            function.tables = {name: table.python_type() for name, table in tables.items()}
            proxies = dynamo_utils.proxy_args_kwargs(
                [shown[index] for index in range(len(args))], {name: shown[name] for name in kwargs}
            )
            proxy = tx.output.create_proxy("call_function", function, *proxies)
            wrapped: Any = wrap_fx_proxy(tx, proxy)
            leaves = iter(wrapped.items)
            result = _variable(tx, function.result, leaves)
            for name, items in function.written.items():
                for key, value in items.items():
                    entry = [tables[name], SourcelessBuilder.create(tx, key), _variable(tx, value, leaves)]
                    SourcelessBuilder.create(tx, operator.setitem).call_function(tx, entry, {})
            return result

        return call

    def checkpoint(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        reentrant = kwargs.get("use_reentrant")
        if reentrant is None or not reentrant.is_python_constant() or reentrant.as_python_constant():
            return call_checkpoint(self, tx, args, kwargs)
        _, kwargs = TagActivationCheckpoint.divide_kwargs(kwargs)
        return args[0].call_function(tx, args[1:], kwargs)

    module, apply = UnspecializedNNModuleVariable, misc.AutogradFunctionVariable
    call_checkpoint = CheckpointHigherOrderVariable._call_function
    call_module = as_node(module.call_function, lambda variable: variable.value)
    call_apply = as_node(apply.call_apply, lambda variable: variable.fn_cls)
    with (
        mock.patch.object(module, "call_function", call_module),
        mock.patch.object(apply, "call_apply", call_apply),
        mock.patch.object(CheckpointHigherOrderVariable, "_call_function", checkpoint),
    ):
        yield


def _is_table(argument: Any) -> bool:
    """Returns whether an argument is a dictionary, or one of Python that wraps it."""
    try:
        kind = argument.python_type()
    except NotImplementedError:
        return False
    return kind is dict or issubclass(kind, UserDict)


def _getattr(tx: Any, value: Any, name: str) -> Any:
    arguments = [value, SourcelessBuilder.create(tx, name)]
    return SourcelessBuilder.create(tx, getattr).call_function(tx, arguments, {})


def _has_proxy(argument: Any) -> bool:
    try:
        argument.as_proxy()
    except (Unsupported, NotImplementedError):
        return False
    return True


# Since 2.14 a class of its own.
_OrderedDictVariable: Any = getattr(dynamo_dicts, "OrderedDictVariable", None) or functools.partial(
    ConstDictVariable, user_cls=OrderedDict
)


def _variable(tx: Any, value: Any, tensors: Iterator[Any]) -> Any:
    """Returns Dynamo's variable for a nested value, with these variables in the place of its tensors."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if type(value) in (tuple, list):
        kind = TupleVariable if type(value) is tuple else ListVariable
        return kind([_variable(tx, each, tensors) for each in value], mutation_type=ValueMutationNew())
    if type(value) in (dict, OrderedDict):
        pairs = {SourcelessBuilder.create(tx, k): _variable(tx, x, tensors) for k, x in value.items()}
        table: Any = ConstDictVariable if type(value) is dict else _OrderedDictVariable
        return table(pairs, mutation_type=ValueMutationNew())
    if isinstance(value, Mapping) or hasattr(value, "_fields"):
        items = value.items() if isinstance(value, Mapping) else zip(value._fields, value, strict=True)
        named = {name: _variable(tx, each, tensors) for name, each in items}
        # A global variable of the captured function has the class, so that guards can name it.
        name = f"class_{id(type(value))}"
        tx.output.global_scope[name] = type(value)
        return VariableTracker.build(tx, type(value), sources.GlobalSource(name)).call_function(tx, [], named)
    return SourcelessBuilder.create(tx, value)


@contextlib.contextmanager
def elements_answered(answer: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Answers what captured code reads from the elements of tensors by a function, in a block.

    Args:
        answer: returns the result of a method of a tensor, such as ``item``, ``equal`` or ``__bool__``. It is
            called with the graph so far, the method's name, and the nodes of its arguments.
    """
    translator = symbolic_convert.InstructionTranslatorBase
    step, call, call_torch = (
        translator.step,
        TensorVariable.call_method,
        TorchInGraphFunctionVariable.call_function,
    )

    def answered(tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tracer = tx.output.current_tracer
        proxies = dynamo_utils.proxy_args_kwargs(args, kwargs)
        read = tx.output.create_proxy("call_function", elements_read, *proxies).node
        found = answer(None if tracer.parent is not None else tracer.graph, name, (read.args, read.kwargs))
        return SourcelessBuilder.create(tx, found)

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in ("equal", "allclose") or (name in ("item", "tolist") and not args and not kwargs):
            return answered(tx, name, [self, *args], kwargs)
        return call(self, tx, name, args, kwargs)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value in (torch.equal, torch.allclose):
            return answered(tx, self.value.__name__, args, kwargs)
        return call_torch(self, tx, args, kwargs)

    def new_step(self: Any) -> Any:
        pointer = self.instruction_pointer
        if pointer is not None and self.stack and _is_branch(self.instructions[pointer].opname):
            top = self.stack[-1].realize()
            if isinstance(top, TensorVariable):
                self.stack[-1] = answered(self, "__bool__", [top], {})
        return step(self)

    with (
        mock.patch.object(translator, "step", new_step),
        mock.patch.object(TensorVariable, "call_method", call_method),
        mock.patch.object(TorchInGraphFunctionVariable, "call_function", call_function),
    ):
        yield


def elements_read(*args: Any, **kwargs: Any) -> None:
    """Does nothing: its node keeps tensors in the graph whose elements the captured code has read."""


def _is_branch(opname: str) -> bool:
    return opname in ("TO_BOOL", "UNARY_NOT") or (
        "JUMP" in opname and "IF_" in opname and "NONE" not in opname
    )


def nodes_watched(
    watch: Callable[[Any, Any, Any, Callable[[], Any]], Any],
) -> contextlib.AbstractContextManager[Any]:
    """Lets a function run each node of a graph with fake tensors, in a block.

    Args:
        watch: called with Dynamo's records, the node, its arguments, and a function that runs it; returns the
            result.
    """
    original = dynamo_utils.run_node

    def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        return watch(tracer, node, (args, kwargs), lambda: original(tracer, node, args, kwargs, nnmodule))

    return mock.patch.object(dynamo_utils, "run_node", run_node)


def _current_exception(translator: Any) -> Any:
    """Returns the exception that is being raised."""
    stack = translator.exn_vt_stack
    latest = getattr(stack, "get_raised_exception", None) or stack.get_current_exception  # since 2.14
    return latest()


def _absent_keys_guarded(guarded: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """Adds a guard where a key of a dictionary is not found, in a block, and the exception to a list."""
    name = "getitem_const_raise_exception_if_absent"
    original = getattr(ConstDictVariable, name)

    def getitem(self: Any, tx: Any, key: Any) -> Any:
        try:
            return original(self, tx, key)
        except ObservedKeyError:
            # The keys of a dictionary that the captured code has made follow from what is guarded.
            is_new = isinstance(self.mutation_type, ValueMutationNew)
            if is_new or (self.source is not None and (key.source is not None or key.is_python_constant())):
                self.install_dict_contains_guard(tx, [key])
                guarded.append(_current_exception(tx))
            raise

    return mock.patch.object(ConstDictVariable, name, getitem)


@contextlib.contextmanager
def _absent_attributes_guarded(guarded: list[Any]) -> Iterator[None]:
    """Adds a guard where an object has no attribute of its own, in a block, and the exception to a list."""
    if not _LOOK_UP_ATTRIBUTES:
        yield
        return
    original = _LOOK_UP_ATTRIBUTES[0].generic_getattr

    def generic_getattr(tx: Any, owner: Any, name: str, *default: Any) -> Any:
        try:
            found = original(tx, owner, name, *default)
        except ObservedAttributeError:
            if owner.source is not None and not tx.output.side_effects.is_modified(owner):
                _guard_whether_has(owner, name)
                guarded.append(_current_exception(tx))
            raise
        if owner.source is not None and _is_from_getattr(owner, name):
            install_guard(owner.source.make_guard(functools.partial(_NOT_IN_DICT, attr=name)))
        return found

    with contextlib.ExitStack() as stack:
        for module in _LOOK_UP_ATTRIBUTES:
            stack.enter_context(mock.patch.object(module, "generic_getattr", generic_getattr))
        yield


# The modules that look up attributes by `generic_getattr`, since 2.14.
_LOOK_UP_ATTRIBUTES: list[Any] = [
    module for module in (symbolic_convert, dynamo_builtin) if hasattr(module, "generic_getattr")
]
_NOT_IN_DICT = GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT


def _is_from_getattr(owner: Any, name: str) -> bool:
    """Returns whether ``__getattr__`` computes an attribute; callers compare the attributes of modules."""
    value = owner.value if isinstance(owner, UserDefinedObjectVariable) else None
    if isinstance(value, torch.nn.Module) or not hasattr(type(value), "__getattr__"):
        return False
    return hasattr(value, "__dict__") and inspect.getattr_static(value, name, owner) is owner


@contextlib.contextmanager
def asked_attributes_guarded() -> Iterator[None]:
    """Makes Dynamo guard whether Python modules and functions have an attribute, if asked, in a block."""
    with contextlib.ExitStack() as stack:
        for kind in (misc.PythonModuleVariable, functions.BaseUserFunctionVariable):
            original = kind.call_obj_hasattr

            def call_obj_hasattr(self: Any, tx: Any, name: str, original: Any = original) -> Any:
                if self.source is not None:
                    _guard_whether_has(self, name)
                return original(self, tx, name)

            stack.enter_context(mock.patch.object(kind, "call_obj_hasattr", call_obj_hasattr))
        yield


def _guard_whether_has(owner: Any, name: str) -> None:
    install_guard(owner.source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))


def cached_calls_answered(
    answer: Callable[[Source | None, Any, tuple[Any, ...] | None, dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[Any]:
    """Takes the results of functions with a cache, `functools.lru_cache`, from a function in a block.

    Args:
        answer: returns the result, given the source of the cached function, the function, its positional
            arguments, or None if some argument is no constant, and its keyword arguments; `NotImplemented` if
            the function below the cache shall be traced.
    """
    original = functions.WrapperUserFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        found = NotImplemented
        if isinstance(self.wrapper_obj, functools._lru_cache_wrapper):
            if all(each.is_python_constant() for each in (*args, *kwargs.values())):
                values = tuple(each.as_python_constant() for each in args)
                named = {key: each.as_python_constant() for key, each in kwargs.items()}
                found = answer(self.source, self.wrapper_obj, values, named)
            else:
                found = answer(self.source, self.wrapper_obj, None, {})
        return (
            original(self, tx, args, kwargs) if found is NotImplemented else VariableTracker.build(tx, found)
        )

    return mock.patch.object(functions.WrapperUserFunctionVariable, "call_function", call_function)


@contextlib.contextmanager
def tensor_attributes_shown(look: Callable[[str, Source | None], None]) -> Iterator[None]:
    """Shows each attribute of a tensor that the captured code reads, in a block.

    Args:
        look: called with the name of the attribute, and the source of the tensor; None for a computed one.
    """
    method = "tp_getattro_impl" if hasattr(TensorVariable, "tp_getattro_impl") else "var_getattr"  # in 2.11
    original = getattr(TensorVariable, method)

    def read(self: Any, tx: Any, name: str) -> Any:
        look(name, self.source)
        return original(self, tx, name)

    with mock.patch.object(TensorVariable, method, read):
        yield


# Side effects

_all_modified_vars = SideEffects._get_modified_vars


@contextlib.contextmanager
def effective_changes_only(names: list[str]) -> Iterator[None]:
    """Makes Dynamo leave out, in a block, modified variables that are as they were before.

    ``self.buffer += 1`` changes a tensor in place, which the graph shows, and then stores the same tensor.
    And a table of skip tensors is empty before and after a layer, as is the stack of function modes.

    Args:
        names: the names of the variables that were modified are stored here.
    """

    def modified_vars(side_effects: Any) -> list[Any]:
        found = [
            variable
            for variable in _all_modified_vars(side_effects)
            if not _stores_same_buffers(variable) and not _is_empty_again(variable)
        ]
        names[:] = [
            f"{source.name}.{attribute}" if attribute else source.name
            for variable in found
            if (source := getattr(variable, "source", None)) is not None
            and not isinstance(source, sources.TempLocalSource)  # an object that the captured code makes
            for attribute in side_effects.store_attr_mutations.get(variable) or [""]
        ]
        return found

    with mock.patch.object(SideEffects, "_get_modified_vars", modified_vars):
        yield


def _is_empty_again(variable: Any) -> bool:
    if getattr(variable, "source", None) is None:
        return False
    if isinstance(variable, torch_function.TorchFunctionModeStackVariable):  # captures begin without modes
        return not variable.symbolic_stack
    return getattr(variable, "original_items", None) == {} and getattr(variable, "items", None) == {}


def _stores_same_buffers(variable: Any) -> bool:
    source = getattr(variable, "source", None)
    if not isinstance(source, sources.AttrSource) or source.member != "_buffers":
        return False
    before, now = getattr(variable, "original_items", None), getattr(variable, "items", None)
    if before is None or now is None or len(before) != len(now):
        return False
    return all(_is_same_tensor(before.get(key.vt), value) for key, value in now.items())


def _is_same_tensor(before: Any, now: Any) -> bool:
    if before is None:
        return False
    before, now = before.realize(), now.realize()
    if before is now:
        return True
    examples = [
        variable.as_proxy().node.meta.get("example_value")
        for variable in (before, now)
        if type(variable).__name__ == "TensorVariable"
    ]
    return len(examples) == 2 and examples[0] is not None and examples[0] is examples[1]


# Guards


def input_sources(output: Any) -> list[Source]:
    """Returns the source of each input of a captured graph."""
    by_index = output.output_graph.export_metadata.graph_input_idx_to_local_source
    return [source for _, source in sorted(by_index.items())]


def sources_of(graph: Any) -> dict[Any, Source]:
    """Returns the source of each input of a graph that is being captured."""
    nodes = graph.find_nodes(op="placeholder")
    return {node: node.meta["grapharg"].source for node in nodes if "grapharg" in node.meta}


def is_random_value(source: Source) -> bool:
    """Returns whether a source is a number drawn from Python's `random`."""
    return isinstance(source, sources.RandomValueSource)


def is_size(source: Source) -> bool:
    """Returns whether a source is a symbol for a size of another input."""
    return isinstance(source, sources.TensorPropertySource)


class _Checks(CheckFunctionManager):
    """Guards whose memory is released with them.

    PyTorch's finalizers, which invalidate its own cached code, would keep the guards and their graph as long
    as the objects that they compare: for modules and classes, until the process ends.
    """

    def id_ref(self, obj: object, obj_str: str) -> int:
        with contextlib.suppress(TypeError):  # as for a bool
            self._weakrefs.setdefault(id(obj), weakref.ref(obj))
        return id(obj)


def check_of(
    graph: Any, code: types.CodeType, guards: Sequence[Guard]
) -> Callable[[Mapping[str, Any]], bool]:
    """Builds the check of some of the guards of a captured graph.

    Args:
        graph: the graph, with Dynamo's records of its capture.
        code: the code of the captured function.
        guards: the guards.

    Returns:
        A function of the captured function's local variables.
    """
    before, graph._guards = graph._guards, GuardsSet(OrderedSet(guards))
    skips, graph.skip_guards_check = graph.skip_guards_check, True  # the check would also measure its time
    try:
        manager = _Checks(code, graph).guard_manager
    finally:
        graph._guards, graph.skip_guards_check = before, skips
    check: Callable[[Mapping[str, Any]], bool] = manager.root.check
    return check
