"""Blocks with frozen quantized weights and adapters run as programs, and equal the plain loop to the bit."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.quantized import KINDS, WIDTH, blocks, eight_bits
from tests.reference import SEED, loop_step, pipeline_step, unequal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*micro-batches on")]

DTYPES = (torch.float32, torch.bfloat16)
CASES = [*itertools.product(KINDS, DTYPES, CHECKPOINT_MODES, (1, 4, 8), (2, 4), (0.0, 0.3))]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("kind", "dtype", "checkpoint", "chunks", "stages", "dropout"), CASES)
def test_gradients_and_updates_equal_the_plain_loop(
    kind: str, dtype: torch.dtype, checkpoint: str, chunks: int, stages: int, dropout: float
) -> None:
    model = blocks(KINDS[kind], 4, dropout, dtype)
    plain = copy.deepcopy(model)
    balance = [4 // stages] * stages
    pipe = GPipe(model, balance=balance, chunks=chunks, checkpoint=checkpoint, backend="aten")
    x = torch.randn(8, WIDTH, dtype=dtype)
    assert not unequal(pipeline_step(pipe, x), loop_step(plain, x, chunks))
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], 1e-2) for each in (pipe, plain)
    ]
    for step in range(3):
        torch.manual_seed(SEED + step)
        pipe(x).square().mean().backward()
        torch.manual_seed(SEED + step)
        with keyed_rng(plain):
            torch.cat([plain(c) for c in x.chunk(chunks)]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (pipe, plain)]
    assert all(map(torch.equal, *trained))


@pytest.mark.filterwarnings("ignore:.*runs in Python")
def test_weights_of_8_bits_equal_the_plain_loop_in_python() -> None:
    """Bitsandbytes moves their scales from the weight to the layer in the first forward, a side effect."""
    model = blocks(eight_bits)
    pipe, x = GPipe(copy.deepcopy(model), balance=[2, 2], chunks=4), torch.randn(8, WIDTH)
    for _ in range(2):
        assert not unequal(pipeline_step(pipe, x), loop_step(model, x, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_parameter_that_requires_a_gradient_is_refused(kind: str) -> None:
    model = blocks(KINDS[kind])
    weight = model[1].up.base.weight
    if not weight.is_floating_point():
        pytest.skip("PyTorch refuses it")
    weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"up.base.weight is quantized .* requires a gradient"):
        GPipe(model, balance=[2, 2], chunks=2)(torch.randn(8, WIDTH))
