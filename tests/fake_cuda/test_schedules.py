"""Random schedules on the fake CUDA runtime, and injected runtime faults, which the checker must detect.

Failures name the case; fake_cuda/train_random_schedules.py documents how to run one case alone.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.schedule import Action, Kind, Schedule
from tests.fake_cuda.build import SOURCES, can_build
from tests.fake_cuda.happens_before import HappensBefore
from tests.fake_cuda.race_detector import Checker, Line, check, parse
from tests.fake_cuda.random_schedule import order_of, random_schedule
from tests.internals import use_schedule
from tests.untraceable import FunctionLayer

ROOT = Path(__file__).parents[2]
NUM_SOAK_CASES, CASES_PER_TEST = 10_000, 500
TIMEOUT_S = 600
NUM_SETUPS = 9  # one for each model
CASES_PER_SETUP = 50
FAULTS = ("dropped", "host_wait", "stale", "misplaced", "early")

needs_fake_cuda = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

Runs = Callable[..., Iterator[Line]]


@pytest.fixture
def run(libraries: tuple[Path, Path]) -> Runs:
    """Runs cases, checks their bits, and streams the log's lines without storing them."""
    runtime, operators = libraries

    def lines(first: int, count: int, *words: str) -> Iterator[Line]:
        out, into = os.pipe()
        variables = {
            "LD_PRELOAD": str(runtime),
            "FAKE_CUDA_LOG": f"/dev/fd/{into}",
            "FAKE_CUDA_LATE": str(first),
            "PYTHONPATH": str(ROOT),
            "GPIPE_FAST_DISABLE": "fuse",  # the race detector does not know which memory a kernel accesses
        }
        command = [sys.executable, "-W", "ignore", str(SOURCES / "train_random_schedules.py")]
        command += [str(operators), str(first), str(count), *words]
        with (
            os.fdopen(out) as log,
            subprocess.Popen(
                command,
                env=os.environ | variables,
                pass_fds=(into,),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process,
        ):
            os.close(into)
            timer = threading.Timer(TIMEOUT_S, process.kill)
            timer.start()
            try:
                yield from parse(log)
                stdout, stderr = process.communicate()
            finally:
                timer.cancel()
                process.kill()
        assert stdout == "equal\n", stdout[-3000:] + stderr[-3000:]

    return lines


def violations_by_case(lines: Iterator[Line], seen: Counter[str]) -> list[str]:
    """Returns the violations, each with its case; counts the lines by kind or mark."""
    checker, case, found = Checker(may_wait=False), "", 0
    violations = []
    for line in lines:
        checker.process(line)
        mark = line.words[0].split(" ")[0] if line.kind == "mark" else ""
        seen[mark or line.kind] += 1
        violations += [f"{case}: {violation}" for violation in checker.violations[found:]]
        found = len(checker.violations)
        if mark == "case":
            case = line.words[0]
    return violations + checker.check(())[found:]


def check_cases(run: Runs, first: int, count: int) -> None:
    seen: Counter[str] = Counter()
    assert violations_by_case(run(first, count), seen)[:10] == []
    assert seen["case"] == seen["begin"] == seen["end"] == count
    assert seen["copy"] > 3 * count, "copies between devices, and from and to the host"
    assert seen["wait"] > 10 * count
    assert seen["finished event"] > count, "the allocator queries events before it reuses memory"


@pytest.mark.extended
@needs_fake_cuda
def test_random_schedules_have_no_race_or_wrong_bit(run: Runs) -> None:
    check_cases(run, 0, NUM_SETUPS * CASES_PER_SETUP)


@needs_fake_cuda
@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, NUM_SOAK_CASES, CASES_PER_TEST))
def test_many_random_schedules_have_no_race_or_wrong_bit(run: Runs, first: int) -> None:
    check_cases(run, first, CASES_PER_TEST)


def test_random_schedules_contain_every_action_and_order() -> None:
    """`Schedule` validates each one; backwards run whole (B) or in parts (I, W), in any order."""
    kinds: Counter[Kind] = Counter()
    orders, slots = set(), set()
    for seed in range(200):
        schedule = random_schedule(random.Random(seed), 3, 3)
        kinds.update(action.kind for row in schedule.stages for action in row)
        orders |= {
            (stage, kind, *order_of(schedule, stage, kind)) for stage in range(3) for kind in (Kind.F, Kind.B)
        }
        slots.add(schedule.slots)
        assert str(schedule) == str(random_schedule(random.Random(seed), 3, 3))
    assert min(kinds[kind] for kind in Kind if kind is not Kind.U) > 200
    assert {order for order in orders if len(order) == 5} == {
        (stage, kind, *order)
        for stage in range(3)
        for kind in (Kind.F, Kind.B)
        for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    }
    assert slots == {1, 2, 3}


@pytest.mark.filterwarnings("ignore:stage 0")
def test_the_first_call_of_a_layer_in_python_uses_the_given_schedule() -> None:
    """The plan of that call is not cached. The order of additions shows which schedule ran."""
    linear = nn.Linear(1, 1, bias=False)
    branching = FunctionLayer(lambda held, x: held(x) if x.sum() > 0 else -held(x), linear)
    model = GPipe(nn.Sequential(branching), [1], devices=["cpu"], chunks=3)
    x = torch.tensor([[1e8], [1.0], [1e8]])
    forwards = [Action(0, Kind.F, m) for m in range(3)]
    for order, total in (((0, 2, 1), 1.0), ((2, 1, 0), 0.0)):
        backwards = [Action(0, Kind.B, m) for m in order]
        model.zero_grad()
        with use_schedule(model, x, Schedule(((*forwards, *backwards),), 3, 1)):
            y = model(x)
        y.backward(torch.tensor([[1.0], [1.0], [-1.0]]))
        assert linear.weight.grad.tolist() == [[total]]


def lines_in_second_step(lines: Sequence[Line], *kinds: str) -> list[int]:
    """Returns the indices of lines of these kinds in the second step of a log."""
    begin, end = (
        [i for i, line in enumerate(lines) if line.words[:1] == (word,)][1] for word in ("begin", "end")
    )
    return [i for i in range(begin, end) if lines[i].kind in kinds]


# Each test runs three cases of one model, and drops waits of the second.
FIRST = 4 * CASES_PER_SETUP * NUM_SETUPS
logs = pytest.mark.parametrize(
    "first",
    [
        FIRST + CASES_PER_SETUP * model
        if model in (3, 7)
        else pytest.param(FIRST + CASES_PER_SETUP * model, marks=pytest.mark.soak)
        for model in range(NUM_SETUPS)
    ],
)


@pytest.mark.sampled(1)
@needs_fake_cuda
@logs
def test_every_wait_is_needed_or_explained_as_redundant(run: Runs, first: int) -> None:
    """Drops each wait: the checker detects exactly the waits whose absence makes the search find a race."""
    lines = list(run(first, 3))
    order = HappensBefore(lines)
    assert check(lines) == []
    assert order.unordered(order.predecessors()) == []
    for wait in lines_in_second_step(lines, "wait"):
        detected = check([*lines[:wait], *lines[wait + 1 :]]) != []
        assert detected == (order.why_redundant(wait) == ""), lines[wait]


def marks_of(lines: Sequence[Line], mark: str) -> dict[int, str]:
    """Returns the marks that begin with a word, without that word, by index."""
    texts = {i: line.words[0] for i, line in enumerate(lines) if line.kind == "mark"}
    return {i: text.removeprefix(f"{mark} ") for i, text in texts.items() if text.split(" ")[0] == mark}


# First cases of setups with several GPUs and no stage on the CPU, where the host must not wait.
SEVERAL_GPUS = [4050, *(pytest.param(first, marks=pytest.mark.soak) for first in (2601, 3651))]


@pytest.mark.extended
@needs_fake_cuda
@pytest.mark.parametrize("first", SEVERAL_GPUS)
def test_the_checker_detects_injected_runtime_faults(run: Runs, first: int) -> None:
    """Where other waits preserve the order, the checker and the search both find no race."""
    lines = list(run(first, 3 * len(FAULTS), "faulty"))
    unordered = HappensBefore(lines).unordered(HappensBefore(lines).predecessors())
    planted = marks_of(lines, "planted")
    assert set(planted.values()) == set(FAULTS)
    triples = pairwise([0, *list(marks_of(lines, "case"))[3::3], len(lines)])
    checker, known = Checker(may_wait=False), 0
    detected = {}
    for begin, end in triples:
        (kind,) = {kind for index, kind in planted.items() if begin <= index < end}
        for line in lines[begin:end]:
            checker.process(line)
        checker.check_stream_roles()
        violations, known = checker.violations[known:], len(checker.violations)
        detected[kind] = any("race: " in violation for violation in violations)
        assert detected[kind] == any(begin <= i < end for i in unordered), kind
        assert (kind == "host_wait") == any("the host waits" in violation for violation in violations)
        assert (kind == "misplaced") == any("copies between devices" in violation for violation in violations)
    assert any(detected[kind] for kind in ("dropped", "stale", "early"))
