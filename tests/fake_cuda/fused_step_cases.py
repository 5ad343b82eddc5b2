"""Steps with fused kernels on a fake device; run by test_fused_steps.py with the fake runtime preloaded.

`fused_step_cases.py OPERATORS CASE...`: runs functions of this file by name, and prints the name of each.
Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.fuse import cubins as machine_code
from gpipe_fast.fuse import left_out, replacement_check
from gpipe_fast.fuse.cubin import CompileFailure, Cubin, generated_from, kernel_of
from gpipe_fast.fuse.cubins import cubins
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.reports.checkup import check_fused
from tests.fake_cuda import interpreter
from tests.fake_cuda.cubin_files import keep_cubins
from tests.fake_cuda.fake_devices import load
from tests.internals import pipeline_of
from tests.unit.csrc.test_no_interpreter import C

DEVICE = torch.device("cuda:0")
WIDTH, ROWS, CHUNKS = 16, 12, 2
# Kernels of two blocks, without the hash that ends their names: the end of a block with the norm of the next,
# which is another kernel in the recompute; the end of the last block, and gradients.
FORWARD, LAST = "generated.tanh_layer_norm", "generated.tanh"
BACKWARD = "generated.layer_norm_backward"
BETWEEN, LAST_BACKWARD = "generated.layer_norm_backward_tanh_backward", "generated.tanh_tanh_backward"
ALL = (FORWARD, LAST, BACKWARD, BETWEEN, LAST_BACKWARD)
# For wrong kernels: a text of their source, and what stands there instead.
WRONG_FORWARD = ("tl.rsqrt(", "1.5 * tl.rsqrt(")
WRONG_BACKWARD = (f"* {1 / WIDTH}", f"* {2 / WIDTH}")

# The launches so far: the kernel, and whether its form was that for pointers that are divisible by 16.
launched: Counter[tuple[str, bool]] = Counter()
# Changes of sources, by kernel: the interpreter runs the changed kernel.
wrong_sources: dict[str, tuple[str, str]] = {}


def register_kernels() -> None:
    """Makes the interpreter know every kernel that a program loads, and note its launches."""
    keep_cubins()
    interpreter.register_loaded(changed)
    launch_of_runtime = interpreter._Interpreter._launch

    def note(self: Any, record: Any) -> None:
        launched[self._kernels[record.image].constants["label"]] += 1
        launch_of_runtime(self, record)

    mock.patch.object(interpreter._Interpreter, "_launch", note).start()


def without_hash(name: str) -> str:
    return re.sub(r"_[0-9a-f]{8}$", "", name)


def changed(launch: KernelLaunch) -> Any:
    """Returns the kernel of a launch, or a wrong one in its place."""
    if without_hash(launch.name) not in wrong_sources:
        return launch.kernel
    text = generated_from(launch.kernel.fn)
    assert text is not None
    right, wrong = wrong_sources[without_hash(launch.name)]
    assert right in text
    return kernel_of(launch.kernel.fn.__name__, text.replace(right, wrong))


class Block(nn.Module):
    """A residual branch with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.linear(self.norm(x)).tanh()
        return total


class Case:
    """A pipeline and its layers in float64 on the CPU, with the same parameters."""

    def __init__(self, balance: tuple[int, ...] = (2,), seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        layers = [Block() for _ in range(sum(balance))]
        for parameter in nn.ModuleList(layers).parameters():
            nn.init.normal_(parameter, std=0.5)
        self.exact = nn.Sequential(*copy.deepcopy(layers)).double()
        settings = {"chunks": CHUNKS, "checkpoint": "always", "fuse": True, "capture": False}
        settings |= {"devices": [DEVICE] * len(balance), **options}
        self.model = GPipe(nn.Sequential(*layers), balance, **settings)

    def step(self, rows: int = ROWS, offset: int = 0) -> Counter[tuple[str, bool]]:
        """Runs a step, and compares its output and all gradients. Returns the launches of the step.

        Args:
            rows: the size of the mini-batch.
            offset: where it begins in its memory, in elements.
        """
        before = launched.copy()
        block = torch.randn(rows * WIDTH + offset)
        x = block.to(DEVICE)[offset:].view(rows, WIDTH).detach().requires_grad_()
        exact_x = block[offset:].view(rows, WIDTH).double().requires_grad_()
        weights = torch.randn(rows, WIDTH)
        found = gradients(self.model, x, weights.to(self.model.devices[-1]))
        expected = gradients(self.exact, exact_x, weights.double())
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-5)
        return launched - before


def gradients(model: nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Returns the output and all gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    output = model(x)
    output.backward(weights)
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def kernels(launches: Counter[tuple[str, bool]]) -> Counter[str]:
    """Counts the launches of each kernel."""
    found: Counter[str] = Counter()
    for (name, _), count in launches.items():
        found[without_hash(name)] += count
    return found


@contextlib.contextmanager
def one_warning(text: str, times: int = 1) -> Iterator[None]:
    """Expects one warning about fused kernels inside the block, or one for each of several kernels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(each.message) for each in caught if "fused kernel" in str(each.message)]
    assert len(found) == times, found
    assert all(text in each for each in found), found


# Kernels that are left out


def a_kernel_that_does_not_compile_is_left_out() -> None:
    def fail(sources: Any, capability: Any) -> list[Cubin | CompileFailure]:
        made = cubins(sources, capability)
        names = [each.kernel.fn.__name__ for each in sources]
        return [
            CompileFailure("no such instruction") if without_hash(f"generated.{name}") == FORWARD else each
            for name, each in zip(names, made, strict=True)
        ]

    with mock.patch.object(machine_code, "cubins", fail), one_warning("no such instruction", times=2):
        case = Case()
        steps = [kernels(case.step()) for _ in range(2)]
        other = kernels(Case(seed=1).step())
    assert [each[FORWARD] for each in (*steps, other)] == [0, 0, 0]
    assert all(each[BACKWARD] >= CHUNKS for each in (*steps, other)), steps


def kernels_that_do_not_load_are_left_out() -> None:
    """On one device: equal stages on others of the kind have its trace, and PyTorch's operators too."""
    C.fake_cuda_plant(b"unloadable", 0)
    with one_warning("it does not load on cuda:0 (CUDA error: no kernel image", times=6):
        case = Case((2, 2), devices=[DEVICE, torch.device("cuda:1")])
        steps = [kernels(case.step()) for _ in range(2)]
    C.fake_cuda_plant(b"", 0)
    assert C.cudaGetLastError() == 0
    assert not any(steps), steps


def a_wrong_forward_is_left_out() -> None:
    """The first step is right already; later plans leave the kernel out."""
    wrong_sources[FORWARD] = WRONG_FORWARD
    with one_warning(f"{FORWARD}_", times=2):
        case = Case()
        first, second, third = (kernels(case.step()) for _ in range(3))
    assert first[FORWARD] > 0
    assert second[FORWARD] == third[FORWARD] == 0
    assert second[BACKWARD] > 0


def a_wrong_kernel_in_a_captured_step() -> None:
    """The first steps of a signature are not captured; so a capture never launches a wrong kernel."""
    wrong_sources[BACKWARD] = WRONG_BACKWARD
    with one_warning(f"{BACKWARD}_"):
        case = Case(capture=True)
        counts = [kernels(case.step())[BACKWARD] for _ in range(5)]
    assert counts[0] > 0
    assert counts[1:] == [0] * 4
    assert any(report.replays for report in pipeline_of(case.model).graph_reports())


# Steps without fused kernels


def deterministic_steps_launch_none() -> None:
    torch.use_deterministic_algorithms(True)
    case = Case()
    assert not case.step()
    torch.use_deterministic_algorithms(False)
    assert kernels(case.step()).keys() == {*ALL}


def fuse_may_be_set_between_calls() -> None:
    case = Case(fuse=False)
    for fuse in (True, True, False, True):
        case.model.fuse = fuse
        assert case.model.fuse == fuse
        assert bool(case.step()) == fuse


# Inputs


def unaligned_inputs_take_the_other_form() -> None:
    """Some kernels read the input; the others, only what the stage computes."""
    case = Case()
    for offset in (0, 4):
        assert {aligned for _, aligned in case.step(offset=offset)} == {True}
    for offset in (1, 3):
        found = {(without_hash(name), aligned) for name, aligned in case.step(offset=offset)}
        reading = {(name, False) for name in (FORWARD, BACKWARD)}
        assert found == reading | {(name, True) for name in (LAST, BETWEEN, LAST_BACKWARD)}


def batches_without_rows() -> None:
    assert not Case().step(rows=0)
    assert Case(seed=1).step(rows=1)


# Steps


def two_steps_may_be_in_flight() -> None:
    """Both backwards follow both forwards: the programs of a stage serve one after another."""
    case, inputs = Case(), [torch.randn(ROWS, WIDTH) for _ in range(2)]
    for model, place, dtype in ((case.model, DEVICE, torch.float32), (case.exact, "cpu", torch.float64)):
        outputs = [model(x.to(place, dtype)) for x in inputs]
        (outputs[0].sum() + outputs[1].square().sum()).backward()
    for ours, theirs in zip(case.model.parameters(), case.exact.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, rtol=1e-4, atol=1e-4)


def checkpoint_modes() -> None:
    """A backward that finds activations saved launches other kernels."""
    found = {}
    for mode in ("always", "except_last", "never"):
        case = Case(checkpoint=mode)
        found[mode] = [kernels(case.step()) for _ in range(2)][-1]
    assert found["always"] == dict.fromkeys(ALL, CHUNKS) | {FORWARD: 2 * CHUNKS}
    assert found["except_last"].keys() == found["always"].keys() | found["never"].keys()
    assert LAST_BACKWARD not in found["never"]


def replays_launch_the_kernels() -> None:
    torch.manual_seed(3)
    x, weights = (torch.randn(ROWS, WIDTH).to(DEVICE) for _ in range(2))
    cases, found = [Case(capture=capture) for capture in (False, True)], []
    for _ in range(6):
        for case in cases:
            before = launched.copy()
            step = gradients(case.model, x.detach().requires_grad_(), weights)
            torch.cuda.synchronize()  # work may be deferred
            found.append((step, launched - before))
        (plain, launches), (captured, replayed) = found[-2:]
        assert all(map(torch.equal, plain, captured))
    assert launches == replayed
    assert max(report.replays for report in pipeline_of(cases[1].model).graph_reports()) >= 3


def equal_stages_share_kernels() -> None:
    """Loads each form of three kernels once, for two models of two stages each."""
    for seed in range(2):
        case = Case((2, 2), seed=seed)
        assert kernels(case.step()) == {**dict.fromkeys(ALL, 2 * CHUNKS), FORWARD: 4 * CHUNKS}


def recordings_name_the_kernels() -> None:
    case = Case((2, 2))
    with case.model.recording() as recording:
        case.step()
    names, again = recording.kernels
    assert names == again
    assert {*map(without_hash, names)} == {*ALL}
    assert str(recording).endswith(
        f"\n\nstage 0 launches {', '.join(names)}\nstage 1 launches {', '.join(names)}"
    )
    case.model.fuse = False
    with case.model.recording() as recording:
        case.step()
    assert recording.kernels == ((), ())


# The self-test of doctor


def the_self_test_of_doctor() -> None:
    before = launched.copy()
    is_right, found = self_test()
    assert is_right, found
    assert re.fullmatch(r"the largest error is \S+ times the error allowed \([1-9]\d* replacements\)", found)
    assert launched - before
    torch.use_deterministic_algorithms(True)
    assert self_test() == (True, "skipped: only deterministic algorithms are allowed")
    torch.use_deterministic_algorithms(False)
    with mock.patch.dict(os.environ, GPIPE_FAST_DISABLE="fuse"):
        assert self_test() == (True, "skipped: GPIPE_FAST_DISABLE contains 'fuse'")


def the_self_test_reports_a_wrong_kernel() -> None:
    wrong_sources[FORWARD] = WRONG_FORWARD
    is_right, found = self_test()
    assert not is_right
    name = f"{FORWARD}_[0-9a-f]{{8}}"
    assert re.fullmatch(f"WRONG, or not compiled or loaded: {name}(, {name})*", found), found


def self_test() -> tuple[bool, str]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Block() for _ in range(2)))
    return check_fused(GPipe, layers, torch.randn(ROWS, WIDTH), DEVICE)


def run(name: str) -> None:
    """Runs one case in a process that knows nothing of earlier ones, but has kept its kernels."""
    for known in (left_out._reasons, left_out._names, left_out.pending, replacement_check._passed):
        known.clear()
    wrong_sources.clear()
    machine_code._load.cache_clear()
    C.fake_cuda_mark(f"begin\t{name}".encode())
    globals()[name]()
    C.fake_cuda_mark(f"end\t{name}".encode())
    assert interpreter.failures() == []
    print(name, flush=True)


if __name__ == "__main__":
    load(sys.argv[1], deterministic=False)
    register_kernels()
    for each in sys.argv[2:]:
        run(each)
