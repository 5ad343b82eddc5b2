"""Where torchgpipe fails: what is right, asserted of our library, and shown to be wrong of torchgpipe."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.torchgpipe.libraries import OURS, TORCHGPIPE, Library, Noting, Of, both, in_python, numbered

pytestmark = [pytest.mark.usefixtures("one_thread"), in_python]

recomputing = pytest.mark.parametrize("checkpoint", ["always", "except_last"])


def linears(number: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(number)))


class WithIntegers(nn.Module):
    def __init__(self, integers_first: bool) -> None:
        super().__init__()
        self.linear, self.integers_first = nn.Linear(6, 6), integers_first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return (y.argmax(1), y) if self.integers_first else (y, y.argmax(1))


@both
@recomputing
@pytest.mark.parametrize(("integers_first", "error"), [(False, RuntimeError), (True, IndexError)])
def test_a_float_and_an_integer_output(
    integers_first: bool, error: type[Exception], checkpoint: str, library: Library
) -> None:
    torch.manual_seed(0)
    layer, x = WithIntegers(integers_first), numbered()
    pipe = library.make(nn.Sequential(nn.Identity(), layer), [1, 1], chunks=4, checkpoint=checkpoint)
    with library.fails(error):
        outputs = pipe(x)
        outputs[integers_first].square().sum().backward()
        assert outputs[1 - integers_first].dtype == torch.int64
        (expected,) = torch.autograd.grad(layer(x)[integers_first].square().sum(), layer.linear.weight)
        torch.testing.assert_close(layer.linear.weight.grad, expected)


@both
def test_a_tuple_with_unequal_batches(library: Library) -> None:
    """8 and 3 samples in 4 chunks: torchgpipe returns 6 and 3."""
    pipe = library.make(nn.Sequential(nn.Identity()), [1], chunks=4)
    with library.fails(pytest.fail.Exception), pytest.raises(ValueError, match="the same batch size"):
        pipe((numbered(8), numbered(3)))


@both
@recomputing
def test_gradients_of_parameters_asked_for_by_name(checkpoint: str, library: Library) -> None:
    """Torchgpipe has none under `always`, and those of the last micro-batch alone under `except_last`."""
    module, x = linears(), numbered()
    pipe = library.make(module, [1, 1], chunks=4, checkpoint=checkpoint)
    parameters = list(module.parameters())
    with library.fails(AssertionError):
        found = torch.autograd.grad(pipe(x).square().sum(), parameters, allow_unused=True)
        assert None not in [None if g is None else 0 for g in found]
        torch.testing.assert_close(found, torch.autograd.grad(module(x).square().sum(), parameters))


@both
def test_except_last_with_fewer_micro_batches_than_chunks(library: Library) -> None:
    """The last one is there, and is not recomputed; torchgpipe waits for the eighth."""
    noting = Noting(library)
    pipe = library.make(nn.Sequential(noting), [1], chunks=8, checkpoint="except_last")
    with library.fails(AssertionError):
        pipe(numbered(3)).sum().backward()
        assert noting.phases == "CCFRR"


@both
def test_more_chunks_after_the_first_call(library: Library) -> None:
    module, x = linears(), numbered()
    pipe = library.make(module, [1, 1], chunks=2)
    pipe(x)
    pipe.chunks = 4
    with library.fails(IndexError):
        torch.testing.assert_close(pipe(x), module(x))


@both
def test_autocast_around_a_call(library: Library) -> None:
    pipe = library.make(linears(), [1, 1], chunks=2)
    with library.fails(AssertionError), torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe(numbered()).dtype == torch.bfloat16


@both
def test_a_deep_copy_after_a_call(library: Library) -> None:
    """What torchgpipe knows its streams by is another object in the copy."""
    pipe, x = library.make(linears(), [1, 1], chunks=2), numbered()
    expected = pipe(x)
    copied = copy.deepcopy(pipe)
    with library.fails(AttributeError):
        assert torch.equal(copied(x), expected)


@both
@recomputing
def test_a_second_backward(checkpoint: str, library: Library) -> None:
    module, x = linears(), numbered()
    output = library.make(module, [1, 1], chunks=2, checkpoint=checkpoint)(x).square().sum()
    output.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    with library.fails(IndexError):
        output.backward()
        assert all(torch.equal(p.grad, 2 * g) for p, g in zip(module.parameters(), first, strict=True))


@pytest.fixture(scope="module")
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        meet = tmp_path_factory.mktemp("gloo") / "meet"
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@both
@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_distributed_data_parallel_around_it(checkpoint: str, library: Library) -> None:
    """Torchgpipe trains so with `never` alone."""
    module, x = linears(), numbered()
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    model = DistributedDataParallel(library.make(module, [1, 1], chunks=4, checkpoint=checkpoint))
    errors = (RuntimeError, AssertionError)
    with library.fails(*errors) if checkpoint != "never" else OURS.fails():
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            torch.testing.assert_close(tuple(p.grad for p in module.parameters()), expected)


SYSTEM_EXIT = """
    import sys, warnings
    import torch
    from torch import nn
    from {library} import GPipe

    class Exits(nn.Module):
        def forward(self, x):
            sys.exit(3)

    warnings.simplefilter("ignore")
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Exits()), [1, 1], devices=["cpu"] * 2, chunks=2)
    print("ready", flush=True)
    pipe(torch.ones(4, 2))
"""


@pytest.mark.parametrize(
    ("library", "patience"), [(OURS, 120), (TORCHGPIPE, 3)], ids=["gpipe_fast", "torchgpipe"]
)
def test_a_stage_that_exits(library: Library, patience: float) -> None:
    """SystemExit comes out of the call; torchgpipe waits for a thread that is gone."""
    program = textwrap.dedent(SYSTEM_EXIT.format(library=library.package.__name__))
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with library.fails(subprocess.TimeoutExpired):
                assert process.wait(patience) == 3
        finally:
            process.kill()


BETWEEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], type[Exception]]] = {
    "a list": (lambda x: [x, x * 2], lambda v: v[0] + v[1] if type(v) is list else v[0], AssertionError),
    "a dict": (lambda x: {"a": x}, lambda v: v["a"], AttributeError),
    "None": (lambda x: (x, None), lambda v: v[0] if v[1] is None else -v[0], AttributeError),
    "a nested tuple": (lambda x: (x, (x, x * 2)), lambda v: v[0] + v[1][1], AttributeError),
}


@both
@pytest.mark.parametrize(("first", "second", "error"), BETWEEN.values(), ids=BETWEEN.keys())
def test_what_is_no_tuple_of_tensors_between_stages(
    first: Callable[[Any], Any], second: Callable[[Any], Any], error: type[Exception], library: Library
) -> None:
    """In torchgpipe a list arrives as a tuple, and the others fail on the way."""
    module, x = nn.Sequential(nn.Linear(6, 6), Of(first), Of(second)), numbered()
    pipe = library.make(module, [2, 1], chunks=2, checkpoint="never")
    with library.fails(error):
        torch.testing.assert_close(pipe(x), module(x))


@both
def test_a_checkpoint_is_loaded_under_another_balance(library: Library) -> None:
    saved, model = library.make(linears(3), [2, 1]), library.make(linears(3), [1, 2])
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.zero_()
    with library.fails(RuntimeError):
        model.load_state_dict(saved.state_dict())
        assert not any(p.any() for p in model.parameters())


class Meets(nn.Module):
    """Waits at a micro-batch until the other one is there, too."""

    def __init__(self, meeting: threading.Barrier, sample: float) -> None:
        super().__init__()
        self.meeting, self.sample = meeting, sample

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) == self.sample:
            self.meeting.wait()
        return x * 2


@both
def test_stages_on_the_cpu_run_at_the_same_time(library: Library) -> None:
    """One with micro-batch 1, while the other has micro-batch 0."""
    meeting = threading.Barrier(2, timeout=10.0 if library is OURS else 0.5)
    stages = nn.Sequential(Meets(meeting, 2.0), Meets(meeting, 0.0))
    pipe, x = library.make(stages, [1, 1], chunks=4), numbered()
    with library.fails(threading.BrokenBarrierError):
        assert torch.equal(pipe(x), x * 4)
