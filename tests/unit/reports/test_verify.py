"""`verify` accepts correct pipelines, rejects wrong ones, and reports the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.reports.verify import Report, Row, verify
from tests.contracts.contract_1_same_bits.test_values import TUPLES
from tests.models import batch_normed, every_model, features, mlp, noisy, uneven_balance
from tests.unit.reports.losses import Alternating, Loss, squared_loss

pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[GPipe, Tensor], Tensor]


def names(report: Report) -> list[str]:
    return [row.name for row in report.rows]


def differing(report: Report) -> dict[str, Row]:
    return {row.name: row for row in report.rows if not row.equal}


@contextmanager
def wrong_forward(change: Change) -> Iterator[None]:
    """Makes every forward of a `GPipe` return ``change(pipe, output)``."""
    forward = GPipe.forward
    with mock.patch.object(GPipe, "forward", lambda self, x: change(self, forward(self, x))):
        yield


@pytest.mark.smoke
@every_model
def test_verify_accepts_every_model(
    make: Callable[[], nn.Sequential], batch: Callable[[int], Tensor]
) -> None:
    model = make()
    report = verify(GPipe(model, uneven_balance(len(model), 2), chunks=4), batch(7), squared_loss)
    assert report, report
    assert report.ok
    gradients = [f"gradient of {name}" for name, _ in model.named_parameters()]
    buffers = [f"buffer {name}" for name, _ in model.named_buffers()]
    assert names(report) == ["output", "loss", *gradients, *buffers]
    assert all(row.difference == row.relative == 0 for row in report.rows)


@pytest.mark.parametrize("name", TUPLES)
def test_verify_accepts_tuple_inputs_and_outputs(name: str) -> None:
    make, balance, arity = TUPLES[name]
    inputs = tuple(features().requires_grad_() for _ in range(abs(arity)))
    x = inputs[0] if arity == 1 else inputs
    pipe = GPipe(nn.Sequential(*make()), balance, chunks=3)
    report = verify(pipe, x, squared_loss)
    assert report, report
    output = pipe(x)
    input_names = (
        ["gradient of input"] if arity == 1 else [f"gradient of input {i}" for i in range(len(inputs))]
    )
    output_names = [f"output {i}" for i in range(len(output))] if isinstance(output, tuple) else ["output"]
    assert names(report)[: len(output_names) + 1 + len(input_names)] == [*output_names, "loss", *input_names]


def test_verify_accepts_eval_mode_and_no_grad_mode() -> None:
    pipe = GPipe(batch_normed(), [2, 3], chunks=4).eval()
    with torch.no_grad():
        report = verify(pipe, features(), squared_loss)
        assert not torch.is_grad_enabled()
    assert report, report
    assert "gradient of 0.weight" in names(report)


def test_verify_accepts_autocast_with_its_weight_cache() -> None:
    """Left on, the cache would add up the gradients of several micro-batches in bfloat16."""
    pipe = GPipe(mlp(), [2, 3], chunks=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = verify(pipe, features(16), squared_loss)
        assert torch.is_autocast_cache_enabled()
    assert report, report


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x + 1)


class DropoutAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return y.transpose(1, 2).flatten(2)


def test_verify_runs_the_backward_outside_of_autocast() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), DropoutAttention(), nn.Linear(8, 8), DropoutAttention())
    pipe = GPipe(layers, [2, 2], chunks=4)
    with torch.autocast("cpu", torch.bfloat16):
        report = verify(pipe, torch.randn(8, 5, 8), squared_loss)
    assert report, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_complex_outputs_are_compared(dtype: torch.dtype) -> None:
    pipe, x = GPipe(mlp().append(Complex()).to(dtype), [2, 4], chunks=2), features().to(dtype)
    report = verify(pipe, x, squared_loss)
    assert report, report
    with wrong_forward(lambda pipe, y: torch.complex(y.real, y.imag + 2**-10)):
        assert differing(verify(pipe, x, squared_loss))["output"].difference == pytest.approx(
            2**-10, rel=1e-3
        )


def test_nan_on_both_sides_is_equal() -> None:
    x = features()
    x[0, 0], x[1, 0] = math.nan, math.inf
    report = verify(GPipe(mlp(), [2, 3], chunks=2), x, squared_loss)
    assert report, report
    with wrong_forward(lambda pipe, y: torch.where(y.isnan(), -y, y)):  # other bits, but still NaN
        assert "output" not in differing(verify(GPipe(mlp(), [2, 3], chunks=2), x, squared_loss))
    with wrong_forward(lambda pipe, y: y.index_fill(0, torch.tensor([5]), math.nan)):
        assert (
            differing(verify(GPipe(mlp(), [2, 3], chunks=2), x, squared_loss))["output"].difference
            == math.inf
        )


def test_verify_rejects_an_output_that_is_off_by_one_bit() -> None:
    def change(pipe: GPipe, y: Tensor) -> Tensor:
        bump = torch.zeros_like(y)
        bump[7, 3] = (torch.nextafter(y[7, 3], torch.tensor(9.0)) - y[7, 3]).detach()
        return y + bump

    with wrong_forward(change):
        report = verify(GPipe(mlp(), [2, 3], chunks=4), features(), squared_loss)
    assert not report
    row = differing(report)["output"]
    assert 0 < row.difference < 1e-7
    assert row.relative == pytest.approx(row.difference / mlp()(features()).abs().max().item(), rel=1e-3)


def test_verify_rejects_a_zero_of_the_other_sign() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    with wrong_forward(lambda pipe, y: torch.where(y == 0, -0.0, y)):
        rows = differing(verify(GPipe(model, [1, 1], chunks=2), features(), squared_loss))
    assert rows["output"] == Row("output", False, 0.0, 0.0)


def test_verify_rejects_wrong_gradients() -> None:
    def change(pipe: GPipe, y: Tensor) -> Tensor:
        y.register_hook(lambda gradient: gradient * 1.5)
        return y

    with wrong_forward(change):
        report = verify(GPipe(mlp(), [2, 3], chunks=4), features(), squared_loss)
    assert set(names(report)) - set(differing(report)) == {"output", "loss"}
    assert differing(report)["gradient of 2.weight"].relative == pytest.approx(0.5, rel=1e-5)


def test_verify_rejects_wrong_buffers() -> None:
    def change(pipe: GPipe, y: Tensor) -> Tensor:
        pipe[1].running_mean.add_(2.0)  # type: ignore[union-attr, operator]
        return y

    with wrong_forward(change):
        rows = differing(verify(GPipe(batch_normed(), [2, 3], chunks=4), features(), squared_loss))
    assert rows.keys() == {"buffer 1.running_mean"}
    assert rows["buffer 1.running_mean"].difference == pytest.approx(2.0)


def test_verify_rejects_other_random_numbers() -> None:
    def change(pipe: GPipe, y: Tensor) -> Tensor:
        return y + torch.rand_like(y)

    with wrong_forward(change):
        assert "output" in differing(verify(GPipe(mlp(), [2, 3], chunks=4), features(), squared_loss))


@pytest.mark.parametrize(
    ("losses", "name", "note"),
    [
        ((torch.mean, lambda y: y.double().mean()), "loss", "dtype torch.float32, not torch.float64"),
        (
            (lambda y: y.mean()[None], torch.mean),
            "loss",
            r"shape torch.Size\(\[1\]\), not torch.Size\(\[\]\)",
        ),
    ],
)
def test_verify_rejects_another_dtype_or_shape(losses: tuple[Loss, Loss], name: str, note: str) -> None:
    row = differing(verify(GPipe(mlp(), [2, 3], chunks=4), features(), Alternating(*losses)))[name]
    assert row.difference == row.relative == math.inf
    with pytest.raises(AssertionError, match=note):
        raise AssertionError(row.note)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_a_gradient_that_is_missing_on_one_side_is_reported() -> None:
    def one(output: tuple[Tensor, ...]) -> Tensor:
        return output[0].sum()

    def both(output: tuple[Tensor, ...]) -> Tensor:
        return one(output) + output[1].sum()

    pipe = GPipe(mlp()[:1].append(Heads()), [1, 1], chunks=2)
    unread = "gradient of 1.b.weight"
    assert unread not in names(verify(pipe, features(), one))
    for losses, note in (
        ((one, both), "missing in the pipeline"),
        ((both, one), "missing in the plain loop"),
    ):
        report = verify(pipe, features(), Alternating(*losses))  # type: ignore[arg-type]
        assert differing(report)[unread] == Row(unread, False, math.inf, math.inf, note)


def test_frozen_parameters_have_no_row() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    report = verify(GPipe(model, [2, 3], chunks=2), features(), squared_loss)
    assert report, report
    assert "gradient of 0.weight" not in names(report)
    assert "gradient of 2.weight" in names(report)


def test_the_loss_may_draw_random_numbers() -> None:
    torch.manual_seed(3)
    report = verify(GPipe(noisy(), [2, 4], chunks=4), features(), lambda y: (y * torch.rand_like(y)).sum())
    assert report, report


@pytest.mark.parametrize(
    ("pipe_chunks", "chunks", "expected"),
    [(3, None, 3), (3, 5, 4), (3, "auto", 7), ("auto", None, 7), ("auto", 2, 2)],
)
def test_chunks_set_the_number_of_micro_batches(pipe_chunks: int, chunks: int | None, expected: int) -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=pipe_chunks)
    report = verify(pipe, features(7), squared_loss, chunks=chunks)
    assert report, report
    assert report.num_microbatches == expected
    assert pipe.chunks == pipe_chunks


def test_the_package_exports_verify() -> None:
    assert gpipe_fast.verify is verify


def test_a_report_prints_a_table() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=2)
    report = verify(pipe, features(), squared_loss, all=True)
    first, empty, headers, _, *rows = str(report).splitlines()
    assert first == "equal bit for bit to the plain loop: 8 tensors"
    assert empty == ""
    assert str(verify(pipe, features(), squared_loss)) == first
    assert report.table() == "\n".join([headers, _, *rows])
    assert report.table(all=False).splitlines() == verify(pipe, features(), squared_loss).table().splitlines()
    assert headers.split() == ["tensor", "equal", "largest", "difference", "relative", "note"]
    assert [row.split()[-3:] for row in rows] == [["yes", "0", "0"]] * 8
    with wrong_forward(lambda pipe, y: y * 2):
        wrong_rows = str(verify(pipe, features(), torch.sum)).splitlines()
    assert wrong_rows[0] == "8 of 8 tensors differ from the plain loop's"
    assert wrong_rows[4].split()[:2] == ["output", "NO"]
    assert wrong_rows[4].split()[3] == "1"


def test_equal_tensors_are_left_out_of_the_table() -> None:
    def change(pipe: GPipe, y: Tensor) -> Tensor:
        pipe[1].running_mean.add_(2.0)  # type: ignore[union-attr, operator]
        return y

    pipe = GPipe(batch_normed(), [2, 3], chunks=4)
    with wrong_forward(change):
        report = verify(pipe, features(), squared_loss)
    headline, _, _, _, *rows = str(report).splitlines()
    assert headline == f"1 of {len(report.rows)} tensors differ from the plain loop's"
    assert [row.split()[:3] for row in rows] == [["buffer", "1.running_mean", "NO"]]
    assert len(report.table(all=True).splitlines()) == 2 + len(report.rows)


class Weighted(nn.Module):
    """Takes two tensors and a keyword argument."""

    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        return (x * scale + y).tanh()


def test_verify_takes_several_inputs_and_keyword_arguments() -> None:
    pipe = GPipe(nn.Sequential(Weighted(), *mlp(), nn.Dropout(0.3)), [3, 4], chunks=4)
    x, y = features().requires_grad_(), features(8).flip(0)
    scale = gpipe_fast.replicate(torch.tensor(0.5, requires_grad=True))
    for report in (
        verify(pipe, x, y, squared_loss, scale=scale),
        verify(pipe, x, loss_fn=squared_loss, y=y, scale=scale),
        verify(pipe, loss_fn=squared_loss, x=x, y=y, scale=0.5),
    ):
        assert report, report
    assert names(verify(pipe, x, y, squared_loss, scale=scale))[2:4] == [
        "gradient of input 0",
        "gradient of input 2",
    ]
    assert verify(GPipe(mlp(), [2, 3], chunks=2), input=features(), loss_fn=squared_loss)


def test_a_note_explains_why_tied_parameters_may_differ() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11, bias=False))
    layers[2].weight = layers[0].weight
    x = torch.randint(11, (16, 5))
    report = verify(GPipe(layers, [2, 1], chunks=8), x, squared_loss)
    (row,) = differing(report).values()
    assert row.name == "gradient of 0.weight"
    assert row.note == (
        "shared by stages 0, 1: its gradient is summed within each stage first, so the last bits may differ"
    )
    assert row.relative < 1e-5


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pipeline = GPipe(mlp(), [5])

    def forward(self, x: Tensor) -> Tensor:
        return self.pipeline(x)


ERRORS: dict[str, tuple[type[Exception], str, object, object, object]] = {
    "a plain model": (
        TypeError,
        "verify compares a GPipe .*, got Sequential",
        mlp(),
        features(),
        squared_loss,
    ),
    "a module that has a pipeline": (
        TypeError,
        "verify compares a GPipe .*, got Wrapper",
        Wrapper(),
        features(),
        squared_loss,
    ),
    "input without tensors": (TypeError, "expected Tensor, but got list", None, [1.0], squared_loss),
    "0-dimensional input": (ValueError, "no dimension to split", None, torch.zeros(()), squared_loss),
    "unequal batch sizes": (ValueError, "same batch size", None, (features(8), features(3)), squared_loss),
    "loss_fn is not a function": (
        TypeError,
        "loss_fn must be a function .*, got Tensor; pass it as the last argument or as loss_fn=",
        None,
        features(),
        torch.ones(2),
    ),
    "loss is a float": (TypeError, "a tensor with one element, got float", None, features(), lambda y: 1.0),
    "loss with many elements": (
        ValueError,
        r"must have one element, got shape \[8, 4\]",
        None,
        features(),
        lambda y: y,
    ),
    "loss without gradient": (
        ValueError,
        "the loss requires no gradient",
        None,
        features(),
        lambda y: y.detach().sum(),
    ),
}


@pytest.mark.parametrize(("kind", "message", "model", "x", "loss"), ERRORS.values(), ids=ERRORS.keys())
def test_wrong_arguments_are_refused(
    kind: type[Exception], message: str, model: object, x: object, loss: object
) -> None:
    with pytest.raises(kind, match=message):
        verify(model or GPipe(mlp(), [2, 3], chunks=2), x, loss)  # type: ignore[arg-type]


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = mlp().requires_grad_(False)
    weight = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="the loss requires no gradient"):
        verify(GPipe(model, [2, 3], chunks=2), features(), lambda y: (y * weight).sum())


def test_wrong_chunks_are_refused() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=2)
    with pytest.raises(ValueError, match="number of chunks must be positive integer or 'auto', got 0"):
        verify(pipe, features(), squared_loss, chunks=0)
    assert pipe.chunks == 2
