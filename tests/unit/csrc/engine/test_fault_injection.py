"""Contract 7, all or nothing: failures injected into every action, and the state after them."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest
import torch

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import BACKWARD, Action, Kind, fill_drain
from tests.internals import inject_delays, inject_failure, inject_failures, remove_faults
from tests.reference import gradient_like, leaf, pipeline, plain_loop, unequal
from tests.unit.csrc.pipelines_under_test import K, M, PipelineUnderTest, mlp, pipeline_under_test

pytestmark = pytest.mark.usefixtures("one_thread")

ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (IndexError, ValueError, TypeError, NotImplementedError, RuntimeError)
}
RECOMPUTED = {
    "always": range(M),
    "except_attention": range(M),
    "except_last": range(M - 1),
    "never": range(0),
}
SCHEDULES = {mode: fill_drain(K, M, recomputed=RECOMPUTED[mode]) for mode in CHECKPOINT_MODES}
FORWARDS = SCHEDULES["never"].forward_part().order()
BACKWARDS = {mode: schedule.backward_part().order() for mode, schedule in SCHEDULES.items()}
# Operators that run before the failure. Programs here have 3 to 40; with the last number, the end fails.
STEPS = (0, 1, 2, 5, 11, 10**6)


def check_error(error: Exception, name: str, action: Action) -> None:
    assert type(error) is ERRORS[name]
    place = rf": stage {action.stage}, layer \d+ \(\w+\), micro-batch {action.microbatch}"
    assert re.fullmatch(rf"injected {name} \(in action {action}({place})?\)", str(error))


def fail(tested: PipelineUnderTest, action: Action, step: int, draw: random.Random) -> None:
    """Lets an action fail after some operators, and checks error type, message, state and the next step."""
    name, retain = draw.choice(list(ERRORS)), draw.random() < 0.5
    in_backward = action.kind in BACKWARD
    tested.set_gradients(draw.random() < 0.5)
    before, x = tested.state(), leaf(tested.x)
    output = pipeline(tested.pipe, x) if in_backward else None
    if output is not None:
        before, kept = tested.state(), kept_bytes(output)
    delays = {"seed": draw.randrange(1 << 30), "max_delay_us": draw.choice((0, 300))}
    inject_failure(tested.pipe, action, name, after=step, **delays)
    with pytest.raises(ERRORS[name]) as caught:
        if output is None:
            pipeline(tested.pipe, x)
        else:
            output.backward(gradient_like(output), retain_graph=retain)
    check_error(caught.value, name, action)
    assert unequal(tested.state(), before) == []
    assert x.grad is None
    remove_faults(tested.pipe)
    if output is not None and retain:
        assert kept_bytes(output) == kept > 0
        tested.set_gradients(False)
        output.backward(gradient_like(output))
        after = tested.state() | {"input gradient": x.grad}
        names = [each for each in tested.expected if "gradient" in each]
        assert unequal({n: after[n] for n in names}, {n: tested.expected[n] for n in names}) == []
    elif output is not None:
        assert kept_bytes(output) == 0
        with pytest.raises(RuntimeError, match="for a second backward, pass retain_graph=True"):
            output.backward(gradient_like(output))
        assert unequal(tested.state(), before) == []
    assert tested.next_step_is_correct()


def check_failures(count: int, seed: int) -> None:
    """Injects failures into actions, checkpoint modes and steps in random order; all into one pipeline."""
    draw, tested = random.Random(seed), pipeline_under_test(mlp)
    everything = [
        (action, mode, step)
        for mode in CHECKPOINT_MODES
        for action, step in product((*FORWARDS, *BACKWARDS[mode]), STEPS)
    ]
    draw.shuffle(everything)
    selected = everything[:count]
    assert {action.kind for action, *_ in selected} == {*Kind}
    for action, tested.pipe.checkpoint, step in selected:
        try:
            fail(tested, action, step, draw)
        except BaseException as error:
            raise AssertionError(f"after {action}, {tested.pipe.checkpoint}, {step}") from error


def test_injected_failures_change_nothing() -> None:
    check_failures(60, seed=0)


@pytest.mark.soak
def test_a_thousand_injected_failures_change_nothing() -> None:
    check_failures(1200, seed=1)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_first_of_several_failures_in_schedule_order_is_raised(backward: bool) -> None:
    """The timing must not matter: ``races`` counts the seeds with which another failing action ends first."""
    tested, order = pipeline_under_test(mlp), BACKWARDS["except_last"] if backward else FORWARDS
    output = tested.pipe(tested.x)

    def run() -> None:
        if backward:
            output.backward(gradient_like(output), retain_graph=True)
        else:
            pipeline(tested.pipe, tested.x)

    draw, races = random.Random(5), 0
    for seed in range(20):
        nearby = draw.randrange(len(order) - 8)
        failing = draw.sample(order[nearby : nearby + 8], 3)
        first = min(failing, key=order.index)
        inject_delays(tested.pipe, seed, max_delay_us=4000)
        with tested.pipe.recording() as recording:
            run()
        ends = [recording.latest[action].end for action in failing]
        races += min(ends) < recording.latest[first].end
        errors = dict(zip(failing, draw.sample(list(ERRORS), 3), strict=True))
        failures = [(str(action), draw.choice(STEPS), error) for action, error in errors.items()]
        inject_failures(tested.pipe, failures, seed, max_delay_us=4000)
        with pytest.raises(ERRORS[errors[first]]) as caught:
            run()
        check_error(caught.value, errors[first], first)
    assert races >= 1
    assert tested.next_step_is_correct()


def test_a_failure_wakes_senders_that_wait_for_a_slot() -> None:
    """In inference, a connection has 4 slots, here for 12 micro-batches."""
    model, x = mlp()
    pipe = GPipe(model.eval(), [3, 3, 4], chunks=12)
    expected = plain_loop(model, x, 12)
    with torch.no_grad():
        for action in ("2RECV_F0", "2F0", "2F5", "1SEND_F4", "1RECV_F9", "2F11"):
            inject_failure(pipe, action, after=1, seed=3, max_delay_us=1000)
            with pytest.raises(ValueError, match=rf"\(in action {action}\b"):
                pipe(x)
            remove_faults(pipe)
            assert torch.equal(pipe(x), expected)
