"""Pipelines on GPUs that are there: outputs, gradients, buffers against the plain loop on the same devices.

What is not captured has the loop's bits, under deterministic algorithms; what is captured, or of lower
precision, is at most twice as far from float64 as PyTorch is.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from bench.accuracy import excess
from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.fake_cuda.program import layers_of
from tests.fake_cuda.program import unequal as unequal_after_training
from tests.inside import pipeline_of
from tests.models import MODELS, cut
from tests.reference import Result, loop_step, pipeline_step, unequal

# For all matrix products of this process; read when the first one is made on a stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:stage"),
    pytest.mark.usefixtures("deterministic", "one_thread"),
]

STAGES, CHUNKS, BATCH = 4, 4, 16
ONE = ["cuda:0"] * STAGES
TRAINED = ("mlp", "skips", "several", "batch norm", "dropout", "tied", "python")
# Graphs are captured after a step or two, then replayed.
STEPS = 5

every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
captured_or_not = pytest.mark.parametrize("capture", [False, True], ids=["uncaptured", "captured"])


def several_gpus() -> list[str]:
    """As many of four as there are, in turns."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    return [f"cuda:{index % count}" for index in range(STAGES)]


def devices_of(where: str) -> list[str]:
    return {
        "one": lambda: ONE,
        "mixed": lambda: ["cuda:0", "cpu", "cuda:0", "cuda:0"],
        "several": several_gpus,
    }[where]()


@pytest.mark.parametrize("where", ["one", "mixed", "several"])
@every_mode
@pytest.mark.parametrize("name", TRAINED)
def test_training_has_the_bits_of_the_plain_loop(name: str, checkpoint: str, where: str) -> None:
    """Several steps with an optimizer."""
    torch.manual_seed(0)
    devices = devices_of(where)
    assert unequal_after_training(name, devices, checkpoint, False, capture=False) == []


@pytest.mark.parametrize("where", ["one", "several"])
def test_steps_that_fail_in_between(where: str) -> None:
    torch.manual_seed(0)
    devices = devices_of(where)
    assert unequal_after_training("skips", devices, "except_last", True, capture=False) == []


@pytest.mark.parametrize("where", ["one", "several"])
@pytest.mark.parametrize("transport", ["peer", "pinned"])
@pytest.mark.parametrize("name", [name for name in TRAINED if name != "python"])
def test_forced_transports(name: str, transport: str, where: str) -> None:
    torch.manual_seed(0)
    keywords = {"capture": False, "transport": transport}
    assert unequal_after_training(name, devices_of(where), "except_last", False, **keywords) == []


def subject(name: str) -> tuple[nn.Sequential, Tensor]:
    """A model and a mini-batch, on the first GPU."""
    if name in MODELS:
        make, batch = MODELS[name]
        return make().to(ONE[0]), batch(BATCH).to(ONE[0])
    torch.manual_seed(0)
    model = nn.Sequential(*layers_of(name))
    return model.to(ONE[0]), torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1)).to(ONE[0])


def piped(model: nn.Sequential, checkpoint: str = "except_last", **keywords: object) -> GPipe:
    """Four stages on one GPU."""
    balance = cut(len(model), STAGES)
    return GPipe(model, balance, devices=ONE, chunks=CHUNKS, checkpoint=checkpoint, **keywords)


def minibatches(x: Tensor) -> list[Tensor]:
    """One for each step, all of them different."""
    return [x.roll(step, 0) + (step if x.is_floating_point() else 0) for step in range(STEPS)]


@every_mode
@pytest.mark.parametrize("name", MODELS)
def test_convolutions_attention_and_more_have_the_bits(name: str, checkpoint: str) -> None:
    model, x = subject(name)
    pipe = piped(model, checkpoint, capture=False)
    for minibatch in (x, x.flip(0), x):
        assert unequal(pipeline_step(pipe, minibatch), loop_step(model, minibatch, CHUNKS)) == []


def beyond(ours: Sequence[Result], plain: Sequence[Result], exact: Sequence[Result]) -> list[str]:
    """What is more than twice as far from float64 as PyTorch's, and by more than one rounding.

    The largest errors of several steps are compared: one of PyTorch's may be small by chance.
    """
    found = []
    for name, first in plain[0].items():
        values = [[step[name] for step in steps] for steps in (ours, plain, exact)]
        if first is None:
            assert not any(value is not None for steps in values for value in steps), name
            continue
        own, other, truth = (torch.stack(steps) for steps in values)  # type: ignore[arg-type]
        if not first.is_floating_point():
            assert torch.equal(own, other), name
        elif excess([own], [other], [truth])[0] > 1:
            found.append(name)
    return found


def lowered(dtype: str) -> contextlib.AbstractContextManager[object]:
    """Autocast without its cache, where that is asked for."""
    if dtype != "autocast":
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False)


def off(model: nn.Sequential, pipe: GPipe, batches: Sequence[Tensor], dtype: str = "float32") -> list[str]:
    """What is further off than it may be, in a step of each mini-batch."""
    exact = copy.deepcopy(model).double()
    ours, plain, truth = list[Result](), list[Result](), list[Result]()
    for x in batches:
        truth.append(loop_step(exact, x.double() if x.is_floating_point() else x, CHUNKS))
        with lowered(dtype):
            ours.append(pipeline_step(pipe, x))
            plain.append(loop_step(model, x, CHUNKS))
    return beyond(ours, plain, truth)


LOW = [name for name in (*TRAINED[:-1], *MODELS) if name != "spectral norm"]
PRECISIONS = [
    *(("float32", name) for name in dict.fromkeys((*TRAINED, *MODELS))),
    *((dtype, name) for dtype in ("bfloat16", "autocast") for name in dict.fromkeys(LOW)),
]


@every_mode
@pytest.mark.parametrize(("dtype", "name"), PRECISIONS)
def test_captured_is_within_twice_the_error_of_pytorch(dtype: str, name: str, checkpoint: str) -> None:
    model, x = subject(name)
    if dtype == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x
    pipe = piped(model, checkpoint, capture=True)
    assert off(model, pipe, minibatches(x), dtype) == []
    assert name == "python" or any(report.replays for report in pipeline_of(pipe).replays())


@pytest.mark.parametrize("transport", ["peer", "pinned"])
@pytest.mark.parametrize("name", ["mlp", "skips", "several", "gpt", "convolutions"])
def test_forced_transports_captured(name: str, transport: str) -> None:
    model, x = subject(name)
    assert off(model, piped(model, capture=True, transport=transport), minibatches(x)) == []


@captured_or_not
def test_gradients_added_up_in_float32(capture: bool) -> None:
    model, x = subject("mlp")
    model, x = model.bfloat16(), x.bfloat16()
    pipe = piped(model, capture=capture, grad_dtype=torch.float32)
    assert off(model, pipe, minibatches(x), "bfloat16") == []


def check(pipe: GPipe, model: nn.Sequential, x: Tensor, capture: bool) -> None:
    """One step."""
    if capture:
        assert off(model, pipe, [x]) == []
    else:
        assert unequal(pipeline_step(pipe, x), loop_step(model, x, CHUNKS)) == []


@captured_or_not
@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutions", "dropout"])
def test_shapes_that_change(name: str, capture: bool) -> None:
    model, x = subject(name)
    pipe = piped(model, capture=capture)
    for size in (16, 16, 16, 8, 16, 5, 8, 3, 16):
        check(pipe, model, x[:size], capture)


@captured_or_not
def test_inference_and_training_take_turns(capture: bool) -> None:
    model, x = subject("convolutions")
    pipe = piped(model, capture=capture)
    for _ in range(STEPS):
        pipe.train()
        check(pipe, model, x, capture)
        pipe.eval()
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), torch.cat([model(part) for part in x.chunk(CHUNKS)]))


def test_the_comparison_can_fail() -> None:
    model, x = subject("convolutions")
    plain, exact = (
        loop_step(m, b, CHUNKS) for m, b in ((model, x), (copy.deepcopy(model).double(), x.double()))
    )
    assert beyond([plain], [plain], [exact]) == []
    for name in ("output", "gradient of 0.weight", "buffer 1.running_mean"):
        assert beyond([{**plain, name: plain[name] * 1.001}], [plain], [exact]) == [name]  # type: ignore[operator]
    with pytest.raises(AssertionError, match="num_batches"):
        name = "buffer 1.num_batches_tracked"
        beyond([{**plain, name: plain[name] + 1}], [plain], [exact])  # type: ignore[operator]
