"""Contract 7, all or nothing: planted and natural failures in every action, and what they leave behind."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.schedule import BACKWARD, Action, Kind, fill_drain
from tests.reference import (
    Result,
    gradient_like,
    leaf,
    loop_step,
    pipeline,
    pipeline_step,
    plain_loop,
    unequal,
)

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("one_thread")

ERRORS: dict[str, type[Exception]] = {
    "IndexError": IndexError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
}
K, M = 3, 4
RECOMPUTED = {"always": range(M), "except_last": range(M - 1), "never": range(0)}
SCHEDULES = {mode: fill_drain(K, M, recomputed=RECOMPUTED[mode]) for mode in CHECKPOINT_MODES}
FORWARDS = SCHEDULES["never"].forward_part().order()
BACKWARDS = {mode: schedule.backward_part().order() for mode, schedule in SCHEDULES.items()}
# Operators of the program that go before the failure; programs here have 3 to 40. The last fails at the end.
STEPS = (0, 1, 2, 5, 11, 10**6)


def mlp() -> tuple[nn.Sequential, Tensor]:
    """Buffers and random draws in every stage that has parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8)),
        *(nn.Dropout(0.2), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    )
    return model, torch.randn(12, 6)


def convolutions() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
        *(nn.AlphaDropout(0.1), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)),
    )
    return model, torch.randn(12, 3, 6, 6)


MODELS = {"mlp": mlp, "convolutions": convolutions}


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


@dataclass
class Pipe:
    """A pipeline, what one of its steps must give, and the planting of failures."""

    pipe: GPipe
    x: Tensor
    expected: Result
    start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.start = {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}

    def plant(self, case: Case) -> None:
        self.pipe._pipeline.disturb(
            case.seed, case.longest_delay_us, [(str(case.action), case.step, case.error)]
        )

    def state(self) -> Result:
        """Everything that a failure must not change."""
        state: Result = {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}
        for name, parameter in self.pipe.named_parameters():
            state[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        return state

    def start_again(self) -> None:
        self.pipe.load_state_dict(self.start)
        self.set_gradients(False)

    def set_gradients(self, present: bool) -> None:
        for parameter in self.pipe.parameters():
            parameter.grad = torch.full_like(parameter, 0.1) if present else None

    def next_step_is_right(self) -> bool:
        """From the parameters and buffers that the first step met."""
        self.start_again()
        self.pipe._pipeline.disturb()
        return unequal(pipeline_step(self.pipe, self.x), self.expected) == []


def open_pipe(make: Callable[[], tuple[nn.Sequential, Tensor]]) -> Pipe:
    model, x = make()
    return Pipe(GPipe(model, [3, 3, 4], chunks=M), x, loop_step(model, x, M))


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def opened(request: pytest.FixtureRequest) -> Iterator[Pipe]:
    """One pipeline for all failures: each must leave it as new."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield open_pipe(request.param)
    torch.set_num_threads(before)


def fail_in_forward(opened: Pipe, case: Case) -> None:
    before = opened.state()
    opened.plant(case)
    with pytest.raises(ERRORS[case.error]) as caught:
        pipeline(opened.pipe, opened.x)
    check_error(caught.value, case.error, case.action)
    assert unequal(opened.state(), before) == []


def fail_in_backward(opened: Pipe, case: Case) -> None:
    x = leaf(opened.x)
    output = pipeline(opened.pipe, x)
    kept = kept_bytes(output)
    before = opened.state()
    opened.plant(case)
    with pytest.raises(ERRORS[case.error]) as caught:
        output.backward(gradient_like(output), retain_graph=case.retain)
    check_error(caught.value, case.error, case.action)
    assert unequal(opened.state(), before) == []
    assert x.grad is None
    opened.pipe._pipeline.disturb()
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
    assert str(error) == f"planted {planted} (in action {action})"


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
    for error in (ValueError("planted TypeError (in action 1I2)"), TypeError("planted TypeError")):
        with pytest.raises(AssertionError):
            check_error(error, case.error, case.action)
    opened.plant(case)
    with pytest.raises(TypeError, match="in action 1I2"):  # not taken back, so the next step fails too
        pipeline_step(opened.pipe, opened.x)
    opened.pipe._pipeline.disturb()


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
    disturb, run = opened.pipe._pipeline.disturb, repeatable(opened, backward)
    draw, races = random.Random(5), 0
    for seed in range(40):
        nearby = draw.randrange(len(order) - 8)
        planted = draw.sample(order[nearby : nearby + 8], 3)
        first = min(planted, key=order.index)
        disturb(seed, 4000)
        with opened.pipe.recording() as recording:
            run()
        ends = [recording.latest[action].end for action in planted]
        races += min(ends) < recording.latest[first].end
        errors = dict(zip(planted, draw.sample(list(ERRORS), 3), strict=True))
        disturb(seed, 4000, [(str(action), draw.choice(STEPS), error) for action, error in errors.items()])
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
            pipe._pipeline.disturb(3, 1000, [(action, 1, "ValueError")])
            with pytest.raises(ValueError, match=rf"\(in action {action}\)"):
                pipe(x)
            pipe._pipeline.disturb()
            assert torch.equal(pipe(x), expected)


class Watched(nn.Module):
    """Hands on what it gets, and keeps statistics of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.norm(x)


class Table(nn.Module):
    """Looks up whole numbers below 11, so that what comes in decides whether it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].long())


class FailingBackward(nn.Module):
    """Its backward looks up a gradient by what went in, and so fails above 2."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, index: Tensor, table: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.save_for_backward(index, table)
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
            index, table = ctx.saved_tensors
            return gradient * torch.index_select(table, 0, index), None, None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x, x.detach()[:, 0].abs().long(), self.table)


class Huge(nn.Module):
    """Adds nothing, by way of 4 PB."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * x.new_ones(2**50).sum()


class HugeBackward(nn.Module):
    """Likewise in its backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return 2 * gradient + 0 * gradient.new_ones(2**50).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x)


def natural(layer: nn.Module, checkpoint: str = "except_last") -> GPipe:
    """What fails is in stage 1; the stages around it have buffers and parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(Watched(), layer, nn.BatchNorm1d(6), nn.Linear(6, 2))
    return GPipe(model, [1, 1, 2], chunks=M, checkpoint=checkpoint)


GOOD = torch.tensor([[0.0, 2, 1, 1, 2, 0, 1, 2]]).t().repeat(1, 6)
BAD = GOOD.clone()
BAD[5] = 99  # the second of micro-batch 2


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(
    ("layer", "action"),
    [(Table, "1F2"), (FailingBackward, "1R2")],
    ids=["in the forward", "in the backward"],
)
def test_an_operator_that_fails(layer: type[nn.Module], action: str, checkpoint: str) -> None:
    """PyTorch's own errors, out of its own operators."""
    pipe = natural(layer(), checkpoint)
    opened = Pipe(pipe, GOOD, loop_step(nn.Sequential(*pipe), GOOD, M))
    before = opened.state()
    with pytest.raises(IndexError) as caught:
        output = pipe(BAD)
        before = opened.state()
        output.sum().backward()
    if checkpoint == "never":
        action = action.replace("R", "I")
    assert str(caught.value) == f"index out of range in self (in action {action})"
    assert unequal(opened.state(), before) == []
    assert opened.next_step_is_right()


def test_an_operator_that_fails_when_recomputed() -> None:
    """The input is changed behind autograd's back, so the forward could look up what the recompute cannot."""
    lookup = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.GELU())
    pipe, x = GPipe(nn.Sequential(lookup, nn.Linear(6, 2)), [1, 1], chunks=M), torch.arange(8)
    output = pipe(x)
    x.data[3] = 11
    with pytest.raises(IndexError, match=r"index out of range in self \(in action 0R1\)"):
        output.sum().backward()
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize(
    ("layer", "action"), [(Huge, "1F0"), (HugeBackward, "1I3")], ids=["in the forward", "in the backward"]
)
def test_more_memory_than_there_can_be(layer: type[nn.Module], action: str) -> None:
    pipe = natural(layer())
    with pytest.raises(
        RuntimeError, match=rf"tried to allocate 4503599627370496 bytes.* \(in action {action}\)"
    ):
        pipe(GOOD).sum().backward()
    assert all(p.grad is None for p in pipe.parameters())
    assert (pipe[2].num_batches_tracked == 0) == (layer is Huge)


def test_a_last_layer_whose_outputs_cannot_be_joined() -> None:
    """A loss as last layer: its numbers have no first dimension."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    model = nn.Sequential(nn.BatchNorm1d(6), Mean())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="output 0 of the last layer is 0-dimensional"):
        GPipe(model, [1, 1], chunks=M)(torch.randn(8, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_threads_fail_on_their_own() -> None:
    """A failing mini-batch of one thread is none of another's business."""
    pipe = natural(Table()).eval()
    expected = plain_loop(nn.Sequential(*pipe), GOOD, M)

    def call(x: Tensor) -> list[str]:
        found = []
        for _ in range(100):
            try:
                found.append("right" if torch.equal(pipe(x), expected) else "wrong")
            except IndexError as error:
                found.append(str(error))
        return found

    with ThreadPoolExecutor(2) as pool:
        of_good, of_bad = pool.map(call, [GOOD, BAD])
    assert set(of_good) == {"right"}
    assert set(of_bad) == {"index out of range in self (in action 1F2)"}


def uses(x: Tensor) -> int:
    """How many tensors share its memory."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


@pytest.mark.parametrize("retain", [False, True])
def test_memory_is_released_after_a_failed_backward(retain: bool) -> None:
    """The first stage keeps a view of the input for each micro-batch."""
    opened = open_pipe(mlp)
    opened.pipe.checkpoint = "always"
    x, alone = opened.x, uses(opened.x)
    output = opened.pipe(x)
    gradient, alone_gradient = gradient_like(output), uses(gradient_like(output))
    assert uses(x) >= alone + M
    opened.pipe._pipeline.disturb(0, 0, [("1I1", 3, "ValueError")])
    with pytest.raises(ValueError, match="planted"):
        output.backward(gradient, retain_graph=retain)
    assert (kept_bytes(output) > 0) == retain
    assert uses(gradient) == alone_gradient
    del output
    assert uses(x) == alone


def test_memory_is_released_after_a_failed_forward() -> None:
    opened = open_pipe(mlp)
    before = uses(opened.x)
    for action in map(str, FORWARDS):
        opened.pipe._pipeline.disturb(0, 0, [(action, 3, "ValueError")])
        with pytest.raises(ValueError, match="planted"):
            opened.pipe(opened.x)
        assert uses(opened.x) == before, action
    gone = weakref.ref(opened.pipe)
    del opened
    gc.collect()
    assert gone() is None


SHORT_OF_MEMORY = """
    import contextlib, resource
    import torch
    from torch import nn
    from gpipe_fast import GPipe
    from gpipe_fast.layers.structure import Inputs

    torch.set_num_threads(1)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2**14))

        def forward(self, x):
            return (x[:, :, None] * self.weight).mean(-1)

    @contextlib.contextmanager
    def room(mebibytes):
        "Address space that is left in the block."
        before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def fails(mebibytes, message, call):
        state = {n: t.clone() for n, t in model.state_dict().items()}
        try:
            with room(mebibytes):
                call()
        except RuntimeError as error:
            assert message in str(error), error
        else:
            raise AssertionError("did not fail")
        assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Wide(), nn.BatchNorm1d(6))
    pipe = GPipe(model, [1, 1, 1], chunks=4)
    small, large = torch.randn(8, 6), torch.randn(800, 6)
    for x in (small, large):
        pipe._plan(Inputs.of((x,), {}))  # traces, which takes memory of its own
    fails(1, "Resource temporarily unavailable", lambda: pipe(small))  # no room for a worker's stack
    pipe(small).sum().backward()
    model.zero_grad()
    fails(40, "tried to allocate 78643200 bytes", lambda: pipe(large))
    output = pipe(large).sum()
    fails(40, "bytes", output.backward)
    for x in (small, large):
        ours = torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))
        plain = torch.cat([model(c) for c in x.chunk(4)]).square().sum()
        assert all(map(torch.equal, ours, torch.autograd.grad(plain, list(model.parameters()))))
    print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much memory is used from /proc")
def test_short_of_memory() -> None:
    """Too little for the workers' stacks, for a forward, for a backward; then enough again."""
    program = textwrap.dedent(SHORT_OF_MEMORY)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
