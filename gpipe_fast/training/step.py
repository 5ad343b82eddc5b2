"""`GPipe.step`: forward, loss and backward of a mini-batch in one call; `GPipe.evaluate`: its loss alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gpipe_fast.distributed.ranks import Ranks
from gpipe_fast.layers.structure import Inputs, LayerSequence
from gpipe_fast.runtime.plan import Order
from gpipe_fast.schedule import ScheduleChoice
from gpipe_fast.training.loss_layer import loss_layer, shape_of_loss
from gpipe_fast.training.losses import Loss, Normalizer, check_normalizer, check_target, key_of, loss_of
from gpipe_fast.training.update import StageUpdates, checked_update
from gpipe_fast.uncompiled import uncompiled

# The maximum number of losses for which programs are kept.
_MAX_LOSSES = 4


class Given(NamedTuple):
    """What a step gets besides the inputs of the first layer.

    Attributes:
        tensors: the tensors of the target, on the last stage's device.
        order: the order of forwards and backwards.
        divisor: by what the sum of the losses is divided.
        weights: by what the loss of each micro-batch is multiplied before; None for 1.
        dim: the dimension along which losses are concatenated.
        scaler: multiplies the loss before its backward; None for 1.
        updates: what updates the parameters of each stage after its last backward; None for nothing.
        offer: tells other processes the losses, the first of the outputs that it gets; None if there are
            none, or the losses are there.
    """

    tensors: tuple[Tensor, ...]
    order: Order
    divisor: Any
    weights: Sequence[float] | None
    dim: int
    scaler: GradScaler | None = None
    updates: StageUpdates | None = None
    offer: Callable[[Sequence[Tensor]], None] | None = None

    def gradients(self, num_microbatches: int, like: Tensor) -> list[list[Tensor]]:
        """Returns the gradient of the loss of each micro-batch, in the order in which autograd multiplies."""
        gradient = torch.ones_like(like)
        if self.scaler is not None:
            gradient = self.scaler.scale(gradient)
        gradient = (gradient / self.divisor).view(shape_of_loss(self.dim))
        if self.weights is None:
            return [[gradient]] * num_microbatches
        return [[gradient * weight] for weight in self.weights]


class Losses(NamedTuple):
    """The losses of a step.

    Attributes:
        each: those of this process's micro-batches.
        total: the sum over the micro-batches of all replicas.
    """

    each: list[Tensor]
    total: Tensor


class Training(LayerSequence):
    """The methods `step` and `evaluate` of a pipeline."""

    schedule: ScheduleChoice
    _trainers: dict[Any, Any]
    _ranks: Ranks | None

    def _reporting(self) -> AbstractContextManager[None]:
        """Returns a context manager that reports an error of its block to the other processes, if any."""
        raise NotImplementedError

    def _checked_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        raise NotImplementedError

    def _prepare_step(self, inputs: Inputs) -> None:
        """Measures the balance, if it is not measured yet, and warns of what a call warns of."""
        raise NotImplementedError

    def _with_loss(self, layer: nn.Module) -> Any:
        """Returns a pipeline of the same layers and a loss."""
        raise NotImplementedError

    def _configure(self, trainer: Any) -> bool:
        """Gives a pipeline with a loss the present settings; returns whether its layers are still these."""
        raise NotImplementedError

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
            mesh; with
            ``return_outputs``, a tuple of it and the detached output, which is None on ranks without the last
            stage.

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
        dim = self.batch_dim if isinstance(self.batch_dim, int) else self.batch_dim[0]
        targets = None if target is None else Inputs.of((target,), {}, dim)
        inputs = self._checked_inputs(args, kwargs)
        self._prepare_step(inputs)
        trainer = self._trainer(loss, loss_fn, targets, keeps_output, dim)
        given, dims = _given_of(targets, inputs.batch_size, trainer.devices[-1])
        if targets is not None:
            target = targets.structure.build(targets.tensors)  # without marks of what is not split
        if updates is not None:
            _check_graphs(inputs.tensors, self.parameters())
        order = Order(self.schedule, dims, updates is not None)
        divisor = 1.0 if loss.divisor is None else _checked_divisor(loss.divisor(target))
        has_loss = self._ranks is None or self._ranks.index == self._ranks.size - 1
        if self._ranks is not None and self._ranks.num_replicas > 1 and has_loss and loss.divisor is not None:
            divisor = self._ranks.sum_of_counts(divisor)
        offer = None
        if self._ranks is not None and has_loss:
            ranks = self._ranks

            def offer(outputs: Sequence[Tensor]) -> None:
                ranks.offer_losses(_losses_of(outputs[0], divisor, weights))

        found = trainer._run(inputs, Given(given, order, divisor, weights, dim, scaler, updates, offer))
        parts, output = found if keeps_output and has_loss else (found, None)
        if torch.is_grad_enabled():
            torch.autograd.backward(parts, torch.ones_like(parts))
        return self._with_replicas(_losses_of(parts, divisor, weights) if has_loss else ()), output

    def _planned_step(
        self, inputs: Inputs, targets: Inputs | None, loss_fn: Any, normalizer: Normalizer
    ) -> tuple[Any, Given]:
        """Returns the pipeline of the layers and the loss, and what it gets, for a plan without a run."""
        if self._ranks is None:
            check_target(loss_fn, None if targets is None else targets.tensors, "memory")
        loss = loss_of(loss_fn, normalizer)
        dim = self.batch_dim if isinstance(self.batch_dim, int) else self.batch_dim[0]
        self._prepare_step(inputs)
        trainer = self._trainer(loss, loss_fn, targets, False, dim)
        given, dims = _given_of(targets, inputs.batch_size, trainer.devices[-1])
        return trainer, Given(given, Order(self.schedule, dims), 1.0, None, dim)

    def _with_replicas(self, each: Sequence[Tensor]) -> Losses:
        """Returns the losses of micro-batches; only the ranks with the last stage pass any."""
        if self._ranks is None:
            return Losses(list(each), functools.reduce(torch.add, each))
        of_replicas = self._ranks.losses(each)
        totals = [functools.reduce(torch.add, losses) for losses in of_replicas]
        return Losses(of_replicas[self._ranks.replica], functools.reduce(torch.add, totals))

    def _trainer(self, loss: Loss, loss_fn: Any, targets: Inputs | None, keeps_output: bool, dim: int) -> Any:
        """Returns the pipeline of the layers and the loss, with the present settings."""
        structure = None if targets is None else targets.structure
        key = loss.key, structure, keeps_output, dim
        trainer, former, key_of_former = self._trainers.pop(key, (None, None, None))
        # The variables that a former function closes over may have changed since.
        if trainer is None or key_of(former) != key_of_former or not self._configure(trainer):
            count = 0 if targets is None else len(targets.tensors)
            trainer = self._with_loss(loss_layer(loss, structure, count, keeps_output, dim))
            self._configure(trainer)
            former = loss_fn  # the layer calls it; kept alive, because its address may be in the key
        self._trainers[key] = trainer, former, key_of(former)
        while len(self._trainers) > _MAX_LOSSES:
            del self._trainers[next(iter(self._trainers))]
        return trainer


def check_list(losses: Any) -> None:
    """Checks the argument ``losses`` of a step.

    Raises:
        TypeError: it is neither a list nor None.
    """
    if losses is not None and not isinstance(losses, list):
        raise TypeError(f"losses must be a list to append to, got {type(losses).__name__}; pass losses=[]")


def result_of(found: Losses, output: Any, losses: list[Tensor] | None, return_outputs: bool) -> Any:
    """Returns what a step returns, from its losses and the output; fills ``losses``."""
    if losses is not None:
        losses += found.each
    return (found.total, output) if return_outputs else found.total


def _losses_of(parts: Tensor, divisor: Any, weights: Sequence[float] | None) -> Sequence[Tensor]:
    """Returns the losses of micro-batches, weighted and divided."""
    each: Sequence[Tensor] = (parts.detach().flatten() / divisor).unbind()
    if weights is None:
        return each
    # A loss without any target that counts is NaN, and has no weight.
    return [x * w if w else torch.zeros_like(x) for x, w in zip(each, weights, strict=True)]


def _check_graphs(inputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> None:
    """Checks that no input has a graph through which a parameter of the model could get a gradient."""
    own = {id(parameter) for parameter in parameters}
    for tensor in inputs:
        if tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in own):
            raise ValueError(
                f"optimizer_in='drain' would update parameters before the backward of the input of shape "
                f"{list(tensor.shape)}, from which they may get more gradients; pass optimizer_in='end', or "
                "the input without its graph, x.detach()"
            )


def _checked_divisor(divisor: Any) -> Any:
    """Returns the divisor of the losses, without dimensions and without a graph."""
    if isinstance(divisor, Real):
        return divisor
    if not isinstance(divisor, Tensor):
        raise TypeError(
            f"the normalizer must be a number or a tensor with one, got {type(divisor).__name__}; pass a "
            "number, or a function of the target that returns one"
        )
    if divisor.numel() != 1:
        raise ValueError(
            f"the normalizer must be one number, got a tensor of shape {list(divisor.shape)}; let it "
            "return a sum"
        )
    return divisor.detach().reshape(())


def _given_of(
    targets: Inputs | None, batch_size: int, device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Returns the checked tensors of the target, and the dimension along which each is split."""
    if targets is None:
        return (), ()
    _check_targets(targets.tensors, targets.dims.inputs, batch_size, device)
    return tuple(x.detach() for x in targets.tensors), targets.dims.inputs


def _check_targets(
    tensors: Sequence[Tensor], dims: Sequence[int | None], batch_size: int, device: torch.device
) -> None:
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"the target has a tensor of shape {list(tensor.shape)} that requires a gradient, which step "
                "does not compute; pass its .detach(), or use loss_fn(model(x), y).backward()"
            )
        if dim is not None and (tensor.dim() <= dim or tensor.shape[dim] != batch_size):
            raise ValueError(
                f"the target has a tensor of shape {list(tensor.shape)}, but the batch size is {batch_size}; "
                "wrap it by gpipe_fast.replicate if every micro-batch needs it whole"
            )
        if tensor.device.type != device.type or (device.index is not None and tensor.device != device):
            raise ValueError(
                f"the target is on {tensor.device}, but the last stage is on {device}; call "
                f".to({str(device)!r})"
            )
