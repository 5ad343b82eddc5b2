"""Contract 7, all or nothing: failures injected into every action, and the state after them."""

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
from tests.internals import inject_delays, inject_failure, inject_failures, remove_faults
from tests.reference import gradient_like, leaf, pipeline, pipeline_step, plain_loop, unequal
from tests.unit.csrc.pipelines_under_test import MODELS, K, M, PipelineUnderTest, mlp, pipeline_under_test

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
# Operators that run before the failure. Programs here have 3 to 40; with the last number, the end fails.
STEPS = (0, 1, 2, 5, 11, 10**6)


@dataclass(frozen=True)
class Case:
    """One injected failure."""

    action: Action
    mode: str
    step: int
    error: str
    seed: int
    max_delay_us: int
    gradients_before: bool
    retain: bool

    @property
    def in_backward(self) -> bool:
        return self.action.kind in BACKWARD


def cases(count: int, seed: int = 0) -> list[Case]:
    """Returns ``count`` of all actions, modes and steps in shuffled order, with other fields at random."""
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


def inject(tested: PipelineUnderTest, case: Case) -> None:
    inject_failure(
        tested.pipe,
        case.action,
        case.error,
        after=case.step,
        seed=case.seed,
        max_delay_us=case.max_delay_us,
    )


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def tested(request: pytest.FixtureRequest) -> Iterator[PipelineUnderTest]:
    """Yields one pipeline for all failures, none of which may change its state."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield pipeline_under_test(request.param)
    torch.set_num_threads(before)


def fail_in_forward(tested: PipelineUnderTest, case: Case) -> None:
    before = tested.state()
    inject(tested, case)
    with pytest.raises(ERRORS[case.error]) as caught:
        pipeline(tested.pipe, tested.x)
    check_error(caught.value, case.error, case.action)
    assert unequal(tested.state(), before) == []


def fail_in_backward(tested: PipelineUnderTest, case: Case) -> None:
    x = leaf(tested.x)
    output = pipeline(tested.pipe, x)
    kept = kept_bytes(output)
    before = tested.state()
    inject(tested, case)
    with pytest.raises(ERRORS[case.error]) as caught:
        output.backward(gradient_like(output), retain_graph=case.retain)
    check_error(caught.value, case.error, case.action)
    assert unequal(tested.state(), before) == []
    assert x.grad is None
    remove_faults(tested.pipe)
    if case.retain:
        assert kept_bytes(output) == kept > 0
        tested.set_gradients(False)
        output.backward(gradient_like(output))
        names = [name for name in tested.expected if name.startswith("gradient")]
        after, expected = tested.state(), tested.expected
        assert unequal({n: after[n] for n in names}, {n: expected[n] for n in names}) == []
        assert unequal({"x": x.grad}, {"x": expected["input gradient"]}) == []
    else:
        assert kept_bytes(output) == 0
        with pytest.raises(RuntimeError, match="for a second backward, pass retain_graph=True"):
            output.backward(gradient_like(output))
        assert unequal(tested.state(), before) == []


def check_error(error: Exception, name: str, action: Action) -> None:
    assert type(error) is ERRORS[name]
    place = rf": stage {action.stage}, layer \d+ \(\w+\), micro-batch {action.microbatch}"
    assert re.fullmatch(rf"injected {name} \(in action {action}({place})?\)", str(error))


def run_case(tested: PipelineUnderTest, case: Case) -> None:
    tested.pipe.checkpoint = case.mode
    tested.set_gradients(case.gradients_before)
    (fail_in_backward if case.in_backward else fail_in_forward)(tested, case)
    assert tested.next_step_is_correct()


def run_cases(tested: PipelineUnderTest, selected: list[Case]) -> None:
    for case in selected:
        try:
            run_case(tested, case)
        except BaseException as error:
            raise AssertionError(f"after {case}") from error


@pytest.mark.sampled(2)
def test_injected_failures_change_nothing(tested: PipelineUnderTest) -> None:
    """Checks error type, message, state, and the next step, for a sample of the soak's failures."""
    selected = cases(150)
    assert {case.action.kind for case in selected} == {*Kind} - {Kind.U}
    run_cases(tested, selected)


@pytest.mark.soak
def test_a_thousand_injected_failures_change_nothing(tested: PipelineUnderTest) -> None:
    selected = cases(1200, seed=1)
    places = {(case.action.stage, case.action.microbatch, case.action.kind, case.mode) for case in selected}
    assert len(places) == sum(len(FORWARDS) + len(backwards) for backwards in BACKWARDS.values())
    assert {case.error for case in selected} == set(ERRORS)
    run_cases(tested, selected)


def test_the_checks_of_injected_failures_can_fail(tested: PipelineUnderTest) -> None:
    """Negative control: each check above fails when it should."""
    case = Case(Action(1, Kind.I, 2), "always", 0, "TypeError", 0, 0, True, False)
    tested.set_gradients(False)
    before = tested.state()
    output = pipeline(tested.pipe, leaf(tested.x))
    assert any("running_mean" in name for name in unequal(tested.state(), before))
    output.backward(gradient_like(output))
    assert any("gradient" in name for name in unequal(tested.state(), before))
    tested.reset()
    for error in (ValueError("injected TypeError (in action 1I2)"), TypeError("injected TypeError")):
        with pytest.raises(AssertionError):
            check_error(error, case.error, case.action)
    inject(tested, case)
    with pytest.raises(TypeError, match="in action 1I2"):  # still injected, so the next step fails, too
        pipeline_step(tested.pipe, tested.x)
    remove_faults(tested.pipe)


def repeatable_call(tested: PipelineUnderTest, backward: bool) -> Callable[[], object]:
    """Returns a call of a forward, or of a backward that can be repeated."""
    if not backward:
        return lambda: pipeline(tested.pipe, tested.x)
    output = pipeline(tested.pipe, tested.x)
    return lambda: output.backward(gradient_like(output), retain_graph=True)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_first_of_several_failures_in_schedule_order_is_raised(backward: bool) -> None:
    """The timing must not matter: ``races`` counts the seeds with which another failing action ends first."""
    tested, order = pipeline_under_test(mlp), BACKWARDS["except_last"] if backward else FORWARDS
    run = repeatable_call(tested, backward)
    draw, races = random.Random(5), 0
    for seed in range(40):
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
    assert races >= 4
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
