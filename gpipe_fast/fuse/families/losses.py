"""Cross-entropy of logits and class indices, with label smoothing, and its gradient.

kernels/cross_entropy.py computes the gradient from the logits: neither the log-softmax nor its gradient is
stored. A backward that finds the log-softmax of its forward saved uses it in place of the logits, because the
softmax of both is the same.

Logits are in ``own``. They are cast to ``stream`` where autocast or the user casts, if the two differ::

    own     log_softmax(x), nll_loss              no cast
    before  log_softmax(x.float()), nll_loss      as transformers does; autocast for the user's log_softmax
    after   nll_loss(log_softmax(x).float())      autocast for cross_entropy
    fused   log_softmax(x, dtype=fp32), nll_loss  autocast for the user's log_softmax in fp16
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_fast.fuse.family import FORWARDS, GRADIENTS, Argument, Case, Numbers, Results
from gpipe_fast.fuse.launchers import CannotLaunch
from gpipe_fast.fuse.patterns import BATCH, CLASS_WEIGHT, CLASSES, IGNORE_INDEX, LENGTH, TARGET_WEIGHT
from gpipe_fast.kernels.cross_entropy import launch_gradient, launch_losses
from gpipe_fast.kernels.mean_loss import launch_loss, launch_scale

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # reductions in ATen's numbering
_ROWS, _SEQUENCES = (BATCH, CLASSES), (BATCH, LENGTH, CLASSES)


def cases(stream: torch.dtype, own: torch.dtype) -> Iterator[Case]:
    """Yields the cases for logits in ``own`` that are cast to ``stream``."""
    for form in _forms(stream, own):
        usual = not form.log_softmax_of_sequences and form.cast != "fused"
        for reduction in (MEAN, SUM, NONE) if usual else (MEAN,):
            for smoothing in (False, True) if usual and reduction == MEAN else (False,):
                loss = Loss(form, reduction, smoothing)
                yield loss.gradient_case()
                yield loss.forward_case()
            # The saved log-softmax does not tell the batch and the length of a cast behind it.
            if usual and reduction != NONE and form.saved[0] == form.shape:
                yield SavedLoss(form, reduction).case()


@dataclass(frozen=True)
class Form:
    """How a loss is spelled.

    Attributes:
        stream: the dtype of the loss.
        own: the dtype of the logits.
        cast: where the cast is: 'own', 'before', 'after' or 'fused'; see the module's docstring.
        shape: the shape of the logits.
        log_softmax_of_sequences: whether the log-softmax is computed before batch and length become one
            dimension.
    """

    stream: torch.dtype
    own: torch.dtype
    cast: str
    shape: tuple[int, ...]
    log_softmax_of_sequences: bool = False

    @property
    def num_rows(self) -> int:
        """The number of targets."""
        return BATCH if len(self.shape) == 2 else BATCH * LENGTH

    @property
    def saved(self) -> Argument:
        """The shape and dtype of the log-softmax."""
        shape = self.shape if self.log_softmax_of_sequences else (self.num_rows, CLASSES)
        return shape, self.own if self.cast == "after" else self.stream

    def log_softmax(self, x: Tensor) -> Tensor:
        """Returns the log-softmax of the logits, in the dtype and shape of `saved`."""
        x = (x.to(self.stream) if self.cast == "before" else x).view(self.saved[0])
        result: Tensor = aten._log_softmax(x, x.dim() - 1, self.cast == "fused")
        return result

    def as_input(self, log_softmax: Tensor) -> Tensor:
        """Returns the input of ``nll_loss``."""
        return self._cast_after(log_softmax, self.stream).view(self.num_rows, CLASSES)

    def gradient_of_log_softmax(self, g: Tensor) -> Tensor:
        """Returns the gradient of the log-softmax from the gradient of `as_input`."""
        return self._cast_after(g, self.own).view(self.saved[0])

    def gradient(self, g: Tensor, log_softmax: Tensor) -> Tensor:
        """Returns the gradient of the logits from the gradient of the log-softmax."""
        dtype = self.own if self.cast == "fused" else g.dtype
        dx: Tensor = aten._log_softmax_backward_data(g, log_softmax, g.dim() - 1, dtype)
        return dx.view(self.shape).to(self.own)

    def _cast_after(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype) if self.cast == "after" else x


def _forms(stream: torch.dtype, own: torch.dtype) -> Iterator[Form]:
    if stream == own:
        yield Form(stream, own, "own", _ROWS)
        yield Form(stream, own, "own", _SEQUENCES, True)
        return
    yield Form(stream, own, "before", _SEQUENCES)
    yield Form(stream, own, "before", _ROWS)
    yield Form(stream, own, "after", _ROWS)
    yield Form(stream, own, "before", _SEQUENCES, True)
    if own == torch.float16:
        yield Form(stream, own, "fused", _ROWS)
        yield Form(stream, own, "fused", _SEQUENCES, True)


@dataclass(frozen=True)
class Loss:
    """A loss of logits, and the gradient of the logits with the forward recomputed."""

    form: Form
    reduction: int
    smoothing: bool

    def forward_case(self) -> Case:
        """Returns the case of the loss."""
        anchor = aten.masked_fill.Scalar if self.smoothing else aten.nll_loss_forward.default
        return Case(
            self._name("cross-entropy"),
            self.forward,
            self._arguments(),
            self.launch_forward,
            anchor,
            phase=FORWARDS,
        )

    def gradient_case(self) -> Case:
        """Returns the case of the gradient."""
        g: Argument = ((self.form.num_rows,) if self.reduction == NONE else (), self.form.stream)
        anchor = aten.masked_fill.Scalar if self.smoothing else aten.nll_loss_backward.default
        arguments, name = (g, *self._arguments()), self._name("gradient of cross-entropy")
        return Case(name, self.gradient, arguments, self.launch_gradient, anchor, phase=GRADIENTS)

    def _name(self, name: str) -> str:
        return name + ", smoothed" * self.smoothing

    def _arguments(self) -> tuple[Argument, ...]:
        return (self.form.shape, self.form.own), ((self.form.num_rows,), torch.int64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        log_softmax = self.form.log_softmax(x)
        loss: Tensor
        loss, _ = aten.nll_loss_forward(
            self.form.as_input(log_softmax), target, None, self.reduction, IGNORE_INDEX
        )
        if not self.smoothing:
            return loss
        dtype = self.form.stream if self.form.cast == "after" else None
        ignored = aten.eq.Scalar(target, IGNORE_INDEX)
        uniform = aten.sum.dim_IntList(log_softmax, [1], dtype=dtype).neg().masked_fill(ignored, 0.0)
        uniform = aten.sum.default(uniform, dtype=dtype)
        if self.reduction == MEAN:
            uniform = uniform / ignored.bitwise_not().sum()
        weighted: Tensor = aten.mul.Scalar(loss, TARGET_WEIGHT) + aten.mul.Scalar(uniform, CLASS_WEIGHT)
        return weighted

    def gradient(self, g: Tensor, x: Tensor, target: Tensor) -> Tensor:
        """The gradient of the logits from the gradient of the loss."""
        form = self.form
        log_softmax = form.log_softmax(x)
        own = form.as_input(log_softmax)
        _, total = aten.nll_loss_forward(own, target, None, self.reduction, IGNORE_INDEX)
        g_target = aten.mul.Scalar(g, TARGET_WEIGHT) if self.smoothing else g
        g_own = aten.nll_loss_backward(g_target, own, target, None, self.reduction, IGNORE_INDEX, total)
        g_own = form.gradient_of_log_softmax(g_own)
        if self.smoothing:
            g_own = form.gradient_of_log_softmax(self._gradient_of_sum(g, target)) + g_own
        return form.gradient(g_own, log_softmax)

    def _gradient_of_sum(self, g: Tensor, target: Tensor) -> Tensor:
        """Returns the gradient of the sum of a row's log-probabilities, for all of them."""
        ignored = aten.eq.Scalar(target, IGNORE_INDEX)
        g = aten.mul.Scalar(g, CLASS_WEIGHT)
        if self.reduction == MEAN:
            g = g / ignored.bitwise_not().sum()
        g = g.expand(target.shape).masked_fill(ignored, 0).neg()
        return g.unsqueeze(1).expand(self.form.num_rows, CLASSES)

    def launch_forward(self, numbers: Numbers, x: Tensor, target: Tensor) -> Results:
        """Replaces `forward`."""
        rows, target = x.reshape(-1, x.shape[-1]), target.contiguous()
        ignore_index = numbers["ignore_index"]
        dtype = self.form.stream if self.reduction == NONE else torch.float32
        losses = launch_losses(rows, target, ignore_index, self._label_smoothing(numbers, x), dtype)
        if self.reduction == NONE:
            return (losses,)
        is_mean = self.reduction == MEAN
        return (launch_loss(losses, target, ignore_index, is_mean, self.form.stream),)

    def launch_gradient(self, numbers: Numbers, g: Tensor, x: Tensor, target: Tensor) -> Results:
        """Replaces `gradient`."""
        target = target.contiguous()
        is_mean = self.reduction == MEAN
        scale = launch_scale(g, target, numbers["ignore_index"]) if is_mean else g.float()
        return _launch_gradient(numbers, scale, x, target, self._label_smoothing(numbers, x), x.dtype)

    def _label_smoothing(self, numbers: Numbers, x: Tensor) -> float:
        if not self.smoothing:
            return 0.0
        smoothing: float = numbers["class_weight"] * x.shape[-1]
        if abs(numbers["target_weight"] + smoothing - 1.0) > 1e-6:
            raise CannotLaunch("the weights of the classes do not sum to 1")
        return smoothing


@dataclass(frozen=True)
class SavedLoss:
    """The gradient of the logits of a loss that has saved its log-softmax."""

    form: Form
    reduction: int

    def case(self) -> Case:
        """Returns the case."""
        g: Argument = ((self.form.num_rows,) if self.reduction == NONE else (), self.form.stream)
        arguments = (g, self.form.saved, ((self.form.num_rows,), torch.int64), ((), self.form.stream))
        return Case(
            "gradient of saved cross-entropy", self.gradient, arguments, self.launch,
            aten.nll_loss_backward.default, phase=GRADIENTS,
        )  # fmt: skip

    def gradient(self, g: Tensor, log_softmax: Tensor, target: Tensor, total: Tensor) -> Tensor:
        """The gradient of the logits from the gradient of the loss."""
        own = self.form.as_input(log_softmax)
        g = aten.nll_loss_backward(g, own, target, None, self.reduction, IGNORE_INDEX, total)
        return self.form.gradient(self.form.gradient_of_log_softmax(g), log_softmax)

    def launch(
        self, numbers: Numbers, g: Tensor, log_softmax: Tensor, target: Tensor, total: Tensor
    ) -> Results:
        """Replaces `gradient`."""
        scale = g.float() / total.float() if self.reduction == MEAN else g.float()
        return _launch_gradient(numbers, scale, log_softmax, target.contiguous(), 0.0, self.form.own)


def _launch_gradient(
    numbers: Numbers, scale: Tensor, x: Tensor, target: Tensor, smoothing: float, dtype: torch.dtype
) -> Results:
    rows, ignore_index = x.reshape(-1, x.shape[-1]), numbers["ignore_index"]
    return (launch_gradient(rows, target, scale, ignore_index, smoothing, dtype=dtype).view(x.shape),)
