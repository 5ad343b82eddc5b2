"""Pipelines equal the plain micro-batch loop bit for bit (contract 1).

Each run draws from every row, by its own fixed seed; `equality.Run` and `equality.Step` are the rows:

| crossed | values |
|---|---|
| layers | every layer of `torch.nn`; models; channels_last images; sequences of these and 180 others |
| values | tensors, views, complex numbers, tokens, tuples, dicts, several arguments, keywords, whole |
| | inputs; skip connections |
| ways | a call and a backward, two, or `autograd.grad`; two calls at a time; a step by `gpipe`, `1f1b`, |
| | `interleaved`, `zb-h1`, with losses of PyTorch and others; an evaluation; a stream |
| cuts | one to four stages; one to nine micro-batches, also uneven ones and fewer than asked for; along |
| | either dimension |
| checkpoint settings | the three modes, shares of activations, one for each stage |
| modes | training, evaluation, no gradients, inference; dtypes; autocast; backends; frozen parameters; |
| | hooks |
| memory | layouts of inputs and of gradients of outputs |
| state | all of these change from step to step; optimizers; accumulation; between steps, failed calls, |
| | copies, loaded states, other attributes, parameters and balances |
| timing | random delays of all actions |

`python -m tests.contracts.contract_1_same_bits.random_runs NAME` repeats a random run.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import warnings
import weakref

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests import models
from tests.contracts.contract_1_same_bits.census import thorough_run
from tests.contracts.contract_1_same_bits.equality import (
    MODES,
    OTHERS,
    Run,
    Step,
    differences,
    train_both,
)
from tests.contracts.contract_1_same_bits.layers import (
    DataDependentBranch,
    return_input,
)
from tests.contracts.contract_1_same_bits.random_runs import (
    RUNS_PER_MINUTE,
    draw,
    draw_of,
    failure,
    names,
)
from tests.contracts.contract_1_same_bits.torch_layers import OUT_OF_SCOPE, RECIPES
from tests.contracts.contract_1_same_bits.torch_layers import RUN_IN_PYTHON as TORCH_IN_PYTHON
from tests.untraceable import WIDTH, FunctionLayer, SignEmbedding

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("error:An output with one or more elements was resized"),
]
NUM_SAMPLED, NUM_AT_ONCE = 8, 20
# As many as run in these minutes on one core.
NUM_RUNS = RUNS_PER_MINUTE * int(os.environ.get("GPIPE_FAST_MINUTES", "20"))


def check(run: Run) -> None:
    ours, expected = train_both(run)
    assert differences(ours, expected) == [], run
    outputs = [v for n, v in expected.items() if v is not None and "output" in n]
    assert all(bool(v.isfinite().all()) for v in outputs), f"an output is not finite: {run}"


def test_every_class_of_torch_nn_has_a_recipe_or_is_out_of_scope() -> None:
    classes = {n for n, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    exercised = {name.split()[0] for name in RECIPES}
    assert exercised & OUT_OF_SCOPE.keys() == set()
    assert classes - exercised - OUT_OF_SCOPE.keys() == set()
    assert TORCH_IN_PYTHON.keys() <= RECIPES.keys()


def check_layer(name: str, run: Run) -> None:
    """Also that it runs as a program, or in Python for the known reason."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(dataclasses.replace(run, backend="auto"))
    reasons = [str(w.message) for w in caught if "runs in Python" in str(w.message)]
    assert bool(reasons) == (name in TORCH_IN_PYTHON)
    assert all(TORCH_IN_PYTHON[name] in reason for reason in reasons)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_of_torch_nn(name: str) -> None:
    check_layer(name, draw_of(f"torch.nn: {name}", 0))


@pytest.mark.soak
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_of_torch_nn_in_every_memory_format(name: str) -> None:
    check_layer(name, thorough_run(name))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OTHERS)
def test_a_model(name: str, seed: int) -> None:
    check(draw_of(name, seed))


@pytest.mark.soak
@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_at_any_timing(name: str) -> None:
    for seed in range(200):
        check(dataclasses.replace(draw_of(name, seed), delays=True))


@pytest.mark.parametrize("name", names(NUM_SAMPLED))
def test_a_random_sequence_of_layers(name: str) -> None:
    assert failure(draw(name)) is None, f"python -m tests.contracts.contract_1_same_bits.random_runs {name}"


@pytest.mark.soak
@pytest.mark.parametrize("first", range(NUM_SAMPLED, NUM_RUNS, NUM_AT_ONCE))
def test_many_random_sequences_of_layers(first: int) -> None:
    failures = {name: failure(draw(name)) for name in names(NUM_AT_ONCE, first)}
    failed = [name for name, found in failures.items() if found]
    assert not failed, f"python -m tests.contracts.contract_1_same_bits.random_runs {' '.join(failed)}"


_RENORMALISED = [
    Run(
        *(seed, "", "tensor", ("max_norm",)),
        balance=(1,),
        steps=(Step(chunks=3, checkpoint=checkpoint, loss="squares", dtype=dtype),) * 3,
    )
    for checkpoint, dtype in (("always", "bfloat16"), ("except_last", "float32"))
    for seed in range(4)
]
# Runs that once differed.
REGRESSIONS: dict[str, list[Run]] = {
    "a gradient in another layout is passed on to the input": [
        Run(layers=("LSTM", layer), steps=(Step(loss="expanded"),) * 3)
        for layer in ("identity", "returned input", "average")
    ],
    "statistics of batch norm have a wider dtype than its input": [
        Run(layers=("linear, tanh", before, "batch norm"), balance=(3,), autocast="bfloat16", backend=backend)
        for before, backend in (("RMS norm", "auto"), ("layer norm", "eager"))
    ],
    # A recompute reads the row of its forward.
    "a rounded renormalised row may exceed max_norm again": _RENORMALISED,
    # In the last step the last micro-batch has a new shape, so it runs in Python and the others do not.
    "gradients of several uses are added one by one": [
        Run(seed, layers=("weight used repeatedly", "LSTM"), steps=(Step(9, 4), Step(9, 4), Step(10, 4)))
        for seed in range(3)
    ],
    "the fake kernel of a sum of embeddings returns another shape": [
        Run(
            layers=("nn.EmbeddingBag sum",),
            balance=(1,),
            steps=(Step(7, 3, dtype="bfloat16"), Step(4, 2, dtype="float16")),
        )
    ],
    "an output's gradient in another layout": [
        Run(layers=("convolution",), steps=(Step(1, 1, 5, loss="expanded"),) * 2),
        Run(layers=("linear, GELU",), steps=(Step(8, 1, 5, loss="transposed"),) * 2),
    ],
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression(name: str) -> None:
    for run in REGRESSIONS[name]:
        check(run)


# Calls, of which each must serve those in other modes: what it traces, or asks to be traced later.
_MODES = [
    *(Step(6, mode=mode, training=training) for mode in MODES for training in (True, False)),
    Step(6, way="gpipe", loss="squares"),
    *(
        Step(6, way=way, loss=loss, mode=mode, training=False)
        for way, loss in (("evaluate", "squares"), ("stream", "noise"))
        for mode in ("no_grad", "inference")
    ),
]


def check_modes(layer: str, steps: list[Step]) -> None:
    layers = ("linear, tanh", layer, "linear, tanh")
    check(Run(layers=layers, balance=(1, 2), input_gradient=False, steps=(*steps, *steps[:2])))


_OF_MODES = ("branch on data", "data-dependent shape", "batch norm", "linear, tanh")


@pytest.mark.parametrize("layer", _OF_MODES)
def test_training_after_inference_of_the_same_layers(layer: str) -> None:
    check_modes(layer, [_MODES[0], _MODES[4], _MODES[0], _MODES[6], _MODES[4], _MODES[0]])


@pytest.mark.sampled(16)
@pytest.mark.parametrize("layer", _OF_MODES)
@pytest.mark.parametrize("seed", range(100))
def test_orders_of_modes(seed: int, layer: str) -> None:
    check_modes(layer, random.Random(seed).sample(_MODES, 4))


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_hooks_on_parameters_without_a_gradient_are_not_called(backend: str) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), FunctionLayer(return_input))
    model, seen = GPipe(layers, [2], chunks=2, backend=backend), []
    layers[1].held.weight.register_hook(lambda gradient: seen.append(gradient))
    model(torch.randn(4, 3, WIDTH)).sum().backward()
    assert seen == []


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_hooks_of_a_branch_that_no_micro_batch_takes_are_not_called(checkpoint: str) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), DataDependentBranch())
    model = GPipe(layers, [1, 2], chunks=2, checkpoint=checkpoint)
    seen: list[str] = []
    layers[2].left.weight.register_hook(lambda gradient: seen.append("left"))
    layers[2].right.weight.register_hook(lambda gradient: seen.append("right"))
    for taken in ("left", "left", "right", "left"):
        x = torch.randn(4, 3, WIDTH).abs() + 1
        with torch.no_grad():
            layers[0].weight.fill_(1.0 if taken == "left" else -1.0)
        seen.clear()
        model(x).sum().backward()
        assert seen == [taken]


def test_a_pipeline_whose_backward_failed_in_autograd_can_be_dropped() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), SignEmbedding(sparse=True)).bfloat16()
    model = GPipe(layers, [2], chunks=2)
    with pytest.raises(NotImplementedError):  # raised by PyTorch, which has no such kernel
        model(torch.randn(4, WIDTH).bfloat16()).sum().backward()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
