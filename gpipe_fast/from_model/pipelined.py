"""A user's model whose forward runs its blocks as a pipeline.

It is an object of a subclass of the model's class, and has the ``__dict__`` of the user's object, not a copy.
So the two have the same parameters, modules and mode, and differ in their forward alone::

    user's model  ─────▶ { _parameters, _modules, training, config, ... } ◀───── pipelined model
    LlamaForCausalLM                                                          (Pipelined, LlamaForCausalLM)
    .forward: plain                                                           .forward: the pipeline
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gpipe_fast.container import Placed
from gpipe_fast.distributed.mesh import refuse_ddp
from gpipe_fast.from_model.calls import Calls, Making, page, wants_cache
from gpipe_fast.from_model.program import Program, SplitInputs
from gpipe_fast.from_model.trl import in_place_of_fused_head
from gpipe_fast.lower.checkpoint import CheckpointChoice, CheckpointSetting
from gpipe_fast.reports.report import Report
from gpipe_fast.reports.steps import Steps, backward_of_sum, unchanged
from gpipe_fast.runtime.runner import Runner
from gpipe_fast.runtime.settings import Setting, Settings
from gpipe_fast.schedule import ScheduleChoice
from gpipe_fast.streaming import CallStream, arguments_in, results
from gpipe_fast.training.losses import LOSSES
from gpipe_fast.training.step import check_list, result_of
from gpipe_fast.training.update import checked_update
from gpipe_fast.unsupported import uncompiled
from gpipe_fast.user_warning import warn_user
from gpipe_fast.weights.load import Initialize, load_weights
from gpipe_fast.weights.source import Source


class PipelinedForward:
    """A descriptor: the forward of a class of pipelined models, or what wraps it in one of them.

    Libraries assign a wrapper to ``model.forward``, as accelerate does for mixed precision. It may not be in
    ``__dict__``, because that is the plain model's, too, whose forward would then be the pipeline.

    Args:
        function: the class's forward, which runs the pipeline.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, model: Any, owner: Any = None) -> Any:
        if model is None:
            return self._function
        return model._wrapper or MethodType(self._function, model)

    def __set__(self, model: Any, wrapper: Any) -> None:
        """Sets what wraps the pipeline.

        Raises:
            TypeError: it does not say that it wraps the present forward, by ``__wrapped__``.
        """
        wrapper = in_place_of_fused_head(wrapper)
        if not self._is_wrapped_by(wrapper):
            name = getattr(wrapper, "__qualname__", type(wrapper).__qualname__)
            raise TypeError(
                f"denied to replace forward of a pipelined {type(model).__name__}, because the pipeline "
                f"would not run; got {name} of {getattr(wrapper, '__module__', None)}; assign a function "
                "that calls it, decorated with functools.wraps(model.forward); to TRL, pass "
                "SFTConfig(loss_type='nll')"
            )
        model._wrapper = wrapper

    def __delete__(self, model: Any) -> None:
        model._wrapper = None

    def _is_wrapped_by(self, wrapper: Any) -> bool:
        def is_the_pipeline(function: Any) -> bool:
            return getattr(function, "__func__", function) is self._function

        return is_the_pipeline(inspect.unwrap(wrapper, stop=is_the_pipeline))


class ModelStream:
    """The calls of a pipelined model in flight; methods as of `gpipe_fast.streaming.CallStream`."""

    def __init__(self, calls: Calls, plain: Callable[[], nn.Module]) -> None:
        """Opens a stream of the calls of a model; ``plain`` returns the plain model."""
        self._calls, self._plain = calls, plain
        self._program: Program | None = None  # of the calls in flight
        self._stream: CallStream | None = None
        self._given: deque[SplitInputs] = deque()  # of the calls in flight
        self._finished: deque[Any] = deque()  # results of earlier programs

    @property
    def num_in_flight(self) -> int:
        """As for `CallStream`."""
        return len(self._finished) + len(self._given)

    def check_unchanged(self) -> None:
        """As for `CallStream`."""
        if self._stream is not None:
            self._stream.check_unchanged()

    def begin(self, batch: Any) -> None:
        """As for `CallStream`. If another program is needed, first waits for the calls of the one before."""
        if self._stream is not None and self._stream.runs_python:
            self._stream.wait_for_all()  # blocks in Python cannot run while the model is recorded
        with torch.no_grad():
            program, given = self._calls.begin(self._plain(), *arguments_in(batch))
            if program is not self._program or self._stream is None:
                while self._given:
                    self._finished.append(self._finish_one())
                self.close()
                self._program = program
                self._stream = CallStream(program.runner, lambda: self._plain().training)
            self._stream.begin((program.argument(given),))
            self._calls.end(program)
        self._given.append(given)

    def finish(self) -> Any:
        """As for `CallStream`."""
        return self._finished.popleft() if self._finished else self._finish_one()

    def _finish_one(self) -> Any:
        assert self._stream is not None
        assert self._program is not None
        given = self._given.popleft()
        outputs = self._stream.finish()
        with torch.no_grad():
            return self._program.combined(outputs, given)

    def close(self) -> None:
        """As for `CallStream`."""
        if self._stream is not None:
            self._stream.close()


# Settings of a `GPipe` that only another pipeline has another value of.
_FIXED = ("backend", "balance", "capture", "devices", "fuse", "grad_dtype", "memory_limit", "transport")

# The attribute that tells `keyed_rng` the blocks of a plain model.
STATE = "_gpipe_fast"
_WRAPPER = "_gpipe_fast_wrapper"


class Pipelined(Placed):
    """Base of the classes of pipelined models, which `gpipe_fast.GPipe.from_model` makes."""

    # Not in `__dict__`, which the user's model and other pipelines of it have, too.
    __slots__ = ("_calls", "_wrapper")
    _calls: Calls
    _wrapper: Any  # around forward; None if there is none
    _plain_class: type[nn.Module]
    _move_by = "every stage has its own device; pass devices=[...] to GPipe.from_model"

    def plain(self) -> Any:
        """Returns the plain model: another object with the same attributes, whose forward is the model's own.

        Its parameters, modules and mode are those of the pipelined model, also after later changes.
        """
        vars(self)[STATE] = self._calls  # for `keyed_rng`
        return _sharing(self, self._plain_class)

    def plain_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plain model on one micro-batch after the other, and returns what a call returns.

        Random numbers are those of a call after the same ``torch.manual_seed``, so that the two can be
        compared.
        """
        return self._calls.loop(self.plain(), args, kwargs)

    @uncompiled
    def step(
        self,
        *args: Any,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = False,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs forward and backward of one mini-batch, in the order of ``schedule``, as `GPipe.step` does.

        The loss is the model's own. Outputs leave no stage, unless they are returned.

        Args:
            args: Positional arguments of the model.
            losses: A list to which the part of each micro-batch in the loss is appended.
            return_outputs: Whether to return what the model returns, too.
            optimizer: As for `GPipe.step`.
            scaler: As for `GPipe.step`.
            max_norm: As for `GPipe.step`.
            kwargs: Keyword arguments of the model, such as the labels.

        Returns:
            The loss of the mini-batch, a detached 0-dimensional tensor; with ``return_outputs``, a tuple of
            it and what the model returns, without gradients.

        Raises:
            TypeError: ``losses``, ``optimizer``, ``scaler`` or ``max_norm`` has a wrong type; a target or a
                loss was passed, which the model does not take; or as for a call.
            ValueError: The model does not return one loss; or the optimizer or ``max_norm`` is invalid, as
                for `GPipe.step`.
            RuntimeError: Gradients are disabled; or as for a call.
        """
        processes = self._calls.processes
        with processes.reporting():
            check_list(losses)
            _check_own_loss(self.plain(), kwargs, "step")
            update = checked_update(self, optimizer, scaler, max_norm, processes)
            each, output = self._calls.step(self.plain(), args, kwargs, return_outputs, scaler)
            update.run()
            return result_of(each, output, losses, return_outputs)

    @uncompiled
    def evaluate(
        self,
        *args: Any,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the model's loss for one mini-batch, as `step` does, without gradients.

        Args:
            args: As for `step`.
            losses: As for `step`.
            return_outputs: As for `step`.
            kwargs: As for `step`.

        Returns:
            As for `step`.

        Raises:
            TypeError: A target or a loss was passed, which the model does not take; or as for a call.
            ValueError: The model does not return one loss.
            RuntimeError: As for a call.
        """
        with self._calls.processes.reporting(), torch.no_grad():
            check_list(losses)
            _check_own_loss(self.plain(), kwargs, "evaluate")
            each, output = self._calls.step(self.plain(), args, kwargs, return_outputs)
            return result_of(each, output, losses, return_outputs)

    @uncompiled
    def report(self, *args: Any, check: bool = False, **kwargs: Any) -> Report:
        """Records some steps, and returns where the time of the median one goes, as `GPipe.report` does.

        If the model does not return one loss, calls are recorded, each with the backward of the sum of its
        outputs; if gradients are disabled, calls alone. Balances are not advised, because blocks are not
        measured one by one.

        Args:
            args: Positional arguments of the model.
            check: As for `GPipe.report`.
            kwargs: Keyword arguments of the model, such as the labels.

        Returns:
            The report.

        Raises:
            TypeError: As for `evaluate`.
            RuntimeError: As for a call; or the model is being recorded.
        """
        return steps_of_model(self, args, kwargs).report(check)

    @uncompiled
    def stream(self, batches: Iterable[Any], *, depth: int | None = None) -> Iterator[Any]:
        """Yields what the model returns for each mini-batch of an iterable, in order, without gradients.

        Mini-batches follow one another without draining the pipeline, as for `GPipe.stream`; it drains only
        where a mini-batch needs other layers than the one before, such as after a change of its length, and
        for models with blocks that run in Python.

        Args:
            batches: The inputs. A tuple contains the positional arguments of a call, a dict its keyword
                arguments; any other value is the only argument. None as for `GPipe.stream`.
            depth: As for `GPipe.stream`.

        Returns:
            A generator.

        Raises:
            TypeError: As for `GPipe.stream`.
            ValueError: As for `GPipe.stream`.
            RuntimeError: From the generator: as for a call, and as for `GPipe.stream`.
        """
        self._calls.processes.refuse("a stream", "call the model for each mini-batch under torch.no_grad()")
        return results(ModelStream(self._calls, self.plain), batches, depth, self._calls.num_stages)

    @property
    def pipeline(self) -> Any:
        """The `GPipe` of the latest call, for `doctor`, `recording` and so on. Its layers hold the blocks.

        Settings are those of the model: set them there, because its next call sets them here.
        """
        program = self._calls.program
        if program.pipeline is None:
            program.pipeline = self._calls.how.face(program.runner)
        program.pipeline.training = self.training
        return program.pipeline

    chunks: Setting[int | Literal["auto"], int | Literal["auto"]] = Setting("_calls")
    checkpoint: Setting[CheckpointSetting, CheckpointChoice] = Setting("_calls")
    schedule: Setting[ScheduleChoice, ScheduleChoice] = Setting("_calls")
    threads_per_stage: Setting[int | None, int | None] = Setting("_calls")

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition: what comes before the blocks, each block, and the rest."""
        return list(self._calls.program.runner.placement.balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return list(self._calls.program.runner.placement.devices)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and (name in ("balance", "devices") or not hasattr(self, name)):
            raise AttributeError(
                f"the {name} of a pipeline of GPipe.from_model cannot be changed, got {value!r}; make "
                f"another one: GPipe.from_model(model.plain(), ..., {name.removesuffix('_limit')}={value!r})"
            )
        super().__setattr__(name, value)

    def load_weights(
        self,
        source: Source,
        *,
        strict: bool = True,
        init: Initialize | None = None,
        quantization_config: Any = None,
    ) -> Any:
        """Loads a state dict or a file, stage by stage, as `GPipe.load_weights` does; with the model's names.

        Args:
            source: As for `GPipe.load_weights`. Files of transformers whose tensors its models rename, stack
                or concatenate while loading, such as those of experts, are loaded as they are.
            strict: As for `GPipe.load_weights`.
            init: As for `GPipe.load_weights`. Of a model of transformers, ``model._init_weights`` sets the
                buffers that files lack.
            quantization_config: For a model of transformers on the meta device, what its ``from_pretrained``
                takes under this name. Each weight is read, moved to the device of its stage and quantized,
                before the next one is read. The numbers are those of ``from_pretrained``.

        Returns:
            As `GPipe.load_weights`.

        Raises:
            TypeError: As for `GPipe.load_weights`; or ``quantization_config`` is none of transformers, or
                the model.
            ValueError: As for `GPipe.load_weights`.
            RuntimeError: As for `GPipe.load_weights`.
        """
        how = strict, init, quantization_config
        return load_weights(self, source, self._calls.program.runner.placed, *how)

    def _runners(self) -> Sequence[Runner]:
        return self._calls.runners()

    def _move_assigned(self) -> None:
        if self._calls.processes.is_mesh:
            self._calls.move_to_devices()

    @property
    def hf_device_map(self) -> dict[str, str]:
        """The device of each module that has parameters, if the stages are on several GPUs.

        transformers' ``Trainer`` and ``accelerate`` read it, and then move nothing.

        Raises:
            AttributeError: the stages are on the CPU or on one GPU.
        """
        devices = self._own_devices()
        if len(devices) < 2 or any(device.type != "cuda" for device in devices):
            return super().__getattr__("hf_device_map")  # type: ignore[return-value]  # as if undefined
        return {
            name: str(parameter.device)
            for name, module in self.named_modules()
            for parameter in module.parameters(recurse=False)
        }

    def _with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plain model, which may keep a cache of earlier tokens.

        Raises:
            RuntimeError: the stages are on several devices, or in several processes.
        """
        devices = sorted(map(str, self._own_devices()))
        if len(devices) > 1 or self._calls.processes.is_mesh:
            raise RuntimeError(
                "a call with a cache of earlier tokens runs the plain model, whose forward moves no tensors "
                f"between devices, got stages on {', '.join(devices)}; call model.generate(..., "
                "use_cache=False), or generate by a copy on one device "
                f"(see 'Generate text', {page('guide/generation.md')})"
            )
        return self.plain().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self._plain_class,), {**vars(self), STATE: self._calls, _WRAPPER: self._wrapper}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wrapper = state.pop(_WRAPPER)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._calls = state[STATE]


def steps_of_model(model: Pipelined, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps:
    """Returns steps with arguments as for `report`."""
    _check_own_loss(model.plain(), kwargs, "report")
    model._calls.processes.refuse("a report", "make the model without mesh, which runs the same schedule")
    is_step = torch.is_grad_enabled() and _returns_a_loss(model, args, kwargs)

    given = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
    tensors = [x for x in given if x.requires_grad and x.is_leaf]

    def run() -> None:
        gradients = [x.grad for x in tensors]
        if is_step:
            model.step(*args, **kwargs)
        else:
            backward_of_sum(model(*args, **kwargs))
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient

    batch_size = model._calls.batch_size(model.plain(), args, kwargs)
    return Steps(model, run, lambda: model.pipeline.recording(), batch_size, is_step)


def _returns_a_loss(model: Pipelined, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    with unchanged(model):
        try:
            model.evaluate(*args, **kwargs)
        except ValueError:
            return False
    return True


def _check_own_loss(model: nn.Module, kwargs: Mapping[str, Any], method: str) -> None:
    """Checks that no loss is passed to a model that computes its own.

    Args:
        model: the plain model.
        kwargs: the keyword arguments of its call.
        method: the name of the called method.

    Raises:
        TypeError: a keyword argument of `GPipe.step` was passed that is none of the model's forward.
    """
    others = [name for name in ("target", "loss_fn", "normalizer") if name in kwargs]
    if not others:
        return
    taken = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    unknown = [each for each in others if each not in taken]
    if unknown and not (takes_any and unknown == ["target"]):
        raise TypeError(
            f"{method} got {', '.join(f'{each}=' for each in unknown)}, but the loss of a pipeline of "
            f"GPipe.from_model is the model's own, and its forward takes {', '.join(taken)}; "
            "pass what it computes the loss from, such as labels=, or call loss_fn(model(...), "
            "target).backward()"
        )


def gradient_checkpointing_enable(self: Pipelined, *args: Any, **kwargs: Any) -> None:
    """Sets ``checkpoint='always'``: stages recompute, and not blocks."""
    warn_user("gradient_checkpointing_enable() of a pipelined model sets its checkpoint='always'")
    self._calls.checkpoint_before = self._calls.checkpoint_before or self.checkpoint
    self.checkpoint = "always"


def gradient_checkpointing_disable(self: Pipelined) -> None:
    """Sets ``checkpoint`` to what it was before `gradient_checkpointing_enable`."""
    if self._calls.checkpoint_before is not None:
        self.checkpoint, self._calls.checkpoint_before = self._calls.checkpoint_before, None


def resize_token_embeddings(
    self: Pipelined, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Resizes the embeddings as the model does, unless gradients of the old size would be left.

    Raises:
        RuntimeError: a parameter has a gradient.
    """
    if new_num_tokens is not None and any(parameter.grad is not None for parameter in self.parameters()):
        raise RuntimeError(
            f"resize_token_embeddings({new_num_tokens}) would leave gradients of the old size; resize the "
            "model before GPipe.from_model, or call model.zero_grad() before, and make the optimizer after it"
        )
    plain: Any = self._plain_class
    return plain.resize_token_embeddings(self, new_num_tokens, *args, **kwargs)


def enable_input_require_grads(self: Pipelined) -> None:
    """Does nothing. Checkpoints of transformers need inputs with gradients, and stages do not."""


def _sharing(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    found = object.__new__(cls)
    object.__setattr__(found, "__dict__", vars(model))
    return found


def _new(cls: type[nn.Module]) -> nn.Module:
    return object.__new__(_pipelined_class(cls))


_classes: dict[type[nn.Module], type[Pipelined]] = {}


def _pipelined_class(cls: Any) -> type[Pipelined]:
    """Returns the class of pipelined models of a class; named like that class, for configurations."""
    if cls in _classes:
        return _classes[cls]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if wants_cache(kwargs) and not torch.is_grad_enabled():  # as by `generate`
            return self._with_cache(*args, **kwargs)
        return self._calls.run(self.plain(), args, kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    attributes: dict[str, Any] = {
        "forward": PipelinedForward(functools.wraps(cls.forward)(uncompiled(forward))),
        "_plain_class": cls,
        **names,
    }
    if hasattr(cls, "gradient_checkpointing_enable"):
        methods = gradient_checkpointing_enable, gradient_checkpointing_disable, enable_input_require_grads
        attributes |= {f.__name__: f for f in methods}
    if hasattr(cls, "resize_token_embeddings"):
        attributes["resize_token_embeddings"] = resize_token_embeddings
    _classes[cls] = type(cls)(cls.__name__, (Pipelined, cls), attributes)
    return _classes[cls]


# How models of transformers since 5.24 and before, and of diffusers, turn their checkpoints off.
_DISABLE = (
    *("activation_checkpointing_disable", "gradient_checkpointing_disable"),
    "disable_gradient_checkpointing",
)
# Packages whose modules compute no gradients of their inputs.
_QUANTIZED = ("torch.ao.nn.quantized", "torch.nn.quantized")


def make_pipelined(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    how: Making,
    settings: Settings,
) -> Any:
    """Returns the pipelined model.

    Args:
        model: as for `GPipe.from_model`.
        args: as for `GPipe.from_model`.
        kwargs: as for `GPipe.from_model`.
        how: how it becomes a pipeline.
        settings: the other arguments of `GPipe.from_model`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, Pipelined):
        raise ValueError(
            f"this {type(model).__name__} is pipelined already; call model.plain() for a plain one"
        )
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of positional arguments, got {type(args).__name__}; pass (x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}")
    if how.loss not in LOSSES:
        raise ValueError(f"loss is not one of {', '.join(map(repr, LOSSES))}, got {how.loss!r}")
    if not args and not kwargs:
        raise ValueError(
            "from_model records a call of the model; pass its arguments, as args=(x,) or "
            "kwargs=dict(input_ids=ids, labels=ids); tensors on the meta device do"
        )
    _refuse_hooks_of_accelerate(model)
    _refuse_quantized(model)
    before = None
    disable = next((found for name in _DISABLE if (found := getattr(model, name, None))), None)
    if disable and any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
        disable()
        if hasattr(model, "_require_grads_hook"):  # on embeddings, for reentrant checkpoints of blocks
            model.disable_input_require_grads()  # type: ignore[operator]
        before = settings.checkpoint
        settings = replace(settings, checkpoint="always")
        warn_user("the model's gradient checkpointing becomes checkpoint='always'")
    calls = Calls(model, how, settings)
    calls.checkpoint_before = before
    calls.prepare(model, args, kwargs or {})
    pipelined: Any = _sharing(model, _pipelined_class(type(model)))
    pipelined._calls, pipelined._wrapper = calls, None
    vars(model)[STATE] = calls
    if calls.processes.is_mesh:
        refuse_ddp(pipelined)
    return pipelined


def _refuse_hooks_of_accelerate(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                f"{name or type(model).__name__} has a hook of accelerate, as device_map='auto' leaves; load "
                "the model without device_map, or call accelerate.hooks.remove_hook_from_submodules(model)"
            )


def _refuse_quantized(model: nn.Module) -> None:
    for name, module in model.named_modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        # A FloatFunctional is where a model that may be quantized adds or concatenates.
        is_torchs = type(module).__module__.startswith(_QUANTIZED)
        if (is_torchs and type(module).__name__ != "FloatFunctional") or any(
            t is not None and t.is_quantized for t in tensors
        ):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is quantized by torch.ao.quantization, "
                "through which no gradients pass; load the model without, as in bfloat16, or quantize it by "
                "bitsandbytes or torchao, and train adapters"
            )
