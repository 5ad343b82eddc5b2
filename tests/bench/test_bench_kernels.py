"""The kernel benchmarks without a GPU: registrations, tables, tuning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bench.__main__
from bench import accuracy, gpu, kernels, liger, measure, traffic, tune
from bench.case import DTYPES, AccuracyCheck, KernelCase, ShapeClass, Tuning
from bench.families import all_cases, all_tunings
from gpipe_fast.kernels import launch as launching
from gpipe_fast.kernels.launch import TUNED, Config, override_config, tuned
from gpipe_fast.kernels.variants import all_variants

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
    assert {tuning.case.name.split()[0] for tuning in all_tunings().values()} <= {
        name.split()[0] for name in all_variants()
    }


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_case_is_as_accurate_as_pytorch(name: str, dtype: str) -> None:
    case = all_cases()[name]
    inputs = case.inputs(1 << 14, DTYPES[dtype], "cpu")
    gradients = case.gradients(inputs)
    accuracy_check = AccuracyCheck.of(case, inputs, gradients)
    assert accuracy_check.error_ratio(gpu.ours(case, inputs, gradients).run()) <= 1
    assert traffic.fused_bytes(case, 1 << 14, DTYPES[dtype]) > 0
    if case.exact is None:
        compiled = kernels.candidates(case, inputs, gradients, backend="aot_eager")[kernels.INDUCTOR]
        assert kernels.measure_error(compiled, accuracy_check, peer=True) <= 1


@every_case
def test_fused_memory_bound_kernels_move_fewer_bytes(name: str) -> None:
    case = all_cases()[name]
    if case.memory_bound:
        assert all(str(traffic.row(case, dtype)[-1])[0] != "-" for dtype in DTYPES)


class RecordedRequests(dict[str, Config]):
    """Replaces the forced configurations: forces none and records the requested names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __contains__(self, name: object) -> bool:
        self.names.append(str(name))
        return False


@pytest.mark.parametrize("kernel", all_tunings())
def test_launchers_request_the_tuned_shape_classes(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = all_tunings()[kernel]
    for name, shape in tuning.shapes.items():
        requests = RecordedRequests()
        monkeypatch.setattr(launching, "_overrides", requests)
        inputs = shape.inputs(torch.float32, "meta")
        with traffic.Traffic().counting_launches():
            tuning.case.launched(*inputs, *tuning.case.gradients(inputs))
        assert f"{kernel} {name}" in requests.names
        assert len({str(config) for config in shape.candidates}) == len(shape.candidates) > 1


@pytest.mark.skipif(not TUNED.exists(), reason="nothing has been tuned")
def test_every_tuned_configuration_is_still_a_candidate() -> None:
    known = {
        f"{kernel} {name}": [str(config) for config in shape.candidates]
        for kernel, tuning in all_tunings().items()
        for name, shape in tuning.shapes.items()
    }
    for kept in json.loads(TUNED.read_text()).values():
        for name, config in kept.items():
            assert str(Config(**config)) in known[name]


# Tables


def measurement(**changed: object) -> kernels.Measurement:
    case = all_cases()["bias_activation gelu"]
    error_ratio = {kernels.OURS: 0.5, kernels.EAGER: 0.0, kernels.INDUCTOR: 0.7, kernels.LIGER: 9.0}
    times = {kernels.OURS: 100.0, kernels.EAGER: 250.0, kernels.INDUCTOR: 150.0, kernels.LIGER: 50.0}
    samples = {name: [time] * 5 for name, time in {**times, kernels.COPY: 90.0}.items()}
    return replace(kernels.Measurement(case, "fp32", 16, error_ratio, samples), **changed)


def test_a_row_reports_times_bandwidth_and_ratios() -> None:
    row = dict(zip(kernels.HEADERS, measurement().row(), strict=True))
    rate = traffic.fused_bytes(all_cases()["bias_activation gelu"], 1 << 24, torch.float32) / 100e-6 / 1e9
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
    assert row[:3] == ["bias_activation gelu", "fp32", 16]
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
            if message == ["begin", "rms_norm with residual, fp32, 256 M"]:
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
    assert not kernels.main(["rms_norm"])
    assert len(started) == 2
    lines = (tmp_path / "kernels_rms_norm.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| rms")]
    found = {(*row[:2], int(row[2])): row[-1] for row in rows}
    assert found["rms_norm", "fp32", 256] == "0.50"
    assert found["rms_norm", "bf16", 256] == "FAILED: RuntimeError: it does not load"
    assert found["rms_norm", "bf16", 16] == "out of memory"
    assert found["rms_norm with residual", "fp32", 256] == "FAILED: its process exited with -6"
    assert found["rms_norm with residual", "fp32", 16] == "0.50"
    assert [key[2] for key in found][:3] == [1, 16, 256]
    assert capsys.readouterr().out.endswith("5 of 12 measurements are right and timed\n")


def one_microsecond_each(candidates: Mapping[str, gpu.Candidate], rounds: int) -> dict[str, list[float]]:
    for candidate in candidates.values():
        candidate.reset()
        candidate.run()
    return {name: [1.0] * rounds for name in candidates}


def test_a_right_kernel_is_timed_with_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = all_cases()["bias_activation relu"]
    inputs = case.inputs
    case = replace(
        case,
        inputs=lambda elements, dtype, device: inputs(1 << 14, dtype, device),
        liger=lambda z, bias: torch.relu(z + bias).mul(1.01),
    )
    monkeypatch.setattr(liger, "available", lambda: True)
    arguments = {"device": "cpu", "backend": "aot_eager", "sample": one_microsecond_each}
    found = kernels.measure(case, "bf16", 1, **arguments)
    assert found.error_ratio[kernels.OURS] <= 1
    assert set(found.times) == {kernels.OURS, *kernels.PEERS, kernels.COPY}
    assert [str(cell)[:5] for cell in found.row()[5:9]] == ["100%", "1.000", "1.000", "1.000"]
    wrong = replace(case, ours=lambda z, bias, g: case.ours(z, bias * 1.1, g))
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
    assert accuracy.error_ratio(off, off, exact_results) == [0.5]
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
    with pytest.raises(SystemExit, match=r"unknown family: nobody; known families: .*bias_activation"):
        kernels.main(["nobody"])
    assert {"kernels", "traffic"} < set(bench.__main__.BENCHMARKS)


def test_packages_of_the_wheelhouse_are_pinned() -> None:
    root = Path(__file__).parents[2]
    pinned = {line.partition("==")[0] for line in (root / "requirements.txt").read_text().splitlines()}
    for line in (root / "bench" / "wheelhouse.txt").read_text().splitlines():
        assert line.startswith("#") or "==" in line or line in pinned, line


# Tuning


def fake_tuning(takes: Mapping[str, float], wrong: str = "", fails: str = "") -> tuple[Tuning, gpu.Sample]:
    """Returns a tuning whose configurations take the given times, and a sampler that reports these times."""
    launched: list[str] = []
    default = Config({"BLOCK": 1})

    def ours(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        config = str(tuned("doubled", "all", default))
        launched.append(config)
        if config == fails:
            raise RuntimeError("out of resource: registers")
        return (3 if config == wrong else 2) * x, 2 * g

    def sample(candidates: Mapping[str, gpu.Candidate], rounds: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name, candidate in candidates.items():
            candidate.run()
            found[name] = [takes[launched[-1]]] * rounds
        return found

    configs = [Config({"BLOCK": size}) for size in (1, 2, 4)]
    case = replace(doubling_case(), ours=ours, launched=ours)
    shape = ShapeClass(lambda dtype, device: case.inputs(64, dtype, device), configs)
    return Tuning("doubled", case, {"all": shape}), sample


def test_tuning_finds_the_fastest_right_configuration() -> None:
    one, two, four = (str(Config({"BLOCK": size})) for size in (1, 2, 4))
    takes = {one: 9.0, two: 6.0, four: 3.0}
    tuning, sample = fake_tuning(takes)
    assert tune.search(tuning, "all", "cpu", sample) == tune.Outcome(Config({"BLOCK": 4}), 3.0, 0)
    for broken in ({"wrong": four}, {"fails": four}):
        tuning, sample = fake_tuning(takes, **broken)
        assert tune.search(tuning, "all", "cpu", sample) == tune.Outcome(Config({"BLOCK": 2}), 1.5, 1)
    tuning, sample = fake_tuning({one: 9.0, two: 8.9, four: 8.9})  # within the margin
    assert tune.search(tuning, "all", "cpu", sample).config is None
    tuning, sample = fake_tuning(takes, wrong=one)
    with pytest.raises(AssertionError, match="wrong"):
        tune.search(tuning, "all", "cpu", sample)


def test_a_tuned_configuration_is_used_on_its_gpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, best = Config({"ROWS": 1}), Config({"ROWS": 2}, num_warps=8)
    monkeypatch.setattr(launching, "TUNED", tmp_path / "tuned.json")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "tuned")
    try:
        launching.save_tuned("another", "kernel", "wide", default)
        launching.save_tuned("tuned", "kernel", "wide", best)
        assert tuned("kernel", "wide", default) is default  # no GPU is in use
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert tuned("kernel", "wide", default) == best
        assert tuned("kernel", "narrow", default) is default
        launching.save_tuned("tuned", "kernel", "narrow", best)
        assert tuned("kernel", "narrow", default) == best
        assert set(json.loads(launching.TUNED.read_text())) == {"another", "tuned"}
    finally:
        launching._read_tuned.cache_clear()
        launching._tuned_configs.cache_clear()


def test_a_forced_configuration_is_used_only_inside_the_block() -> None:
    default, other = Config({"ROWS": 1}), Config({"ROWS": 2})
    with override_config("kernel", "class", other):
        assert tuned("kernel", "class", default) is other
        assert tuned("kernel", "another", default) is default
    assert tuned("kernel", "class", default) is default


@without_gpu
def test_tuning_refuses_to_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "needs a GPU"), (["nobody"], "unknown kernel: nobody")):
        with pytest.raises(SystemExit):
            tune.main(arguments)
        assert message in capsys.readouterr().err
