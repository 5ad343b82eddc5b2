"""KeyedRandomMode in eager mode and under tracing, and keyed_rng around a plain micro-batch loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gpipe_fast.randomness.random import UnkeyedRandomOp, keyed_rng, make_key, minibatch_key
from tests.unit.randomness.keyed_draws import draw, keyed_mode


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.poisson(torch.ones(3)), "aten.poisson.default has no keyed counterpart"),
        (lambda: torch.rand(3, generator=torch.Generator()), "has no keyed counterpart"),
        (lambda: torch.empty(3).normal_(generator=torch.Generator()), "has no keyed counterpart"),
        (lambda: torch.randn(3, dtype=torch.complex64), "complex64"),
        (lambda: checkpoint(F.dropout, torch.ones(3, requires_grad=True), use_reentrant=False), "checkpoint"),
    ],
)
def test_random_operations_that_cannot_be_keyed_raise(call: Callable[[], Tensor], message: str) -> None:
    with keyed_mode(), pytest.raises(UnkeyedRandomOp, match=message):
        call()


class FusedAttentionRecorder(TorchFunctionMode):
    """Records whether attention may use a fused kernel, which would draw its own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_allowed: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            cuda = torch.backends.cuda
            fused = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
            self.fused_allowed.append(any(enabled() for enabled in fused))
        return func(*args, **kwargs or {})


def test_attention_with_dropout_is_not_fused_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    with FusedAttentionRecorder() as recorder, keyed_mode():
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        F.scaled_dot_product_attention(q, k, v, None, 0.3)
        F.scaled_dot_product_attention(q, k, v)
    assert recorder.fused_allowed == [False, False, True]


def test_keyed_rng_counts_microbatches_and_layers() -> None:
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    x = torch.ones(8, 64)
    with keyed_rng(model, key=5):
        outputs = [model(c) for c in x.chunk(4)]
    for microbatch, output in enumerate(outputs):
        expected = x[:2]
        for layer, ordinal in ((1, 0), (2, 0), (2, 1)):
            mask = draw("bernoulli", [2, 64], 0.5, key=make_key(5, microbatch), layer=layer, ordinal=ordinal)
            expected = expected * mask.div(0.5)
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "calls_whole_model", [[False, False, False], [False, True, False], [True, False, True]]
)
def test_keyed_rng_counts_layers_that_are_called_one_by_one(calls_whole_model: list[bool]) -> None:
    """Such calls may be mixed with calls of the whole model; one layer occurs twice, first and last."""
    shared = nn.Dropout(0.5)
    model = nn.Sequential(shared, nn.Sequential(nn.Dropout(0.5), nn.ReLU()), nn.Dropout(0.1), shared)
    x = torch.ones(6, 64)
    with keyed_rng(model, key=5):
        expected = [model(c) for c in x.chunk(3)]
    with keyed_rng(model, key=5):
        for c, whole, wanted in zip(x.chunk(3), calls_whole_model, expected, strict=True):
            if whole:
                c = model(c)
            else:
                for layer in model:
                    c = layer(c)
            assert torch.equal(c, wanted)


def test_keyed_rng_begins_the_next_microbatch_after_a_failed_layer() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Bilinear(1, 1, 1))
    with keyed_rng(model, key=5):
        first = model[0](torch.ones(64))
        with pytest.raises(TypeError, match="forward"):
            model[1](first)
        second = model[0](torch.ones(64))
    masks = [draw("bernoulli", [64], 0.5, key=make_key(5, m), layer=0, ordinal=0) for m in range(2)]
    assert torch.equal(torch.stack([first, second]), torch.stack(masks) * 2)


def test_keyed_rng_refuses_layers_out_of_order() -> None:
    model, x = nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Tanh()), torch.ones(3)
    for calls, expected in (
        ([1], r"out of order: got a ReLU, expected layer 0 \(Dropout\) or"),
        ([0, 2], r"out of order: got a Tanh, expected layer 1 \(ReLU\) or layer 0 \(Dropout\) for"),
        ([0, 0, 1, 1], r"out of order: got a ReLU, expected layer 2 \(Tanh\) or layer 0"),
        ([0, 1, 2, 1], r"out of order: got a ReLU, expected layer 0 \(Dropout\) for the next micro"),
    ):
        with keyed_rng(model):
            for call in calls[:-1]:
                model[call](x)
            with pytest.raises(RuntimeError, match=expected):
                model[calls[-1]](x)


def test_manual_seed_determines_the_keys_of_keyed_rng() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with keyed_rng(model):
            outputs.append(model(torch.ones(64)))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    keys = [minibatch_key() for _ in range(64)]
    assert len(set(keys)) == 64
    assert min(keys) < -(2**60)
    assert max(keys) > 2**60


def test_keyed_rng_leaves_no_hooks_behind() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Bilinear(1, 1, 1))
    with pytest.raises(TypeError, match="forward"), keyed_rng(model):
        model(torch.ones(3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_keyed_rng_counts_a_layer_of_torchscript_which_takes_no_hooks() -> None:
    plain = nn.Sequential(*(nn.Dropout() for _ in range(3)))
    scripted = nn.Sequential(plain[0], torch.jit.script(plain[1]), plain[2])
    outputs = []
    for model in (plain, scripted, scripted):
        with keyed_rng(model, key=3):
            outputs.append(torch.cat([model(part) for part in torch.ones(8, 64).chunk(2)]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
    assert not torch.equal(outputs[0][:4], outputs[0][4:])


def test_keyed_rng_refuses_modules_whose_layers_it_cannot_count() -> None:
    with (
        pytest.raises(TypeError, match=r"must be an nn\.Sequential, but is Linear"),
        keyed_rng(nn.Linear(1, 1)),
    ):
        pass


def test_multi_head_attention_with_dropout_is_not_fused_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch function mode sees no calls inside of multi-head attention."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    attend, allowed = F.scaled_dot_product_attention, []

    def recording_attend(*args: Any) -> Tensor:
        allowed.append(torch.backends.cuda.flash_sdp_enabled())
        return attend(*args)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording_attend)
    attention, x = nn.MultiheadAttention(8, 2, dropout=0.3), torch.randn(4, 2, 8)
    with keyed_mode():
        attention(x, x, x, need_weights=False)
        attention.eval()(x, x, x, need_weights=False)
    assert allowed == [False, True]
