"""`GPipe`: a module that trains the layers of an `nn.Sequential` as a pipeline.

The path of a call, from top to bottom::

    forward(x)             step(x, target=y, loss_fn=f)
      _checked_inputs        _step
      │                        _checked_inputs
      │                        _trainer         another pipeline, of the layers and the loss
      _run  ◀────────────────  trainer._run
        _prepare_call
          _plan
            _describe        detects changes of the layers; in the first call, chooses the balance
            Planner.plan     the programs, from the cache or newly made (gpipe_fast/runtime/planner.py)
        Pipeline.forward or Pipeline.step, in C++ (csrc/pipeline/pipeline.h)
        _finish_call         warnings, and the nesting of the outputs

`prepare` stops after `_plan`. `stream` begins the next call before the one before has finished.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gpipe_fast import progress
from gpipe_fast._extension import Pipeline, PythonWorkers
from gpipe_fast.arguments import (
    CAPTURES,
    MemoryLimit,
    check_inputs,
    check_module,
    check_no_others,
    check_signature,
    checked_backend,
    checked_batch_dim,
    checked_capture,
    checked_checkpoint,
    checked_chunks,
    checked_grad_dtype,
    checked_memory,
    checked_schedule,
    checked_threads_per_stage,
    checked_transport,
    pass_through,
    switched_backend,
    warn_idle_stages,
    warn_sequence_first,
    warn_square_input,
    warn_surplus_devices,
)
from gpipe_fast.arguments import CHECKPOINT_MODES as CHECKPOINT_MODES
from gpipe_fast.balance.automatic import default_balance
from gpipe_fast.container import Container
from gpipe_fast.devices import Device, absent_gpu, silence_stream_warning
from gpipe_fast.distributed.mesh import (
    check_backend,
    check_balance,
    check_no_replicas,
    check_not_shared,
    checked_timeout,
    refuse_ddp,
    ties_of,
)
from gpipe_fast.distributed.ranks import Ranks
from gpipe_fast.from_model.blocks import Blocks
from gpipe_fast.from_model.pipelined import make_pipelined
from gpipe_fast.fuse import left_out
from gpipe_fast.layers.batchnorm import check_can_defer, enable_deferral
from gpipe_fast.layers.skip import verify_skippables
from gpipe_fast.layers.structure import ONE_TENSOR, BatchDim, Inputs
from gpipe_fast.lower.checkpoint import CheckpointChoice, CheckpointSetting, checkpoint_policy
from gpipe_fast.reports.explain import explain_call, on_absent_device
from gpipe_fast.reports.explanation import Explanation
from gpipe_fast.reports.recording import Recording, exchange_stages, kernel_names, record, stage_sizes
from gpipe_fast.reports.reporting import Reporting
from gpipe_fast.runtime.compile import CompilationFailure
from gpipe_fast.runtime.connections import connections_of, describe_connections
from gpipe_fast.runtime.exit_and_fork import open_pipeline
from gpipe_fast.runtime.memory_limit import Limits, choice_within, partitions_within
from gpipe_fast.runtime.plan import PlannedCall, StepOrder
from gpipe_fast.runtime.planner import Call, Planner, PreparedCall, failure_message
from gpipe_fast.runtime.stage import TRACING_LOCK, Stage, Tie
from gpipe_fast.runtime.stage_memory import StageBytes, stage_bytes
from gpipe_fast.runtime.state import ModuleState
from gpipe_fast.schedule import ScheduleChoice
from gpipe_fast.schedule.budget import BudgetError
from gpipe_fast.schedule.cuts import Partition
from gpipe_fast.stages import checked_placement, partitions_of, resolve_balance, resolve_devices, stages_of
from gpipe_fast.streaming import CallStream, arguments_in, check_depth, results
from gpipe_fast.trace.joint_graph import parameters_of
from gpipe_fast.trace.layer_states import LayerStates
from gpipe_fast.training.losses import (
    Loss,
    Normalizer,
    check_normalizer,
    check_target,
    key_of,
    loss_layer,
    loss_of,
)
from gpipe_fast.training.step import (
    Given,
    Losses,
    check_graphs,
    check_list,
    checked_divisor,
    given_of,
    losses_of,
    result_of,
)
from gpipe_fast.training.update import StageUpdates, checked_update
from gpipe_fast.unsupported import global_hook, has_observers, uncompiled, without_observers
from gpipe_fast.user_warning import warn_user, warns_of_idle_stages

if TYPE_CHECKING:
    from gpipe_fast.distributed.mesh import Mesh

# The maximum number of losses for which programs are kept.
_MAX_LOSSES = 4
# Attributes that a copy creates anew.
_NOT_COPIED = frozenset(
    {"_layers", "_stages", "_connections", "_state", "_planner", "_pipeline", "_python_workers"}
)
# A copied `_compiled_call_impl` would call the original module; nn.Module does not copy it either.
_NOT_COPIED |= {"_hook_planner", "_compiled_call_impl", "_trainers"}


class GPipe(Reporting, Container):
    """Trains a sequence of layers as a pipeline of stages over micro-batches.

    Outputs, gradients and buffers equal those of ``torch.cat([module(c) for c in x.chunk(chunks)])``, bit for
    bit on the CPU. The children, parameter names and ``state_dict`` are those of ``module``::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        loss_fn(model(x), y).backward()

    Args:
        module: The layers. They are moved to the devices of their stages, not copied.
        balance: The number of layers of each partition. By default there is one partition per device, or per
            processor without GPUs. The first call measures every layer on its first micro-batch and chooses
            the balance whose slowest partition is fastest; before it, and if a layer cannot be measured,
            partitions have about equal parameter counts.
        devices: One device for each partition; surplus devices are ignored, without ``balance`` after a
            warning. By default all visible GPUs, or
            the CPU for all stages if there are none. With a ``mesh``, the device of this process's stage, or
            a list with one for each process; by default the current GPU if the mesh is one of GPUs or a group
            of NCCL, else the CPU.
        chunks: The number of micro-batches per mini-batch, which is split as by ``Tensor.chunk``; or
            ``'auto'``, four per stage, but at most one per sample.
        batch_dim: The dimension along which inputs are split into micro-batches and outputs concatenated, as
            in ``torch.cat([module(c) for c in x.chunk(chunks, batch_dim)], batch_dim)``; negative dimensions
            count from the end. Or a tuple with one dimension for each input tensor that is split, in argument
            order; outputs are then concatenated along the first of them, and must have their batch there.
        checkpoint: Which micro-batches recompute their activations in the backward: ``'always'``,
            ``'except_last'`` or ``'never'``. With ``'except_attention'`` all recompute everything but fused
            attention, whose results are saved: the policy ``MUST_SAVE`` of
            ``torch.utils.checkpoint.CheckpointPolicy`` for attention. Or a number from 0 to 1: each
            micro-batch of a stage saves at most this share of the bytes that it saves under ``'never'``, and
            those of them that spare most time; the rest is recomputed. Or a list with one of these for each
            stage. In eval mode, nothing is recomputed. Where a micro-batch recomputes anything, layers in
            Python save nothing.
        memory: The bytes that training may take on each device: a number, a text such as ``'20GiB'``, or one
            of these for each device. Each stage then recomputes as little as fits, in place of what
            ``checkpoint`` says. Parameters, buffers, gradients, boundary tensors, saved tensors and
            intermediates count, as predicted from shapes; the state of an optimizer does not. All layers
            have to be traced. With ``balance=None``, the first call chooses the balance, too.
        deferred_batch_norm: Update the running statistics of batch norm once per mini-batch, from all of its
            samples, instead of once per micro-batch.
        grad_dtype: The dtype in which gradients of bfloat16 and float16 parameters are accumulated over the
            micro-batches of a mini-batch: None for the parameter's dtype, or ``torch.float32``, from which
            they are rounded once at the end of the backward. float32 needs 4 bytes per element of these
            parameters during the backward. Other parameters are not affected.
        backend: ``'auto'`` lowers layers to C++ programs; layers that cannot be traced faithfully run in
            Python, in the same schedule, after a warning that names the stage, the layer and the reason.
            ``'aten'`` raises an error for such layers. ``'eager'`` runs all layers in Python.
        capture: Replay mini-batches that run on GPUs only as CUDA graphs, from the third one of a shape on:
            ``True``, ``False``, or ``'auto'``: only if the first two took the host about as long to enqueue
            as the device to execute, since otherwise a graph costs memory and gains nothing.
            ``doctor()`` reports what cannot be captured. It has no effect on CPU stages, nor with a ``mesh``
            or with ``memory``: the attribute is then False, and cannot be set to True.
        fuse: Let stages on GPUs of compute capability 8.0 or higher replace operators that are limited by
            memory traffic by fused Triton kernels (element-wise operators, norms, losses), which are launched
            without Python. Results then differ from the plain loop's by rounding. It has no effect on CPU
            stages, under ``torch.use_deterministic_algorithms(True)``, and if the environment variable
            ``GPIPE_FAST_DISABLE`` contains ``fuse``. None: True.
        transport: How boundary tensors move between stages on GPUs. ``'auto'`` passes them on by reference
            within a device, copies them between devices with peer access, and otherwise through pinned host
            memory. ``'peer'`` and ``'pinned'`` force one kind of copy, also within a device.
        schedule: The order in which `step` runs forwards and backwards. ``'gpipe'``: all forwards before the
            first backward. ``'1f1b'``: each backward as early as possible, so that a stage keeps at most one
            micro-batch for itself and for each later stage. ``'zb-h1'``: 1F1B, with weight gradients computed
            where a stage would wait. ``'interleaved'``: 1F1B for several stages on each device, which take
            turns. Or a ``gpipe_fast.schedule.Schedule``, or a function of the number of stages and of
            micro-batches that returns one. May be set between calls.
        mesh: Processes of torch.distributed: a process group, or a ``DeviceMesh`` with a dimension ``'pp'``,
            or of one dimension without a name. Of P processes, process r has the stages r, r + P, r + 2 P
            and so on; by default one. Each process makes this pipeline alike, and the same calls with inputs
            and targets of equal shapes; it keeps the layers of its own stages only, and puts the others on
            the meta device. The first stage reads the inputs, the last one the target. A mesh with a
            dimension ``'dp_replicate'``, too, has as many replicas of all stages, which run different
            samples, and sum or average their gradients. None: all stages are in this process.
        timeout: The maximum time, in seconds, that a process waits for another one.

    Raises:
        TypeError: ``module`` is not a ``Sequential``, its skip connections do not match, ``batch_dim`` is
            neither an integer nor an iterable of integers, or ``mesh`` is neither a process group nor a
            ``DeviceMesh``.
        ValueError: ``balance``, ``chunks``, ``checkpoint``, ``grad_dtype``, ``backend``, ``transport``,
            ``mesh`` or ``timeout`` is invalid, a stage of a ``mesh`` shares a tensor with another one, a
            layer occurs twice, has the name of an attribute of this class or sharded parameters, layers are
            too large for their devices, or ``transport`` is ``'peer'`` and two devices cannot copy directly.
        IndexError: There are fewer devices than partitions.

    Attributes:
        backend: As passed.
        grad_dtype: As passed.
        transport: As passed.
    """

    _state: ModuleState
    _hook_planner: Planner | None

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *others: NoReturn,
        devices: Iterable[Device] | Device | None = None,
        chunks: int | Literal["auto"] = 1,
        batch_dim: int | Iterable[int] = 0,
        checkpoint: CheckpointChoice = "except_last",
        memory: MemoryLimit = None,
        deferred_batch_norm: bool = False,
        grad_dtype: torch.dtype | None = None,
        backend: str = "auto",
        capture: bool | str = "auto",
        transport: str = "auto",
        fuse: bool | None = None,
        schedule: ScheduleChoice = "gpipe",
        mesh: Mesh | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        check_no_others(others)
        # Check in torchgpipe's order, then our own arguments; the module is unchanged until all checks pass.
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.batch_dim = batch_dim
        self._ranks: Ranks | None = None
        self._ties: list[Tie] = []
        own_partitions = slice(None)
        if mesh is not None:
            self._ranks = Ranks.of_mesh(mesh, checked_timeout(timeout), devices)
            own_partitions = slice(self._ranks.index, None, self._ranks.size)
            check_backend(backend)
            balance = None if balance is None else list(balance)
            check_balance(balance, self._ranks.size, self._ranks.num_replicas)
            # Those of stages in other processes count as like ours.
            devices = [self._ranks.device] * len(balance or range(self._ranks.size))
        check_module(module, "; other modules are cut into layers by GPipe.from_model(module, args=(x,))")
        self._user_devices = resolve_devices(devices)
        if devices is not None and balance is None and mesh is None:
            warn_surplus_devices(len(self._user_devices or ()), len(module))
        self._balance, self._devices = checked_placement(
            list(module.named_children()), balance, self._user_devices, own_partitions
        )
        self.checkpoint = checkpoint  # again, now that the number of stages is known
        self.memory_limit = memory
        if self._ranks is not None:
            check_balance(self._balance, self._ranks.size, self._ranks.num_replicas)
            self._own_stages = self._ranks.stages_of(len(self._balance))
            named = partitions_of(module.named_children(), self._balance)
            partitions = [nn.Sequential(OrderedDict(own)) for own in named]
            check_not_shared(partitions, self._ranks.size)
            self._ranks.check_homes(partitions)
            self._ties = ties_of(partitions)
        self._deferred_batch_norm = bool(deferred_batch_norm)
        if self._deferred_batch_norm:
            check_can_defer(module.named_children())
        self.backend = checked_backend(backend)
        self.grad_dtype = checked_grad_dtype(grad_dtype)
        self.transport = checked_transport(transport)
        self.schedule = schedule
        self._fuse = fuse is None or bool(fuse)
        self._connections = connections_of(self._balance, self._devices, list(module), self.transport)
        self.threads_per_stage = None
        self._capture = checked_capture(capture)
        self._warned_of_idle_stages = False
        self._checks_usage = True
        self._trainers: dict[Any, tuple[Any, Any, Any]] = {}  # pipelines with a loss
        self._balance_pending = balance is None and len(self._balance) > 1 and mesh is None
        self._register_layers(module)
        if self._ranks is not None:
            self._ranks.note_homes(partitions)
            refuse_ddp(
                self, "instead, pass GPipe a mesh with a dimension 'dp_replicate', for replicas of all stages"
            )
        if self._deferred_batch_norm:
            enable_deferral(self)
        self._python_workers = PythonWorkers()
        self._pipeline = self._open_pipeline()
        self._rebuild_stages()

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        blocks: Blocks | None = None,
        balance: Iterable[int] | None = None,
        devices: Iterable[Device] | Device | None = None,
        chunks: int | Literal["auto"] = 1,
        checkpoint: CheckpointChoice = "except_last",
        memory: MemoryLimit = None,
        loss: str = "exact",
        grad_dtype: torch.dtype | None = None,
        backend: str = "auto",
        capture: bool | str = "auto",
        transport: str = "auto",
        fuse: bool | None = None,
        schedule: ScheduleChoice = "gpipe",
        mesh: Mesh | None = None,
        timeout: float = 60.0,
    ) -> Any:
        """Makes a pipeline of a model that is not an ``nn.Sequential``, from an example of its arguments.

        The model is called on stand-ins without elements, to see which modules its forward calls, in which
        order, and what it computes between them. It is cut before and after each block, such as the layers of
        a Transformer::

            model = GPipe.from_model(model, kwargs=dict(input_ids=ids, labels=ids), chunks=8)
            loss = model(input_ids=ids, labels=labels).loss

        The result is the model with another forward: it has the same class name, attributes, parameters and
        ``state_dict``, and takes and returns what the model does. Outputs and gradients equal those of the
        plain model over the same micro-batches. Other arguments, shapes and modes than the example's are
        possible; the first call of a kind takes longer.

        Args:
            model: The model. Its modules are moved to the devices of their stages, not copied. The object
                that was passed still runs its plain forward; so does ``plain()`` of the result.
            args: Positional arguments of a call, as an example. Tensors on the meta device do. Which inputs
                are split along their first dimension is found by calls with other batch sizes, and not from
                equal numbers; an input that is wrapped by `replicate` is not.
            kwargs: Keyword arguments of that call.
            blocks: The modules at which the model is cut: names of modules, modules or classes. A list of
                modules stands for its children. By default the lists of modules that are called in order.
            balance: The number of blocks of each partition; or the number of layers, which are what comes
                before the blocks, each block, and the rest. By default as for `GPipe`.
            devices: As for `GPipe`.
            chunks: As for `GPipe`.
            checkpoint: As for `GPipe`.
            memory: As for `GPipe`.
            loss: ``'exact'`` refuses outputs, such as a loss, that do not follow from those of micro-batches.
                ``'per-microbatch'`` averages them over micro-batches, and returns None for outputs that
                compare samples with each other.
            grad_dtype: As for `GPipe`.
            backend: As for `GPipe`.
            capture: As for `GPipe`.
            transport: As for `GPipe`.
            fuse: As for `GPipe`.
            schedule: As for `GPipe`.
            mesh: As for `GPipe`; without replicas. Each process passes the same inputs, with their elements.
                A call returns what the model does in the last process; in the others, a tensor to call
                ``backward`` on stands for each output that requires a gradient, and None for any other one.
            timeout: As for `GPipe`.

        Returns:
            The pipelined model. Its ``chunks``, ``checkpoint``, ``schedule`` and ``threads_per_stage`` may be
            set; ``pipeline`` is the `GPipe` that ran last.

        Raises:
            TypeError: ``model`` is not a module, or another argument has a wrong type.
            ValueError: an argument is invalid, ``blocks`` names no blocks, or the model is quantized or has
                hooks of accelerate.
            RuntimeError: The model cannot be cut; the message says what stands in the way.
        """
        options: dict[str, Any] = {"grad_dtype": grad_dtype, "backend": backend, "capture": capture}
        options |= {"transport": transport, "fuse": fuse, "memory": memory}
        ranks = None
        if mesh is None:
            places = resolve_devices(devices)
            options["devices"] = None if devices is None else places
            number = None if places is None else len(places)
        else:
            options["mesh"] = ranks = Ranks.of_mesh(mesh, checked_timeout(timeout), devices)
            check_no_replicas(ranks.num_replicas)
            number = ranks.size
        make = functools.partial(cls, **options)
        settings = chunks, checkpoint, schedule, loss
        return make_pipelined(model, args, kwargs, blocks, balance, number, *settings, make, ranks)

    # A call.

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one mini-batch. `torch.compile` does not trace into this method.

        Args:
            args: The first layer's arguments: tensors of any dtype, nested in tuples, lists and dicts, with
                None, bools, numbers and strings. Every tensor is split along `batch_dim` into micro-batches,
                unless it is wrapped by `replicate`. Every micro-batch gets replicated tensors and all other
                values whole. Layers are traced again for each value of a number; pass numbers that change
                from call to call as ``replicate(torch.tensor(number))``.
            kwargs: Keyword arguments of the first layer, of the same types. A single argument ``input`` is
                passed by position, as by ``Sequential``.

        Returns:
            The last layer's return value, nested as it was returned, with each tensor concatenated over
            micro-batches along `batch_dim`. Without layers, the argument itself.

        Raises:
            TypeError: The input, or the return value of a stage, contains a value of another type; or the
                input, or the return value of the last layer, contains no tensor.
            ValueError: The tensors lack the batch dimension, differ in batch size, or are not on the device
                of the first stage.
            RuntimeError: A stage cannot be traced and ``backend='aten'``, a lazy module is uninitialized, or
                a tensor is on the meta device; the message names the layer and the reason. A layer in Python
                changes what other layers read. Or the call is
                inside a ``torch.func`` transform, a tracer, or forward-mode AD.
        """
        if not len(self):
            return pass_through(args, kwargs, self._batch_dim)
        with self._reporting():
            return self._run(self._checked_inputs(args, kwargs))

    def _run(self, inputs: Inputs, given: Given | None = None) -> Any:
        """Runs the forward of a mini-batch; with ``given``, a step, or without gradients its forward."""
        call = self._prepare_call(inputs, given)
        plan, tensors = call.plan, (call.parameters, call.buffers)
        if self._ranks is not None:
            self._ranks.begin(call.pipeline, self._call_of(inputs, given), plan, self._stages)
        if given is None:
            outputs, structure = call.pipeline.forward(plan.native, inputs.tensors, *tensors, call.key())
        else:
            gradients = []
            if torch.is_grad_enabled():
                losses = plan.possible_losses(self._stages[-1])
                gradients = given.gradients(plan.schedule.num_microbatches, losses)
            key = call.key()
            update = None if given.updates is None else given.updates.of(call.parameters)
            outputs, structure = call.pipeline.step(
                plan.native, inputs.tensors, given.tensors, gradients, *tensors, key, update, given.offer
            )
        return self._finish_call(call, outputs, structure)

    def _prepare_call(self, inputs: Inputs, given: Given | None = None) -> PreparedCall:
        """Returns the call for these inputs, the present layers and the present settings."""
        with TRACING_LOCK:
            with nullcontext() if self._ranks is None else self._ranks.compiling():
                plan = self._plan(inputs, given)
            state = self._state if self._planner.module_warnings.in_python else None
            parts = self._state.parameters, self._state.buffers
            call = PreparedCall(plan, self._pipeline, *parts, state, self._planner.layers_in_python)
            if state is not None:
                state.watch()
        self._emit_warnings()
        return call

    def _finish_call(self, call: PreparedCall, outputs: list[Tensor], structure: Any) -> Any:
        """Returns what a call returns, after the checks and warnings that follow its run."""
        call.check_unchanged()
        self._emit_warnings()
        return outputs[0] if structure is ONE_TENSOR else structure.build_unaliased(outputs)

    def _checked_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], allow_meta: bool = False
    ) -> Inputs:
        """Returns the checked arguments of a call, with zeros for meta tensors if those are allowed."""
        if not args and kwargs.keys() == {"input"}:
            args, kwargs = (kwargs["input"],), {}
        inputs = Inputs.of(args, kwargs, self._batch_dim)
        if allow_meta:
            inputs = inputs.with_memory(self._devices[0])
        check_inputs(inputs, self._devices)
        if kwargs or len(args) != 1:
            check_signature(next(iter(self)), args, kwargs)
        return inputs

    def _targets(self, target: Any) -> Inputs | None:
        """Returns the target of a step as tensors, of which each is split like the outputs."""
        return None if target is None else Inputs.of((target,), {}, self._output_dim)

    @property
    def _output_dim(self) -> int:
        """The dimension along which outputs are concatenated."""
        return self._batch_dim if isinstance(self._batch_dim, int) else self._batch_dim[0]

    def _plan(self, inputs: Inputs, given: Given | None = None) -> PlannedCall:
        """Returns the plan for these inputs and the present layers. The caller holds the tracing lock."""

        def plan(hook: str | None = None) -> PlannedCall:
            call = self._describe(inputs, given)
            planner = self._planner if hook is None else self._planner_under_hook(hook)
            return planner.plan(self._within_memory(planner, call))

        is_observed = has_observers(inputs.tensors, self.modules)
        return without_observers(plan, global_hook()) if is_observed else plan()

    def _describe(self, inputs: Inputs, given: Given | None = None, order: StepOrder | None = None) -> Call:
        """Returns a call with these inputs, for the present layers and settings.

        Args:
            inputs: the inputs.
            given: what a step gives to its loss.
            order: the order in which a step will run them, for a choice of the balance.
        """
        self._detect_changes()
        chunks = self._num_chunks(inputs.batch_size)
        if self._balance_pending and inputs.batch_size and self._has_data():
            if self._memory_limits is None:
                self._balance_by_time(inputs, chunks)
            elif self.training and torch.is_grad_enabled():
                self._balance_within_memory(self._memory_limits, inputs, order)
        if self._checks_usage:
            self._checks_usage = False
            warn_sequence_first([stage.layers for stage in self._stages], inputs.dims)
            warn_square_input(inputs)
        return self._call_of(inputs, given)

    def _detect_changes(self) -> None:
        """Detects changes of the layers since the last call, and updates the state and stages accordingly."""
        layers = cast(Collection[nn.Module], self._modules.values())
        if self._state.update(layers) and self._deferred_batch_norm:
            self._state = ModuleState(self._layer_states(), self._planner.module_warnings.in_python)
            enable_deferral(layers)  # includes batch norms that were added since
            self._state.update(layers)
        if self._state.layers != self._layers:
            self._balance = resolve_balance(self._state.layers, self._balance)
            self._rebuild_stages()
            self._state.update(layers)

    def _call_of(self, inputs: Inputs, given: Given | None) -> Call:
        """As for `_describe`, if nothing has changed since."""
        chunks = self._chunks_of(inputs.batch_size)
        training = self.training and torch.is_grad_enabled()
        checkpoint = checkpoint_policy(self.checkpoint, len(self._balance), training)
        call = Call(inputs, chunks, self._threads(), checkpoint, self._state)
        return call if given is None else replace(call, given=given.tensors, order=given.order)

    def _chunks_of(self, batch: int) -> int:
        return max(1, min(4 * len(self._stages), batch)) if self.chunks == "auto" else self.chunks

    def _num_chunks(self, batch: int) -> int:
        """Returns the number of micro-batches for this batch size; warns once if the user's number is low."""
        num_stages, enough, chunks = len(self._stages), 4 * len(self._stages), self._chunks_of(batch)
        is_few = num_stages > 1 and chunks < enough and self.training
        if is_few and not self._warned_of_idle_stages and warns_of_idle_stages():
            self._warned_of_idle_stages = True
            warn_idle_stages(num_stages, chunks, batch)
        return chunks

    def _threads(self) -> int:
        num_stages = len(self._stages if self._own_stages is None else self._own_stages)  # of this process
        return self.threads_per_stage or max(1, torch.get_num_threads() // max(1, num_stages))

    def _within_memory(self, planner: Planner, call: Call) -> Call:
        """Returns a call that saves as much as the memory allows, if there is a limit."""
        if self._memory_limits is None or not (self.training and torch.is_grad_enabled()):
            return call
        return choice_within(planner, call, self._memory_limits).applied_to(call)

    def _planner_under_hook(self, hook: str) -> Planner:
        """Returns the planner that runs all layers in Python, so that global module hooks are called."""
        if self.backend == "aten" or self._ranks is not None:
            cause = "backend='aten'" if self._ranks is None else "a mesh"
            raise RuntimeError(
                f"the global module hook {hook} needs layers in Python, and {cause} allows none; "
                "remove the hook, or pass backend='auto' to GPipe without a mesh"
            )
        if self._hook_planner is None:
            self._hook_planner = Planner(self._stages, "eager", self._python_workers)
            if self.backend != "eager":
                self._planner.module_warnings.pending.append(
                    f"all layers run in Python while the global module hook {hook} is registered; to run "
                    "layers as C++ programs, remove it, or register it only on the layers that need it"
                )
        return self._hook_planner

    def _emit_warnings(self) -> None:
        """Emits the planner's pending warnings and those about fused kernels, each once."""
        for pending in (self._planner.module_warnings.pending, left_out.pending):
            while pending:
                warn_user(pending.pop(0))

    def _reporting(self) -> AbstractContextManager[None]:
        """Returns a context manager that reports an error of its block to the other processes, if any."""
        return nullcontext() if self._ranks is None else self._ranks.reporting()

    # Calls that are prepared, or follow one another.

    @uncompiled
    def prepare(self, *args: Any, also: Sequence[Any] = (), **kwargs: Any) -> None:
        """Does the work of a first call beforehand: traces, compiles and builds programs; runs no layer.

        The next call with inputs of these shapes is as fast as any later one. Parameters, buffers, gradients
        and PyTorch's random state are left unchanged. Programs are made for the present train or eval mode,
        grad mode, autocast mode and settings of the model::

            model.prepare(x)
            model.prepare(torch.empty(64, 128, device="meta"), also=[last_batch])
            with torch.no_grad():
                model.eval().prepare(x)

        If the balance is not measured yet, layers are measured on copies, as by the first call. Layers that
        run in Python cannot be prepared, nor can the layers around them; a warning names the first one.

        Args:
            args: The arguments of a call, as for `forward`: a mini-batch. Only shapes, dtypes, strides and
                ``requires_grad`` are read. Meta tensors stand for tensors on the first stage's device; a
                balance is measured on zeros in their place.
            also: Further mini-batches, of other shapes. A tuple contains the positional arguments of a call;
                any other value is the only argument. Programs of up to 32 kinds of calls are kept.
            kwargs: The keyword arguments of each call.

        Raises:
            TypeError: As for `forward`; or ``also`` is neither a list nor a tuple.
            ValueError: As for `forward`.
            RuntimeError: As for `forward`.
        """
        if not isinstance(also, (list, tuple)):
            raise TypeError(
                "also must be a list or tuple of further mini-batches, got "
                f"{type(also).__name__}; pass also=[x]"
            )
        if not len(self):
            return
        further = [each if isinstance(each, tuple) else (each,) for each in also]
        calls = [self._checked_inputs(each, kwargs, allow_meta=True) for each in (args, *further)]
        with progress.working("preparing calls") as work:
            for index, inputs in enumerate(calls):
                work.enter_call(index, len(calls))
                with TRACING_LOCK:
                    obstacle = self._plan(inputs).obstacle
                if obstacle:
                    warn_user(f"the call is not prepared, and takes longer the first time: {obstacle}")
        self._emit_warnings()

    @uncompiled
    def stream(self, batches: Iterable[Any], *, depth: int | None = None) -> Iterator[Any]:
        """Yields the result of the model for each mini-batch of an iterable, in order, without gradients.

        Stages go on with the next mini-batch while later stages still compute the one before, so that the
        pipeline does not drain between mini-batches, as it does between calls::

            model.eval()
            for y in model.stream(loader, depth=8):
                ...

        Results equal those of calls of the model under ``torch.no_grad()``, bit for bit, also with random
        layers in train mode. A mini-batch that is read must not be changed before its result is yielded, and
        neither must parameters.

        If a mini-batch fails, or the iterable does, the error is raised after the results of the mini-batches
        before were yielded. A generator that is closed or dropped cancels what is in flight. Calls of the
        model meanwhile, also steps and other streams, first wait until the mini-batches in flight are
        complete.

        Args:
            batches: The inputs. A tuple contains the positional arguments of a call, a dict its keyword
                arguments; any other value is the only argument. Each is split into micro-batches as by
                `forward`.
            depth: The maximum number of mini-batches that are read and not yielded, which bounds memory. By
                default two per stage, at least two.

        Returns:
            A generator.

        Raises:
            TypeError: ``batches`` is a tensor, or not iterable. From the generator: as for `forward`.
            ValueError: ``depth`` is not a positive integer, or the model has a mesh. From the generator: as
                for `forward`.
            RuntimeError: From the generator: as for `forward`; the forward writes a buffer, as batch norm
                does in train mode; stages were moved to other devices; or, under train mode, mini-batches
                draw random numbers in another order than calls.
        """
        if self._ranks is not None:
            raise ValueError(
                f"a pipeline with a mesh cannot stream yet, got {type(batches).__name__}; call model(x) for "
                "each mini-batch under torch.no_grad()"
            )
        if not len(self):
            check_depth(batches, depth)
            return (pass_through(*arguments_in(batch), self.batch_dim) for batch in batches)
        return results(CallStream(self), batches, depth, len(self._balance))

    # Steps: calls of a pipeline with another layer, for the loss.

    @uncompiled
    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any],
        normalizer: Normalizer = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        max_norm: float | None = None,
        optimizer_in: Literal["end", "drain"] = "end",
        **kwargs: Any,
    ) -> Any:
        """Runs forward, loss and backward of one mini-batch, in the order of ``schedule``.

        ::

            optimizer.zero_grad()
            loss = model.step(x, target=y, loss_fn=torch.nn.functional.cross_entropy, optimizer=optimizer)

        Gradients are added to ``.grad``, as by ``loss_fn(model(x), y).backward()``, which they equal apart
        from rounding. The loss is computed in the last stage for each micro-batch; the target goes there
        alone, and outputs leave no stage. If anything fails, gradients and buffers are as before; if the
        optimizer fails, the gradients are in ``.grad``.

        Losses of PyTorch with ``reduction='mean'`` are exact: `cross_entropy` and `nll_loss`, with ignored
        targets and weights of classes, and losses of elements, such as `mse_loss`. Their sum over the
        mini-batch is divided once by what the mean of the whole would be divided by. With replicas along
        ``'dp_replicate'``, the mini-batch is that of all replicas together.

        Args:
            args: The first layer's arguments, as for `forward`.
            target: What the loss is computed with: tensors, nested in tuples, lists and dicts. Each tensor is
                split like the inputs, unless it is wrapped by `replicate`. It must be on the last stage's
                device. None: ``loss_fn`` gets the output alone.
            loss_fn: A function of the last layer's output and the target: a loss of ``torch.nn`` or
                ``torch.nn.functional``, also in a ``functools.partial``; or another function that returns a
                sum, with a ``normalizer``.
            normalizer: The number by which the sum of the losses is divided, or a function that returns it
                for the target; with replicas, those of all of them are added up. By default that of the loss.
            losses: A list to which the loss of each micro-batch is appended, divided like the sum; of this
                replica's.
            return_outputs: Whether to return the outputs, too. In ``torch.distributed.pipelining``, the
                default is True.
            optimizer: Runs its ``step()`` once all gradients are in ``.grad``, where they stay. By default
                the caller does.
            scaler: A ``torch.amp.GradScaler``. It multiplies the loss, as ``scaler.scale(loss).backward()``
                does; with an optimizer, ``scaler.step(optimizer)`` and ``scaler.update()`` take the place of
                ``optimizer.step()``. The returned losses are not multiplied.
            max_norm: The maximum norm of the gradients of the optimizer's parameters together, to which
                ``torch.nn.utils.clip_grad_norm_`` clips them, unscaled, before the update.
            optimizer_in: When the optimizer runs: ``'end'``, after all backwards; or ``'drain'``: for the
                parameters of a stage as soon as their gradients are complete, while other stages still run
                backwards, and for parameters of several stages at the end. With a scaler or ``max_norm``,
                which need all gradients, ``'drain'`` is as ``'end'``; also with a mesh, whose processes
                update after all of them have succeeded. If anything fails, some stages may be updated
                already; a note to the error names them.
            kwargs: Keyword arguments of the first layer.

        Returns:
            The loss of the mini-batch, over all replicas, a detached 0-dimensional tensor, on all ranks of a
            mesh; with ``return_outputs``, a tuple of it and the detached output, which is None on ranks
            without the last stage.

        Raises:
            TypeError: As for `forward`; or ``loss_fn`` is not a function, or ``normalizer``, ``optimizer``,
                ``scaler`` or ``max_norm`` has a wrong type.
            ValueError: As for `forward`; the target has another batch size, the divisor of ``loss_fn`` is
                not known, 0 or not finite, or nothing requires a gradient; the optimizer has no parameter of
                the model, or needs a closure, as ``torch.optim.LBFGS`` does;
                ``max_norm`` is negative, NaN, or passed without an optimizer; or ``optimizer_in`` is unknown,
                or ``'drain'`` with an optimizer that is not one of ``torch.optim``, or with hooks of the
                optimizer or of parameters.
            RuntimeError: As for `forward`; or gradients are disabled.
        """
        with self._reporting():
            check_list(losses)
            self._check_loss(loss_fn, target, normalizer, "step")
            update = checked_update(self, optimizer, scaler, max_norm, optimizer_in, loss_fn, self._ranks)
            loss = loss_of(loss_fn, normalizer)
            with update.after() as updates:
                call = args, kwargs, loss, loss_fn, target, return_outputs
                found, output = self._step(*call, scaler=scaler, updates=updates)
            return result_of(found, output, losses, return_outputs)

    @uncompiled
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any],
        normalizer: Normalizer = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the loss of one mini-batch, computed as by `step`, without gradients.

        ::

            model.eval()
            loss = model.evaluate(x, target=y, loss_fn=torch.nn.functional.cross_entropy)

        Outputs leave no stage, and nothing is saved for a backward. The mode is not switched: in training
        mode, layers draw random numbers and write buffers, as in a call under ``torch.no_grad()``.

        Args:
            args: As for `step`.
            target: As for `step`.
            loss_fn: As for `step`.
            normalizer: As for `step`.
            losses: As for `step`.
            return_outputs: As for `step`.
            kwargs: As for `step`.

        Returns:
            As for `step`.

        Raises:
            TypeError: As for `forward`; or ``loss_fn`` is not a function, or ``normalizer`` has a wrong type.
            ValueError: As for `forward`; the target has another batch size, or the divisor of ``loss_fn`` is
                not known, 0 or not finite.
            RuntimeError: As for `forward`.
        """
        with self._reporting(), torch.no_grad():
            check_list(losses)
            self._check_loss(loss_fn, target, normalizer, "evaluate")
            loss = loss_of(loss_fn, normalizer)
            found, output = self._step(args, kwargs, loss, loss_fn, target, return_outputs)
            return result_of(found, output, losses, return_outputs)

    def _check_loss(self, loss_fn: Any, target: Any, normalizer: Normalizer, method: str) -> None:
        if self._ranks is None:  # else only the processes with the last stage need the target
            check_target(loss_fn, target, method)
        if self._ranks is None or self._ranks.num_replicas == 1:  # else one replica may have no targets
            check_normalizer(normalizer)

    def _step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss,
        loss_fn: Any,
        target: Any = None,
        keeps_output: bool = False,
        weights: Sequence[float] | None = None,
        scaler: GradScaler | None = None,
        updates: StageUpdates | None = None,
    ) -> tuple[Losses, Any]:
        """Runs a step without its update; if gradients are disabled, the forward and the loss alone.

        Args:
            args: as for `step`.
            kwargs: as for `step`.
            loss: the loss.
            loss_fn: the function of which it was made.
            target: as for `step`.
            keeps_output: whether to return the output.
            weights: the weight of each micro-batch's loss; None for 1.
            scaler: as for `step`.
            updates: as for `Given`.

        Returns:
            The losses, weighted and divided; and the output, or None.
        """
        if not len(self):
            raise ValueError("the model has no layers, so it has no loss; pass some to GPipe")
        targets = self._targets(target)
        inputs = self._checked_inputs(args, kwargs)
        trainer, given = self._trainer(inputs, targets, loss, loss_fn, keeps_output)
        if targets is not None:
            target = targets.structure.build(targets.tensors)  # without marks of what is not split
        if updates is not None:
            check_graphs(inputs.tensors, self.parameters())
        divisor = 1.0 if loss.divisor is None else checked_divisor(loss.divisor(target))
        ranks, offer = self._ranks, None
        has_loss = ranks is None or ranks.index == ranks.size - 1
        if ranks is not None and has_loss:
            if ranks.num_replicas > 1 and loss.divisor is not None:
                divisor = ranks.sum_of_counts(divisor)

            def offer(outputs: Sequence[Tensor]) -> None:
                ranks.offer_losses(losses_of(outputs[0], divisor, weights))

        order = given.order._replace(updates=updates is not None)
        given = Given(given.tensors, order, divisor, weights, given.dim, scaler, updates, offer)
        found = trainer._run(inputs, given)
        parts, output = found if keeps_output and has_loss else (found, None)
        if torch.is_grad_enabled():
            torch.autograd.backward(parts, torch.ones_like(parts))
        return Losses.of(losses_of(parts, divisor, weights) if has_loss else (), ranks), output

    def _trainer(
        self, inputs: Inputs, targets: Inputs | None, loss: Loss, loss_fn: Any, keeps_output: bool
    ) -> tuple[GPipe, Given]:
        """Returns the pipeline of the layers and the loss, and what a step gives it of the target.

        First measures the balance, if it is not measured yet, and warns of what a call warns of.
        """
        with TRACING_LOCK:
            self._describe(inputs, order=StepOrder(self.schedule, ()))
        structure = None if targets is None else targets.structure
        key = loss.key, structure, keeps_output, self._output_dim
        trainer, former, key_of_former = self._trainers.pop(key, (None, None, None))
        # The variables that a former function closes over may have changed since.
        if trainer is None or key_of(former) != key_of_former or not self._configure(trainer):
            count = 0 if targets is None else len(targets.tensors)
            trainer = self._with_loss(loss_layer(loss, structure, count, keeps_output, self._output_dim))
            self._configure(trainer)
            former = loss_fn  # the layer calls it; kept alive, because its address may be in the key
        self._trainers[key] = trainer, former, key_of(former)
        while len(self._trainers) > _MAX_LOSSES:
            del self._trainers[next(iter(self._trainers))]
        given, dims = given_of(targets, inputs.batch_size, trainer.devices[-1])
        return trainer, Given(given, StepOrder(self.schedule, dims), 1.0, None, self._output_dim)

    def _with_loss(self, layer: nn.Module) -> GPipe:
        """Returns a pipeline of the same layers and a loss."""
        children = dict(self.named_children())
        name = next(name for name in ("loss", "loss_of_step", "_") if name not in children)
        balance = [*self._balance[:-1], self._balance[-1] + 1]
        found = GPipe(
            nn.Sequential(OrderedDict(children | {name: layer})),
            balance,
            devices=self._devices,
            deferred_batch_norm=self._deferred_batch_norm,
            grad_dtype=self.grad_dtype,
            backend=self.backend,
            capture=self._capture,
            transport=self.transport,
            fuse=self._fuse,
            mesh=cast(Any, self._ranks),
        )
        found._checks_usage, found._warned_of_idle_stages = False, True  # this pipeline does
        found._ties = self._ties  # known before a state dict was assigned
        found._share_runs(self)  # for recordings
        return found

    def _configure(self, trainer: GPipe) -> bool:
        """Gives a pipeline with a loss the present settings and returns true, if its stages are these."""
        *layers, _ = trainer._modules.values()
        balance = [*trainer._balance[:-1], trainer._balance[-1] - 1]
        own = self._balance, self._devices, list(self._modules.values())
        if (balance, trainer._devices, layers) != own:
            return False
        trainer.chunks, trainer.checkpoint, trainer.batch_dim = self.chunks, self.checkpoint, self.batch_dim
        trainer.threads_per_stage, trainer.training = self.threads_per_stage, self.training
        trainer.memory_limit, trainer.fuse = self.memory_limit, self._fuse
        return True

    def _share_runs(self, other: GPipe) -> None:
        """Makes the runs of this pipeline those of another one, which has as many stages."""
        self._python_workers, self._pipeline = other._python_workers, other._pipeline
        self._rebuild_stages()

    # Settings that the next call reads. An invalid value is refused on assignment.

    @property
    def chunks(self) -> int | Literal["auto"]:
        """The number of micro-batches, or 'auto': four per stage, at most one per sample. May be set.

        Raises:
            ValueError: On assignment, the value is invalid. The old value is kept.
        """
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int | Literal["auto"]) -> None:
        self._chunks = checked_chunks(chunks)

    @property
    def schedule(self) -> ScheduleChoice:
        """The order of forwards and backwards in `step`; may be set between calls.

        Raises:
            TypeError: On assignment, as for `GPipe`. The old value is kept.
            ValueError: On assignment, the name is unknown. The old value is kept.
        """
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: ScheduleChoice) -> None:
        self._schedule = checked_schedule(schedule)

    @property
    def batch_dim(self) -> BatchDim:
        """The batch dimension, of all inputs or of each input that is split; may be set between calls.

        Raises:
            TypeError: On assignment, the value is not made of integers. The old value is kept.
            ValueError: On assignment, the value is empty. The old value is kept.
        """
        return self._batch_dim

    @batch_dim.setter
    def batch_dim(self, batch_dim: int | Iterable[int]) -> None:
        self._batch_dim = checked_batch_dim(batch_dim)

    @property
    def checkpoint(self) -> CheckpointSetting:
        """Which micro-batches recompute, or the share of activations to save; may be set between calls.

        As for `GPipe`; a list is returned as a tuple.

        Raises:
            ValueError: On assignment, the value is invalid. The old value is kept.
        """
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: CheckpointChoice) -> None:
        self._checkpoint = checked_checkpoint(checkpoint, len(getattr(self, "_balance", ())) or None)

    @property
    def memory_limit(self) -> MemoryLimit:
        """The bytes that a step may take on each device, as for `GPipe`; may be set between calls.

        Raises:
            ValueError: On assignment, the value is invalid, there is not one for each device, or there is a
                mesh. The old value is kept.
        """
        return self._memory

    @memory_limit.setter
    def memory_limit(self, memory: MemoryLimit) -> None:
        if memory is not None and self._ranks is not None:
            raise ValueError(
                f"memory={memory!r} with a mesh is not possible yet, because each process would measure "
                "other times, and choose something else; pass checkpoint, a number for each stage"
            )
        had_limit = getattr(self, "_memory", None) is not None
        self._memory_limits = checked_memory(memory, self._devices)
        self._memory = memory
        if "_pipeline" in self.__dict__ and had_limit is not (memory is not None):
            self._pipeline.set_capture(CAPTURES[self.capture])

    @property
    def threads_per_stage(self) -> int | None:
        """The number of intra-op threads of each stage; may be set between calls.

        None, the default, divides the caller's threads (``torch.get_num_threads()``) among the stages.

        Raises:
            ValueError: On assignment, the value is invalid. The old value is kept.
        """
        return self._threads_per_stage

    @threads_per_stage.setter
    def threads_per_stage(self, threads: int | None) -> None:
        self._threads_per_stage = checked_threads_per_stage(threads)

    @property
    def capture(self) -> bool | str:
        """Whether mini-batches on GPUs are captured and replayed as CUDA graphs; may be set between calls.

        True, False or 'auto', see `GPipe`. False with a mesh, whose processes exchange tensors during a
        mini-batch, and with a memory limit, because graphs keep their memory, and need copies of all
        gradients.

        Raises:
            ValueError: On assignment of True or 'auto', there is a mesh or a memory limit; or of another
                value. The old value is kept.
        """
        return self._capture if self._ranks is None and self._memory_limits is None else False

    @capture.setter
    def capture(self, capture: bool | str) -> None:
        if capture and self._ranks is not None:
            raise ValueError(
                f"capture={capture!r} with a mesh is not possible, because processes exchange tensors during "
                "a mini-batch; leave it, or make the model without mesh"
            )
        if capture and self._memory_limits is not None:
            raise ValueError(
                f"capture={capture!r} with memory={self._memory!r} is not possible, because graphs keep "
                "their memory between steps; leave it, or pass checkpoint instead of memory"
            )
        self._capture = checked_capture(capture)
        self._pipeline.set_capture(CAPTURES[self.capture])

    @property
    def fuse(self) -> bool:
        """Whether stages on GPUs use fused kernels; may be set between calls; the next call compiles."""
        return self._fuse

    @fuse.setter
    def fuse(self, fuse: bool) -> None:
        with TRACING_LOCK:
            if bool(fuse) != self._fuse:
                self._fuse = bool(fuse)
                self._rebuild_stages()

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition; a copy.

        Assigning repartitions the layers and moves them to their devices; the next call builds new programs.
        Optimizer state is not moved: create the optimizer after repartitioning if layers change their device.

        Raises:
            ValueError: on assignment, the balance does not fit the layers. The old balance is kept.
            IndexError: on assignment, there are more partitions than devices. The old balance is kept.
        """
        return list(self._balance)

    @balance.setter
    def balance(self, balance: Iterable[int]) -> None:
        self._repartition(balance, self._user_devices)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition; a copy. Assigning moves the layers, as for `balance`.

        Raises:
            ValueError: on assignment, stages cannot run on one of the devices. The old devices are kept.
            IndexError: on assignment, there are fewer devices than partitions. The old devices are kept.
        """
        return list(self._devices)

    @devices.setter
    def devices(self, devices: Iterable[Device] | None) -> None:
        self._repartition(self._balance, devices)

    # The stages, which settings and copies make anew.

    def _repartition(self, balance: Iterable[int], devices: Iterable[Device] | None) -> None:
        """Repartitions the layers and moves them. Raises errors before it changes anything."""
        if self._ranks is not None:
            raise ValueError(
                "with a mesh, layers stay in the processes that they are in, got the balance "
                f"{list(balance)}; make a new GPipe with it, and load the state dict"
            )
        wanted = resolve_devices(devices)
        with TRACING_LOCK:
            sizes, places = checked_placement(list(self.named_children()), balance, wanted)
            connections_of(sizes, places, list(self), self.transport)
            as_before = places == self._devices
            if not as_before and self._pipeline.recorded():
                raise RuntimeError(
                    "stages cannot be added, removed or moved while the model is recorded, got devices "
                    f"{list(map(str, places))}; leave the model.recording() block first"
                )
            self._balance, self._devices, self._user_devices = sizes, places, wanted
            self._balance_pending = False
            self._move_to_devices()
            if not as_before:
                self._pipeline = self._open_pipeline()
            self._rebuild_stages()

    def _rebuild_stages(self) -> None:
        verify_skippables(self)
        self._layers = list(self)
        self._stages = stages_of(
            self._layers,
            self._balance,
            self._devices,
            self._deferred_batch_norm,
            self.grad_dtype,
            self._fuse,
            own_stages=self._own_stages,
            ties=self._ties,
            by_nccl=self._ranks is not None and self._ranks.by_nccl,
        )
        self._connections = connections_of(self._balance, self._devices, self._layers, self.transport)
        if self._ranks is not None:
            self._connections = [replace(each, route="process group") for each in self._connections]
        backend = switched_backend(self.backend if self._ranks is None else "aten")
        self._planner = Planner(self._stages, backend, self._python_workers)
        self._hook_planner = None
        self._pipeline.forget_graphs()
        self._state = ModuleState(self._layer_states(), self._planner.module_warnings.in_python)

    def _stages_for(
        self, balance: Sequence[int], devices: Sequence[torch.device], is_absent: bool = False
    ) -> list[Stage]:
        """Returns stages that are not those of the model, to compare them."""
        options = self._deferred_batch_norm, self.grad_dtype, self._fuse
        return stages_of(self._layers, balance, devices, *options, is_absent=is_absent)

    def _layer_states(self) -> LayerStates:
        return self._stages[0].states if self._stages else LayerStates()

    def _open_pipeline(self) -> Pipeline:
        pipeline = open_pipeline(max(1, len(self._balance)), self._python_workers, self.transport)
        pipeline.set_capture(CAPTURES[self.capture])
        silence_stream_warning(self._devices)
        return pipeline

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to copy or pickle: all but threads and programs, which are created on demand."""
        if self._ranks is not None:
            raise TypeError(
                "a GPipe with a mesh cannot be copied or pickled, because its processes make it together; "
                "save model.state_dict(), which has the tensors of the own stage"
            )
        return {k: v for k, v in vars(self).items() if k not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._trainers = {}
        self._python_workers = PythonWorkers()
        self._pipeline = self._open_pipeline()
        self._rebuild_stages()

    # The balance, if the first call chooses it.

    def _balance_by_time(self, inputs: Inputs, chunks: int) -> None:
        """Repartitions the layers by their measured time on the first micro-batch of this mini-batch."""
        first = inputs.dims.split(inputs.tensors, chunks)[0]
        try:
            found = default_balance(
                len(self._balance),
                nn.Sequential(OrderedDict(self.named_children())),
                inputs.structure.build(first),
                threads=self.threads_per_stage,
                device=self._devices[0],
            )
        except Exception as error:
            self._balance_pending = False
            warn_user(
                "layers are balanced by parameter count, unless you pass balance=[...], because measuring "
                f"their time failed: {error}"
            )
            return
        self._balance_pending = False
        self._take_balance(found)

    def _balance_within_memory(self, limits: Limits, inputs: Inputs, order: StepOrder | None) -> None:
        """Repartitions the layers such that a step that fits into the memory is fastest.

        The costs of single layers are estimates of those of stages. So the fastest partition by these is
        compared with the fastest one of all, by their plans. If none fits, the one that needs least is tried.
        """
        schedule = "gpipe" if order is None else order.schedule
        partitions = self._partitions(inputs, self._chunks_of(inputs.batch_size), schedule)
        try:
            candidates = [partitions(limits)[0].balance]
        except BudgetError as error:
            candidates = [error.balance]
        candidates.append(partitions(dict.fromkeys(limits, math.inf))[0].balance)
        call = replace(self._call_of(inputs, None), order=order)
        times: dict[tuple[int, ...], float] = {}
        failure: BudgetError | None = None
        for candidate in dict.fromkeys(candidates):
            stages = self._stages_for(candidate, self._devices)
            planner = Planner(stages, self.backend, self._python_workers)
            try:
                times[candidate] = choice_within(planner, call, limits).nanoseconds
            except BudgetError as error:
                failure = failure or error
        if failure is not None and not times:
            if order is None:
                raise failure
            times[candidates[0]] = 0.0  # a step has a loss, too, and with it the last stage may need less
        fastest = min(times, key=lambda each: times[each])
        self._take_balance(list(fastest))
        self._balance_pending = False

    def _partitions(
        self, inputs: Inputs, chunks: int, schedule: ScheduleChoice
    ) -> Callable[[Limits], list[Partition]]:
        """Returns a function that returns the fastest partitions with so many micro-batches within limits."""
        ones = [1] * len(self._layers)
        stages = self._stages_for(ones, [self._devices[0]] * len(ones))
        planner = Planner(stages, self.backend, self._python_workers)
        policy = checkpoint_policy("always", len(ones), True)
        call = replace(self._call_of(inputs, None), checkpoint=policy, chunks=chunks)
        return partitions_within(planner, call, self._devices, schedule)

    def _take_balance(self, found: list[int]) -> None:
        before = self._balance
        if found == before:
            return
        self._balance = found
        try:
            self._move_to_devices()
            self._rebuild_stages()
        except BaseException:
            self._balance = before
            self._move_to_devices()
            raise
        self._detect_changes()

    # Reports.

    def explain(self, *args: Any, device: Device | None = None, **kwargs: Any) -> Explanation:
        """Explains what fused kernels compute in each stage, and what they save; runs no layer.

        Args:
            args: The arguments of a call, as for `forward`: a mini-batch. Only shapes, dtypes, strides and
                ``requires_grad`` are read.
            device: A CUDA device for which the stages are explained, as ``'cuda'``. The machine need not have
                it. By default the model's own devices; on the CPU, nothing is fused.
            kwargs: The keyword arguments of a call.

        Returns:
            The explanation, for the present grad mode, autocast mode and settings of the model.
            Autocast for the CPU counts as autocast for a device that is named. ``print`` shows tables.

        Raises:
            TypeError: As for `forward`; or ``device`` is neither a name, a number nor a device.
            ValueError: As for `forward`; or ``device`` is no CUDA device.
            RuntimeError: A stage cannot be traced and ``backend='aten'``, or another thread runs layers.
        """
        place = None if device is None else absent_gpu(device)
        inputs = self._checked_inputs(args, kwargs)
        with TRACING_LOCK:
            self._detect_changes()
            planner = self._planner if place is None else self._absent_planner(place)
            training = self.training and torch.is_grad_enabled()
            checkpoint = checkpoint_policy(self.checkpoint, len(self._balance), training)
            chunks = self._chunks_of(inputs.batch_size)
            call = Call(inputs, chunks, self._threads(), checkpoint, self._state)
            # What is saved is chosen for the model's own devices, whose limits are known.
            return explain_call(planner, self._within_memory(self._planner, call), place)

    def _stage_bytes(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        normalizer: Any,
        devices: Sequence[torch.device] | None,
    ) -> tuple[Sequence[StageBytes | None], Sequence[str]]:
        """As for `Reporting._stage_bytes`."""
        if not len(self):
            raise ValueError("the model has no layers, so it needs no memory; pass some to GPipe")
        if devices is not None and self._memory_limits is not None:
            raise ValueError(
                "device was passed, but memory holds for the model's own devices; set model.memory_limit = "
                "None, and model.checkpoint, to predict for another device"
            )
        inputs = self._checked_inputs(args, kwargs, allow_meta=True)
        pipeline, given = self, None
        if loss_fn is not None:
            targets = self._targets(target)
            if targets is not None:
                targets = targets.with_memory(self._devices[-1])
            if self._ranks is None:
                check_target(loss_fn, None if targets is None else targets.tensors, "memory")
            pipeline, given = self._trainer(inputs, targets, loss_of(loss_fn, normalizer), loss_fn, False)
        with TRACING_LOCK:
            call = pipeline._describe(inputs, given)  # may choose the balance
            call = pipeline._within_memory(pipeline._planner, call)
            if devices is not None:
                return pipeline._stage_bytes_on(devices, call)
            planner = pipeline._planner
            plan = planner.plan(call)
            if plan.compiled is None:
                unknown = planner.unknown_stages(plan.failed_stage, plan.obstacle)
                return [None] * len(self._stages), unknown
            return stage_bytes(pipeline._stages, plan.compiled, call), ()

    def _stage_bytes_on(
        self, devices: Sequence[torch.device], call: Call
    ) -> tuple[Sequence[StageBytes | None], Sequence[str]]:
        """Returns what each stage needs on devices that the machine need not have, or why it is not known.

        All are traced on the first one.
        """
        planner, nothing = self._absent_planner(devices[0]), [None] * len(self._stages)
        if planner.backend == "eager":
            return nothing, planner.unknown_stages(None, "")
        with on_absent_device(call, devices[0]) as absent:
            absent.state.update_key()  # under these modes
            compiled = planner.compile(absent)
            if isinstance(compiled, CompilationFailure):
                reason = failure_message(compiled, planner.stages)
                return nothing, planner.unknown_stages(compiled.stage_index, reason)
            stages = self._stages_for(self._balance, devices, is_absent=True)
            return stage_bytes(stages, compiled, absent), ()

    def _absent_planner(self, device: torch.device) -> Planner:
        """Returns a planner for the stages on a device that the machine need not have."""
        stages = self._stages_for(self._balance, [device] * len(self._balance), is_absent=True)
        return Planner(stages, self.backend, self._python_workers)

    def _stage_parameters(self) -> list[list[Tensor]]:
        """As for `Reporting._stage_parameters`."""
        seen: set[Tensor] = set()
        found: list[list[Tensor]] = []
        for stage in self._stages:
            own: list[Tensor] = [p for p in dict.fromkeys(parameters_of(stage.layers)) if p not in seen]
            seen.update(own)
            found.append(own)
        return found

    @property
    def _pipelines(self) -> list[GPipe]:
        """This pipeline and those with a loss, the latest last."""
        return [self, *(trainer for trainer, *_ in self._trainers.values())]

    def _layers_in_python(self) -> set[int]:
        found = (each._planner.module_warnings.in_python for each in self._pipelines)
        return {layer for layers in found for layer in layers if layer < len(self)}

    def _locks(self) -> list[AbstractContextManager[Any]]:
        """Returns the locks that are held while layers run in Python, in calls and in steps."""
        return [lock for each in self._pipelines for lock in each._planner.locks]

    def recording(self) -> AbstractContextManager[Recording]:
        """Returns a context manager that records the begin and end of every action and every wait.

        With a mesh, all ranks record the same calls. At the end of the block they exchange what they have
        recorded, so that each has the events of all stages, on the clock of the first rank; it raises a
        RuntimeError if a rank has failed or does not answer within ``timeout``. If an exception leaves the
        block, the recording has only what ran in this process.
        """

        def complete(recording: Recording) -> None:
            recording.kernels = kernel_names(self._stages, self._planner.lowered())
            recording.rank_of = self._rank_of()
            recording.sizes = stage_sizes(self._stages)

        own = record(self._pipeline, complete)
        return own if self._ranks is None else self._recording_of_all(own, self._ranks)

    @contextmanager
    def _recording_of_all(
        self, recording: AbstractContextManager[Recording], ranks: Ranks
    ) -> Iterator[Recording]:
        with ranks.reporting():
            with recording as found:
                yield found
            stages = ranks.stages_of(len(self._stages))
            exchange_stages(found, stages, ranks.exchange, receives_in_recv=ranks.by_nccl)

    def _rank_of(self) -> tuple[int, ...]:
        """Returns the ranks of the stages in the latest step, if several stages form one; else nothing."""
        plan = self._pipelines[-1]._planner.latest
        if plan is None or not plan.is_step or plan.schedule.ranks == plan.schedule.stages:
            return ()
        return tuple(plan.schedule.rank_of[stage] for stage in range(plan.schedule.num_stages))

    def extra_repr(self) -> str:
        """Returns the balance, devices and settings, and the connections of stages if one is on a GPU."""
        places = f"balance={self.balance}, devices={[str(device) for device in self._devices]}"
        lines = [f"{places}, chunks={self.chunks!r}, checkpoint={self.checkpoint!r}"]
        if any(device.type != "cpu" for device in self._devices):
            lines += describe_connections(self._connections, self._planner.latest)
        return "\n".join(lines)
