"""Cross-entropy on the CPU: the reference implementation, operators, errors, autograd and torch.compile."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_fast.kernels import cross_entropy, linear_cross_entropy
from gpipe_fast.kernels.linear_cross_entropy import (
    MIN_CHUNK_ROWS,
    choose_chunk_rows,
    chunked_loss_and_gradients,
)


@pytest.fixture(autouse=True)
def seed_generator() -> None:
    torch.manual_seed(0)


def random_x_and_targets(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns the input of a layer that computes logits, and targets."""
    x, target = torch.randn(9, 5, dtype=dtype, requires_grad=True), torch.randint(7, (9,))
    target[2] = -100
    return x, target


def test_cross_entropy_operators_pass_opcheck() -> None:
    logits, target = torch.randn(9, 7, requires_grad=True), torch.randint(7, (9,))
    ops, options = torch.ops.gpipe_fast, (-100, 0.1)
    for reduction in ("mean", "sum", "none"):
        torch.library.opcheck(ops.cross_entropy.default, (logits, target, *options, reduction, True))
        plain = logits.detach()
        torch.library.opcheck(ops.cross_entropy_.default, (plain.clone(), target, *options, reduction))
    torch.library.opcheck(ops.cross_entropy_.default, (torch.randn(7, 9).t(), target, *options, "sum"))
    for g in (torch.tensor(2.0), torch.randn(9)):
        torch.library.opcheck(ops.scale_precomputed_gradient_.default, (plain.clone(), g))
    torch.library.opcheck(ops.with_precomputed_gradient.default, (logits, torch.randn(())))
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((9, 5), (7, 5), (7,)))
    for arguments in ((x, weight, target, bias), (x, weight, target, None)):
        needs = [True, True, arguments[3] is not None]
        torch.library.opcheck(ops.linear_cross_entropy.default, (*arguments, *options, "mean", 4, needs))


# Losses as functions of x, weight and target.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, weight, target: linear_cross_entropy(x, weight, target, chunk_rows=4),
    "out of place": lambda x, weight, target: cross_entropy(F.linear(x, weight), target),
    "in place": lambda x, weight, target: cross_entropy(F.linear(x, weight), target, inplace=True),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
def test_a_compiled_cross_entropy_equals_the_eager_one(name: str) -> None:
    (x, target), weight = random_x_and_targets(), torch.randn(7, 5, requires_grad=True)

    def doubled(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return 2 * LOSSES[name](x.sin(), weight, target)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    losses = [function(x, weight, target) for function in (compiled, doubled)]
    assert torch.equal(*losses)
    assert all(map(torch.equal, *(torch.autograd.grad(loss, [x, weight]) for loss in losses)))


@every_loss
def test_the_backward_of_a_cross_entropy_can_run_again_with_retain_graph(name: str) -> None:
    (x, target), weight = random_x_and_targets(), torch.randn(7, 5, requires_grad=True)
    loss = LOSSES[name](x, weight, target)
    once = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    thrice = torch.autograd.grad(loss, [x, weight], torch.tensor(3.0), retain_graph=True)
    again = torch.autograd.grad(loss, [x, weight])
    for a, b, c in zip(once, thrice, again, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(b, 3 * a)


def test_gradients_of_several_backwards_are_summed_without_aliasing() -> None:
    logits, target = torch.randn(9, 7, requires_grad=True), torch.randint(7, (9,))
    expected = torch.autograd.grad(F.cross_entropy(logits, target), logits)[0]
    loss = cross_entropy(logits, target)
    for each in (loss, loss, cross_entropy(logits, target)):
        each.backward(retain_graph=True)
    torch.testing.assert_close(logits.grad, 3 * expected)


@every_loss
def test_a_second_derivative_of_a_cross_entropy_is_an_error(name: str) -> None:
    (x, target), weight = random_x_and_targets(), torch.randn(7, 5, requires_grad=True)
    loss = LOSSES[name](x, weight, target)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_linear_cross_entropy_gives_gradients_only_to_inputs_that_require_them() -> None:
    (x, target), weight, bias = random_x_and_targets(), torch.randn(7, 5), torch.randn(7, requires_grad=True)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(x, weight, bias), target), [x, bias])
    found = torch.autograd.grad(linear_cross_entropy(x, weight, target, bias), [x, bias])
    torch.testing.assert_close(found, expected)
    assert not linear_cross_entropy(x.detach(), weight, target).requires_grad


def test_backward_through_saved_logits_that_were_overwritten_is_an_error() -> None:
    x, target = random_x_and_targets()
    logits = F.linear(x, torch.randn(7, 5)).exp()
    loss = cross_entropy(logits, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cross_entropy_in_place_accepts_logits_that_are_a_view() -> None:
    (x, target), weight = random_x_and_targets(), torch.randn(8, 5)
    target[2] = 0
    expected = torch.autograd.grad(F.cross_entropy(F.linear(x, weight)[:, :7], target), x)[0]
    logits = F.linear(x.view(3, 3, 5), weight).view(9, 8)[:, :7]
    torch.testing.assert_close(
        torch.autograd.grad(cross_entropy(logits, target, inplace=True), x)[0], expected
    )


@pytest.mark.parametrize("bad", [7, -1])
def test_a_target_out_of_range_is_an_error_on_the_cpu(bad: int) -> None:
    (x, target), weight = random_x_and_targets(), torch.randn(7, 5)
    target[3] = bad
    for loss in LOSSES.values():
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            loss(x, weight, target)


LOGITS, TARGET = torch.randn(3, 7), torch.zeros(3, dtype=torch.int64)
X, WEIGHT = torch.randn(3, 5), torch.randn(7, 5)
SHAPE = r"targets must have the shape of the logits \[3, 7\] without the last dimension, got \[2\]"
REFUSED = {
    SHAPE: (cross_entropy, (LOGITS, TARGET[:2]), {}),
    r"the logits \[\] without the last dimension, got \[3\]": (
        cross_entropy, (torch.tensor(1.0), TARGET), {},
    ),
    "targets must be class indices in int64, got torch.int32": (cross_entropy, (LOGITS, TARGET.int()), {}),
    "supports only fp32, fp16 and bf16, got torch.float64": (cross_entropy, (LOGITS.double(), TARGET), {}),
    "targets must be on cpu, got meta": (cross_entropy, (LOGITS, TARGET.to("meta")), {}),
    "label smoothing must be from 0 to 1, got 1.5": (
        cross_entropy, (LOGITS, TARGET), {"label_smoothing": 1.5},
    ),
    "reduction is not one of mean, sum, none, got 'max'": (
        cross_entropy, (LOGITS, TARGET), {"reduction": "max"},
    ),
    "they are a leaf tensor of shape": (
        cross_entropy, (LOGITS.clone().requires_grad_(), TARGET), {"inplace": True},
    ),
    r"for x \(..., features\) of shape \[3, 5\], got \[5, 7\]": (
        linear_cross_entropy, (X, WEIGHT.t(), TARGET), {},
    ),
    rf"{SHAPE}$": (linear_cross_entropy, (X, WEIGHT, TARGET[:2]), {}),
    r"the bias must be of shape \[7\], got \[5\]": (
        linear_cross_entropy, (X, WEIGHT, TARGET, torch.zeros(5)), {},
    ),
    "the weight must be torch.float32 on cpu like x, got torch.float16 on cpu": (
        linear_cross_entropy, (X, WEIGHT.half(), TARGET), {},
    ),
    "reduction is not one of mean, sum, got 'none'": (
        linear_cross_entropy, (X, WEIGHT, TARGET), {"reduction": "none"},
    ),
    "chunk_rows must be at least 1, got 0": (linear_cross_entropy, (X, WEIGHT, TARGET), {"chunk_rows": 0}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_arguments_are_refused(message: str) -> None:
    function, arguments, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)


class AllocationTracker(TorchDispatchMode):
    """Tracks the live bytes of tensors that operators allocate, their peak, and the largest allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage()._cdata for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)
        }
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, Tensor) and result.untyped_storage()._cdata not in known | self._seen:
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.alive += size
        self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


@pytest.mark.parametrize(("dtype", "num_fp32_copies"), [(torch.float32, 0), (torch.bfloat16, 1)], ids=str)
def test_linear_cross_entropy_never_allocates_the_full_logits(
    dtype: torch.dtype, num_fp32_copies: int
) -> None:
    rows, features, classes, chunk_rows = 512, 16, 256, 32
    x, weight = torch.randn(rows, features, dtype=dtype), torch.randn(classes, features, dtype=dtype)
    target, bias = torch.randint(classes, (rows,)), torch.randn(classes, dtype=dtype)
    needs = [True, True, True]
    with AllocationTracker() as tracker:
        results = chunked_loss_and_gradients(x, weight, target, bias, -100, 0.1, "mean", chunk_rows, needs)
    assert tracker.alive >= sum(t.nbytes for t in results), "the tracker misses the results"
    # On the CPU, the reference and the factors of the weight's gradient make fp32 copies of a few chunks.
    temporary = tracker.peak - sum(t.nbytes for t in results) - num_fp32_copies * 4 * classes * (features + 1)
    assert temporary <= 8 * 4 * chunk_rows * classes < 4 * rows * classes // 2 + 1
    assert tracker.largest <= 4 * max(chunk_rows * classes, rows * features)
    with AllocationTracker() as tracker:
        chunked_loss_and_gradients(x, weight, target, bias, -100, 0.1, "mean", rows, needs)
    assert tracker.largest >= x.itemsize * rows * classes, "the tracker misses the full logits"


def test_chunk_rows_are_chosen_by_shape() -> None:
    assert choose_chunk_rows(16384, 128256, 4096) == MIN_CHUNK_ROWS
    assert choose_chunk_rows(65536, 32000, 4096) == 16384  # 8389 rows of logits take as much memory as x
    assert (choose_chunk_rows(4096, 100, 4096), choose_chunk_rows(0, 0, 0)) == (4096, 1)
