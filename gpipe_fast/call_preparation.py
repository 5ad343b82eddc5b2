"""`GPipe.prepare`: makes the programs of calls before the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_fast import progress
from gpipe_fast.layers.structure import Inputs, LayerSequence
from gpipe_fast.runtime.plan import PlannedCall
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.strides import span
from gpipe_fast.uncompiled import uncompiled
from gpipe_fast.unsupported import global_hook, has_observers, without_observers
from gpipe_fast.user_warning import warn_user


class CallPreparation(LayerSequence):
    """The method `prepare` of a pipeline."""

    def _checked_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], allow_meta: bool = False
    ) -> Inputs:
        raise NotImplementedError

    def _plan(self, inputs: Inputs, hook: str | None = None) -> PlannedCall:
        raise NotImplementedError

    def _emit_warnings(self) -> None:
        raise NotImplementedError

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
                self._prepare(inputs)
        self._emit_warnings()

    def _prepare(self, inputs: Inputs) -> None:
        observed = has_observers(inputs.tensors, self.modules)
        with TRACING_LOCK:
            plan = without_observers(self._plan, inputs, global_hook()) if observed else self._plan(inputs)
        if plan.obstacle:
            warn_user(f"the call is not prepared, and takes longer the first time: {plan.obstacle}")


def with_memory(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns inputs with zeros on a device in place of meta tensors."""

    def zeros(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or tensor.layout is not torch.strided:
            return tensor
        memory = torch.zeros(span(tensor.shape, tensor.stride()), dtype=tensor.dtype, device=device)
        return memory.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)

    return inputs._replace(tensors=[*map(zeros, inputs.tensors)])
