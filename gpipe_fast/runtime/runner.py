"""The runner: runs the calls of one sequence of layers, and keeps what it made for them.

`GPipe` is the face over one runner; the models of `from_model` have one for each kind of call. For a loss, a
runner makes another one, of the same layers and the loss, which shares what is expensive::

    GPipe ──▶ Runner ───── with_layer(loss) ────▶ Runner of the layers and a loss
               │    ╲                            ╱   │
             Planner  ╲    stages but the last  ╱  Planner        plans of calls, and of steps
               │        ▶     Compiler     ◀        │             captures and traces
               └────────▶     Pipeline     ◀────────┘             in C++ (csrc/pipeline/pipeline.h)

The path of a call, from top to bottom::

    call(args, kwargs)
      checked_inputs     errors about the arguments
      choose_balance     in the first call, if the user has given none
      prepared_call
        _observed        without the modes and hooks around the call
        updated_call     detects changes of the layers
        within_memory    with a limit, what to save; the first time, it may trace and lower up to 10 plans
        Planner.plan     the programs, from the cache or newly made (gpipe_fast/runtime/planner.py)
      processes.begin    with a mesh, an agreement of all processes
      Pipeline.forward or Pipeline.step, in C++
      finish             warnings, and the nesting of the outputs

A step (gpipe_fast/training/step.py) calls `run` of the runner with the loss. `GPipe.prepare` stops after
`plan`; `GPipe.stream` prepares the next call before the one before has finished.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gpipe_fast._extension import Pipeline, PythonWorkers
from gpipe_fast.arguments import (
    check_inputs,
    check_not_sparse,
    check_signature,
    enough_chunks,
    naming_edges,
    warn_idle_stages,
    warn_sequence_first,
    warn_square_input,
)
from gpipe_fast.devices import Device, devices_differ, moved, silence_stream_warning
from gpipe_fast.fuse import left_out
from gpipe_fast.layers.batchnorm import check_can_defer, enable_deferral, normalises_micro_batches
from gpipe_fast.layers.quantized import move_parts
from gpipe_fast.layers.sharded import GradientPart, check_unchanged_in_backward, local_tensor
from gpipe_fast.layers.structure import ONE_TENSOR, Inputs, stage_threads
from gpipe_fast.lower.checkpoint import checkpoint_policy
from gpipe_fast.runtime.connections import Connection, connections_of
from gpipe_fast.runtime.exit_and_fork import open_pipeline
from gpipe_fast.runtime.first_balance import first_balance
from gpipe_fast.runtime.memory_limit import choice_within
from gpipe_fast.runtime.placement import Placement, resolve_balance
from gpipe_fast.runtime.plan import PlannedCall, StepOrder
from gpipe_fast.runtime.planner import Call, Planner, PreparedCall
from gpipe_fast.runtime.processes import ONE_PROCESS, Processes
from gpipe_fast.runtime.settings import CAPTURES, Settings, switched_backend
from gpipe_fast.runtime.stage import TRACING_LOCK, Stage, StageOptions
from gpipe_fast.runtime.state import ModuleState
from gpipe_fast.schedule import ScheduleChoice
from gpipe_fast.skip import skips_of, verify_skippables
from gpipe_fast.trace.joint_graph import parameters_of
from gpipe_fast.trace.layer_states import LayerStates
from gpipe_fast.unsupported import global_hook, has_observers, without_observers
from gpipe_fast.user_warning import warn_user, warns_of_idle_stages
from gpipe_fast.weights.load import forget_data

_Result = TypeVar("_Result")
# The most times that a call is planned because layers in Python change meanwhile. A state that cannot be
# compared counts as changed each time.
_MOST_PLANS = 3
# Settings for which stages are made anew.
_COMPILED = "backend", "deferred_batch_norm", "fuse", "grad_dtype", "transport"


@dataclass(frozen=True)
class StepInputs:
    """What a step gets besides the inputs of the first layer.

    Attributes:
        tensors: the tensors of the target, on the last stage's device.
        order: the order of forwards and backwards.
        divisor: by what the sum of the losses is divided.
        shape: the shape of the loss of a micro-batch.
        scaler: multiplies the loss before its backward; None for 1.
        offer: tells other processes the losses, the first of the outputs that it gets; None if there are
            none, or the losses are there.
        measure: writes the measures of the mini-batch into one of the tensors; None if the loss has none.
        asked: what the update of the step takes, by name, which all processes agree on.
    """

    tensors: tuple[Tensor, ...]
    order: StepOrder
    divisor: Any = 1.0
    shape: Sequence[int] = (1,)
    scaler: GradScaler | None = None
    offer: Callable[[Sequence[Tensor]], None] | None = None
    measure: Callable[[], None] | None = None
    asked: Mapping[str, str] = field(default_factory=dict)

    def gradients(self, num_microbatches: int, losses: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns the gradients of the loss of each micro-batch, in the order in which autograd multiplies.

        Args:
            num_microbatches: the number of micro-batches.
            losses: tensors like the loss, one for each dtype that it may have.
        """
        return [[self._gradient(torch.ones_like(loss)) for loss in losses]] * num_microbatches

    def _gradient(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the loss of a micro-batch, given that of the scaled loss."""
        if self.scaler is not None:
            gradient = self.scaler.scale(gradient)
        found: Tensor = gradient / self.divisor
        return found.view(*self.shape)


class Runner:
    """Runs the calls of one sequence of layers.

    Attributes:
        children: the layers by name; the dictionary of the module that has them, which may change.
        placement: the number of layers of each stage, and its device.
        settings: the settings that calls read.
        processes: the processes that have the stages.
        stages: the stages.
        planner: makes the plans of calls.
        pipeline: runs the plans, in C++.
        python_workers: the registry of workers that are running Python.
        state: detects changes of the layers.
        warns_of_inputs: whether the next call warns of inputs that are probably split by mistake.
        warns_of_idle_stages: whether calls warn, once, of too few micro-batches.
        with_losses: the runners with a loss, each with its layer, by what they depend on besides the stages.
            They last until the stages are made anew.
    """

    _has_old_graphs = False

    def __init__(
        self,
        children: dict[str, nn.Module],
        placement: Placement,
        settings: Settings,
        processes: Processes = ONE_PROCESS,
    ) -> None:
        """Makes a runner, and moves the layers to their devices; if a check fails, nothing has changed.

        Args:
            children: as above.
            placement: as above.
            settings: as above.
            processes: as above.

        Raises:
            ValueError: layers cannot be where they should be, or settings do not fit the stages.
        """
        self.children, self.placement = children, placement
        self.settings, self.processes = settings, processes
        processes.check_settings(settings)
        partitions = self.partitions()
        self._ties = processes.check_partitions(partitions)
        settings.check_for(placement.devices)
        if settings.deferred_batch_norm:
            check_can_defer(children.items())
        self._check_connections(placement, settings.transport)
        self.move_layers()
        processes.note_homes(partitions)
        if settings.deferred_batch_norm:
            enable_deferral(self.layers)
        self.warns_of_inputs, self.warns_of_idle_stages = True, True
        self.python_workers = PythonWorkers()
        self.pipeline = self._open_pipeline()
        self.rebuild()

    # The layers, and where they are.

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, in order."""
        return [*self.children.values()]

    def partitions(self) -> list[nn.Sequential]:
        """Returns the layers of each stage, under their names."""
        return self.placement.partitions(self.children)

    @property
    def own_stages(self) -> range:
        """The stages of this process."""
        return self.processes.stages_of(len(self.placement.balance))

    def placed(self) -> list[tuple[nn.Sequential, torch.device]]:
        """Returns the layers of each stage and its device: meta for those in other processes."""
        own, meta = self.own_stages, torch.device("meta")
        devices = [device if i in own else meta for i, device in enumerate(self.placement.devices)]
        return list(zip(self.partitions(), devices, strict=True))

    def own_tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers of the stages of this process."""
        own = (partition for partition, device in self.placed() if device.type != "meta")
        return [t for partition in own for t in (*partition.parameters(), *partition.buffers())]

    def move_layers(self) -> None:
        """Moves the layers to the devices of their stages, except for tensors on the meta device."""
        replaced = {tensor: tensor for tensor in self.own_tensors()}
        for partition, device in self.placed():
            if device.type == "meta":
                forget_data(partition, replaced)
            elif any(
                devices_differ(t.device, device) for t in (*partition.parameters(), *partition.buffers())
            ):

                def move(tensor: Tensor, to: torch.device = device) -> Tensor:
                    # A meta tensor has no data to move.
                    return tensor if tensor.is_meta else moved(tensor, to)

                partition._apply(move)
                move_parts(partition, move)

    def place(self, balance: Iterable[int], devices: Iterable[Device] | Device | None) -> None:
        """Repartitions the layers and moves them. Raises errors before it changes anything.

        Raises:
            ValueError: the balance does not fit, or there is a mesh.
            IndexError: there are fewer devices than partitions.
            RuntimeError: stages would be moved while the model is recorded.
        """
        if self.processes.is_mesh:
            raise ValueError(
                "with a mesh, layers stay in the processes that they are in, got the balance "
                f"{list(balance)}; make a new GPipe with it, and load the state dict"
            )
        found = Placement.checked(self.children, balance, devices)
        if found.devices != self.placement.devices:
            devices = f"devices {list(map(str, found.devices))}"
            self._check_not_recorded("added, removed or moved", devices)
        with TRACING_LOCK:
            self._take(found)
        self.forget_old_graphs()

    def _take(self, found: Placement) -> None:
        """Moves the layers to another placement; if that fails, they are as before."""
        before, self.placement = self.placement, found
        if found[:2] == before[:2]:
            return
        is_moved = found.devices != before.devices
        try:
            self._check_connections(found, self.settings.transport)
            self.move_layers()
            if is_moved:
                self.pipeline = self._open_pipeline()
            self.rebuild()
        except BaseException:
            self.placement = before
            self.move_layers()
            raise

    def _check_not_recorded(self, changed: str, received: str) -> None:
        if self.pipeline.recorded():
            raise RuntimeError(
                f"stages cannot be {changed} while the model is recorded, got {received}; leave the "
                "model.recording() block first"
            )

    # The stages, which another placement, setting or layer makes anew.

    def rebuild(self) -> None:
        """Makes the stages anew, and forgets all programs."""
        verify_skippables(nn.Sequential(OrderedDict(self.children)))
        self._start(self.stages_of(self.placement.balance, self.placement.devices))
        self._has_old_graphs = True

    def forget_old_graphs(self) -> None:
        """Frees the CUDA graphs of former stages. It waits for runs, which may wait for the tracing lock."""
        if self._has_old_graphs:
            self._has_old_graphs = False
            self.pipeline.forget_graphs()

    def _start(self, stages: list[Stage], base: Planner | None = None) -> None:
        self.stages = stages
        self.planner = Planner(stages, self._backend, self.python_workers, base)
        self._planner_under_hooks: Planner | None = None
        self.with_losses: dict[Hashable, tuple[Runner, Any]] = {}
        self._begin_state()

    def _begin_state(self) -> None:
        states = self.stages[0].states if self.stages else LayerStates()
        self.state = ModuleState(states, self.planner.in_python)

    @property
    def _backend(self) -> str:
        return switched_backend("aten" if self.processes.is_mesh else self.settings.backend)

    def stages_of(
        self, balance: list[int], devices: list[torch.device], is_absent: bool = False
    ) -> list[Stage]:
        """Returns stages of the layers: this runner's, or others, to compare them.

        Args:
            balance: the number of layers of each stage.
            devices: the device of each stage.
            is_absent: whether the stages are only traced, for devices that the machine need not have.
        """
        settings = self.settings
        options = StageOptions(
            settings.deferred_batch_norm,
            settings.grad_dtype,
            settings.fuse,
            is_absent,
            ties=() if is_absent else self._ties,
            by_nccl=self.processes.by_nccl,
            devices=() if is_absent else tuple(devices),
        )
        own = range(len(balance)) if is_absent else self.processes.stages_of(len(balance))
        # A weak reference: the processes keep plans, and those, in C++, their stages.
        processes: Processes = weakref.proxy(self.processes)
        layers, skips, states = self.layers, skips_of(self.layers), LayerStates()
        stages: list[Stage] = []
        for index, (end, size) in enumerate(zip(accumulate(balance), balance, strict=True)):
            here, first = options._replace(is_remote=index not in own), end - size
            stage = Stage(layers[first:end], first, devices[index], skips=skips, options=here, states=states)
            stage.own_group = partial(_own_group, processes, index)
            stages.append(stage)
        return stages

    def planner_for(
        self, balance: list[int], devices: list[torch.device], is_absent: bool = False
    ) -> Planner:
        """Returns a planner for other stages of the layers; arguments as for `stages_of`."""
        stages = self.stages_of(balance, devices, is_absent)
        return Planner(stages, switched_backend(self.settings.backend), self.python_workers)

    def with_layer(self, layer: nn.Module) -> Runner:
        """Returns a runner of the same layers and one more, in the last stage, until `rebuild`.

        It has the settings of this runner, its compiler and its pipeline, so layers are captured and traced
        once for both.
        """
        return _LongerRunner(self, layer)

    def forget(self, longer: Runner) -> None:
        """Frees what the compiler keeps only for the last layer of a runner that `with_layer` has made."""
        used = {state for runner, *_ in self.with_losses.values() for state in runner.stages[-1].loss_states}
        self.planner.compiler.forget_states(longer.stages[-1].loss_states - used)
        self.stages[0].states.forget(longer.stages[-1].loss_states - used)

    def state_to_copy(self) -> tuple[Any, ...]:
        """Returns the arguments, but the layers, that make a runner like this one.

        Raises:
            TypeError: there is a mesh.
        """
        if self.processes.is_mesh:
            raise TypeError(
                "a GPipe with a mesh cannot be copied or pickled, because its processes make it together; "
                "save model.state_dict(), which has the tensors of the own stage"
            )
        return self.placement, self.settings, self.processes

    def _open_pipeline(self) -> Pipeline:
        devices = self.placement.devices
        pipeline = open_pipeline(max(1, len(devices)), self.python_workers, self.settings.transport)
        pipeline.set_capture(CAPTURES[self.capture])
        silence_stream_warning(devices)
        return pipeline

    def share_pipeline(self, other: Runner) -> None:
        """Makes the pipeline that of another runner, which has as many stages, with its connections."""
        self.python_workers, self.pipeline = other.python_workers, other.pipeline
        self.rebuild()

    # Settings.

    @property
    def capture(self) -> bool | str:
        """Whether mini-batches on GPUs are captured as CUDA graphs: as set, where they can be."""
        can_capture = not self.processes.is_mesh and self.settings.memory_limit is None
        return self.settings.capture if can_capture else False

    def configure(self, **changes: Any) -> None:
        """Changes settings; the next call reads them. Raises errors before it changes anything.

        Raises:
            TypeError: a value has a wrong type.
            ValueError: a value is invalid, or not possible with a mesh or a memory limit.
        """
        if changes.get("capture"):
            self._check_can_capture(changes["capture"])
        self.apply(replace(self.settings, **changes))

    def apply(self, settings: Settings) -> None:
        """Takes other settings, as `configure` does."""
        before = self.settings
        settings.check_for(self.placement.devices)
        self.processes.check_settings(settings)
        if settings.transport != before.transport:
            self._check_connections(self.placement, settings.transport)
            self._check_not_recorded("connected otherwise", f"transport={settings.transport!r}")
        for runner in self.runners:
            runner.settings = settings
        if any(getattr(settings, name) != getattr(before, name) for name in _COMPILED):
            with TRACING_LOCK:
                if settings.transport != before.transport:
                    self.pipeline = self._open_pipeline()
                self.rebuild()
            self.forget_old_graphs()
        self.pipeline.set_capture(CAPTURES[self.capture])

    def _check_can_capture(self, capture: Any) -> None:
        if self.processes.is_mesh:
            raise ValueError(
                f"capture={capture!r} with a mesh is not possible, because processes exchange tensors during "
                "a mini-batch; leave it, or make the model without mesh"
            )
        if self.settings.memory_limit is not None:
            raise ValueError(
                f"capture={capture!r} with memory={self.settings.memory_limit!r} is not possible, because "
                "graphs keep their memory between steps; leave it, or pass checkpoint instead of memory"
            )

    @property
    def output_dim(self) -> int:
        """The dimension along which outputs are concatenated."""
        dim = self.settings.batch_dim
        return dim if isinstance(dim, int) else dim[0]

    def chunks_of(self, batch_size: int) -> int:
        """Returns the number of micro-batches of a mini-batch."""
        chunks = self.settings.chunks
        return enough_chunks(len(self.stages), batch_size) if chunks == "auto" else chunks

    def threads(self) -> int:
        """Returns the number of intra-op threads of each stage of this process."""
        return stage_threads(self.settings.threads_per_stage, len(self.own_stages))

    # A call.

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
        """Runs one mini-batch; see `GPipe.forward`.

        Args:
            args: positional arguments of the first layer.
            kwargs: its keyword arguments.
            training: whether the model is in train mode.
        """
        with self.processes.reporting():
            inputs = self.checked_inputs(args, kwargs)
            self.choose_balance(inputs, training)
            return self.run(inputs, training)

    def checked_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], allow_meta: bool = False
    ) -> Inputs:
        """Returns the checked arguments of a call, with zeros for meta tensors if those are allowed."""
        if not args and kwargs.keys() == {"input"}:
            args, kwargs = (kwargs["input"],), {}
        inputs = Inputs.of(args, kwargs, self.settings.batch_dim)
        devices = self.placement.devices
        if allow_meta:
            inputs = inputs.with_memory(devices[0])
        check_inputs(inputs, devices)
        if kwargs or len(args) != 1:
            check_signature(self.layers[0], args, kwargs)
        return inputs

    def run(self, inputs: Inputs, training: bool, given: StepInputs | None = None) -> Any:
        """Runs the forward of a mini-batch; with ``given``, a step, or without gradients its forward."""
        with naming_edges(inputs):
            call = self.prepared_call(inputs, training, given)
            plan, key = call.plan, call.key()
            seed, asked = key if isinstance(key, int) else 0, {} if given is None else given.asked
            self.processes.begin(call.pipeline, call.call, plan, self.stages, asked, seed)
            if self.state.is_sharded:
                call = call._replace(
                    parameters=self.processes.with_whole(self.state.parameters, call.parameters)
                )
            tensors = call.parameters, call.buffers
            if given is None:
                outputs, structure = call.pipeline.forward(plan.native, inputs.tensors, *tensors, key)
                if self.state.is_sharded:
                    check_unchanged_in_backward(outputs, self.state.parameters)
            else:
                if given.measure is not None:
                    given.measure()
                gradients = []
                if torch.is_grad_enabled():
                    losses = plan.possible_losses(self.stages[-1])
                    gradients = given.gradients(plan.schedule.num_microbatches, losses)
                outputs, structure = call.pipeline.step(
                    plan.native, inputs.tensors, given.tensors, gradients, *tensors, key, given.offer
                )
            return self.finish(call, outputs, structure)

    def prepared_call(self, inputs: Inputs, training: bool, given: StepInputs | None = None) -> PreparedCall:
        """Returns the call for these inputs, the present layers and the present settings."""
        with TRACING_LOCK:
            for _ in range(_MOST_PLANS):
                with self.processes.compiling():
                    call, plan = self.plan(inputs, training, given)
                state = self.state if self.planner.in_python else None
                if state is None:
                    break
                state.watch()
                if not self.follow_changes():  # a call in flight may change its layers in Python
                    break
            parts = self._local_parameters(), self.state.buffers
            prepared = PreparedCall(call, plan, self.pipeline, *parts, state, self.planner.layers_in_python)
        self.forget_old_graphs()
        self.warn(inputs, training)
        return prepared

    def _local_parameters(self) -> Sequence[Tensor]:
        """Returns the parameters of all layers; of sharded ones, the parts of this process."""
        parameters: list[nn.Parameter] = self.state.parameters
        if not self.state.is_sharded:
            return parameters
        known: dict[int, GradientPart] = {}
        for stage in self.stages:
            own = parameters_of(stage.layers)
            known |= {id(own[index]): part for index, part in stage.sharded_gradients.items()}
        return [local_tensor(parameter, known.get(id(parameter))) for parameter in parameters]

    def finish(self, call: PreparedCall, outputs: list[Tensor], structure: Any) -> Any:
        """Returns what a call returns, after the checks and warnings that follow its run."""
        call.check_unchanged()
        self.warn_of_layers()
        return outputs[0] if structure is ONE_TENSOR else structure.build_unaliased(outputs)

    def plan(
        self, inputs: Inputs, training: bool, given: StepInputs | None = None
    ) -> tuple[Call, PlannedCall]:
        """Returns the description of a call, and its plan. The caller holds the tracing lock."""

        def plan(hook: str | None) -> tuple[Call, PlannedCall]:
            call = self.updated_call(inputs, training, given)
            planner = self.planner if hook is None else self._planner_for_hook(hook)
            call = self.within_memory(planner, call, training)
            return call, planner.plan(call)

        return self._observed(inputs, plan)

    def _observed(self, inputs: Inputs, function: Callable[[str | None], _Result]) -> _Result:
        """Calls a function, without the modes and hooks around it, with the name of a global hook or None."""
        if not has_observers(inputs.tensors, lambda: nn.ModuleList(self.layers).modules()):
            return function(None)
        return without_observers(function, global_hook())

    def updated_call(self, inputs: Inputs, training: bool, given: StepInputs | None = None) -> Call:
        """Returns the description of a call, after an update to the present layers, maybe with new stages.

        Args:
            inputs: the inputs.
            training: as for `call`.
            given: what a step gives to its loss.
        """
        self.detect_changes()
        return self.call_of(inputs, training, given)

    def choose_balance(self, inputs: Inputs, training: bool, schedule: ScheduleChoice | None = None) -> None:
        """Chooses the balance, in the first call, if the user has given none.

        Args:
            inputs: the inputs of the call.
            training: as for `call`.
            schedule: that of the step that follows; None if none does.
        """
        if not (self.placement.is_pending and inputs.batch_size):
            return
        with TRACING_LOCK:
            self.detect_changes()
            if any(tensor.is_meta for tensor in self.own_tensors()):
                return
            found = self._observed(inputs, lambda _: first_balance(self, inputs, training, schedule))
            if found is not None:
                self._take(self.placement._replace(balance=found, is_pending=False))

    def call_of(self, inputs: Inputs, training: bool, given: StepInputs | None = None) -> Call:
        """As for `updated_call`, if nothing has changed since."""
        chunks, number = self.chunks_of(inputs.batch_size), len(self.stages)
        is_training = training and torch.is_grad_enabled()
        checkpoint = checkpoint_policy(self.settings.checkpoint, number, is_training)
        call = Call(inputs, chunks, self.threads(), checkpoint, self.state)
        return call if given is None else replace(call, given=given.tensors, order=given.order)

    def detect_changes(self) -> None:
        """Detects changes of the layers since the last call, and updates the state and stages accordingly."""
        self.follow_changes()
        self.state.update_key()

    def follow_changes(self) -> bool:
        """Updates the stages if modules, parameters or buffers were changed, and returns whether they were.

        The state's key stays as it is.
        """
        layers: Collection[nn.Module] = self.children.values()
        is_changed = self.state.update(layers)
        if is_changed:
            check_not_sparse(layers)
            self.processes.check_shards(list(layers))
            if self.settings.deferred_batch_norm:
                self._begin_state()
                enable_deferral(layers)  # includes batch norms that were added since
                self.state.update(layers)
        self._follow_layers()
        return is_changed

    def _follow_layers(self) -> None:
        if [layer for stage in self.stages for layer in stage.layers] != self.state.layers:
            balance = resolve_balance(self.state.layers, self.placement.balance)
            self.placement = self.placement._replace(balance=balance)
            self.rebuild()
            self.state.update(self.children.values())

    def within_memory(self, planner: Planner, call: Call, training: bool) -> Call:
        """Returns a call that saves as much as the memory allows, if there is a limit."""
        limits = self.settings.limits(self.placement.devices)
        if limits is None or not (training and torch.is_grad_enabled()):
            return call
        return choice_within(planner, call, limits).applied_to(call)

    def _planner_for_hook(self, hook: str) -> Planner:
        """Returns the planner that runs all layers in Python, so that global module hooks are called."""
        backend, is_mesh = self.settings.backend, self.processes.is_mesh
        if backend == "aten" or is_mesh:
            cause = "a mesh" if is_mesh else "backend='aten'"
            raise RuntimeError(
                f"the global module hook {hook} needs layers in Python, and {cause} allows none; "
                "remove the hook, or pass backend='auto' to GPipe without a mesh"
            )
        if self._planner_under_hooks is None:
            self._planner_under_hooks = Planner(self.stages, "eager", self.python_workers)
            if backend != "eager":
                self.planner.module_warnings.pending.append(
                    f"all layers run in Python while the global module hook {hook} is registered; to run "
                    "layers as C++ programs, remove it, or register it only on the layers that need it"
                )
        return self._planner_under_hooks

    # Warnings, after the plan of a call.

    def warn(self, inputs: Inputs, training: bool) -> None:
        """Warns of probable mistakes in the use of the pipeline, each once."""
        if self.warns_of_inputs:
            self.warns_of_inputs = False
            warn_sequence_first([stage.layers for stage in self.stages], inputs.dims)
            warn_square_input(inputs)
        number, chunks = len(self.stages), self.chunks_of(inputs.batch_size)
        is_few = number > 1 and chunks < 4 * number and training
        if is_few and self.warns_of_idle_stages and warns_of_idle_stages():
            self.warns_of_idle_stages = False
            batch_norm = normalises_micro_batches(self.layers)
            warn_idle_stages(number, chunks, inputs.batch_size, batch_norm)
        self.warn_of_layers()

    def warn_of_layers(self) -> None:
        """Warns of layers in Python and of missing kernels, each once."""
        for pending in (self.planner.module_warnings.pending, left_out.pending):
            while pending:
                warn_user(pending.pop(0))

    # What reports read.

    @property
    def connections(self) -> list[Connection]:
        """The pairs of stages that exchange tensors."""
        found = self._check_connections(self.placement, self.settings.transport)
        if not self.processes.is_mesh:
            return found
        return [replace(each, route="process group") for each in found]

    def _check_connections(self, placement: Placement, transport: str) -> list[Connection]:
        return connections_of(placement.balance, placement.devices, self.layers, transport)

    @property
    def runners(self) -> list[Runner]:
        """This runner and those with a loss, the latest last."""
        return [self, *(runner for runner, *_ in self.with_losses.values())]

    def locks(self) -> list[Any]:
        """Returns the locks that are held while layers run in Python, in calls and in steps."""
        return list(dict.fromkeys(lock for each in self.runners for lock in each.planner.locks))


class _LongerRunner(Runner):
    """Runs the layers of another runner and one more, until that runner makes its stages anew."""

    def __init__(self, base: Runner, layer: nn.Module) -> None:
        names = ("loss", *(f"loss{number}" for number in range(len(base.children))))
        name = next(name for name in names if name not in base.children)
        # Not the runner itself, which refers to this one: reference counts do not free a cycle.
        self._others, self._layer = base.children, {name: layer}
        self.settings = base.settings
        self.warns_of_inputs = self.warns_of_idle_stages = False
        self.processes, self._ties = base.processes, base._ties
        self.python_workers, self.pipeline = base.python_workers, base.pipeline
        *balance, last = base.placement.balance
        self.placement = base.placement._replace(balance=[*balance, last + 1], is_pending=False)
        last_stage = base.stages[-1].with_loss(layer, skips_of(self.layers))
        self._start([*base.stages[:-1], last_stage], base.planner)

    @property
    def children(self) -> dict[str, nn.Module]:  # type: ignore[override]
        """As for `Runner`."""
        return self._others | self._layer

    def _follow_layers(self) -> None:
        """Does nothing: the other runner has detected changes of its layers before."""


def _own_group(processes: Processes, stage: int, name: str) -> str:
    return processes.own_group(stage, name)
