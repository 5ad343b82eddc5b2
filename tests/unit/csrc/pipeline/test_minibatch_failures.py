"""Contract 7, all or nothing: failing layers, too little memory, and memory released after a failure."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor
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
from tests.reference import gradient_like, loop_step, pipeline_step, plain_loop, unequal
from tests.unit.csrc.pipelines_under_test import K, M, PipelineUnderTest, mlp, pipeline_under_test
from tests.untraceable import without_warnings

ROOT = Path(__file__).parents[4]

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


class FailingBackward(nn.Module):
    """Doubles its input; the backward uses the input as an index and fails if it is above 2."""

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
    """Adds zero, computed from a temporary tensor of 4 PiB."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * x.new_ones(2**50).sum()


class HugeBackward(nn.Module):
    """Allocates a temporary tensor of 4 PiB in its backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return 2 * gradient + 0 * gradient.new_ones(2**50).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x)


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
    ("layer", "action"),
    [(Table, "1F2"), (FailingBackward, "1R2")],
    ids=["in the forward", "in the backward"],
)
def test_operator_errors_name_action_and_layer_and_change_nothing(
    layer: type[nn.Module], action: str, checkpoint: str
) -> None:
    """The errors come from PyTorch's own operators."""
    pipe = pipe_with(layer(), checkpoint)
    tested = PipelineUnderTest(pipe, GOOD, loop_step(nn.Sequential(*pipe), GOOD, M))
    before = tested.state()
    with pytest.raises(IndexError) as caught:
        output = pipe(BAD)
        before = tested.state()
        output.sum().backward()
    if checkpoint == "never":
        action = action.replace("R", "I")
    place = f"in action {action}: stage 1, layer 1 ({layer.__name__}), micro-batch 2"
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


def test_errors_of_a_recompute_name_action_and_layer() -> None:
    """Changes the input without autograd's knowledge, so that only the recompute's lookup fails."""
    lookup = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.GELU())
    pipe, x = GPipe(nn.Sequential(lookup, nn.Linear(6, 2)), [1, 1], chunks=M), torch.arange(8)
    output = pipe(x)
    x.data[3] = 11
    place = r"in action 0R1: stage 0, layer 0 \(Sequential\), micro-batch 1"
    with pytest.raises(IndexError, match=rf"index out of range in self \({place}\)"):
        output.sum().backward()
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize(
    ("layer", "action"), [(Huge, "1F0"), (HugeBackward, "1I3")], ids=["in the forward", "in the backward"]
)
def test_failed_allocations_name_action_and_layer(layer: type[nn.Module], action: str) -> None:
    pipe = pipe_with(layer())
    with pytest.raises(
        RuntimeError,
        match=rf"tried to allocate 4503599627370496 bytes.* \(in action {action}: stage 1, layer 1 \(Huge.*"
        "; stage 1 on cpu holds .*; to reduce this, use more chunks",
    ):
        pipe(GOOD).sum().backward()
    assert all(p.grad is None for p in pipe.parameters())
    assert (pipe[2].num_batches_tracked == 0) == (layer is Huge)


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


def test_a_second_interrupt_does_not_keep_buffers_from_being_restored() -> None:
    model = GPipe(nn.Sequential(ReplacesBuffer(KeyboardInterrupt())), [1], backend="eager")
    with pytest.raises(ValueError, match="the layer fails"):
        model(torch.randn(8, 4))
    assert model[0].count == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_while_buffers_are_restored_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: printed.append(str(args.exc_value)))
    model = GPipe(nn.Sequential(ReplacesBuffer(RuntimeError("frozen"))), [1], backend="eager")
    with pytest.raises(ValueError, match="the layer fails"):
        model(torch.randn(8, 4))
    assert printed == ["frozen"]


def test_outputs_that_cannot_be_concatenated_are_refused() -> None:
    """The last layer is a loss, whose 0-dimensional outputs have no batch dimension."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    model = nn.Sequential(nn.BatchNorm1d(6), Mean())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="output 0 of the last layer is 0-dimensional"):
        GPipe(model, [1, 1], chunks=M)(torch.randn(8, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_failure_does_not_affect_calls_of_other_threads() -> None:
    pipe = pipe_with(Table()).eval()
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
        good_results, bad_results = pool.map(call, [GOOD, BAD])
    assert set(good_results) == {"right"}
    assert set(bad_results) == {
        "index out of range in self (in action 1F2: stage 1, layer 1 (Table), micro-batch 2)"
    }


def num_references(x: Tensor) -> int:
    """Returns how many tensors share ``x``'s memory."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


@pytest.mark.parametrize("retain", [False, True])
def test_memory_is_released_after_a_failed_backward(retain: bool) -> None:
    """The first stage keeps a view of the input for each micro-batch."""
    tested = pipeline_under_test(mlp)
    tested.pipe.checkpoint = "always"
    x, references = tested.x, num_references(tested.x)
    output = tested.pipe(x)
    gradient, gradient_references = gradient_like(output), num_references(gradient_like(output))
    assert num_references(x) >= references + M
    inject_failure(tested.pipe, "1I1", after=3)
    with pytest.raises(ValueError, match="injected"):
        output.backward(gradient, retain_graph=retain)
    assert (kept_bytes(output) > 0) == retain
    assert num_references(gradient) == gradient_references
    del output
    assert num_references(x) == references


def test_memory_is_released_after_a_failed_forward() -> None:
    tested = pipeline_under_test(mlp)
    before = num_references(tested.x)
    for action in fill_drain(K, M, backward=False).order():
        inject_failure(tested.pipe, action, after=3)
        with pytest.raises(ValueError, match="injected"):
            tested.pipe(tested.x)
        assert num_references(tested.x) == before, action
    weak_pipe = weakref.ref(tested.pipe)
    del tested
    gc.collect()
    assert weak_pipe() is None


LOW_MEMORY_PROGRAM = """
    import contextlib, resource
    import torch
    from torch import nn
    from gpipe_fast import GPipe
    from tests.internals import plan_of

    torch.set_num_threads(1)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2**14))

        def forward(self, x):
            return (x[:, :, None] * self.weight).mean(-1)

    @contextlib.contextmanager
    def free_address_space(mebibytes):
        "Limits the free address space in the block."
        before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def check_failure(mebibytes, message, call):
        state = {n: t.clone() for n, t in model.state_dict().items()}
        try:
            with free_address_space(mebibytes):
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
        plan_of(pipe, x)  # traces, which needs memory, too
    check_failure(1, "Resource temporarily unavailable", lambda: pipe(small))  # no space for a stack
    pipe(small).sum().backward()
    model.zero_grad()
    check_failure(40, "tried to allocate 78643200 bytes", lambda: pipe(large))
    output = pipe(large).sum()
    check_failure(40, "bytes", output.backward)
    for x in (small, large):
        ours = torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))
        plain = torch.cat([model(c) for c in x.chunk(4)]).square().sum()
        assert all(map(torch.equal, ours, torch.autograd.grad(plain, list(model.parameters()))))
    print("done")
"""


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much memory is used from /proc")
def test_a_pipeline_recovers_from_too_little_memory() -> None:
    """Lacks memory for the workers' stacks, for a forward and for a backward; then has enough again."""
    program = textwrap.dedent(LOW_MEMORY_PROGRAM)
    done = run_python("-c", program)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
