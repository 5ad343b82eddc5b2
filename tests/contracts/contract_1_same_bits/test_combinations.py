"""Random combinations of layers, balances and training options equal the plain loop bit for bit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gpipe_fast import GPipe, keyed_rng, verify
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.structure import Replicated
from tests.contracts.contract_1_same_bits.combinations import (
    AUTOCAST,
    BACKENDS,
    CHANGES,
    DTYPES,
    HOOKS,
    LAYOUTS,
    LOSSES,
    OPTIMIZERS,
    Combination,
    draw,
    make_tensor,
)
from tests.contracts.contract_1_same_bits.layer_menu import (
    INPUTS,
    MENU,
    OUTPUTS,
    RUN_IN_PYTHON,
    TOKENS,
    DataDependentBranch,
    return_input,
)
from tests.reference import gradient_like
from tests.untraceable import WIDTH, FunctionLayer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

NUM_SAMPLED, NUM_COMBINATIONS = 40, 300

# Outputs, gradients, parameters and buffers of a training run, by step and name.
Result = dict[str, Tensor | None]


class MultiInputSequential(nn.Sequential):
    """A Sequential whose first layer may have several arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        value = first(*args, **kwargs)
        for layer in others:
            value = layer(value)
        return value


class PlainLoop(nn.Sequential):
    """The plain loop over micro-batches."""

    chunks = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        baseline = MultiInputSequential(*self)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_replicated)
        # Chunks every leaf once: chunking it repeatedly would add zero-padded gradients.
        parts = [leaf.chunk(self.chunks) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        outputs = []
        with keyed_rng(baseline):
            for m in range(max(len(part) for part in parts if _is_chunked(part))):
                part_args, part_kwargs = tree_unflatten([_micro_batch_part(part, m) for part in parts], spec)
                outputs.append(baseline(*part_args, **part_kwargs))
        return tree_map(lambda *v: torch.cat(v) if isinstance(v[0], Tensor) else v[0], *outputs)


def _is_chunked(part: Any) -> bool:
    return isinstance(part, tuple)


def _micro_batch_part(part: Any, m: int) -> Any:
    if _is_chunked(part):
        return part[m]
    return part.value if isinstance(part, Replicated) else part


def _is_replicated(value: Any) -> bool:
    return isinstance(value, Replicated)


def _scaled(value: Any, factor: float) -> Any:
    def scale(v: Any) -> Any:
        return v * factor if isinstance(v, Tensor) and v.is_floating_point() else v

    return tree_map(scale, value, is_leaf=_is_replicated)


def register_hooks(model: nn.Module, names: Iterable[str]) -> None:
    """Registers hooks that change their arguments."""
    if "forward" in names:
        model.register_forward_hook(lambda module, args, output: _scaled(output, 0.75))
    if "forward pre" in names:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: _scaled((args, kwargs), 0.5), with_kwargs=True
        )
    if "full backward" in names:
        model.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(None if g is None else g * 3 for g in inputs)
        )
    if "parameter" in names:
        for parameter in [p for p in model.parameters() if p.requires_grad][:2]:
            parameter.register_hook(lambda g: None if g is None else g * 2)


def run_backward(output: Any, loss: str) -> None:
    """Runs the backward; the kinds of loss produce gradients in different memory layouts."""
    roots = [o for o in tree_leaves(output) if isinstance(o, Tensor) and o.requires_grad]
    if not roots:
        return
    if loss == "noise":
        torch.autograd.backward(roots, [gradient_like(o) for o in roots])
    elif loss == "squares":
        torch.stack([(i + 1) * o.double().square().mean() for i, o in enumerate(roots)]).sum().backward()
    elif loss == "mean":
        torch.stack([o.mean().double() for o in roots]).sum().backward()
    elif loss == "first":
        roots[0].double().square().sum().backward()
    else:
        torch.stack([o.transpose(1, 2).contiguous().sin().sum().double() for o in roots]).sum().backward()


def inputs_of(c: Combination, step: int) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Returns the arguments of a step, and the tensors among them that may get a gradient."""
    generator = torch.Generator().manual_seed(1000 * c.seed + step)
    changed = c.change if step == c.change_at else "nothing"
    batch = c.batch % 13 + 1 if changed == "batch" else c.batch
    length = c.length + 1 if changed == "length" else c.length
    x, y = (make_tensor(c, generator, batch, length, WIDTH) for _ in range(2))
    weight = make_tensor(c, generator, 1, WIDTH, WIDTH)[0]
    tokens = torch.randint(TOKENS, (batch, length), generator=generator)
    leaves = [t.requires_grad_(c.input_gradient and c.grad) for t in (x, y, weight)]
    args, kwargs = INPUTS[c.inputs].call(*leaves, tokens)
    return args, kwargs, leaves


def train(model: GPipe | PlainLoop, c: Combination) -> Result:
    """Trains for `c.steps` steps, with the change `c.change` at one of them."""
    result: Result = {}
    register_hooks(model, c.hooks)
    make = torch.optim.SGD if c.optimizer == "SGD" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=0.01)
    torch.manual_seed(c.seed)
    for step in range(c.steps):
        changed = c.change if step == c.change_at else "nothing"
        model.chunks = c.chunks % 9 + 1 if changed == "chunks" else c.chunks
        model.train(c.training and changed != "eval")
        if isinstance(model, GPipe):
            other = CHECKPOINT_MODES[CHECKPOINT_MODES.index(c.checkpoint) - 1]
            model.checkpoint = other if changed == "checkpoint" else c.checkpoint
        if changed == "freeze":
            next(model.parameters()).requires_grad_(False)
        if not c.accumulate:
            optimizer.zero_grad()
        args, kwargs, leaves = inputs_of(c, step)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=c.autocast != "off", cache_enabled=False)
        with autocast, torch.set_grad_enabled(c.grad):
            output = model(*args, **kwargs)
        run_backward(output, c.loss)
        found: Result = {"constants": torch.tensor(list(_constants(output).encode()))}
        found |= {f"output {i}": o.detach() for i, o in enumerate(_tensors(output))}
        found |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves)}
        found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        optimizer.step()
        found |= {n: p.detach() for n, p in model.named_parameters()}
        found |= {f"buffer {n}": b for n, b in model.named_buffers()}
        found["generator"] = torch.get_rng_state()
        result |= {f"step {step}: {n}": None if v is None else v.clone() for n, v in found.items()}
    return result


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in tree_leaves(value) if isinstance(v, Tensor)]


def _constants(value: Any) -> str:
    return str(tree_map(lambda v: ... if isinstance(v, Tensor) else v, value))


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Returns whether all bits are equal, including the sign of zero; all NaNs count as equal."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    bits = _INTEGER_OF_SIZE[a.element_size()]
    return bool(((a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())).all())


def differing_tensors(ours: Result, expected: Result) -> list[str]:
    """Returns the names of the tensors that differ."""
    assert ours.keys() == expected.keys()
    return [name for name in expected if not equal_bits(ours[name], expected[name])]


def train_both(c: Combination) -> tuple[Result, Result]:
    """Trains a pipeline and the plain loop, and returns both results."""
    baseline = PlainLoop(*c.build())
    pipe = GPipe(nn.Sequential(*c.build()), list(c.balance), chunks=c.chunks, backend=c.backend)
    try:
        expected = train(baseline, c)
    except RuntimeError as error:
        if "could not create a primitive" in str(error):
            pytest.skip(f"PyTorch has no kernel for this processor: {error}")
        raise
    return train(pipe, c), expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "seed",
    [s if s < NUM_SAMPLED else pytest.param(s, marks=pytest.mark.soak) for s in range(NUM_COMBINATIONS)],
)
def test_a_random_combination_equals_the_plain_loop(seed: int) -> None:
    c = draw(seed)
    ours, expected = train_both(c)
    assert differing_tensors(ours, expected) == [], c
    outputs = [v for n, v in expected.items() if v is not None and "output" in n]
    assert all(bool(v.isfinite().all()) for v in outputs), f"an output is not finite: {c}"


@pytest.mark.extended
def test_the_comparison_detects_one_flipped_bit() -> None:
    ours, expected = train_both(draw(0))
    name, gradient = next((n, g) for n, g in ours.items() if g is not None and "gradient of" in n)
    bits = gradient.view(_INTEGER_OF_SIZE[gradient.element_size()]).view(-1)
    bits[-1] ^= 1
    assert differing_tensors(ours, expected) == [name]
    bits[-1] ^= 1
    ours[name] = None
    assert differing_tensors(ours, expected) == [name]


def test_every_option_is_drawn_several_times() -> None:
    combinations = [draw(seed) for seed in range(NUM_COMBINATIONS)]
    assert combinations == [draw(seed) for seed in range(NUM_COMBINATIONS)]
    tables: dict[str, Iterable[str]] = {
        **{"inputs": INPUTS, "outputs": OUTPUTS, "dtype": DTYPES, "backend": BACKENDS},
        **{"checkpoint": CHECKPOINT_MODES, "autocast": AUTOCAST, "layout": LAYOUTS, "loss": LOSSES},
        **{"change": CHANGES, "optimizer": OPTIMIZERS},
    }
    for field, table in tables.items():
        counts = Counter(getattr(c, field) for c in combinations)
        assert counts.keys() == set(table)
        assert min(counts.values()) >= 15, counts
    for names, table in (("layers", MENU), ("hooks", HOOKS)):
        counts = Counter(name for c in combinations for name in set(getattr(c, names)))
        assert counts.keys() == set(table)
        assert min(counts.values()) >= 10, counts
    assert {len(c.balance) for c in combinations} == {1, 2, 3, 4}
    assert {c.batch for c in combinations} == set(range(1, 14))
    assert {c.chunks for c in combinations} == set(range(1, 10))
    assert {sum(c.balance) for c in combinations} >= set(range(3, 10))
    assert {sum(name in RUN_IN_PYTHON for name in c.layers) for c in combinations} == {0, 1, 2}
    for seen in (
        [c.batch < c.chunks for c in combinations],
        [c.batch % c.chunks > 0 for c in combinations],
        [len(c.skips) > 0 for c in combinations],
        [len(c.skips) > 0 and c.in_python for c in combinations],
        *(
            [getattr(c, f.name) for c in combinations]
            for f in dataclasses.fields(Combination)
            if f.type == "bool"
        ),
    ):
        assert 15 <= sum(seen) <= NUM_COMBINATIONS - 15


# Regressions that random combinations found, minimised.


def small_combination(**changes: Any) -> Combination:
    """Returns a small combination with these changes."""
    baseline = Combination(
        **{"seed": 0, "inputs": "tensor", "layers": (), "skips": (), "outputs": "tensor", "balance": (2,)},
        **{"batch": 3, "length": 3, "chunks": 2, "checkpoint": "never", "backend": "auto"},
        **{"dtype": "float32", "autocast": "off", "layout": "contiguous", "input_gradient": True},
        **{"frozen": 0.0, "hooks": (), "training": True, "grad": True, "optimizer": "SGD", "loss": "squares"},
        **{"accumulate": False, "steps": 3, "change": "nothing", "change_at": 1},
    )
    return dataclasses.replace(baseline, **changes)


@pytest.mark.parametrize("layer", ["identity", "returned input", "average"])
def test_a_layer_after_one_in_python_passes_its_gradient_on(layer: str) -> None:
    """A gradient that arrives in an unexpected layout is passed on to the input."""
    assert differing_tensors(*train_both(small_combination(layers=("LSTM", layer), loss="mean"))) == []


@pytest.mark.parametrize("before", ["RMS norm", pytest.param("layer norm", marks=pytest.mark.extended)])
def test_batch_norm_under_autocast_equals_the_plain_loop(before: str) -> None:
    """The statistics have a wider dtype than the input."""
    c = small_combination(layers=("linear, tanh", before, "batch norm"), balance=(3,), autocast="bfloat16")
    for seed in range(4):
        for backend in ("auto", "eager"):
            assert differing_tensors(*train_both(dataclasses.replace(c, seed=seed, backend=backend))) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_an_embedding_that_renormalises_its_rows_equals_the_plain_loop(checkpoint: str, dtype: str) -> None:
    """A rounded renormalised row may exceed max_norm again; a recompute reads the row of its forward."""
    c = small_combination(layers=("max_norm",), balance=(1,), chunks=3, checkpoint=checkpoint, dtype=dtype)
    for seed in range(4):
        assert differing_tensors(*train_both(dataclasses.replace(c, seed=seed))) == []


def test_gradients_of_several_uses_are_added_one_by_one_as_in_autograd() -> None:
    """In the last step the last micro-batch has a new shape, so it runs in Python and the others do not."""
    c = small_combination(
        layers=("weight used repeatedly", "LSTM"), batch=9, chunks=4, change="batch", change_at=2
    )
    for seed in range(4):
        assert differing_tensors(*train_both(dataclasses.replace(c, seed=seed))) == []


@pytest.mark.parametrize(
    ("layers", "loss"),
    [
        (("convolution",), lambda y: y.sum()),
        (("linear, GELU",), lambda y: y.movedim(2, 0).contiguous().sin().sum()),
    ],
)
def test_an_output_gradient_in_another_layout_equals_the_plain_loop(
    layers: tuple[str, ...], loss: Callable[[Tensor], Tensor]
) -> None:
    c = small_combination(layers=layers, chunks=1, batch=1 if "convolution" in layers else 8, length=5)
    model = nn.Sequential(*c.build())
    report = verify(GPipe(model, [2], chunks=1), make_tensor(c, torch.Generator(), c.batch, 5, WIDTH), loss)
    assert report, report


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_hooks_on_parameters_without_a_gradient_are_not_called(backend: str) -> None:
    model = GPipe(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), FunctionLayer(return_input)), [2], chunks=2, backend=backend
    )
    seen: list[Any] = []
    model[1].held.weight.register_hook(lambda gradient: seen.append(gradient))
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
            layers[0].weight.fill_(1.0)
            layers[0].weight.mul_(1 if taken == "left" else -1)
        seen.clear()
        model(x).sum().backward()
        assert seen == [taken]


_FAILING_BACKWARD = """
import torch
from torch import nn
from gpipe_fast import GPipe

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 4, sparse=True)

    def forward(self, x):
        return x + self.table((x > 0).long()).sum(-1)

model = GPipe(nn.Sequential(nn.Linear(4, 4), Sparse()).bfloat16(), [2], chunks=2)
try:
    model(torch.randn(4, 4).bfloat16()).sum().backward()
except NotImplementedError as error:  # raised by PyTorch, which has no such kernel
    print(error)
del model
print("gone")
"""


def test_a_pipeline_whose_backward_failed_in_autograd_can_be_dropped() -> None:
    process = subprocess.Popen([sys.executable, "-c", _FAILING_BACKWARD], stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert output.splitlines()[-1:] == ["gone"]
