"""Cases in which torchgpipe fails: gpipe_fast is correct, and torchgpipe is shown to be wrong."""

from __future__ import annotations

import contextlib
import copy
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.programs import run_python
from tests.torchgpipe.libraries import (
    OURS,
    TORCHGPIPE,
    FunctionLayer,
    Library,
    RecordingLinear,
    both_libraries,
    ignore_python_warning,
    numbered_samples,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), ignore_python_warning]

recomputing_modes = pytest.mark.parametrize("checkpoint", ["always", "except_last"])


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


@both_libraries
@recomputing_modes
@pytest.mark.parametrize(("integers_first", "error"), [(False, RuntimeError), (True, IndexError)])
def test_an_integer_output_beside_a_float_output_keeps_its_dtype(
    integers_first: bool, error: type[Exception], checkpoint: str, library: Library
) -> None:
    torch.manual_seed(0)
    layer, x = WithIntegers(integers_first), numbered_samples()
    pipe = library.make(nn.Sequential(nn.Identity(), layer), [1, 1], chunks=4, checkpoint=checkpoint)
    with library.torchgpipe_raises(error):
        outputs = pipe(x)
        outputs[integers_first].square().sum().backward()
        assert outputs[1 - integers_first].dtype == torch.int64
        (expected,) = torch.autograd.grad(layer(x)[integers_first].square().sum(), layer.linear.weight)
        torch.testing.assert_close(layer.linear.weight.grad, expected)


@both_libraries
def test_a_tuple_of_unequal_batch_sizes_is_rejected(library: Library) -> None:
    """8 and 3 samples in 4 chunks: torchgpipe returns 6 and 3."""
    pipe = library.make(nn.Sequential(nn.Identity()), [1], chunks=4)
    with (
        library.torchgpipe_raises(pytest.fail.Exception),
        pytest.raises(ValueError, match="the same batch size"),
    ):
        pipe((numbered_samples(8), numbered_samples(3)))


@both_libraries
@recomputing_modes
def test_autograd_grad_returns_the_gradients_of_parameters(checkpoint: str, library: Library) -> None:
    """Torchgpipe returns None under `always`, and the last micro-batch's gradients under `except_last`."""
    module, x = linears(), numbered_samples()
    pipe = library.make(module, [1, 1], chunks=4, checkpoint=checkpoint)
    parameters = list(module.parameters())
    with library.torchgpipe_raises(AssertionError):
        actual = torch.autograd.grad(pipe(x).square().sum(), parameters, allow_unused=True)
        assert None not in [None if g is None else 0 for g in actual]
        torch.testing.assert_close(actual, torch.autograd.grad(module(x).square().sum(), parameters))


@both_libraries
def test_except_last_spares_the_last_micro_batch_even_with_fewer_than_chunks(library: Library) -> None:
    """The last micro-batch is not recomputed; torchgpipe recomputes it, because it is not the eighth."""
    recorder = RecordingLinear(library)
    pipe = library.make(nn.Sequential(recorder), [1], chunks=8, checkpoint="except_last")
    with library.torchgpipe_raises(AssertionError):
        pipe(numbered_samples(3)).sum().backward()
        assert recorder.phases == "CCFRR"


@both_libraries
def test_chunks_can_grow_after_the_first_call(library: Library) -> None:
    module, x = linears(), numbered_samples()
    pipe = library.make(module, [1, 1], chunks=2)
    pipe(x)
    pipe.chunks = 4
    with library.torchgpipe_raises(IndexError):
        torch.testing.assert_close(pipe(x), module(x))


@both_libraries
def test_autocast_around_a_call_applies_to_the_stages(library: Library) -> None:
    pipe = library.make(linears(), [1, 1], chunks=2)
    with library.torchgpipe_raises(AssertionError), torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe(numbered_samples()).dtype == torch.bfloat16


@both_libraries
def test_a_deep_copy_after_a_call_works(library: Library) -> None:
    """Torchgpipe identifies its streams by objects, which a deep copy replaces."""
    pipe, x = library.make(linears(), [1, 1], chunks=2), numbered_samples()
    expected = pipe(x)
    duplicate = copy.deepcopy(pipe)
    with library.torchgpipe_raises(AttributeError):
        assert torch.equal(duplicate(x), expected)


@both_libraries
@recomputing_modes
def test_a_second_backward_adds_the_same_gradients(checkpoint: str, library: Library) -> None:
    module, x = linears(), numbered_samples()
    output = library.make(module, [1, 1], chunks=2, checkpoint=checkpoint)(x).square().sum()
    output.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    with library.torchgpipe_raises(IndexError):
        output.backward()
        assert all(torch.equal(p.grad, 2 * g) for p, g in zip(module.parameters(), first, strict=True))


@pytest.fixture(scope="module")
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        rendezvous = tmp_path_factory.mktemp("gloo") / "meet"
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@both_libraries
@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_training_inside_distributed_data_parallel_works(checkpoint: str, library: Library) -> None:
    """Torchgpipe trains inside DistributedDataParallel only with `never`."""
    module, x = linears(), numbered_samples()
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    model = DistributedDataParallel(library.make(module, [1, 1], chunks=4, checkpoint=checkpoint))
    errors = (RuntimeError, AssertionError)
    with library.torchgpipe_raises(*errors) if checkpoint != "never" else contextlib.nullcontext():
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
    pipe(torch.ones(4, 2))
"""


@pytest.mark.parametrize(
    ("library", "timeout_s"), [(OURS, 120), (TORCHGPIPE, 3)], ids=["gpipe_fast", "torchgpipe"]
)
def test_a_call_raises_the_system_exit_of_a_stage(library: Library, timeout_s: float) -> None:
    """The call raises SystemExit; torchgpipe waits for a thread that has ended."""
    program = textwrap.dedent(SYSTEM_EXIT.format(library=library.package.__name__))
    with library.torchgpipe_raises(TimeoutError):
        assert run_python("-c", program, timeout=timeout_s).returncode == 3


PASSED_VALUES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], type[Exception]]] = {
    "a list": (lambda x: [x, x * 2], lambda v: v[0] + v[1] if type(v) is list else v[0], AssertionError),
    "a dict": (lambda x: {"a": x}, lambda v: v["a"], AttributeError),
    "None": (lambda x: (x, None), lambda v: v[0] if v[1] is None else -v[0], AttributeError),
    "a nested tuple": (lambda x: (x, (x, x * 2)), lambda v: v[0] + v[1][1], AttributeError),
}


@both_libraries
@pytest.mark.parametrize(("first", "second", "error"), PASSED_VALUES.values(), ids=PASSED_VALUES.keys())
def test_values_other_than_tuples_of_tensors_pass_between_stages(
    first: Callable[[Any], Any], second: Callable[[Any], Any], error: type[Exception], library: Library
) -> None:
    """Torchgpipe turns a list into a tuple, and fails to pass on the other types."""
    module, x = (
        nn.Sequential(nn.Linear(6, 6), FunctionLayer(first), FunctionLayer(second)),
        numbered_samples(),
    )
    pipe = library.make(module, [2, 1], chunks=2, checkpoint="never")
    with library.torchgpipe_raises(error):
        torch.testing.assert_close(pipe(x), module(x))


@both_libraries
def test_a_checkpoint_is_loaded_under_another_balance(library: Library) -> None:
    saved, model = library.make(linears(3), [2, 1]), library.make(linears(3), [1, 2])
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.zero_()
    with library.torchgpipe_raises(RuntimeError):
        model.load_state_dict(saved.state_dict())
        assert not any(p.any() for p in model.parameters())


class MeetsOtherStage(nn.Module):
    """Waits at one micro-batch until the layer of the other stage has reached its own."""

    def __init__(self, barrier: threading.Barrier, sample: float) -> None:
        super().__init__()
        self.barrier, self.sample = barrier, sample

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) == self.sample:
            self.barrier.wait()
        return x * 2


@both_libraries
def test_stages_on_the_cpu_run_at_the_same_time(library: Library) -> None:
    """Stage 0 runs micro-batch 1 while stage 1 runs micro-batch 0."""
    barrier = threading.Barrier(2, timeout=10.0 if library is OURS else 0.5)
    stages = nn.Sequential(MeetsOtherStage(barrier, 2.0), MeetsOtherStage(barrier, 0.0))
    pipe, x = library.make(stages, [1, 1], chunks=4), numbered_samples()
    with library.torchgpipe_raises(threading.BrokenBarrierError):
        assert torch.equal(pipe(x), x * 4)
