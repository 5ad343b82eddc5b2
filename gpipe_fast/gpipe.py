"""GPipe: the user's Sequential, trained as a pipeline."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
from torch import nn

from gpipe_fast._extension import Interpreted, Pipeline
from gpipe_fast.arguments import CHECKPOINT_MODES as CHECKPOINT_MODES
from gpipe_fast.arguments import (
    check_accepted,
    check_holds_tensor,
    check_inputs,
    check_module,
    checked_batch_dim,
    checked_chunks,
    checked_grad_dtype,
    checked_mode,
    checked_transport,
)
from gpipe_fast.balance.automatic import balance_automatically
from gpipe_fast.container import Container
from gpipe_fast.devices import Device
from gpipe_fast.layers.batchnorm import check_can_defer, defer
from gpipe_fast.layers.skip import skips_of, verify_skippables
from gpipe_fast.layers.structure import ONE_TENSOR, BatchDim, Inputs
from gpipe_fast.lower.checkpoint import checkpoint_of
from gpipe_fast.notes import note_idle_stages, note_sequence_first
from gpipe_fast.randomness.random import MinibatchKey, minibatch_key
from gpipe_fast.runtime.edges import described, edges_of
from gpipe_fast.runtime.lifetime import open_pipeline
from gpipe_fast.runtime.plan import Plan
from gpipe_fast.runtime.planner import Planner, Signature
from gpipe_fast.runtime.recording import Recording, record
from gpipe_fast.runtime.stage import TURN
from gpipe_fast.runtime.state import State
from gpipe_fast.stages import chosen_balance, given_devices, placed, stages_of
from gpipe_fast.uncompiled import uncompiled
from gpipe_fast.unsupported import global_hook, is_watched, unwatched

# What a copy makes anew.
_NOT_COPIED = frozenset({"_layers", "_stages", "_edges", "_state", "_planner", "_pipeline", "_interpreted"})
# The last would call the original; PyTorch's modules leave it behind too.
_NOT_COPIED |= {"_hooked", "_compiled_call_impl"}

BACKENDS = ("auto", "aten", "eager")


class GPipe(Container):
    """Trains a sequence of layers as a pipeline of stages over micro-batches.

    The numbers are those of ``torch.cat([module(c) for c in x.chunk(chunks)])``: outputs, gradients and
    buffers, bit for bit on the CPU. Children, parameter names and ``state_dict`` are those of ``module``::

        model = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        loss_fn(model(x), y).backward()

    Args:
        module: the layers; they are not copied, and moved to the devices of their stages.
        balance: layers per partition. By default the first call measures every layer on its first
            micro-batch, and cuts so that the slowest partition is as fast as possible; until then, and where
            a layer cannot be measured, it is an even cut by parameter count. There are as many partitions as
            ``devices``, or processors.
        devices: one for each partition, what is left over is dropped; by default all GPUs that are visible,
            and where there are none, CPU stages.
        chunks: micro-batches per mini-batch, which is cut as ``Tensor.chunk`` cuts it; or ``'auto'``, four
            for each stage as far as the batch goes.
        batch_dim: the dimension of the batch, along which inputs are cut into micro-batches and outputs
            joined, as by ``torch.cat([module(c) for c in x.chunk(chunks, batch_dim)], batch_dim)``; a
            negative one counts from the end. Or one for each tensor of the input that is cut, in the order of
            the arguments; outputs are then joined along the first of them.
        checkpoint: which micro-batches recompute their activations in the backward: ``'always'``,
            ``'except_last'`` or ``'never'``. In eval mode none does.
        deferred_batch_norm: let batch norm's running statistics be those of the whole mini-batch, taken once;
            else they are taken from each micro-batch.
        grad_dtype: None, or ``torch.float32``: gradients of bfloat16 and float16 parameters are added up over
            the micro-batches of a mini-batch in that, and rounded once to the parameter's dtype when its
            backward ends. It takes 4 bytes for each element of such parameters during the backward. Other
            parameters are not affected.
        backend: ``'auto'`` lowers layers to C++ programs, and runs those that cannot be traced faithfully in
            Python, in the same schedule, after a warning that names stage, layer and reason; for ``'aten'``
            they are an error; ``'eager'`` runs all layers in Python.
        capture: replay what runs on GPUs alone as CUDA graphs, from the third mini-batch of a shape on, as
            far as it can be captured; ``doctor()`` says what is not. The CPU's stages have none.
        transport: how tensors go from stage to stage between GPUs. ``'auto'`` hands them over on one device,
            copies them where two reach each other's memory, and else through pinned memory of the host;
            ``'peer'`` and ``'pinned'`` do the one or the other everywhere, on one device, too.

    Raises:
        TypeError: ``module`` is not a ``Sequential``, its skip connections do not match, or ``batch_dim`` is
            neither an integer nor several.
        ValueError: ``balance``, ``chunks``, ``checkpoint`` or ``grad_dtype`` does not fit, a layer is there
            twice or has a name that is taken here, layers are too large for their devices, or ``transport``
            is ``'peer'`` and devices do not reach each other.
        IndexError: there are fewer devices than partitions.

    Attributes:
        grad_dtype: in what gradients are added up.
        transport: as given.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int | Literal["auto"] = 1,
        batch_dim: int | Iterable[int] = 0,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        grad_dtype: torch.dtype | None = None,
        backend: str = "auto",
        capture: bool = True,
        transport: str = "auto",
    ) -> None:
        super().__init__()
        # Checked in torchgpipe's order, then what is ours; nothing of the module is touched before.
        self.chunks = chunks
        self.checkpoint = checkpoint
        self.batch_dim = batch_dim
        check_module(module)
        self._given_devices = given_devices(devices)
        self._balance, self._devices = placed(list(module.named_children()), balance, self._given_devices)
        self._deferred = bool(deferred_batch_norm)
        if self._deferred:
            check_can_defer(module.named_children())
        if backend not in BACKENDS:
            raise ValueError(f"backend is not one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        self.backend = backend
        self.grad_dtype = checked_grad_dtype(grad_dtype)
        self.transport = checked_transport(transport)
        self._edges = edges_of(self._balance, self._devices, skips_of(module), self.transport)
        self.threads_per_stage = None
        self._capture = bool(capture)
        self._warned = False
        self._note_sequence_first = True
        self._to_balance = balance is None and len(self._balance) > 1
        self._adopt(module)
        if self._deferred:
            defer(self)
        self._interpreted = Interpreted()
        self._pipeline = self._open()
        self._begin()

    def _open(self) -> Pipeline:
        pipeline = open_pipeline(max(1, len(self._balance)), self._interpreted, self.transport)
        pipeline.set_capture(self._capture)
        return pipeline

    def _begin(self) -> None:
        verify_skippables(self)
        self._layers = list(self)
        self._stages = stages_of(self._layers, self._balance, self._devices, self._deferred, self.grad_dtype)
        self._edges = edges_of(self._balance, self._devices, skips_of(self._layers), self.transport)
        self._planner = Planner(self._stages, self.backend, self._interpreted)
        self._hooked: Planner | None = None
        self._pipeline.forget_replays()
        self._state = State(self._planner.remarks.in_python)

    def __getstate__(self) -> dict[str, Any]:
        """What copying and pickling keep: all but threads and programs, which are made again when needed."""
        return {k: v for k, v in vars(self).items() if k not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._interpreted = Interpreted()
        self._pipeline = self._open()
        self._begin()

    def _arrange(self, balance: Iterable[int], devices: Iterable[Device] | None) -> None:
        """Cuts the layers anew and moves them; raises before anything has changed."""
        wanted = given_devices(devices)
        with TURN:
            sizes, places = placed(list(self.named_children()), balance, wanted)
            edges_of(sizes, places, skips_of(self), self.transport)
            as_before = places == self._devices
            if not as_before and self._pipeline.recorded():
                raise RuntimeError("stages cannot be added, removed or moved while the model is recorded")
            self._balance, self._devices, self._given_devices = sizes, places, wanted
            self._to_balance = False
            self._place()
            if not as_before:
                self._pipeline = self._open()
            self._begin()

    @property
    def capture(self) -> bool:
        """Whether what runs on GPUs is captured and replayed; may be set between calls."""
        return self._capture

    @capture.setter
    def capture(self, capture: bool) -> None:
        self._capture = bool(capture)
        self._pipeline.set_capture(self._capture)

    @property
    def chunks(self) -> int | Literal["auto"]:
        """Micro-batches per mini-batch, or 'auto': four a stage, as far as the batch goes; may be set.

        Raises:
            ValueError: when set to something else, and stays as it was.
        """
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int | Literal["auto"]) -> None:
        self._chunks = checked_chunks(chunks)

    @property
    def batch_dim(self) -> BatchDim:
        """The dimension of the batch, or that of each tensor that is cut; may be set between calls.

        Raises:
            TypeError: when set to something else, and stays as it was.
            ValueError: when set to no dimension, and stays as it was.
        """
        return self._batch_dim

    @batch_dim.setter
    def batch_dim(self, batch_dim: int | Iterable[int]) -> None:
        self._batch_dim = checked_batch_dim(batch_dim)

    @property
    def checkpoint(self) -> str:
        """Which micro-batches recompute: 'always', 'except_last' or 'never'; may be set between calls.

        Raises:
            ValueError: when set to something else, and stays as it was.
        """
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        self._checkpoint = checked_mode(checkpoint)

    @property
    def threads_per_stage(self) -> int | None:
        """Intra-op threads of each stage; may be set between calls.

        None, the default, divides those of the caller (``torch.get_num_threads()``) among the stages.
        """
        return self._threads_per_stage

    @threads_per_stage.setter
    def threads_per_stage(self, threads: int | None) -> None:
        if threads is not None and (type(threads) is not int or threads <= 0):
            raise ValueError(f"threads_per_stage must be a positive integer or None, got {threads!r}")
        self._threads_per_stage = threads

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one mini-batch; `torch.compile` around it leaves it as it is.

        Args:
            args: what the first layer takes: tensors of any dtype, nested in tuples, lists and dicts, beside
                None, bools, numbers and strings. The batch, `batch_dim` of every tensor, is cut into
                micro-batches; what is wrapped by `replicate` is not, and what is no tensor cannot be: every
                micro-batch gets all of it.
            kwargs: likewise, where the first layer takes keyword arguments; ``input`` alone is the one
                argument, as it is of a ``Sequential``.

        Returns:
            What the last layer returns for each micro-batch, nested likewise, each tensor concatenated along
            `batch_dim`; without layers, the argument itself, whatever its dimensions.

        Raises:
            TypeError: there is something in the input, or in what a stage returns, that is neither a tensor
                nor such a constant; or there is no tensor in the input, or in what the last layer returns.
            ValueError: the tensors have no such dimension, or batches of different sizes, or are not on the
                first stage's device.
            RuntimeError: a stage cannot be traced, under ``backend='aten'``; the message names the layer and
                the reason. Or the call is within a transform of ``torch.func``, a tracer, or forward-mode AD.
        """
        if not args and kwargs.keys() == {"input"}:
            args, kwargs = (kwargs["input"],), {}
        inputs = Inputs.of(args, kwargs, self._batch_dim)
        if not len(self):
            return _pass_through(args, kwargs, inputs)
        watched = is_watched(inputs.tensors, self.modules)
        check_inputs(inputs, self._devices)
        if kwargs or len(args) != 1:
            check_accepted(next(iter(self)), args, kwargs)
        with TURN:
            plan = unwatched(self._plan, inputs, global_hook()) if watched else self._plan(inputs)
            parameters, buffers, pipeline = self._state.parameters, self._state.buffers, self._pipeline
        remarks = self._planner.remarks.texts
        if remarks:
            self._warn()
        # What draws nothing leaves PyTorch's generator as it was.
        key = MinibatchKey() if plan.draws is None else minibatch_key() if plan.draws else 0
        outputs, structure = pipeline.forward(plan.native, inputs.tensors, parameters, buffers, key)
        if remarks:
            self._warn()
        return outputs[0] if structure is ONE_TENSOR else structure.build_apart(outputs)

    def _warn(self) -> None:
        """Says what runs in Python, once."""
        texts = self._planner.remarks.texts
        while texts:
            warnings.warn(texts.pop(0), stacklevel=6)

    def _plan(self, inputs: Inputs, hook: str | None = None) -> Plan:
        """The plan for such a call, of the layers as they are now; in Python under a hook on all modules."""
        self._look()
        chunks = self._num_chunks(inputs.batch_size)
        if self._to_balance and inputs.batch_size:
            self._balance_by_time(inputs, chunks)
        if self._note_sequence_first:
            self._note_sequence_first = False
            note_sequence_first([stage.layers for stage in self._stages], inputs.dims)
        threads = self.threads_per_stage or max(1, torch.get_num_threads() // len(self._stages))
        signature = Signature.of(inputs, chunks, threads, self._state)
        planner = self._planner if hook is None else self._hooked_planner(hook)
        checkpoint = checkpoint_of(self.checkpoint, self.training and torch.is_grad_enabled())
        plan = planner.plan(signature, inputs.tensors, checkpoint)
        if self._state.is_behind():
            self._look()
            planner.rename(signature, Signature.of(inputs, chunks, threads, self._state))
        return plan

    def _hooked_planner(self, hook: str) -> Planner:
        """The one under which all layers run in Python, where hooks on all modules are called."""
        if self.backend == "aten":
            raise RuntimeError(
                f"the global module hook {hook} needs layers in Python, and backend='aten' allows none; "
                "remove it, or choose backend='auto'"
            )
        if self._hooked is None:
            self._hooked = Planner(self._stages, "eager", self._interpreted)
            if self.backend != "eager":
                self._planner.remarks.texts.append(
                    f"all layers run in Python while the global module hook {hook} is there; registered on "
                    "single layers it lets the others stay native"
                )
        return self._hooked

    def _look(self) -> None:
        """Notices what was changed since the last call."""
        layers = cast(Collection[nn.Module], self._modules.values())
        if self._state.look(layers) and self._deferred:
            defer(layers)  # also what has come since
            self._state = State(self._planner.remarks.in_python)
            self._state.look(layers)
        if self._state.layers != self._layers:
            self._balance = chosen_balance(self._state.layers, self._balance)
            self._begin()
            self._state.look(layers)

    def _balance_by_time(self, inputs: Inputs, chunks: int) -> None:
        """Cuts the layers by what they take for this mini-batch's first micro-batch."""
        self._to_balance = False
        first = inputs.dims.cut(inputs.tensors, chunks)[0]
        try:
            found = balance_automatically(
                len(self._balance),
                nn.Sequential(OrderedDict(self.named_children())),
                inputs.structure.build(first),
                threads=self.threads_per_stage,
                device=self._devices[0],
            )
        except Exception as error:
            warnings.warn(f"layers are cut evenly by their parameters: {error}", stacklevel=7)
            return
        if found != self._balance:
            self._balance = found
            self._place()
            self._begin()
            self._look()

    def _num_chunks(self, batch: int) -> int:
        """Into how many micro-batches to cut a mini-batch; a note says what too few of them cost."""
        num_stages = len(self._stages)
        enough = 4 * num_stages
        chunks = max(1, min(enough, batch)) if self.chunks == "auto" else self.chunks
        if num_stages > 1 and chunks < enough and self.training and not self._warned:
            self._warned = True
            note_idle_stages(num_stages, chunks, enough)
        return chunks

    def extra_repr(self) -> str:
        """How the layers are cut and run, and how tensors get from stage to stage where there are GPUs."""
        places = f"balance={self.balance}, devices={[str(device) for device in self._devices]}"
        lines = [f"{places}, chunks={self.chunks!r}, checkpoint={self.checkpoint!r}"]
        if any(device.type != "cpu" for device in self._devices):
            lines += described(self._edges, self._planner.latest)
        return "\n".join(lines)

    def recording(self) -> AbstractContextManager[Recording]:
        """Records begin and end of every action and of every wait inside a block.

        ::

            with model.recording() as recording:
                loss_fn(model(x), y).backward()
            print(recording.bubble())
        """
        return record(self._pipeline)


def _pass_through(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Inputs) -> Any:
    """Returns the only argument unchanged; nothing cuts it, so it needs no batch dimension."""
    if len(args) != 1 or kwargs:
        raise TypeError(
            f"a GPipe without layers takes one argument and returns it, got {len(args) + len(kwargs)} "
            f"({len(kwargs)} of them by keyword)"
        )
    check_holds_tensor(inputs)
    return inputs.structure.build(inputs.tensors) if None in inputs.dims.inputs else args[0]
