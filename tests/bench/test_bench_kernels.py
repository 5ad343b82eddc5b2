"""The kernel benchmarks without a GPU: registrations and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import measure
from bench.gpu import accuracy, kernels, liger
from bench.gpu import timing as gpu
from bench.gpu.case import DTYPES, AccuracyCheck, KernelCase
from bench.gpu.families import all_cases
from bench.gpu.variants import all_variants
from tools import traffic

pytestmark = pytest.mark.extended

every_case = pytest.mark.parametrize("name", all_cases())
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def doubling_case(rows: int = 4) -> KernelCase:
    """Returns a case without a kernel: 2 x, with the gradient 2 g."""

    def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [torch.randn(rows, elements // rows, dtype=dtype, device=device)]

    def ours(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 2 * g

    return KernelCase("doubled", inputs, (0,), lambda x: x + x, ours, ours)


# Registrations


def test_every_kernel_family_has_benchmark_cases() -> None:
    families = {name.split()[0] for name in all_variants()}
    assert {name.split()[0] for name in all_cases()} == families


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_case_is_as_accurate_as_pytorch(name: str, dtype: str) -> None:
    case = all_cases()[name]
    inputs = case.inputs(1 << 14, DTYPES[dtype], "cpu")
    gradients = case.gradients(inputs)
    accuracy_check = AccuracyCheck.of(case, inputs, gradients)
    assert accuracy_check.error_ratio(gpu.ours(case, inputs, gradients).run()) <= 1
    assert traffic.fused_bytes(case, 1 << 14, DTYPES[dtype]) > 0
    compiled = kernels.candidates(case, inputs, gradients, backend="aot_eager")[kernels.INDUCTOR]
    assert kernels.measure_error(compiled, accuracy_check, peer=True) <= 1


@every_case
def test_fused_memory_bound_kernels_move_fewer_bytes(name: str) -> None:
    case = all_cases()[name]
    if case.memory_bound:
        assert all(str(traffic.row(case, dtype)[-1])[0] != "-" for dtype in DTYPES)


# Tables


def measurement(**changed: object) -> kernels.Measurement:
    case = all_cases()["stack 3 parts"]
    error_ratio = {kernels.OURS: 0.5, kernels.EAGER: 0.0, kernels.INDUCTOR: 0.7, kernels.LIGER: 9.0}
    times = {kernels.OURS: 100.0, kernels.EAGER: 250.0, kernels.INDUCTOR: 150.0, kernels.LIGER: 50.0}
    samples = {name: [time] * 5 for name, time in {**times, kernels.COPY: 90.0}.items()}
    return replace(kernels.Measurement(case, "fp32", 16, error_ratio, samples), **changed)


def test_a_row_reports_times_bandwidth_and_ratios() -> None:
    row = dict(zip(kernels.HEADERS, measurement().row(), strict=True))
    rate = traffic.fused_bytes(all_cases()["stack 3 parts"], 1 << 24, torch.float32) / 100e-6 / 1e9
    assert row["ours, µs"] == "100.0 [100.0, 100.0]"
    assert row["GB/s"] == f"{rate:.0f}"
    assert row["of copy"] == "90%"
    assert row["eager / ours"] == "2.500 [2.500, 2.500]"
    assert row["Inductor / ours"] == "1.500 [1.500, 1.500]"
    assert row["Liger-Kernel / ours"] == "different function"
    assert row["error"] == "0.50"
    assert measurement(times={k: [1.0, 2.0] for k in (kernels.OURS, kernels.COPY)}).row()[6:9] == ["-"] * 3


@pytest.mark.parametrize("off", [1.01, float("inf"), float("nan")])
def test_a_wrong_kernel_gets_no_times(off: float) -> None:
    row = measurement(error_ratio={kernels.OURS: off}).row()
    assert row[:3] == ["stack 3 parts", "fp32", 16]
    assert set(row[3:-1]) == {"-"}
    assert str(row[-1]).startswith("WRONG")
    assert len(row) == len(kernels.HEADERS)
    assert measurement(fault="out of memory").row()[-1] == "out of memory"


def test_a_measurement_that_raises_or_crashes_costs_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: a crash is simulated by a process that sends nothing more."""
    started: list[Sequence[str]] = []

    class InThisProcess:
        def __init__(self, names: Sequence[str]) -> None:
            started.append(names)
            self._messages = kernels.run_here(names)

        def next(self, seconds: float) -> Sequence[Any] | None:
            message = next(self._messages, None)
            if message == ["begin", "cross_entropy mean, with the linear layer, fp32, 256 M"]:
                self._messages = iter(())
            return message

        def stop(self) -> str:
            return "FAILED: its process exited with -6"

    def measured(case: KernelCase, dtype: str, millions: int) -> kernels.Measurement:
        if dtype == "bf16":
            raise torch.OutOfMemoryError if millions == 16 else RuntimeError("it does\nnot load")
        return measurement(case=case, dtype=dtype, millions=millions)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "machine", lambda: "A machine")
    monkeypatch.setattr(kernels, "measure", measured)
    monkeypatch.setattr(kernels, "_start", InThisProcess)
    assert not kernels.main(["cross_entropy"])
    assert len(started) == 2
    lines = (tmp_path / "kernels_cross_entropy.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| cross")]
    found = {(*row[:2], int(row[2])): row[-1] for row in rows}
    assert found["cross_entropy mean", "fp32", 256] == "0.50"
    assert found["cross_entropy mean", "bf16", 256] == "FAILED: RuntimeError: it does not load"
    assert found["cross_entropy mean", "bf16", 16] == "out of memory"
    assert (
        found["cross_entropy mean, with the linear layer", "fp32", 256]
        == "FAILED: its process exited with -6"
    )
    assert found["cross_entropy mean, with the linear layer", "fp32", 16] == "0.50"
    assert [key[2] for key in found][:3] == [1, 16, 256]
    assert capsys.readouterr().out.endswith("5 of 12 measurements are right and timed\n")


def one_microsecond_each(candidates: Mapping[str, gpu.Candidate], rounds: int) -> dict[str, list[float]]:
    for candidate in candidates.values():
        candidate.reset()
        candidate.run()
    return {name: [1.0] * rounds for name in candidates}


def test_a_right_kernel_is_timed_with_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = all_cases()["cross_entropy mean"]
    inputs = case.inputs
    case = replace(
        case,
        inputs=lambda elements, dtype, device: inputs(1 << 14, dtype, device),
        liger=lambda logits, target: F.cross_entropy(logits.float(), target),
    )
    monkeypatch.setattr(liger, "available", lambda: True)
    arguments = {"device": "cpu", "backend": "aot_eager", "sample": one_microsecond_each}
    found = kernels.measure(case, "bf16", 1, **arguments)
    assert found.error_ratio[kernels.OURS] <= 1
    assert set(found.times) == {kernels.OURS, *kernels.PEERS, kernels.COPY}
    assert [str(cell)[:5] for cell in found.row()[5:9]] == ["100%", "1.000", "1.000", "1.000"]
    wrong = replace(case, ours=lambda logits, target, g: case.ours(logits * 1.1, target, g))
    assert kernels.measure(wrong, "bf16", 1, **arguments).times == {}

    def raises(*tensors: Tensor) -> Tensor:
        raise RuntimeError("too many columns")

    without = kernels.measure(replace(case, liger=raises), "bf16", 1, **arguments)
    assert kernels.LIGER not in without.times


def test_wrong_results_are_detected() -> None:
    case = doubling_case()
    inputs = case.inputs(64, torch.float32, "cpu")
    gradients = case.gradients(inputs)
    accuracy_check = AccuracyCheck.of(case, inputs, gradients)
    assert accuracy_check.error_ratio(case.fused(inputs, gradients)) == 0
    for wrong in (
        lambda x, g: (2 * x, 2 * g * (1 + 1e-6)),
        lambda x, g: (2 * x,),
        lambda x, g: (2 * x, (2 * g)[0]),
        lambda x, g: (2 * x, 2 * g.half()),
        lambda x, g: (2 * x, torch.full_like(g, float("nan"))),
    ):
        assert accuracy_check.error_ratio(replace(case, ours=wrong).fused(inputs, gradients)) > 1


def test_in_place_candidates_start_from_fresh_inputs() -> None:
    case = replace(doubling_case(), ours=lambda x, g: (x.mul_(2), g.mul_(2)), overwritten=(0, 1))
    inputs = case.inputs(64, torch.float32, "cpu")
    gradients = case.gradients(inputs)
    accuracy_check, candidate = AccuracyCheck.of(case, inputs, gradients), gpu.ours(case, inputs, gradients)
    for _ in range(2):
        assert kernels.measure_error(candidate, accuracy_check, peer=False) == 0
    assert accuracy_check.error_ratio(candidate.run()) > 1
    assert torch.equal(case.unfused(inputs, gradients)[0], accuracy_check.eager[0])


def test_errors_are_fractions_of_the_allowed_error() -> None:
    exact_results = [torch.tensor([1.0, 2.0], dtype=torch.float64)]
    exact, off = [exact_results[0].float()], [torch.tensor([1.0, 2.5])]
    assert accuracy.error_ratio(exact, exact, exact_results) == [0.0]
    assert accuracy.error_ratio(off, off, exact_results) == [0.0]
    assert accuracy.error_ratio([torch.tensor([1.0, 1.5])], off, exact_results) == [0.5]
    assert accuracy.error_ratio([exact_results[0].float() + 2.0], off, exact_results) == [2.0]
    zeros = [torch.zeros(2, dtype=torch.float64)]
    assert accuracy.error_ratio([torch.ones(2)], [torch.zeros(2)], zeros) == [float("inf")]
    accuracy.check(off, off, exact_results)
    with pytest.raises(AssertionError, match="2"):
        accuracy.check([exact_results[0].float() + 2.0], off, exact_results)


@without_gpu
def test_without_a_gpu_no_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    kernels.main()
    assert "needs a GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=r"unknown family: nobody; known families: .*cross_entropy"):
        kernels.main(["nobody"])


def test_packages_of_the_wheelhouse_are_pinned() -> None:
    root = Path(__file__).parents[2]
    pinned = {line.partition("==")[0] for line in (root / "requirements.txt").read_text().splitlines()}
    for line in (root / "bench" / "wheelhouse.txt").read_text().splitlines():
        assert line.startswith("#") or "==" in line or line in pinned, line
