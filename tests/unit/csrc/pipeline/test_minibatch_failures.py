"""Contract 7, all or nothing: failing layers, too little memory, and memory released after a failure."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast._extension import kept_bytes
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.schedule import fill_drain
from tests.internals import inject_failure, remove_faults
from tests.programs import run_python
from tests.reference import gradient_like, loop_step, pipeline_step, unequal
from tests.unit.csrc.pipelines_under_test import K, M, PipelineUnderTest, mlp, pipeline_under_test
from tests.untraceable import without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")


class RunningStatistics(nn.Module):
    """Returns its input and updates running statistics of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.norm(x)


class Table(nn.Module):
    """An embedding with 11 rows, which fails if its input holds a larger index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].long())


class InBackward(nn.Module):
    """Doubles its input; its backward calls a function of the gradient and of the input."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, function: Callable[..., Tensor]) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.function = function
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
            return ctx.function(gradient, *ctx.saved_tensors), None

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x, self.function)


def look_up(gradient: Tensor, x: Tensor) -> Tensor:
    """Uses the input as an index, and fails if it is above 2."""
    return gradient * torch.index_select(torch.ones(3, 6), 0, x[:, 0].abs().long())


class Huge(nn.Module):
    """Adds zero, computed from a temporary tensor of 4 PiB."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * x.new_ones(2**50).sum()


def pipe_with(layer: nn.Module, checkpoint: str = "except_last") -> GPipe:
    """Returns a pipeline with ``layer`` as stage 1, between stages with buffers and parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(RunningStatistics(), layer, nn.BatchNorm1d(6), nn.Linear(6, 2))
    return GPipe(model, [1, 1, 2], chunks=M, checkpoint=checkpoint)


GOOD = torch.tensor([[0.0, 2, 1, 1, 2, 0, 1, 2]]).t().repeat(1, 6)
BAD = GOOD.clone()
BAD[5] = 99  # the second sample of micro-batch 2


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(
    ("make", "action"),
    [(Table, "1F2"), (lambda: InBackward(look_up), "1R2")],
    ids=["in the forward", "in the backward"],
)
def test_operator_errors_name_action_and_layer_and_change_nothing(
    make: Callable[[], nn.Module], action: str, checkpoint: str
) -> None:
    """The errors come from PyTorch's own operators."""
    pipe = pipe_with(make(), checkpoint)
    tested = PipelineUnderTest(pipe, GOOD, loop_step(nn.Sequential(*pipe), GOOD, M))
    before = tested.state()
    with pytest.raises(IndexError) as caught:
        output = pipe(BAD)
        before = tested.state()
        output.sum().backward()
    if checkpoint == "never":
        action = action.replace("R", "I")
    place = f"in action {action}: stage 1, layer 1 ({type(pipe[1]).__name__}), micro-batch 2"
    assert str(caught.value) == f"index out of range in self ({place})"
    assert unequal(tested.state(), before) == []
    assert tested.next_step_is_correct()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > -1 else -x


class OtherLinear(nn.Linear):
    """A second class with the same computation."""


@pytest.mark.parametrize(
    ("kind", "checkpoint", "layers"),
    # The recompute needs no product, and the Tanh has no weights.
    [("F", "never", [0, 1]), ("R", "always", [0]), ("W", "never", [1]), ("I", "never", [0, 1])],
)
def test_errors_in_equal_stages_name_the_layers_of_their_own_stage(
    kind: str, checkpoint: str, layers: list[int]
) -> None:
    """Equal stages share one trace, which numbers layers from the start of the stage."""
    torch.manual_seed(0)
    linear = (nn.Linear, nn.Linear, OtherLinear)
    model = nn.Sequential(*(layer for make in linear for layer in (nn.Tanh(), make(6, 6))))
    pipe, x = GPipe(model, [2] * 3, chunks=2, checkpoint=checkpoint), torch.randn(4, 6)
    for stage in (1, 2):
        found = set()
        for step in range(12):
            inject_failure(pipe, f"{stage}{kind}1", after=step)
            with pytest.raises(ValueError) as caught:
                pipe(x).square().sum().backward()
            remove_faults(pipe)
            found.add(str(caught.value))
        begin = f"injected ValueError (in action {stage}{kind}1"
        after = {f"{begin})"}  # after the last operator no layer is running
        expected = [(2 * stage + layer, model[2 * stage + layer]) for layer in layers]
        assert found - after == {
            f"{begin}: stage {stage}, {layer_title(*at)}, micro-batch 1)" for at in expected
        }
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 2)) == []


def test_errors_name_a_lowered_layer_that_follows_a_python_layer() -> None:
    model = nn.Sequential(RunningStatistics(), Branching(), Table())
    pipe = GPipe(model, [1, 2], chunks=M)
    with without_warnings():
        for _ in range(4):
            pipe(GOOD)
        with pytest.raises(IndexError, match=r"1F2: stage 1, layer 2 \(Table\), micro-batch 2\)$"):
            pipe(BAD)


@pytest.mark.parametrize(
    ("layer", "action"),
    [(Huge(), "1F0"), (InBackward(lambda g, x: g + 0 * g.new_ones(2**50).sum()), "1I3")],
    ids=["in the forward", "in the backward"],
)
def test_failed_allocations_name_action_and_layer(layer: nn.Module, action: str) -> None:
    pipe = pipe_with(layer)
    with pytest.raises(
        RuntimeError,
        match=rf"tried to allocate 4503599627370496 bytes.* \(in action {action}: stage 1, layer 1 \(.*"
        "; stage 1 on cpu holds .*; to reduce this, use more chunks",
    ):
        pipe(GOOD).sum().backward()
    assert all(p.grad is None for p in pipe.parameters())
    assert (pipe[2].num_batches_tracked == 0) == isinstance(layer, Huge)


def test_injected_errors_of_the_allocator_and_of_a_device_keep_their_types() -> None:
    """The next call works."""
    pipe = GPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), [2, 2], devices=["cpu"] * 2, chunks=4)
    x = torch.randn(8, 4)
    for action, step in (("1F2", lambda: pipe(x)), ("0B1", lambda: pipe(x).sum().backward())):
        message = (
            rf"injected OutOfMemoryError \(in action {action}: .*; stage {action[0]} on cpu holds 160 bytes "
            r"of parameters, .* 32 bytes of boundary tensors for each of 4 micro-batches "
            r"\(128 bytes in total\)"
        )
        for error, expected in (
            (torch.OutOfMemoryError, message),
            (torch.AcceleratorError, rf"injected AcceleratorError \(in action {action}: stage"),
        ):
            inject_failure(pipe, action, error.__name__, after=1)
            with pytest.raises(error, match=expected):
                step()
            remove_faults(pipe)
            pipe(x).sum().backward()


def test_a_failure_with_buffers_that_are_inference_tensors_is_an_error() -> None:
    """Buffers are restored after a failure, and an error in this would end the process."""
    with torch.inference_mode():
        model = GPipe(nn.Sequential(nn.BatchNorm1d(4)), [1], backend="eager")
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        model(torch.randn(8, 4))


class ReplacesBuffer(nn.Module):
    """Replaces a buffer and fails; replacing it once more raises the error that is given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.errors: list[BaseException] = []
        self.error = error

    def __setattr__(self, name: str, value: object) -> None:
        if name == "count" and self.errors:
            raise self.errors.pop()
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.errors = [self.error]
        raise ValueError("the layer fails")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("frozen")], ids=repr)
def test_errors_while_buffers_are_restored(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt does not keep buffers from being restored; another error is printed."""
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: printed.append(args.exc_value))
    model = GPipe(nn.Sequential(ReplacesBuffer(error)), [1], backend="eager")
    with pytest.raises(ValueError, match="the layer fails"):
        model(torch.randn(8, 4))
    if isinstance(error, KeyboardInterrupt):
        assert model[0].count == 0
    else:
        assert printed == [error]


def num_references(x: Tensor) -> int:
    """Returns how many tensors share ``x``'s memory."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


@pytest.mark.parametrize("retain", [False, True])
def test_memory_is_released_after_failures(retain: bool) -> None:
    """The first stage keeps a view of the input for each micro-batch."""
    tested = pipeline_under_test(mlp)
    tested.pipe.checkpoint = "always"
    x, before = tested.x, num_references(tested.x)
    for action in fill_drain(K, M, backward=False).order():
        inject_failure(tested.pipe, action, after=3)
        with pytest.raises(ValueError, match="injected"):
            tested.pipe(x)
        assert num_references(x) == before, action
    remove_faults(tested.pipe)
    output = tested.pipe(x)
    gradient = gradient_like(output)
    of_gradient = num_references(gradient)
    assert num_references(x) >= before + M
    inject_failure(tested.pipe, "1I1", after=3)
    with pytest.raises(ValueError, match="injected"):
        output.backward(gradient, retain_graph=retain)
    assert (kept_bytes(output) > 0) == retain
    assert num_references(gradient) == of_gradient
    del output
    assert num_references(x) == before
    weak_pipe = weakref.ref(tested.pipe)
    del tested
    gc.collect()
    assert weak_pipe() is None


LOW_MEMORY_PROGRAM = """
    import resource
    import torch
    from torch import nn
    from gpipe_fast import GPipe
    from tests.internals import plan_of

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6))
    pipe, x = GPipe(model, [1, 1, 1], chunks=4), torch.randn(8, 6)
    plan_of(pipe, x)  # traces, which needs memory, too
    state = {n: t.clone() for n, t in model.state_dict().items()}
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))  # no space for a stack
    try:
        pipe(x)
    except RuntimeError as error:
        assert "Resource temporarily unavailable" in str(error), error
    else:
        raise AssertionError("did not fail")
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    pipe(x).sum().backward()
    print("done")
"""


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much memory is used from /proc")
def test_a_pipeline_recovers_from_too_little_memory_for_its_workers() -> None:
    done = run_python("-c", textwrap.dedent(LOW_MEMORY_PROGRAM))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
