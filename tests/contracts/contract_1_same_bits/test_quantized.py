"""Blocks with frozen quantized weights and adapters run as programs, and equal the plain loop to the bit."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.quantized import stored_bytes
from tests.quantized import KINDS, WIDTH, GroupedLinear, blocks, eight_bits
from tests.reference import SEED, loop_step, pipeline_step, unequal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*micro-batches on")]

DTYPES = (torch.float32, torch.bfloat16)
# GPTQ and AWQ keep numbers in buffers, so that their weights are no parameters.
EVERY_KIND = {**KINDS, "grouped": GroupedLinear}
CASES = [*itertools.product(EVERY_KIND, DTYPES, CHECKPOINT_MODES, (1, 4, 8), (2, 4), (0.0, 0.3))]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("kind", "dtype", "checkpoint", "chunks", "stages", "dropout"), CASES)
def test_gradients_and_updates_equal_the_plain_loop(
    kind: str, dtype: torch.dtype, checkpoint: str, chunks: int, stages: int, dropout: float
) -> None:
    model = blocks(EVERY_KIND[kind], 4, dropout, dtype)
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


def optimizer_of(library: str, name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    module = pytest.importorskip(f"{library}.optim", reason=f"{library} is not installed")
    more = {"min_8bit_size": 16} if library == "bitsandbytes" else {}
    return lambda parameters: getattr(module, name)(parameters, lr=1e-2, **more)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("bitsandbytes", "AdamW8bit"),
        ("bitsandbytes", "PagedAdamW8bit"),
        ("bitsandbytes", "PagedAdamW32bit"),
        ("torchao", "AdamW8bit"),
        ("torchao", "AdamW4bit"),
    ],
)
def test_optimizers_with_a_state_of_few_bits_update_in_a_step(library: str, name: str, in_step: bool) -> None:
    make, kind = optimizer_of(library, name), "NF4" if library == "bitsandbytes" else "torchao int8"
    model = blocks(KINDS[kind], 2).append(nn.Linear(WIDTH, 128))  # large enough for a state of few bits
    plain = copy.deepcopy(model)
    pipe, chunks = GPipe(model, balance=[1, 2], chunks=4), 4
    both = [[p for p in each.parameters() if p.requires_grad] for each in (pipe, plain)]
    ours, other = map(make, both)
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(8, WIDTH), torch.randn(8, 128)
        if in_step:
            pipe.step(x, target=target, loss_fn=F.mse_loss, optimizer=ours)
        else:
            pipe.step(x, target=target, loss_fn=F.mse_loss)
            ours.step()
        ours.zero_grad()
        pairs = zip(x.chunk(chunks), target.chunk(chunks), strict=True)
        losses = [F.mse_loss(plain(part), wanted) / chunks for part, wanted in pairs]
        sum(losses[1:], losses[0]).backward()
        other.step()
        other.zero_grad()
        assert all(map(torch.equal, *both))
    state = [each for of_one in ours.state.values() for each in of_one.values()]
    kept = sum(stored_bytes(each) for each in state if isinstance(each, torch.Tensor))
    assert sum(pipe.memory(x, optimizer=make).optimizer) == kept
    tensors = [each for each in state if isinstance(each, torch.Tensor)]
    assert "32bit" in name or any(
        type(each) is not torch.Tensor or each.dtype is torch.uint8 for each in tensors
    )


@pytest.mark.parametrize("kind", KINDS)
def test_copies_keep_the_scales(kind: str) -> None:
    pipe, x = GPipe(blocks(KINDS[kind]), balance=[2, 2], chunks=2), torch.randn(8, WIDTH)
    expected = pipeline_step(pipe, x)
    assert not unequal(pipeline_step(copy.deepcopy(pipe), x), expected)
    if not kind.startswith("torchao"):  # replaces a method of the layer by one that cannot be pickled
        file = io.BytesIO()
        torch.save(pipe, file)
        file.seek(0)
        assert not unequal(pipeline_step(torch.load(file, weights_only=False), x), expected)
    assert list(pipe.state_dict()) == list(blocks(KINDS[kind]).state_dict())
