"""Every random operation that is replaced: shape, distribution, and equal bits for equal keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.unit.randomness.keyed_draws import N, assert_distributed, keyed_mode

SHAPE = (64, 96, 2)
X = torch.linspace(-1, 1, math.prod(SHAPE)).view(SHAPE)
INTS = torch.zeros(SHAPE, dtype=torch.int64)
WEIGHTS = torch.tensor([[1.0, 0.0, 3.0, 4.0]]).expand(4096, 4)


# Each replaced operation, and the expected mean of its draws (None if it is not checked).
OPS: dict[str, tuple[Callable[[], Tensor], float | None]] = {
    "bernoulli": (lambda: torch.bernoulli(torch.full(SHAPE, 0.3)), 0.3),
    "bernoulli.p": (lambda: torch.bernoulli(X, 0.3), 0.3),
    "bernoulli_": (lambda: torch.empty(SHAPE).bernoulli_(0.3), 0.3),
    "bernoulli_.Tensor": (lambda: torch.empty(SHAPE).bernoulli_(torch.tensor(0.3, dtype=torch.float64)), 0.3),
    "native_dropout": (lambda: torch.native_dropout(torch.ones(SHAPE), 0.3, True)[0], 1.0),
    "dropout": (lambda: F.dropout(torch.ones(SHAPE), 0.3), 1.0),
    "dropout1d": (lambda: F.dropout1d(torch.ones(SHAPE), 0.3), 1.0),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.zeros(SHAPE), 0.3, training=True), 0.0),
    "feature_alpha_dropout": (lambda: F.feature_alpha_dropout(torch.zeros(SHAPE), 0.3, training=True), 0.0),
    "attention": (lambda: F.scaled_dot_product_attention(X[:2], X[:2], X[:2], dropout_p=0.3), None),
    "rand": (lambda: torch.rand(SHAPE), 0.5),
    "rand_like": (lambda: torch.rand_like(X), 0.5),
    "randn": (lambda: torch.randn(SHAPE), 0.0),
    "randn_like": (lambda: torch.randn_like(X), 0.0),
    "uniform_": (lambda: torch.empty(SHAPE).uniform_(-1, 3), 1.0),
    "normal_": (lambda: torch.empty(SHAPE).normal_(1, 2), 1.0),
    "normal_functional": (lambda: torch.ops.aten.normal_functional(X, 1.0, 2.0), 1.0),
    "normal.Tensor_float": (lambda: torch.normal(torch.full(SHAPE, 2.0), 0.5), 2.0),
    "normal.float_Tensor": (lambda: torch.normal(2.0, torch.full(SHAPE, 0.5)), 2.0),
    "normal.Tensor_Tensor": (lambda: torch.normal(torch.full(SHAPE, 2.0), torch.tensor(0.5)), 2.0),
    "normal.float_float": (lambda: torch.normal(2.0, 0.5, SHAPE), 2.0),
    "exponential_": (lambda: torch.empty(SHAPE).exponential_(2.0), 0.5),
    "log_normal_": (lambda: torch.empty(SHAPE).log_normal_(0.0, 0.5), math.exp(0.125)),
    "cauchy_": (lambda: torch.empty(SHAPE).cauchy_(3.0, 0.1).atan(), None),
    "geometric_": (lambda: torch.empty(SHAPE).geometric_(0.25), 4.0),
    "geometric_ of integers": (lambda: INTS.clone().geometric_(0.25), 4.0),
    "randint": (lambda: torch.randint(9, SHAPE), 4.0),
    "randint.low": (lambda: torch.randint(-2, 9, SHAPE), 3.0),
    "randint_like": (lambda: torch.randint_like(INTS, 9), 4.0),
    "randint_like.low": (lambda: torch.randint_like(X, -2, 9), 3.0),
    "random_": (lambda: torch.empty(SHAPE, dtype=torch.uint8).random_(), 127.5),
    "random_ of floats": (lambda: torch.empty(SHAPE).random_() / 2**24, 0.5),
    "random_.to": (lambda: INTS.clone().random_(9), 4.0),
    "random_.from": (lambda: INTS.clone().random_(-2, 9), 3.0),
    "random_.from to the end": (lambda: INTS.clone().random_(-(2**63), None).double() / 2**63, 0.0),
    "randperm": (lambda: torch.randperm(1001), 500.0),
    "multinomial": (lambda: WEIGHTS.multinomial(1), 2.25),
    "multinomial with replacement": (lambda: WEIGHTS.multinomial(9, replacement=True), 2.25),
    "multinomial of one row": (lambda: WEIGHTS[0].multinomial(4096, replacement=True), 2.25),
    "rrelu": (lambda: F.rrelu(-torch.ones(SHAPE), 0.2, 0.4, training=True), -0.3),
    "rrelu_": (lambda: F.rrelu_(-torch.ones(SHAPE), 0.2, 0.4, training=True), -0.3),
    "fractional_max_pool2d": (lambda: F.fractional_max_pool2d(X[None], (3, 1), (31, 1)), None),
    "gumbel_softmax": (lambda: F.gumbel_softmax(torch.zeros(SHAPE)), 0.5),
}


@pytest.mark.parametrize("name", OPS)
def test_a_replaced_operation_draws_reproducibly_from_its_distribution(name: str) -> None:
    call, mean = OPS[name]
    plain = call()
    with keyed_mode():
        first, second = call(), call()
    state = torch.get_rng_state()
    with keyed_mode():
        assert torch.equal(first, call())
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, second)
    assert (first.shape, first.dtype, first.stride()) == (plain.shape, plain.dtype, plain.stride())
    if mean is not None:
        values = first.double()
        error = values.std().item() / math.sqrt(values.numel())
        assert abs(values.mean().item() - mean) < 4.5 * error
    with FakeTensorMode(allow_non_fake_inputs=True), keyed_mode():
        assert call().shape == plain.shape


def test_permutations_integers_samples_and_cauchy_follow_their_distributions() -> None:
    with keyed_mode():
        assert sorted(torch.randperm(1001).tolist()) == list(range(1001))
        assert torch.randint(3, (1000,)).unique().tolist() == [0, 1, 2]
        sample = WEIGHTS.multinomial(3)
        counts = WEIGHTS.multinomial(1, replacement=True).flatten().bincount(minlength=4).double()
        cauchy = torch.empty(N, dtype=torch.float64).cauchy_(3.0, 0.1)
    assert (
        sample.sort().values == torch.tensor([0, 2, 3])
    ).all()  # without replacement; a weight of 0 is never drawn
    expected = WEIGHTS[0].double() / 8 * 4096
    assert counts[1] == 0
    assert ((counts - expected)[[0, 2, 3]].abs() < 4 * expected[[0, 2, 3]].sqrt()).all()
    assert_distributed(cauchy, lambda x: 0.5 + ((x - 3.0) / 0.1).atan() / math.pi)


def test_operations_that_draw_nothing_do_not_shift_later_draws() -> None:
    x = torch.randn(3, 4)
    with keyed_mode():
        first = F.dropout(x)
    with keyed_mode():
        assert torch.equal(F.rrelu(x), F.leaky_relu(x, (1 / 8 + 1 / 3) / 2))
        assert torch.equal(torch.native_dropout(x, 0.5, False)[0], x)
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
        assert torch.equal(F.dropout(x), first)


def test_dropout_masks_do_not_depend_on_the_memory_format() -> None:
    x = torch.ones(4, 8, 6, 6)
    with keyed_mode():
        expected = F.dropout(x, 0.4)
    with keyed_mode():
        channels_last = F.dropout(x.to(memory_format=torch.channels_last), 0.4)
    with keyed_mode():
        native, mask = torch.native_dropout(x.to(memory_format=torch.channels_last), 0.4, True)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert native.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(expected, channels_last)
    assert torch.equal(mask, expected != 0)
