"""The report on the machine and on CPU models; tests/fake_cuda/test_pipelines.py covers GPU models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe, doctor
from gpipe_fast.reports import doctor as doctor_module
from gpipe_fast.reports.doctor import Capability, describe_code, fused_lines
from gpipe_fast.skip import pop, skippable, stash
from tests.programs import run_python

pytestmark = pytest.mark.usefixtures("one_thread")


def section(report: str, title: str) -> list[str]:
    """Returns the lines of the section `title`."""
    found = [part.splitlines() for part in report.split("\n\n") if part.splitlines()[0] == title]
    assert len(found) == 1, report
    return [line.strip() for line in found[0][1:]]


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.sum() > 0 else x.sigmoid()


def step(model: GPipe) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(8, 4, requires_grad=True)).sum().backward()


def test_the_report_lists_versions_and_devices() -> None:
    versions, devices = section(doctor(), "versions"), section(doctor(), "devices")
    assert versions[0].startswith(f"torch {torch.__version__}, ")
    assert gpipe_fast.build_info()["torch"] in versions[1]
    assert ("no GPU found" in versions[0]) == (not torch.cuda.is_available())
    assert devices[0].startswith("cpu: ")
    assert sum("GiB" in line for line in devices) == torch.cuda.device_count()


def test_the_report_says_for_which_gpus_the_extension_has_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates two GPUs, one newer than every architecture that the extension was built for."""
    gpus = [SimpleNamespace(name=f"GPU {m}", total_memory=2**30, major=m, minor=0) for m in (9, 11)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    built = gpipe_fast.build_info() | {"cuda_archs": "8.0;9.0"}
    monkeypatch.setattr("gpipe_fast.reports.doctor.build_info", lambda: built)
    assert section(doctor(), "devices")[1:] == [
        "cuda:0: GPU 9, 1.0 GiB, compute capability 9.0",
        "cuda:0: the extension has code for it, built for 9.0",
        "cuda:1: GPU 11, 1.0 GiB, compute capability 11.0",
        "cuda:1: the extension has no code for 11.0, only for 8.0;9.0; rebuild it with "
        "TORCH_CUDA_ARCH_LIST=11.0",
        "cuda:0 and cuda:1 have peer access to each other",
    ]


def test_the_command_line_prints_the_report() -> None:
    done = run_python("-m", "gpipe_fast.doctor", warning="error::RuntimeWarning")
    assert done.returncode == 0, done.stderr
    assert section(done.stdout, "versions") == section(doctor(), "versions")
    assert "Warning" not in done.stderr


def test_the_report_says_what_plans_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_FAST_PLANS_MIB", "0")
    model = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)
    assert section(doctor(model), "plans") == [
        "0 kept, with programs and graphs of about 0.0 MiB of at most 0.0 MiB",
        "templates for further sizes: about 0.0 MiB of at most 0.0 MiB",
    ]
    for rows in (8, 6):
        model(torch.ones(rows, 4))
    kept, evicted, _ = section(doctor(model), "plans")
    assert kept.startswith("1 kept, ")
    assert evicted == "1 evicted since the model was made"


def test_transport_sizes_are_reported_after_the_first_call() -> None:
    model = GPipe(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), [2, 1], chunks=4)
    before = doctor(model)
    assert section(before, "stages") == [
        "stage 0 (cpu): layer '0' (Linear), layer '1' (ReLU)",
        "stage 1 (cpu): layer '2' (Linear)",
    ]
    assert section(before, "transport") == [
        "stage 0 (cpu) -> stage 1 (cpu): hand-over",
        "the sizes of boundary tensors are unknown until the first call",
    ]
    assert section(before, "Python layers") == ["unknown until the first call"]
    step(model)
    after = doctor(model)
    # A micro-batch has two samples of six floats each.
    assert section(after, "transport") == [
        "stage 0 (cpu) -> stage 1 (cpu): hand-over; in flight at most 4 x 48 bytes forward, "
        "4 x 48 bytes backward"
    ]
    assert section(after, "Python layers") == ["none"]
    with torch.no_grad():
        model(torch.ones(8, 4))
    assert "at most 4 x 48 bytes forward, nothing backward" in section(doctor(model), "transport")[0]


def test_layers_in_python_are_reported_with_the_reason_every_time() -> None:
    model = GPipe(nn.Sequential(nn.Linear(4, 4), Branching()), [1, 1], chunks=2)
    for _ in range(2):
        step(model)
        (line,) = section(doctor(model), "Python layers")
        assert line.startswith("stage 1, layer 1 (Branching) runs in Python: ")
    assert section(doctor(model), "transport") == [
        "stage 0 (cpu) -> stage 1 (cpu): hand-over; sizes are known only at run time"
    ]


def test_the_report_counts_tensor_tuples_and_skip_connections() -> None:
    @skippable(stash=["skip"])
    class Down(nn.Module):
        def forward(self, x: Tensor) -> Iterator[object]:
            yield stash("skip", x.double())
            return x, x > 0

    class Middle(nn.Module):
        def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
            return values[0] * values[1]

    @skippable(pop=["skip"])
    class Up(nn.Module):
        def forward(self, x: Tensor) -> Iterator[object]:
            skip = yield pop("skip")
            return x + skip.float()

    model = GPipe(nn.Sequential(Down(), Middle(), Up()), [1, 1, 1], chunks=4)
    step(model)
    assert section(doctor(model), "transport") == [
        "stage 0 (cpu) -> stage 1 (cpu): hand-over; in flight at most 4 x 2 tensors, 40 bytes forward, "
        "4 x 32 bytes backward",
        "stage 1 (cpu) -> stage 2 (cpu): hand-over; in flight at most 4 x 32 bytes forward, "
        "4 x 32 bytes backward",
        "stage 0 (cpu) -> stage 2 (cpu), skip connection: hand-over; in flight at most 4 x 64 bytes forward, "
        "4 x 64 bytes backward",
    ]


def test_repr_of_a_model_shows_its_settings_and_layers() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = repr(layers)
    model = GPipe(layers, [1, 1], chunks=2)
    step(model)
    settings = "balance=[1, 1], devices=['cpu', 'cpu'], chunks=2, checkpoint='except_last'"
    assert repr(model) == before.replace("Sequential(", f"GPipe(\n  {settings}")
    model.chunks, model.checkpoint = "auto", "never"
    assert "chunks='auto', checkpoint='never'" in repr(model)


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def model_on_a_gpu(**changed: Any) -> Any:
    return SimpleNamespace(**{"devices": [GPU], "fuse": True, **changed})


def test_the_reason_for_no_kernels_is_a_line() -> None:
    assert fused_lines(model_on_a_gpu(fuse=False)) == ["none, because the model has fuse=False"]
    with mock.patch.object(doctor_module, "why_unfused", side_effect=lambda device, fuse: f"{device} is old"):
        assert fused_lines(model_on_a_gpu(devices=[CPU, GPU])) == ["none, because cuda:0 is old"]


@pytest.mark.parametrize("numbers", [[3, 0], []])
def test_fused_groups_are_counted_after_the_first_call(numbers: list[int]) -> None:
    graphs = [(None, "forward", ["norm"] * number) for number in numbers]
    with (
        mock.patch.object(doctor_module, "why_unfused", return_value=None),
        mock.patch.object(doctor_module, "replaced_by_graph", return_value=graphs),
        mock.patch.object(doctor_module.left_out, "names", return_value=["wrong"] * len(numbers)),
    ):
        groups = "3 groups of operators in 2 graphs; model.explain(x) lists them"
        known = [groups, "left out: wrong", "left out: wrong"]
        assert fused_lines(model_on_a_gpu()) == (known if numbers else ["unknown until the first call"])


WHEEL = "7.5;8.0;9.0;12.0+PTX"


@pytest.mark.parametrize(
    ("gpu", "archs", "expected"),
    [
        ((9, 0), WHEEL, "code for it, built for 9.0"),
        ((8, 9), "8.0 8.6+PTX", "code for it, built for 8.6"),
        ((10, 3), "10.0f", "code for it, built for 10.0"),
        ((9, 0), "9.0a", "code for it, built for 9.0"),
        ((13, 0), WHEEL, "PTX for it, of 12.0"),
        ((9, 0), "none", "built without CUDA"),
        ((8, 0), "8.6+PTX", "no code for 8.0"),
        ((7, 0), WHEEL, "no code for 7.0"),
        ((10, 0), "9.0a+PTX", "no code for 10.0"),
        ((9, 1), "9.0a", "no code for 9.1"),
        ((12, 0), "10.0f+PTX", "no code for 12.0"),
        ((9, 0), "8.0;Hopper", "no code for 9.0"),
    ],
)
def test_the_report_names_the_code_that_a_gpu_runs_or_how_to_rebuild(
    gpu: Capability, archs: str, expected: str
) -> None:
    found = describe_code(gpu, archs)
    assert expected in found
    assert ("TORCH_CUDA_ARCH_LIST={}.{}".format(*gpu) in found) == ("code for it" not in expected)
