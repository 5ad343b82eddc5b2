"""Contract 7, all or nothing: failures planted in every action, and what they leave behind."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import BACKWARD, Action, Kind, fill_drain
from tests.inside import delay, disturb_no_more, plant_failure, plant_failures
from tests.reference import gradient_like, leaf, pipeline, pipeline_step, plain_loop, unequal
from tests.unit.csrc.failing_pipelines import MODELS, K, M, Pipe, mlp, open_pipe

pytestmark = pytest.mark.usefixtures("one_thread")

ERRORS: dict[str, type[Exception]] = {
    "IndexError": IndexError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
}
RECOMPUTED = {"always": range(M), "except_last": range(M - 1), "never": range(0)}
SCHEDULES = {mode: fill_drain(K, M, recomputed=RECOMPUTED[mode]) for mode in CHECKPOINT_MODES}
FORWARDS = SCHEDULES["never"].forward_part().order()
BACKWARDS = {mode: schedule.backward_part().order() for mode, schedule in SCHEDULES.items()}
# Operators of the program that go before the failure; programs here have 3 to 40. The last fails at the end.
STEPS = (0, 1, 2, 5, 11, 10**6)


@dataclass(frozen=True)
class Case:
    """One planted failure."""

    action: Action
    mode: str
    step: int
    error: str
    seed: int
    longest_delay_us: int
    gradients_before: bool
    retain: bool

    @property
    def in_backward(self) -> bool:
        return self.action.kind in BACKWARD


def cases(count: int, seed: int = 0) -> list[Case]:
    """The first ``count`` of all actions, modes and steps in a shuffled order, the rest drawn."""
    draw = random.Random(seed)
    everything = [
        (action, mode, step)
        for mode in CHECKPOINT_MODES
        for action, step in product((*FORWARDS, *BACKWARDS[mode]), STEPS)
    ]
    draw.shuffle(everything)
    assert count <= len(everything)
    return [
        Case(
            *(action, mode, step, draw.choice(list(ERRORS)), draw.randrange(1 << 30), draw.choice((0, 300))),
            *(draw.random() < 0.5, draw.random() < 0.5),
        )
        for action, mode, step in everything[:count]
    ]


def plant(opened: Pipe, case: Case) -> None:
    plant_failure(
        opened.pipe,
        case.action,
        case.error,
        after=case.step,
        seed=case.seed,
        longest_us=case.longest_delay_us,
    )


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def opened(request: pytest.FixtureRequest) -> Iterator[Pipe]:
    """One pipeline for all failures: each must leave it as new."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield open_pipe(request.param)
    torch.set_num_threads(before)


def fail_in_forward(opened: Pipe, case: Case) -> None:
    before = opened.state()
    plant(opened, case)
    with pytest.raises(ERRORS[case.error]) as caught:
        pipeline(opened.pipe, opened.x)
    check_error(caught.value, case.error, case.action)
    assert unequal(opened.state(), before) == []


def fail_in_backward(opened: Pipe, case: Case) -> None:
    x = leaf(opened.x)
    output = pipeline(opened.pipe, x)
    kept = kept_bytes(output)
    before = opened.state()
    plant(opened, case)
    with pytest.raises(ERRORS[case.error]) as caught:
        output.backward(gradient_like(output), retain_graph=case.retain)
    check_error(caught.value, case.error, case.action)
    assert unequal(opened.state(), before) == []
    assert x.grad is None
    disturb_no_more(opened.pipe)
    if case.retain:
        assert kept_bytes(output) == kept > 0
        opened.set_gradients(False)
        output.backward(gradient_like(output))
        names = [name for name in opened.expected if name.startswith("gradient")]
        after, expected = opened.state(), opened.expected
        assert unequal({n: after[n] for n in names}, {n: expected[n] for n in names}) == []
        assert unequal({"x": x.grad}, {"x": expected["input gradient"]}) == []
    else:
        assert kept_bytes(output) == 0
        with pytest.raises(RuntimeError, match="a second backward needs retain_graph=True"):
            output.backward(gradient_like(output))
        assert unequal(opened.state(), before) == []


def check_error(error: Exception, planted: str, action: Action) -> None:
    assert type(error) is ERRORS[planted]
    place = rf": stage {action.stage}, layer \d+ \(\w+\), micro-batch {action.microbatch}"
    assert re.fullmatch(rf"injected {planted} \(in action {action}({place})?\)", str(error))


def run_case(opened: Pipe, case: Case) -> None:
    opened.pipe.checkpoint = case.mode
    opened.set_gradients(case.gradients_before)
    (fail_in_backward if case.in_backward else fail_in_forward)(opened, case)
    assert opened.next_step_is_right()


def run_cases(opened: Pipe, planted: list[Case]) -> None:
    for case in planted:
        try:
            run_case(opened, case)
        except BaseException as error:
            raise AssertionError(f"after {case}") from error


@pytest.mark.sampled(2)
def test_planted_failures(opened: Pipe) -> None:
    """Type, message, nothing changed, nothing stuck, the next step right: a sample of the soak."""
    planted = cases(150)
    assert {case.action.kind for case in planted} == set(Kind)
    run_cases(opened, planted)


@pytest.mark.soak
def test_a_thousand_planted_failures(opened: Pipe) -> None:
    planted = cases(1200, seed=1)
    places = {(case.action.stage, case.action.microbatch, case.action.kind, case.mode) for case in planted}
    assert len(places) == sum(len(FORWARDS) + len(backwards) for backwards in BACKWARDS.values())
    assert {case.error for case in planted} == set(ERRORS)
    run_cases(opened, planted)


def test_the_checks_can_fail(opened: Pipe) -> None:
    """Each comparison above notices what it is for."""
    case = Case(Action(1, Kind.I, 2), "always", 0, "TypeError", 0, 0, True, False)
    opened.set_gradients(False)
    before = opened.state()
    output = pipeline(opened.pipe, leaf(opened.x))
    assert any("running_mean" in name for name in unequal(opened.state(), before))
    output.backward(gradient_like(output))
    assert any("gradient" in name for name in unequal(opened.state(), before))
    opened.start_again()
    for error in (ValueError("injected TypeError (in action 1I2)"), TypeError("injected TypeError")):
        with pytest.raises(AssertionError):
            check_error(error, case.error, case.action)
    plant(opened, case)
    with pytest.raises(TypeError, match="in action 1I2"):  # not taken back, so the next step fails too
        pipeline_step(opened.pipe, opened.x)
    disturb_no_more(opened.pipe)


def repeatable(opened: Pipe, backward: bool) -> Callable[[], object]:
    """A forward, or a backward that can be called again."""
    if not backward:
        return lambda: pipeline(opened.pipe, opened.x)
    output = pipeline(opened.pipe, opened.x)
    return lambda: output.backward(gradient_like(output), retain_graph=True)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_of_several_failures_the_first_in_schedule_order_comes_out(backward: bool) -> None:
    """Whatever the timing. ``races`` counts the seeds by which it is not the first in time to fail."""
    opened, order = open_pipe(mlp), BACKWARDS["except_last"] if backward else FORWARDS
    run = repeatable(opened, backward)
    draw, races = random.Random(5), 0
    for seed in range(40):
        nearby = draw.randrange(len(order) - 8)
        planted = draw.sample(order[nearby : nearby + 8], 3)
        first = min(planted, key=order.index)
        delay(opened.pipe, seed, longest_us=4000)
        with opened.pipe.recording() as recording:
            run()
        ends = [recording.latest[action].end for action in planted]
        races += min(ends) < recording.latest[first].end
        errors = dict(zip(planted, draw.sample(list(ERRORS), 3), strict=True))
        failures = [(str(action), draw.choice(STEPS), error) for action, error in errors.items()]
        plant_failures(opened.pipe, failures, seed, longest_us=4000)
        with pytest.raises(ERRORS[errors[first]]) as caught:
            run()
        check_error(caught.value, errors[first], first)
    assert races >= 4
    assert opened.next_step_is_right()


def test_a_failure_wakes_senders_that_wait_for_room() -> None:
    """In inference an edge holds 4 boundary tensors, here of 12."""
    model, x = mlp()
    pipe = GPipe(model.eval(), [3, 3, 4], chunks=12)
    expected = plain_loop(model, x, 12)
    with torch.no_grad():
        for action in ("2RECV_F0", "2F0", "2F5", "1SEND_F4", "1RECV_F9", "2F11"):
            plant_failure(pipe, action, after=1, seed=3, longest_us=1000)
            with pytest.raises(ValueError, match=rf"\(in action {action}\b"):
                pipe(x)
            disturb_no_more(pipe)
            assert torch.equal(pipe(x), expected)
