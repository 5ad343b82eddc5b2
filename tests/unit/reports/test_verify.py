"""`verify` accepts correct pipelines, rejects wrong ones, and reports the differences."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe, switches
from gpipe_fast.reports.verify import Report, Row, verify
from gpipe_fast.trace.symbolic import Template
from gpipe_fast.verify import find_switch
from tests.models import MODELS, batch_normed, features, mlp, uneven_balance

pytestmark = pytest.mark.usefixtures("one_thread")


Loss = Callable[[Tensor], object]


def squared_loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([o.abs().float().square().mean() for o in outputs]).sum()


class Alternating:
    """Calls the losses in turn: the first for the pipeline, the second for the plain loop."""

    def __init__(self, *losses: Loss) -> None:
        self.losses = list(losses)

    def __call__(self, output: Tensor) -> Tensor:
        loss = self.losses.pop(0)(output)
        return loss  # type: ignore[return-value]


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
@pytest.mark.parametrize("name", ["gpt", "spectral norm"])
def test_verify_accepts_models_and_has_a_row_for_each_tensor(name: str) -> None:
    make, batch = MODELS[name]
    model = make()
    model[0].requires_grad_(False)
    report = verify(GPipe(model, uneven_balance(len(model), 2), chunks=4), batch(7), squared_loss)
    assert report, report
    assert report.ok
    gradients = [f"gradient of {name}" for name, p in model.named_parameters() if p.requires_grad]
    buffers = [f"buffer {name}" for name, _ in model.named_buffers()]
    assert names(report) == ["output", "loss", *gradients, *buffers]
    assert all(row.difference == row.relative == 0 for row in report.rows)


class Pair(nn.Module):
    """Takes two tensors, and returns a complex one beside a real one."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.complex(*pair), pair[0] * pair[1]


def test_verify_accepts_tuples_complex_numbers_and_a_loss_that_draws() -> None:
    pipe = GPipe(nn.Sequential(Pair(), nn.Identity()), [1, 1], chunks=3)
    x = features().requires_grad_(), features().requires_grad_()
    report = verify(pipe, x, lambda y: squared_loss(y) * torch.rand(()))
    assert report, report
    assert names(report) == ["output 0", "output 1", "loss", "gradient of input 0", "gradient of input 1"]
    with wrong_forward(lambda pipe, y: (torch.complex(y[0].real, y[0].imag + 2**-10), y[1])):
        rows = differing(verify(pipe, x, squared_loss))
    assert rows["output 0"].difference == pytest.approx(2**-10, rel=1e-3)


def test_verify_accepts_eval_mode_and_no_grad_mode() -> None:
    pipe = GPipe(batch_normed(), [2, 3], chunks=4).eval()
    with torch.no_grad():
        report = verify(pipe, features(), squared_loss)
        assert not torch.is_grad_enabled()
    assert report, report
    assert "gradient of 0.weight" in names(report)


class DropoutAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


def test_verify_accepts_autocast_with_its_weight_cache() -> None:
    """Left on, the cache would add up the gradients of several micro-batches in bfloat16.

    The backward of the attention differs if it runs under autocast.
    """
    layers = nn.Sequential(nn.Linear(8, 8), DropoutAttention(), nn.Linear(8, 8), DropoutAttention())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = verify(GPipe(layers, [2, 2], chunks=4), torch.randn(8, 2, 5, 8), squared_loss)
        assert torch.is_autocast_cache_enabled()
    assert report, report


def test_nan_on_both_sides_is_equal() -> None:
    x = features()
    x[0, 0], x[1, 0] = math.nan, math.inf
    pipe = GPipe(mlp(), [2, 3], chunks=2)
    report = verify(pipe, x, squared_loss)
    assert report, report
    with wrong_forward(lambda pipe, y: torch.where(y.isnan(), -y, y)):  # other bits, but still NaN
        assert "output" not in differing(verify(pipe, x, squared_loss))
    with wrong_forward(lambda pipe, y: y.index_fill(0, torch.tensor([5]), math.nan)):
        assert differing(verify(pipe, x, squared_loss))["output"].difference == math.inf


def one_bit_off(pipe: GPipe, y: Tensor) -> Tensor:
    bump = torch.zeros_like(y)
    bump[7, 3] = (torch.nextafter(y[7, 3], torch.tensor(9.0)) - y[7, 3]).detach()
    return y + bump


def other_zeros(pipe: GPipe, y: Tensor) -> Tensor:
    return torch.where(y == 0, -0.0, y)


def test_verify_rejects_an_output_that_is_off_by_one_bit_or_by_the_sign_of_a_zero() -> None:
    model = mlp().append(nn.ReLU())
    for change, largest in ((one_bit_off, 1e-7), (other_zeros, 0.0)):
        with wrong_forward(change):
            report = verify(GPipe(model, [2, 4], chunks=4), features(), squared_loss)
        assert not report
        row = differing(report)["output"]
        assert (row.difference > 0) == (largest > 0)
        assert row.difference <= largest
        largest_output = model(features()).abs().max().item()
        assert row.relative == pytest.approx(row.difference / largest_output, rel=1e-3)


def test_verify_rejects_wrong_gradients() -> None:
    def change(pipe: GPipe, y: Tensor) -> Tensor:
        y.register_hook(lambda gradient: gradient * 1.5)
        return y

    with wrong_forward(change):
        report = verify(GPipe(mlp(), [2, 3], chunks=4), features(), squared_loss)
    assert set(names(report)) - set(differing(report)) == {"output", "loss"}
    assert differing(report)["gradient of 2.weight"].relative == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ((torch.mean, lambda y: y.double().mean()), "dtype torch.float32, not torch.float64"),
        ((lambda y: y.mean()[None], torch.mean), "shape torch.Size([1]), not torch.Size([])"),
    ],
)
def test_verify_rejects_another_dtype_or_shape(losses: tuple[Loss, Loss], note: str) -> None:
    row = differing(verify(GPipe(mlp(), [2, 3], chunks=4), features(), Alternating(*losses)))["loss"]
    assert row.difference == row.relative == math.inf
    assert note in row.note


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


def test_chunks_set_the_number_of_micro_batches() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=3)
    for chunks, expected in ((None, 3), (5, 4), ("auto", 7)):
        report = verify(pipe, features(7), squared_loss, chunks=chunks)  # type: ignore[arg-type]
        assert report, report
        assert report.num_microbatches == expected
        assert pipe.chunks == 3
    with pytest.raises(ValueError, match="number of chunks must be positive integer or 'auto', got 0"):
        verify(pipe, features(), squared_loss, chunks=0)
    assert pipe.chunks == 3


def test_equal_tensors_are_left_out_of_the_table() -> None:
    def change(pipe: GPipe, y: Tensor) -> Tensor:
        pipe[1].running_mean.add_(2.0)  # type: ignore[union-attr, operator]
        return y

    pipe = GPipe(batch_normed(), [2, 3], chunks=4)
    with wrong_forward(change):
        report = verify(pipe, features(), squared_loss)
    assert differing(report)["buffer 1.running_mean"].difference == pytest.approx(2.0)
    headline, _, headers, _, *rows = str(report).splitlines()
    assert headers.split() == ["tensor", "equal", "largest", "difference", "relative", "note"]
    assert headline == f"1 of {len(report.rows)} tensors differ from the plain loop's"
    assert [row.split()[:3] for row in rows] == [["buffer", "1.running_mean", "NO"]]
    assert len(report.table(all=True).splitlines()) == 2 + len(report.rows)
    equal = verify(pipe, features(), squared_loss, all=True)
    assert str(equal) == f"{equal.headline}\n\n{equal.table()}"
    assert str(verify(pipe, features(), squared_loss)) == equal.headline
    assert equal.headline == f"equal bit for bit to the plain loop: {len(report.rows)} tensors"


class Weighted(nn.Module):
    """Takes two tensors and a keyword argument."""

    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        return (x * scale + y).tanh()


def test_verify_takes_several_inputs_and_keyword_arguments() -> None:
    pipe = GPipe(nn.Sequential(Weighted(), *mlp(), nn.Dropout(0.3)), [3, 4], chunks=4)
    x, y = features().requires_grad_(), features(8).flip(0)
    scale = gpipe_fast.replicate(torch.tensor(0.5, requires_grad=True))
    report = verify(pipe, x, y, squared_loss, scale=scale)
    assert report, report
    assert names(report)[2:4] == ["gradient of input 0", "gradient of input 2"]
    report = verify(pipe, loss_fn=squared_loss, x=x, y=y, scale=0.5)
    assert report, report


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


class StateSnapshot:
    """The state that `verify` must not change."""

    def __init__(self, pipe: GPipe, x: Tensor) -> None:
        tensors = [x, *pipe.parameters(), *pipe.buffers()]
        self.identities = [(id(t), id(t.grad)) for t in tensors]
        self.values = [(t.detach().clone(), None if t.grad is None else t.grad.clone()) for t in tensors]
        self.modes = [module.training for module in pipe.modules()]
        self.random = torch.get_rng_state()
        self.settings = (
            (pipe.chunks, pipe.threads_per_stage, pipe.checkpoint, pipe.balance),
            (torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_cache_enabled()),
        )

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, StateSnapshot)
        pairs = zip(self.values, other.values, strict=True)
        assert self.identities == other.identities
        assert all(torch.equal(a, b) for (a, _), (b, _) in pairs)
        assert all(a is b or torch.equal(a, b) for (_, a), (_, b) in pairs)  # type: ignore[arg-type]
        assert self.modes == other.modes
        assert torch.equal(self.random, other.random)
        assert self.settings == other.settings
        return True


def failing(output: Tensor) -> Tensor:
    raise ZeroDivisionError("the loss")


def squared_loss_with_one_thread(output: Tensor) -> Tensor:
    assert torch.get_num_threads() == 1  # two threads for two stages
    return squared_loss(output)


@pytest.mark.parametrize(
    ("loss", "gradients"),
    [
        ((squared_loss_with_one_thread, squared_loss_with_one_thread), True),
        ((failing,), False),
        ((squared_loss, failing), True),
    ],
    ids=["no failure", "first loss fails", "second loss fails"],
)
def test_verify_restores_all_state(loss: tuple[Loss, ...], gradients: bool) -> None:
    pipe, x = GPipe(batch_normed(), [2, 3], chunks="auto"), features(16)
    pipe[2].eval()  # unlike the other layers
    if gradients:
        pipe(x).sum().backward()
    torch.rand(3)
    torch.set_num_threads(2)
    before = StateSnapshot(pipe, x)
    if failing in loss:
        with pytest.raises(ZeroDivisionError, match="the loss"):
            verify(pipe, x, Alternating(*loss), chunks=3)
    else:
        report = verify(pipe, x, Alternating(*loss), chunks=3)
        assert report, report
    assert StateSnapshot(pipe, x) == before


def test_an_input_that_is_written_in_place_is_restored() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4).requires_grad_(False), nn.PReLU())
    x = features()
    before = x.clone()
    report = verify(GPipe(model, [2, 1], chunks=2), x, squared_loss)
    assert report, report
    assert torch.equal(x, before)


def test_verify_runs_no_post_accumulate_grad_hooks() -> None:
    """Such a hook may run an optimizer."""
    pipe, hooked = GPipe(mlp(), [2, 3], chunks=2), []
    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(hooked.append)
    assert verify(pipe, features(), squared_loss)
    assert hooked == []
    squared_loss(pipe(features())).backward()
    assert len(hooked) == 6


@pytest.mark.usefixtures("fresh_warnings")
def test_verify_leaves_the_warning_about_few_micro_batches_to_training() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(pipe, features(), squared_loss)
    with pytest.warns(UserWarning, match="2 micro-batches on 2 stages"):
        pipe(features())


@pytest.mark.parametrize("cause", [*switches.SWITCHES, None])
def test_the_switch_of_a_planted_difference_is_found(cause: str | None) -> None:
    forward = GPipe.forward

    def wrong(self: GPipe, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + (cause is None or not switches.is_disabled(cause))

    pipe = GPipe(mlp(), [2, len(mlp()) - 2], chunks=4)
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with mock.patch.object(GPipe, "forward", wrong):
        found = find_switch(pipe, features(8), squared_loss)
    assert found.causes == ([] if cause is None else [cause])
    assert f"{cause or 'nothing'} " in str(found)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())
    assert pipe.backend == "auto"


def test_equal_steps_have_no_cause() -> None:
    found = find_switch(GPipe(mlp(), [len(mlp())], chunks=4, backend="aten"), features(8), squared_loss)
    assert found.all_on.ok
    assert found.causes == []
    assert "capture" not in found.by_switch


def test_templates_are_made_for_the_other_mini_batches() -> None:
    """Only then can a template be the cause."""
    pipe = GPipe(mlp(), [len(mlp())], chunks=2)
    with mock.patch.object(Template, "at", autospec=True, side_effect=Template.at) as at:
        found = find_switch(pipe, features(24), squared_loss, also=[features(8), features(16)])
    assert found.all_on.ok
    assert at.called
