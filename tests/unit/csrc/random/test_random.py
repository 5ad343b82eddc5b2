"""The keyed operators: their bits, distributions and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_fast.randomness.random import make_key
from tests.unit.randomness.keyed_draws import (
    DRAWS,
    KEY,
    N,
    assert_distributed,
    assert_uncorrelated,
    draw,
    keyed,
)


def word_pairs(n: int, **place: Any) -> Tensor:
    """Returns the draw's words, two per integer: over the full range, an integer is its bits + minimum."""
    return draw("integer", [n], -(2**63), 2**63 - 1, **place) ^ -(2**63)


# Known answers that Random123 publishes.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    low, high = (int(word, 16) for word in key.split())
    signed = (high << 32 | low) - (1 << 64 if high >> 31 else 0)
    words = keyed.philox_block(signed, [int(word, 16) for word in counter.split()])
    assert " ".join(f"{word:08x}" for word in words.tolist()) == expected


def test_each_element_draws_from_its_own_philox_block() -> None:
    minibatch, microbatch, first_layer = KEY.tolist()
    drawn = word_pairs(2**12, layer=5, ordinal=9)
    for block in (0, 1, 7, 8, 255, 256, 2047):
        words = keyed.philox_block(minibatch, [block, 0, microbatch, (first_layer + 5) << 16 | 9]).tolist()
        for half in (0, 1):
            assert drawn[2 * block + half].item() % 2**64 == words[2 * half] | words[2 * half + 1] << 32


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.usefixtures("one_thread")  # which restores the number
@pytest.mark.parametrize("n", [0, 1, 3, 1025, 2**20 + 7])
def test_bits_depend_only_on_the_element_index(name: str, n: int) -> None:
    dtypes = [torch.int64] if name == "integer" else [torch.float32, torch.float64, torch.bfloat16]
    for dtype in dtypes:
        torch.set_num_threads(1)
        one = draw(name, [n], dtype=dtype)
        torch.set_num_threads(2)
        assert torch.equal(one, draw(name, [n], dtype=dtype))
        assert one.is_contiguous()
        assert one.dtype == dtype
        m = n // 2
        assert torch.equal(one[:m], draw(name, [m], dtype=dtype))
        assert torch.equal(one, draw(name, [1, n, 1], dtype=dtype).flatten())


@pytest.mark.parametrize("name", DRAWS)
def test_every_coordinate_of_the_key_changes_the_draw(name: str) -> None:
    base = draw(name, [N])
    minibatch, microbatch, first_layer = KEY.tolist()
    others = [
        draw(name, [N], key=make_key(minibatch + 1, microbatch, first_layer)),
        draw(name, [N], key=make_key(minibatch ^ (1 << 40), microbatch, first_layer)),
        draw(name, [N], key=make_key(minibatch, microbatch + 1, first_layer)),
        draw(name, [N], layer=2),
        draw(name, [N], ordinal=1),
        torch.cat([base[1:], base[:1]]),
    ]
    for other in others:
        assert_uncorrelated(base, other)
    # Layers are numbered from the start of the model, independently of the stages.
    assert torch.equal(base, draw(name, [N], key=make_key(minibatch, microbatch, 0), layer=first_layer + 1))


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli_draws_have_the_given_rate(p: float) -> None:
    mask = draw("bernoulli", [N], p, dtype=torch.bool)
    assert abs(mask.double().mean().item() - p) <= 4 * math.sqrt(p * (1 - p) / N)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64):
        assert torch.equal(draw("bernoulli", [N], p, dtype=dtype), mask.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_continuous_draws_have_their_distributions(dtype: torch.dtype) -> None:
    uniform = draw("uniform", [N], 0.0, 1.0, dtype=dtype)
    normal = draw("normal", [N], 0.0, 1.0, dtype=dtype)
    exponential = draw("exponential", [N], 1.0, dtype=dtype)
    assert_distributed(uniform, lambda x: x.clamp(0, 1))
    assert_distributed(normal, torch.special.ndtr)
    assert_distributed(exponential, lambda x: -torch.expm1(-x))
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert exponential.min() > 0
    assert_uncorrelated(normal[::2], normal[1::2])  # a Box-Muller pair


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_draws_are_rounded_within_their_range(dtype: torch.dtype) -> None:
    uniform = draw("uniform", [N], 0.0, 1.0, dtype=dtype)
    assert uniform.max() < 1  # not rounded up to the open end
    assert draw("uniform", [N], 1.0, 1.01, dtype=dtype).double().max() < 1.01
    assert abs(uniform.double().mean().item() - 0.5) < 0.01
    assert torch.equal(draw("normal", [N], dtype=dtype), draw("normal", [N]).to(dtype))
    assert torch.equal(draw("exponential", [N], dtype=dtype), draw("exponential", [N]).to(dtype))


def test_normal_and_exponential_draws_are_exact_to_float32() -> None:
    """Recomputes both draws in float64 from the words that they used."""
    words = word_pairs(N // 2)
    u = ((words & 0xFFFFFFFF).float() * 2.0**-32 + 2.0**-33).double()
    angle = ((words >> 32) & 0xFFFFFFFF).double() * (2 * math.pi * 2.0**-32)
    radius = torch.sqrt(-2 * torch.log(u))
    expected = torch.stack([radius * angle.cos(), radius * angle.sin()], 1).flatten()
    torch.testing.assert_close(draw("normal", [N], 0.0, 1.0).double(), expected, rtol=1e-6, atol=5e-7)
    # 2^-24, a float's resolution below 1, is the coarsest step of the uniform draw.
    exponentials = draw("exponential", [N], 1.0)[::2].double()
    torch.testing.assert_close(exponentials, -torch.log(u), rtol=5e-7, atol=2.0**-24)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw("bernoulli", [4], 1.5), "p must be in"),
        (lambda: draw("normal", [4], 0.0, -1.0), "std must not be negative"),
        (lambda: draw("exponential", [4], 0.0), "rate must be positive"),
        (lambda: draw("uniform", [4], key=torch.zeros(2, dtype=torch.int64)), "key must be"),
        (lambda: draw("uniform", [4], layer=70_000), "layer must fit 16 bits"),
        (lambda: draw("uniform", [4], ordinal=65_536), "65536 random ops"),
    ],
)
def test_invalid_arguments_of_draws_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", DRAWS)
def test_keyed_operators_pass_opcheck(name: str) -> None:
    dtype = torch.int64 if name == "integer" else torch.float32
    torch.library.opcheck(
        getattr(keyed, f"keyed_{name}").default,
        (KEY, 1, 0, [3, 5], *DRAWS[name]),
        {"dtype": dtype, "device": torch.device("cpu")},
    )
