"""Pipelines on real GPUs: outputs, gradients and buffers against the plain loop on the same devices.

Uncaptured steps equal the loop bit for bit, under deterministic algorithms. Captured and lower-precision
steps may have at most twice PyTorch's error against float64.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.fake_cuda.train_models import layers_of
from tests.fake_cuda.train_models import unequal as unequal_after_training
from tests.internals import pipeline_of
from tests.models import MODELS, uneven_balance
from tests.reference import Result, loop_step, pipeline_step, unequal
from tests.unit.kernels.accuracy import error_ratio

# cuBLAS reads this before the process's first matrix product on a stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:stage"),
    pytest.mark.usefixtures("deterministic", "one_thread"),
]

NUM_STAGES, CHUNKS, BATCH = 4, 4, 16
ONE_GPU = ["cuda:0"] * NUM_STAGES
TRAINED = ("mlp", "skips", "several", "batch norm", "dropout", "tied", "python")
# Enough steps to capture graphs, after one or two steps, and to replay them.
STEPS = 5

every_checkpoint_mode = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
captured_or_not = pytest.mark.parametrize("capture", [False, True], ids=["uncaptured", "captured"])


def several_gpus() -> list[str]:
    """Returns a device for each stage, round robin over the GPUs; skips the test if there is only one."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    return [f"cuda:{index % count}" for index in range(NUM_STAGES)]


def devices_of(placement: str) -> list[str]:
    return {
        "one": lambda: ONE_GPU,
        "mixed": lambda: ["cuda:0", "cpu", "cuda:0", "cuda:0"],
        "several": several_gpus,
    }[placement]()


@pytest.mark.parametrize("placement", ["one", "mixed", "several"])
@every_checkpoint_mode
@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_the_plain_loop_bit_for_bit(name: str, checkpoint: str, placement: str) -> None:
    """Trains for several steps with an optimizer."""
    torch.manual_seed(0)
    devices = devices_of(placement)
    assert unequal_after_training(name, devices, checkpoint, False, capture=False) == []


@pytest.mark.parametrize("placement", ["one", "several"])
@pytest.mark.parametrize("transport", ["peer", "pinned"])
@pytest.mark.parametrize("name", [name for name in TRAINED if name != "python"])
def test_forced_transports_equal_the_plain_loop_bit_for_bit(
    name: str, transport: str, placement: str
) -> None:
    torch.manual_seed(0)
    keywords = {"capture": False, "transport": transport}
    assert unequal_after_training(name, devices_of(placement), "except_last", False, **keywords) == []


def model_and_batch(name: str) -> tuple[nn.Sequential, Tensor]:
    """Returns a model and a mini-batch on the first GPU."""
    if name in MODELS:
        make, batch = MODELS[name]
        return make().to(ONE_GPU[0]), batch(BATCH).to(ONE_GPU[0])
    torch.manual_seed(0)
    model = nn.Sequential(*layers_of(name))
    return model.to(ONE_GPU[0]), torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(1)).to(
        ONE_GPU[0]
    )


def make_pipe(model: nn.Sequential, checkpoint: str = "except_last", **keywords: object) -> GPipe:
    """Returns a pipeline of four stages on one GPU."""
    balance = uneven_balance(len(model), NUM_STAGES)
    keywords = {"checkpoint": checkpoint, "capture": True, **keywords}
    return GPipe(model, balance, devices=ONE_GPU, chunks=CHUNKS, **keywords)


def minibatches(x: Tensor) -> list[Tensor]:
    """Returns a different mini-batch for each step."""
    return [x.roll(step, 0) + (step if x.is_floating_point() else 0) for step in range(STEPS)]


@every_checkpoint_mode
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_the_plain_loop_bit_for_bit(name: str, checkpoint: str) -> None:
    model, x = model_and_batch(name)
    pipe = make_pipe(model, checkpoint, capture=False)
    for minibatch in (x, x.flip(0), x):
        assert unequal(pipeline_step(pipe, minibatch), loop_step(model, minibatch, CHUNKS)) == []


def inaccurate_tensors(ours: Sequence[Result], plain: Sequence[Result], exact: Sequence[Result]) -> list[str]:
    """Returns the names of tensors whose error exceeds twice PyTorch's, and by more than one rounding.

    The largest errors of several steps are compared, because PyTorch's error in one may be small by chance.
    """
    found = []
    for name, first_value in plain[0].items():
        values = [[step[name] for step in steps] for steps in (ours, plain, exact)]
        if first_value is None:
            assert not any(value is not None for steps in values for value in steps), name
            continue
        ours_stacked, plain_stacked, exact_stacked = (torch.stack(steps) for steps in values)  # type: ignore[arg-type]
        if not first_value.is_floating_point():
            assert torch.equal(ours_stacked, plain_stacked), name
        elif error_ratio([ours_stacked], [plain_stacked], [exact_stacked])[0] > 1:
            found.append(name)
    return found


def autocast_context(dtype: str) -> contextlib.AbstractContextManager[object]:
    """Returns autocast without its weight cache if `dtype` is "autocast", else a null context."""
    if dtype != "autocast":
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False)


def inaccurate_after_steps(
    model: nn.Sequential, pipe: GPipe, batches: Sequence[Tensor], dtype: str = "float32"
) -> list[str]:
    """Runs a step for each mini-batch, and returns the names of tensors whose error is too large."""
    exact = copy.deepcopy(model).double()
    ours, plain, exact_results = list[Result](), list[Result](), list[Result]()
    for x in batches:
        exact_results.append(loop_step(exact, x.double() if x.is_floating_point() else x, CHUNKS))
        with autocast_context(dtype):
            ours.append(pipeline_step(pipe, x))
            plain.append(loop_step(model, x, CHUNKS))
    return inaccurate_tensors(ours, plain, exact_results)


LOW_PRECISION_MODELS = [name for name in (*TRAINED[:-1], *MODELS) if name != "spectral norm"]
PRECISIONS = [
    *(("float32", name) for name in dict.fromkeys((*TRAINED, *MODELS))),
    *((dtype, name) for dtype in ("bfloat16", "autocast") for name in dict.fromkeys(LOW_PRECISION_MODELS)),
]


@every_checkpoint_mode
@pytest.mark.parametrize(("dtype", "name"), PRECISIONS)
def test_captured_steps_have_at_most_twice_the_error_of_pytorch(
    dtype: str, name: str, checkpoint: str
) -> None:
    model, x = model_and_batch(name)
    if dtype == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x
    pipe = make_pipe(model, checkpoint, capture=True)
    assert inaccurate_after_steps(model, pipe, minibatches(x), dtype) == []
    assert name == "python" or any(report.replays for report in pipeline_of(pipe).graph_reports())


@captured_or_not
def test_gradients_accumulated_in_float32_are_accurate(capture: bool) -> None:
    model, x = model_and_batch("mlp")
    model, x = model.bfloat16(), x.bfloat16()
    pipe = make_pipe(model, capture=capture, grad_dtype=torch.float32)
    assert inaccurate_after_steps(model, pipe, minibatches(x), "bfloat16") == []


def check_step(pipe: GPipe, model: nn.Sequential, x: Tensor, capture: bool) -> None:
    """Checks one step: bit for bit if uncaptured, by its error if captured."""
    if capture:
        assert inaccurate_after_steps(model, pipe, [x]) == []
    else:
        assert unequal(pipeline_step(pipe, x), loop_step(model, x, CHUNKS)) == []


@captured_or_not
@pytest.mark.parametrize("name", ["mlp", "gpt", "convolutions", "dropout"])
def test_changing_batch_sizes_equal_the_plain_loop(name: str, capture: bool) -> None:
    model, x = model_and_batch(name)
    pipe = make_pipe(model, capture=capture)
    for size in (16, 16, 16, 8, 16, 5, 8, 3, 16):
        check_step(pipe, model, x[:size], capture)
