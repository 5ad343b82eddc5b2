"""`GPipe`: a module that trains the layers of an `nn.Sequential` as a pipeline.

The class is a face: it checks what users pass, and asks its runner (gpipe_fast/runtime/runner.py), whose
first lines show the path of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gpipe_fast import progress
from gpipe_fast.arguments import check_module, check_no_others, pass_through, warn_surplus_devices
from gpipe_fast.devices import Device
from gpipe_fast.distributed.mesh import checked_timeout, refuse_ddp
from gpipe_fast.distributed.ranks import Ranks
from gpipe_fast.from_model.blocks import Blocks
from gpipe_fast.from_model.calls import Making
from gpipe_fast.from_model.pipelined import make_pipelined
from gpipe_fast.from_model.tensor_plan import apply_plan
from gpipe_fast.layers.structure import BatchDim
from gpipe_fast.lower.checkpoint import CHECKPOINT_MODES as CHECKPOINT_MODES
from gpipe_fast.lower.checkpoint import CheckpointChoice, CheckpointSetting
from gpipe_fast.reports.reporting import Reporting
from gpipe_fast.runtime.connections import describe_connections
from gpipe_fast.runtime.placement import Placement, resolve_devices
from gpipe_fast.runtime.processes import ONE_PROCESS, Processes
from gpipe_fast.runtime.runner import Runner
from gpipe_fast.runtime.settings import MemoryLimit, Setting, Settings
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.schedule import ScheduleChoice
from gpipe_fast.streaming import CallStream, arguments_in, check_depth, results
from gpipe_fast.training.losses import Normalizer
from gpipe_fast.training.step import Objective, check_list, result_of, run_step
from gpipe_fast.training.update import checked_update
from gpipe_fast.unsupported import uncompiled
from gpipe_fast.user_warning import warn_user

if TYPE_CHECKING:
    from gpipe_fast.distributed.mesh import Mesh


class GPipe(Reporting):
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
            warning. By default all visible GPUs, or the CPU for all stages if there are none. With a
            ``mesh``, the device of this process's stage, or a list with one for each process; by default the
            current GPU if the mesh is one of GPUs or a group of NCCL, else the CPU.
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
            intermediates count, as predicted from shapes; the state of an optimizer does not. All layers have
            to be traced. With ``balance=None``, the first call chooses the balance, too.
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
            as the device to execute, since otherwise a graph costs memory and gains nothing. ``doctor()``
            reports what cannot be captured. It has no effect on CPU stages, nor with a ``mesh`` or with
            ``memory``: the attribute is then False, and cannot be set to True.
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
            or of one dimension without a name. Of P processes, process r has the stages r, r + P, r + 2 P and
            so on; by default one. Each process makes this pipeline alike, and the same calls with inputs and
            targets of equal shapes; it keeps the layers of its own stages only, and puts the others on the
            meta device. The first stage reads the inputs, the last one the target. A mesh with a dimension
            ``'dp_replicate'``, too, has as many replicas of all stages, which run different samples, and sum
            or average their gradients; so has one with ``'fsdp'``, over which `shard` divides parameters.
            Processes along a dimension ``'tp'`` have the same stages, of layers that ``parallelize_module``
            has divided over them. None: all stages are in this process.
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

    """

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
        Settings(chunks=chunks, checkpoint=checkpoint)  # type: ignore[arg-type]  # a list becomes a tuple
        processes: Processes = ONE_PROCESS
        if mesh is not None:
            processes = Ranks.of_mesh(mesh, checked_timeout(timeout), devices)
        check_module(module, "; other modules are cut into layers by GPipe.from_model(module, args=(x,))")
        if devices is not None and balance is None and mesh is None:
            warn_surplus_devices(len(resolve_devices(devices) or ()), len(module))
        self._register_layers(module)
        placement = Placement.checked(self._children(), balance, devices, processes)
        settings = Settings(
            chunks=chunks,
            checkpoint=checkpoint,  # type: ignore[arg-type]
            batch_dim=batch_dim,  # type: ignore[arg-type]
            memory_limit=memory,
            deferred_batch_norm=deferred_batch_norm,
            backend=backend,
            grad_dtype=grad_dtype,
            transport=transport,
            schedule=schedule,
            fuse=fuse is None or bool(fuse),
            capture=capture,
        )
        self._runner = Runner(self._children(), placement, settings, processes)
        if processes.is_mesh:
            refuse_ddp(self)

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
                modules stands for its children. By default the lists of modules that are called in order, or
                else the children of the model, of which large ones are opened.
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
            mesh: As for `GPipe`; without replicas. Along a dimension ``'tp'``, parameters are divided by the
                plan of a model of transformers, and replaced, unless they are DTensors already. Each process
                passes the same inputs, with their elements. A call returns what the model does in the last
                process; in the others, a tensor to call ``backward`` on stands for each output that requires
                a gradient, and None for any other one.
            timeout: As for `GPipe`.

        Returns:
            The pipelined model. Its ``chunks``, ``checkpoint``, ``schedule`` and ``threads_per_stage`` may be
            set; ``pipeline`` is the `GPipe` that ran last.

        Raises:
            TypeError: ``model`` is not a module, or another argument has a wrong type.
            ValueError: an argument is invalid, ``blocks`` names no blocks, or the model has hooks of
                accelerate or modules of `torch.ao.quantization`.
            RuntimeError: The model cannot be cut; the message says what stands in the way.
        """
        settings = Settings(
            chunks=chunks,
            checkpoint=checkpoint,  # type: ignore[arg-type]  # a list becomes a tuple
            memory_limit=memory,
            backend=backend,
            grad_dtype=grad_dtype,
            transport=transport,
            schedule=schedule,
            fuse=fuse is None or bool(fuse),
            capture=capture,
        )
        processes: Processes = ONE_PROCESS
        number = None
        if mesh is None:
            found = resolve_devices(devices)
            devices = None if devices is None else found
            number = None if found is None else len(found)
        else:
            processes = Ranks.of_mesh(mesh, checked_timeout(timeout), devices)
            number = processes.size
            if processes.num_shards > 1:
                apply_plan(model, mesh["tp"])  # type: ignore[index]  # no process group has parts
        sizes = None if balance is None else list(balance)
        how = Making(cls._over, blocks, sizes, devices, number, loss, processes)
        return make_pipelined(model, args, kwargs, how, settings)

    @classmethod
    def _over(cls, runner: Runner) -> GPipe:
        """Returns the face over a runner."""
        found = cls.__new__(cls)
        nn.Module.__init__(found)
        vars(found)["_modules"] = runner.children
        found._runner = runner
        return found

    # Calls.

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
                changes what other layers read. Or the call is inside a ``torch.func`` transform, a tracer, or
                forward-mode AD.
        """
        if not len(self):
            return pass_through(args, kwargs, self.batch_dim)
        return self._runner.call(args, kwargs, self.training)

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
                any other value is the only argument. Programs of up to 256 kinds of calls are kept.
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
        runner = self._runner
        further = [each if isinstance(each, tuple) else (each,) for each in also]
        calls = [runner.checked_inputs(each, kwargs, allow_meta=True) for each in (args, *further)]
        with progress.working("preparing calls") as work:
            for inputs in calls:
                work.purpose = ""  # the present call's
                runner.choose_balance(inputs, self.training)
                with TRACING_LOCK:
                    _, plan = runner.plan(inputs, self.training)
                if plan.obstacle:
                    warn_user(f"the call is not prepared, and takes longer the first time: {plan.obstacle}")
                runner.warn(inputs, self.training)

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
                `forward`. None, while something is in flight, means that the next one depends on a result:
                it is asked for once more after the next result was yielded.
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
        if self._runner.processes.is_mesh:
            raise ValueError(
                f"a pipeline with a mesh cannot stream yet, got {type(batches).__name__}; call model(x) for "
                "each mini-batch under torch.no_grad()"
            )
        if not len(self):
            check_depth(batches, depth)
            return (pass_through(*arguments_in(batch), self.batch_dim) for batch in batches)
        calls = CallStream(self._runner, lambda: self.training)
        return results(calls, batches, depth, len(self.balance))

    @uncompiled
    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any],
        normalizer: Normalizer = None,
        loss: str = "exact",
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        max_norm: float | None = None,
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

        The loss is that of the whole mini-batch, also if micro-batches have unequal numbers of samples, or of
        targets that count: the first call finds in its graph what is a sum or a mean over samples, and what
        is computed from all targets, as the number of those that are not ignored. A loss that compares
        samples with each other is refused, unless there is one micro-batch. With replicas along
        ``'dp_replicate'``, the mini-batch is that of all replicas together.

        Args:
            args: The first layer's arguments, as for `forward`.
            target: What the loss is computed with: tensors, nested in tuples, lists and dicts. Each tensor is
                split like the inputs, unless it is wrapped by `replicate`. It must be on the last stage's
                device. None: ``loss_fn`` gets the output alone.
            loss_fn: A function or a module of the last layer's output and the target, such as a loss of
                ``torch.nn`` or ``lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())``. Parameters of
                a module get gradients, too.
            normalizer: The number by which the sum of the losses is divided, or a function that returns it
                for the target; with replicas, those of all of them are added up. ``loss_fn`` then returns a
                sum. By default the loss of the mini-batch is found as above.
            loss: ``'exact'``, or ``'per-microbatch'`` for the mean of the losses of micro-batches, each with
                the weight of its number of samples.
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
            kwargs: Keyword arguments of the first layer.

        Returns:
            The loss of the mini-batch, over all replicas, a detached 0-dimensional tensor, on all ranks of a
            mesh; with ``return_outputs``, a tuple of it and the detached output, which is None on ranks
            without the last stage.

        Raises:
            TypeError: As for `forward`; or ``loss_fn`` is not a function, or ``normalizer``, ``optimizer``,
                ``scaler`` or ``max_norm`` has a wrong type.
            ValueError: As for `forward`; the target has another batch size, the loss does not follow from
                those of micro-batches, ``normalizer`` is 0 or not finite, or nothing requires a gradient; the
                optimizer has no parameter of the model, or needs a closure, as ``torch.optim.LBFGS`` does;
                or ``max_norm`` is negative, NaN, or passed without an optimizer.
            RuntimeError: As for `forward`; or gradients are disabled.
        """
        processes = self._runner.processes
        with processes.reporting():
            check_list(losses)
            how = loss, return_outputs, "step", processes
            objective = Objective.checked(loss_fn, target, normalizer, *how)
            update = checked_update(self, optimizer, scaler, max_norm, processes)
            call = self._runner, args, kwargs, self.training, objective
            found, output = run_step(*call, scaler, update.asked())
            update.run()
            return result_of(found, output, losses, return_outputs)

    @uncompiled
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any],
        normalizer: Normalizer = None,
        loss: str = "exact",
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
            loss: As for `step`.
            losses: As for `step`.
            return_outputs: As for `step`.
            kwargs: As for `step`.

        Returns:
            As for `step`.

        Raises:
            TypeError: As for `forward`; or ``loss_fn`` is not a function, or ``normalizer`` has a wrong type.
            ValueError: As for `forward`; the target has another batch size, the loss does not follow from
                those of micro-batches, or ``normalizer`` is 0 or not finite.
            RuntimeError: As for `forward`.
        """
        processes = self._runner.processes
        with processes.reporting(), torch.no_grad():
            check_list(losses)
            how = loss, return_outputs, "evaluate", processes
            objective = Objective.checked(loss_fn, target, normalizer, *how)
            found, output = run_step(self._runner, args, kwargs, self.training, objective)
            return result_of(found, output, losses, return_outputs)

    # Settings, which the next call reads. An invalid value is refused on assignment.

    chunks: Setting[int | Literal["auto"], int | Literal["auto"]] = Setting("_runner")
    """The number of micro-batches, or 'auto': four per stage, at most one per sample. May be set."""
    schedule: Setting[ScheduleChoice, ScheduleChoice] = Setting("_runner")
    """The order of forwards and backwards in `step`; may be set between calls."""
    batch_dim: Setting[BatchDim, int | Iterable[int]] = Setting("_runner")
    """The batch dimension, of all inputs or of each input that is split; may be set between calls."""
    checkpoint: Setting[CheckpointSetting, CheckpointChoice] = Setting("_runner")
    """Which micro-batches recompute, as for `GPipe`; a list becomes a tuple. May be set between calls."""
    memory_limit: Setting[MemoryLimit, MemoryLimit] = Setting("_runner")
    """The bytes that a step may take on each device, as for `GPipe`; may be set between calls."""
    threads_per_stage: Setting[int | None, int | None] = Setting("_runner")
    """The number of intra-op threads of each stage; may be set between calls. None, the default, divides
    the caller's threads (``torch.get_num_threads()``) among the stages."""
    fuse: Setting[bool, bool] = Setting("_runner")
    """Whether stages on GPUs use fused kernels; may be set between calls; the next call compiles."""
    backend: Setting[str, str] = Setting("_runner")
    """How layers run, as for `GPipe`; may be set between calls; the next call compiles."""
    grad_dtype: Setting[torch.dtype | None, torch.dtype | None] = Setting("_runner")
    """The dtype in which gradients are accumulated, as for `GPipe`; may be set between calls."""
    transport: Setting[str, str] = Setting("_runner")
    """How boundary tensors move between stages on GPUs, as for `GPipe`; may be set between calls."""

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
        return self._runner.capture

    @capture.setter
    def capture(self, capture: bool | str) -> None:
        self._runner.configure(capture=capture)

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition; a copy.

        Assigning repartitions the layers and moves them to their devices; the next call builds new programs.
        Optimizer state is not moved: create the optimizer after repartitioning if layers change their device.

        Raises:
            ValueError: on assignment, the balance does not fit the layers. The old balance is kept.
            IndexError: on assignment, there are more partitions than devices. The old balance is kept.
        """
        return list(self._runner.placement.balance)

    @balance.setter
    def balance(self, balance: Iterable[int]) -> None:
        self._runner.place(balance, self._runner.placement.choice)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition; a copy. Assigning moves the layers, as for `balance`.

        Raises:
            ValueError: on assignment, stages cannot run on one of the devices. The old devices are kept.
            IndexError: on assignment, there are fewer devices than partitions. The old devices are kept.
        """
        return list(self._runner.placement.devices)

    @devices.setter
    def devices(self, devices: Iterable[Device] | None) -> None:
        self._runner.place(self.balance, devices)

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to copy or pickle: all but threads and programs, which are created on demand."""
        # A copied `_compiled_call_impl` would call the original module; nn.Module does not copy it either.
        state = {k: v for k, v in vars(self).items() if k not in ("_runner", "_compiled_call_impl")}
        return state | {"_runner": self._runner.state_to_copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = state.pop("_runner")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._runner = Runner(self._children(), *copied)

    def extra_repr(self) -> str:
        """Returns the balance, devices and settings, and the connections of stages if one is on a GPU."""
        runner = self._runner
        places = f"balance={self.balance}, devices={[str(device) for device in self.devices]}"
        lines = [f"{places}, chunks={self.chunks!r}, checkpoint={self.checkpoint!r}"]
        if any(device.type != "cpu" for device in self.devices):
            lines += describe_connections(runner.connections, runner.planner.latest)
        return "\n".join(lines)
