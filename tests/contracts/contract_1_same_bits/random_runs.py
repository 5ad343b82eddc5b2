"""Draws training runs at random.

`python -m tests.contracts.contract_1_same_bits.random_runs NAME` repeats a run, and describes it if it fails.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import SCHEDULES
from tests.contracts.contract_1_same_bits import layers as menu
from tests.contracts.contract_1_same_bits import unusual_layers
from tests.contracts.contract_1_same_bits.equality import (
    AUTOCAST,
    CALLS,
    CHANGES,
    DTYPES,
    HOOKS,
    LAYOUTS,
    LOSSES,
    LOSSES_OF_ANY,
    MODES,
    STEP_LOSSES,
    SUBJECTS,
    WAYS,
    Run,
    Step,
    differences,
    train_both,
)
from tests.contracts.contract_1_same_bits.layers import INPUTS, MENU, OUTPUTS
from tests.sampling import seed
from tests.untraceable import WIDTH

# As measured on one core.
RUNS_PER_MINUTE = 36
CHECKPOINTS = (*CHECKPOINT_MODES, 0.1, 0.25, 0.5, 0.75, 0.9)
_SUBJECTS_OF_SEVERAL_USES = {
    "spectral norm",
    *(f"torch.nn: {name}" for name in ("RNN", "GRU")),
    *(f"torch.nn: {name} with a state" for name in ("RNNCell", "GRUCell", "LSTMCell")),
}
# Numbers of samples and chunks: even ones, single samples, many, and uneven ones. Only of many elements do
# kernels compute some by vectors and some one by one.
_SIZES = [(8, 4), (8, 8), (34, 2), (7, 4)]
# Batch norm needs two values per channel in every micro-batch.
_SIZES_OF_SINGLE_PIXELS = [(8, 4), (8, 4), (8, 3)]
_GROUPS = {
    "usual": [*menu.LOWERED],
    **{
        name.lower(): [*getattr(unusual_layers, name)]
        for name in (
            "VIEWS",
            "IN_PLACE",
            "COMPLEX",
            "OPERATORS",
            "AUTOGRAD",
            "PARAMETERS",
            "STATE",
            "OF_TORCH",
        )
    },
}


def draw_of(subject: str, seed: int) -> Run:
    """Returns a run of a model: one micro-batch, uneven ones, steps and inference, in other layouts."""
    r = random.Random(f"{subject} {seed}")
    balance = _draw_balance(r, len(list(SUBJECTS[subject].make())))
    shares = [_draw_checkpoint(r, len(balance)) for _ in range(3)]
    layouts = [r.choice(LAYOUTS[:3]) for _ in range(4)]
    ways = ("call", "crossed calls", *SCHEDULES)[: 2 if subject in _SUBJECTS_OF_SEVERAL_USES else None]
    sizes = _SIZES_OF_SINGLE_PIXELS if subject == "channels_last: batch norm, 1 pixels wide" else _SIZES
    uneven, way = sizes[-1], r.choice(ways)
    steps = [
        Step(2, 1, checkpoint=shares[0]),
        Step(*uneven, checkpoint=shares[1], layout=layouts[0], loss=r.choice(["noise", *LOSSES])),
        Step(
            *r.choice(sizes),
            checkpoint=shares[2],
            layout=layouts[1],
            way=way,
            loss="squares" if way in SCHEDULES else "noise",
        ),
        Step(*uneven, layout=layouts[2], training=False, mode="grad" if r.random() < 0.7 else "no_grad"),
    ]
    backend = r.choice(["auto", "auto", "eager"])
    return Run(
        seed, subject, balance=balance, input_gradient=r.random() < 0.6, delays=r.random() < 0.3,
        steps=tuple(steps), backend=backend,
    )  # fmt: skip


def names(count: int, first: int = 0) -> list[str]:
    """Returns the names of runs of the present seed."""
    return [f"{seed()}/{number}" for number in range(first, first + count)]


def draw(name: str) -> Run:
    """Returns the run of this name: a random sequence of layers and of steps."""
    r = random.Random(name)
    batch_dim = int(r.random() < 0.1)
    inputs = "tensor" if batch_dim else r.choice([*INPUTS, "tensor", "tokens"])
    outputs = "tensor" if batch_dim else r.choice([*OUTPUTS, "tensor", "tensor", "head"])
    layers = _draw_layers(r)
    skips = _draw_skips(r, len(layers))
    num_layers = len(INPUTS[inputs].layers()) + sum(len(MENU[n]()) for n in layers) + len(OUTPUTS[outputs]())
    balance = _draw_balance(r, num_layers + 2 * len(skips) + 2 * batch_dim)
    in_python = [n for n in layers if n in menu.IN_PYTHON]
    is_sparse = any("sparse" in n for n in layers)
    is_reentrant = "reentrant checkpoint" in layers
    # PyTorch has no kernel that adds sparse bfloat16 tensors, and hardly one for float16 complex numbers.
    narrow = not is_sparse and inputs != "complex"
    dtypes = ["float32", "float32", *DTYPES] if narrow else ["float32", "float64"]
    # On the CPU, PyTorch's fused encoder layer is not aware of autocast (pytorch/pytorch#107663).
    has_encoder = any("encoder" in n or "nn.Transformer" in n for n in layers)
    autocast = "off" if has_encoder else r.choice(["off", "off", "off", *AUTOCAST])
    if autocast != "off":  # PyTorch refuses to concatenate float16 tensors under an autocast to bfloat16
        dtypes = [dtype for dtype in dtypes if dtype != "float16"]
    run = Run(
        r.randrange(2**31),
        "",
        inputs,
        layers,
        skips,
        outputs,
        balance,
        batch_dim,
        backend=r.choice(
            ["auto", "auto", "auto", "eager"] if in_python else ["auto", "auto", "auto", "aten", "eager"]
        ),
        autocast=autocast,
        # A reentrant checkpoint in the plain loop gives no gradients if its inputs need none.
        input_gradient=r.random() < 0.5 or is_reentrant,
        frozen=r.choice([0.0, 0.0, 0.0, 0.3, 0.8]) * (not is_reentrant),
        hooks=tuple(hook for hook in HOOKS if r.random() < 0.08),
        optimizer="SGD" if is_sparse else r.choice(["SGD", "AdamW"]),
        accumulate=r.random() < 0.2 and not (is_reentrant or is_sparse),
        delays=r.random() < 0.2,
    )
    first = Step(
        batch=r.randint(1, 13),
        chunks=r.randint(1, 9),
        length=r.randint(2, 5),  # batch norm needs at least two values per channel
        checkpoint=_draw_checkpoint(r, len(balance)),
        layout=r.choice(["contiguous", "contiguous", *LAYOUTS]),
        training=r.random() < 0.8,
        dtype=r.choice(dtypes),
    )
    steps = [_changed(r, run, first, dtypes) for _ in range(r.randint(2, 6))]
    return dataclasses.replace(run, steps=tuple(steps))


def _changed(r: random.Random, run: Run, step: Step, dtypes: list[str]) -> Step:
    """Returns a step in a random way that differs from another in a few settings."""
    found: dict[str, Any] = {}
    if r.random() < 0.3:
        found["batch"] = r.randint(1, 13)
    if r.random() < 0.2:
        found["length"] = r.randint(2, 5)
    if r.random() < 0.2:
        found["chunks"] = r.randint(1, 9)
    if r.random() < 0.2:
        found["layout"] = r.choice(LAYOUTS)
    if r.random() < 0.2:
        found["checkpoint"] = _draw_checkpoint(r, len(run.balance))
    if r.random() < 0.15:
        found["training"] = not step.training
    if r.random() < 0.1:
        found["dtype"] = r.choice(dtypes)
    if r.random() < 0.4:
        found["change"] = r.choice(CHANGES)
        is_refused = run.inputs == "tensor" and not run.batch_dim and refuses_another_width(run.layers[0])
        if found["change"] == "invalid call" and not is_refused:
            found["change"] = "attributes"
    # Reentrant checkpoints of the plain loop add each micro-batch's gradient to those of an earlier backward.
    way = r.choice(
        ["call"] if "reentrant checkpoint" in run.layers else ["call", "call", "call", *WAYS, *SCHEDULES]
    )
    if way == "crossed calls" and any("max_norm" in name for name in run.layers):
        way = "call"  # the second forward changes a parameter, so that the backward of the first is refused
    found |= {"way": way, "loss": r.choice(["noise", *LOSSES])}
    if way == "call":
        found["mode"] = r.choice(["grad", "grad", *MODES])
    elif (
        way == "stream"
    ):  # it writes no buffers, has either positional or keyword arguments, and calls no hook
        found["training"] = False
        is_refused = "side effects" in run.layers or "keyword" in run.inputs or run.hooks
        found["way"] = "call" if is_refused else way
    elif way not in CALLS:
        is_tensor = run.outputs in ("tensor", "head") and not run.batch_dim
        found["loss"] = r.choice(
            [*STEP_LOSSES] if is_tensor else ["squares"] if run.batch_dim else LOSSES_OF_ANY
        )
        # Gradients of whole inputs are added up in one order by all schedules.
        if "replicated" in run.inputs and way in SCHEDULES:
            found["way"] = "gpipe"
        # Hooks of the model, and of parameters, are called once for each mini-batch.
        if run.hooks:
            found |= {"way": "call", "loss": "noise"}
        elif any(uses_a_parameter_repeatedly(name) for name in run.layers):
            found["chunks"] = 1
    return dataclasses.replace(step, **found)


@functools.cache
def refuses_another_width(name: str) -> bool:
    """Returns whether the first layer of an entry raises an error if there is one channel too many."""
    try:
        MENU[name]()[0](torch.zeros(4, 3, WIDTH + 1))
    except (RuntimeError, ValueError, AssertionError):
        return True
    return False


@functools.cache
def uses_a_parameter_repeatedly(name: str) -> bool:
    """Returns whether a step of several micro-batches adds up gradients in another order than the loop."""
    if "sparse" in name:  # uses a row repeatedly
        return True
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # LSTM is one operator in float32 only.
        return any(_num_uses(MENU[name](), dtype) > 1 for dtype in (torch.float32, torch.float64))


def _num_uses(layers: menu.Layers, dtype: torch.dtype) -> int:
    """Returns how often autograd adds to the gradient of a parameter, at most."""
    y = torch.randn(2, 3, WIDTH, dtype=dtype, requires_grad=True)
    for layer in layers:
        y = layer.to(dtype)(y)
    num_uses, waiting = Counter[Any](), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        num_uses[node] += 1
        if node is not None and num_uses[node] == 1:
            waiting += [parent for parent, _ in node.next_functions]
    return max(
        (n for node, n in num_uses.items() if isinstance(getattr(node, "variable", None), nn.Parameter)),
        default=0,
    )


def _draw_checkpoint(r: random.Random, num_stages: int) -> Any:
    return r.choice([*CHECKPOINTS, tuple(r.choice(CHECKPOINTS) for _ in range(num_stages))])


def _draw_layers(r: random.Random) -> tuple[str, ...]:
    """Returns one to six names, some of them repeated; at most two layers run in Python."""
    names, in_python = list[str](), 0
    for _ in range(r.randint(1, 6)):
        name = r.choice(r.choice([*_GROUPS.values(), [*menu.RUN_IN_PYTHON], _GROUPS["usual"]]))
        in_python += name in menu.IN_PYTHON
        if name not in menu.IN_PYTHON or in_python <= 2:
            names += [name] * (3 if r.random() < 0.1 and name not in menu.IN_PYTHON else 1)
    return tuple(names or ["identity"])


def _draw_skips(r: random.Random, num_entries: int) -> tuple[tuple[int, int], ...]:
    """Returns no skip connections for most of the runs, else one to three."""
    if r.random() < 0.7:
        return ()
    gaps = range(num_entries + 1)
    return tuple((min(pair), max(pair)) for pair in (r.sample(gaps, 2) for _ in range(r.randint(1, 3))))


def _draw_balance(r: random.Random, num_layers: int) -> tuple[int, ...]:
    num_stages = r.randint(1, min(4, num_layers))
    ends = [0, *sorted(r.sample(range(1, num_layers), num_stages - 1)), num_layers]
    return tuple(end - begin for begin, end in itertools.pairwise(ends))


def failure(run: Run) -> str | None:
    """Returns what is wrong: an error, or which tensors differ."""
    try:
        found = differences(*train_both(run))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"different: {', '.join(found[:6])}" if found else None


def main(names: list[str]) -> None:
    """Repeats runs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        found = failure(draw(name))
        print(name, "equal" if found is None else found)
        if found is not None:
            print(draw(name))


if __name__ == "__main__":
    main(sys.argv[1:])
