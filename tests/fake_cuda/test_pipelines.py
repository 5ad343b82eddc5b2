"""Bits, races and transports of pipelines on the fake CUDA runtime.

tests/fake_cuda/runtime/ is preloaded in place of the CUDA runtime; the CPU's operators compute.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpipe_fast import build_info
from gpipe_fast.reports.doctor import describe_code
from gpipe_fast.schedule import SCHEDULES
from tests.fake_cuda import process
from tests.fake_cuda.build import can_build
from tests.fake_cuda.race_detector import Line, check, read

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

MODELS = ("mlp", "skips", "several", "batch norm", "dropout", "tied", "python")
MODELS += ("convolutions", "convolutions, channels last")
FOUR_DEVICES, ONE_DEVICE, WITH_CPU = (
    "cuda:0,cuda:1,cuda:2,cuda:3",
    "cuda:1,cuda:1,cuda:1,cuda:1",
    "cuda:0,cpu,cuda:0,cuda:1",
)

Runs = Callable[..., list[Line]]


@pytest.fixture
def train(libraries: tuple[Path, Path], tmp_path: Path) -> Runs:
    """Trains models, checks their bits, and returns the log."""

    def run(models: str, devices: str, *words: str, late: int = 0, **more: str) -> list[Line]:
        log = tmp_path / "log"
        found = process.run("train_models.py", libraries, models, devices, *words, late=late, log=log, **more)
        assert found == ["equal"]
        return read(log)

    return run


@pytest.mark.parametrize(
    ("models", "devices", "checkpoints"),
    [
        (("several", "batch norm", "python"), WITH_CPU, ["except_last"]),
        *(
            pytest.param(MODELS, each, ["never", "except_last", "always"], marks=pytest.mark.extended)
            for each in (FOUR_DEVICES, ONE_DEVICE, WITH_CPU)
        ),
    ],
    ids=["some", "four", "one", "mixed"],
)
def test_models_equal_the_plain_loop_without_races(
    models: Sequence[str], devices: str, checkpoints: list[str], train: Runs
) -> None:
    assert check(train("/".join(models), devices, *checkpoints, late=1)) == []


@pytest.mark.parametrize(
    "schedule",
    [name if name == "1f1b" else pytest.param(name, marks=pytest.mark.extended) for name in SCHEDULES],
)
def test_whole_steps_equal_the_plain_loop_without_races(schedule: str, train: Runs) -> None:
    assert check(train("mlp/skips/dropout", FOUR_DEVICES, schedule, "never", "always", late=1)) == []


@pytest.mark.extended
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE, WITH_CPU], ids=["four", "one", "mixed"])
def test_all_models_in_whole_steps(devices: str, schedule: str, train: Runs) -> None:
    if schedule == "interleaved" and devices == WITH_CPU:
        devices = "cuda:0,cpu,cuda:0,cpu"  # gives each device equally many stages
    models = "/".join(model for model in MODELS if model not in ("tied", "several"))
    assert check(train(models, devices, "own_streams", schedule, "except_last", late=1)) == []


@pytest.mark.extended
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE, WITH_CPU], ids=["four", "one", "mixed"])
def test_caller_streams_are_ordered_with_the_pipeline(devices: str, train: Runs) -> None:
    """Also in a backward: its thread has only one caller stream, and waits for the forward's work on all."""
    assert check(train("mlp/batch norm", devices, "own_streams", "never", "except_last", late=1)) == []


@pytest.mark.extended
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE, WITH_CPU], ids=["four", "one", "mixed"])
def test_delays_and_failing_steps_cause_no_race(devices: str, train: Runs) -> None:
    assert check(train("skips", devices, "failures", "except_last", late=1)) == []


def lines_in_steps(lines: Sequence[Line]) -> list[int]:
    """Returns the indices of lines in steps that did not make a plan."""
    indices, inside = [], False
    for index, line in enumerate(lines):
        if line.kind == "mark":
            inside = line.words[0] == "begin"
        elif inside:
            indices.append(index)
    return indices


def device_copies(lines: Sequence[Line]) -> list[int]:
    """Returns the indices of copies from device memory to device memory in steps."""
    return [p for p in lines_in_steps(lines) if lines[p].kind == "copy" and lines[p].words[1] == "d2d"]


def test_the_checker_detects_missing_waits(train: Runs) -> None:
    """Removes all waits of one stream within steps from the log, for each stream."""
    lines = train("mlp", FOUR_DEVICES, "except_last", late=1)
    inside = set(lines_in_steps(lines))
    waits = {lines[p].words[0] for p in inside if lines[p].kind == "wait"}
    copying = {lines[p].words[0] for p in device_copies(lines)}
    computing = {lines[p].words[0] for p in inside if lines[p].kind in ("read", "write")}
    assert len(waits & copying) >= 3, "copy streams wait for the tensors that they copy"
    assert len(waits & computing) >= 4, "stages wait for the tensors that they receive"
    for stream in waits & (copying | computing):
        kept = [
            line
            for index, line in enumerate(lines)
            if not (index in inside and line.kind == "wait" and line.words[0] == stream)
        ]
        assert check(kept), f"stream {stream} needs no wait"


@pytest.mark.extended
def test_the_checker_detects_memory_reused_too_early(train: Runs) -> None:
    """Removes the allocator's event queries from the log, as if it ignored uses on other streams."""
    lines = train("mlp", FOUR_DEVICES, "except_last", late=1)
    assert any(line.kind == "finished event" for line in lines)
    assert check([line for line in lines if line.kind != "finished event"])


@pytest.mark.extended
def test_the_checker_detects_a_copy_on_a_compute_stream(train: Runs) -> None:
    lines = train("mlp", FOUR_DEVICES, "never", late=1)
    index = random.Random(0).choice(device_copies(lines))
    moved = lines[index]
    computing = next(lines[p].words[0] for p in lines_in_steps(lines) if lines[p].kind == "write")
    lines[index] = Line(moved.number, moved.thread, moved.kind, (computing, *moved.words[1:]))
    assert any("copies between devices" in violation for violation in check(lines))


@pytest.mark.extended
def test_the_checker_detects_a_host_wait_in_a_step(train: Runs) -> None:
    lines = train("mlp", ONE_DEVICE, "never")
    index = lines_in_steps(lines)[5]
    waiting = Line(0, 0, "synchronize device", ("1",))
    changed = [*lines[:index], waiting, *lines[index:]]
    assert any("the host waits" in violation for violation in check(changed))


def copy_kinds(lines: Sequence[Line]) -> set[str]:
    """Returns the kinds of copies in steps: source2target, of device (d), pinned (p), pageable memory (h)."""
    return {lines[p].words[1] for p in lines_in_steps(lines) if lines[p].kind == "copy"}


def device_pairs(lines: Sequence[Line]) -> set[tuple[int, int]]:
    """Returns the source and target devices of copies in steps."""
    blocks = [
        (int(line.words[1], 16), int(line.words[2]), int(line.words[0]))
        for line in lines
        if line.kind == "malloc"
    ]

    def device(pointer: str) -> int:
        return next(
            where for begin, size, where in reversed(blocks) if begin <= int(pointer, 16) < begin + size
        )

    return {(device(lines[p].words[3]), device(lines[p].words[2])) for p in device_copies(lines)}


FORCED_CASES = {
    "four": (FOUR_DEVICES, "skips/small/tied/python/beside"),
    "one": (ONE_DEVICE, "skips/small"),
    "mixed": (WITH_CPU, "small"),
}


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["peer", "pinned"])
@pytest.mark.parametrize("where", FORCED_CASES)
def test_a_forced_transport_carries_all_copies(where: str, transport: str, train: Runs) -> None:
    devices, models = FORCED_CASES[where]
    lines = train(models, devices, transport, "except_last", late=1)
    assert check(lines) == []
    by_host = {"d2p", "p2d"} <= copy_kinds(lines)
    assert by_host == (transport == "pinned" or where == "mixed")
    assert bool(copy_streams(lines)) == (transport == "peer"), "copies have own streams, also on one device"


def copy_streams(lines: Sequence[Line]) -> set[str]:
    """Returns the streams that copy between device memory in steps, and do not compute."""
    return {lines[p].words[0] for p in device_copies(lines)} - {
        lines[p].words[0] for p in lines_in_steps(lines) if lines[p].kind in ("read", "write")
    }


@pytest.mark.extended
def test_small_tensors_are_coalesced_into_one_copy(train: Runs) -> None:
    """Two connections carry six tensors each, one of them empty, and the gradients of four."""
    lines = train("small", FOUR_DEVICES, "peer", "except_last")
    steps = sum(line.kind == "mark" and line.words[0] == "begin" for line in lines)
    copies_per_microbatch, microbatches = 6, 8
    crossing = [p for p in device_copies(lines) if lines[p].words[0] in copy_streams(lines)]
    assert len(crossing) == copies_per_microbatch * microbatches * steps


@pytest.mark.extended
@pytest.mark.parametrize(
    ("peers", "peer_pairs"),
    [
        ("0", set()),
        ("0-1,1-0,1-2,3-2", {(0, 1), (1, 0)}),
    ],
)
def test_devices_without_peer_access_copy_through_the_host(
    peers: str, peer_pairs: set[tuple[int, int]], train: Runs
) -> None:
    """Copies between devices without peer access go through pinned host memory."""
    lines = train("skips", FOUR_DEVICES, "except_last", late=1, peers=peers)
    assert check(lines) == []
    assert {"d2p", "p2d"} <= copy_kinds(lines)
    assert {pair for pair in device_pairs(lines) if pair[0] != pair[1]} == peer_pairs


@pytest.mark.extended
def test_the_checker_detects_a_ring_block_reused_too_early(train: Runs) -> None:
    """Removes the waits of the streams that fill ring blocks from the log, or of those that empty them."""
    lines = train("large", FOUR_DEVICES, "pinned", "never", late=1)
    assert check(lines) == []
    inside = set(lines_in_steps(lines))
    for kind, other in (("d2p", "p2d"), ("p2d", "d2p")):
        ring = {lines[p].words[0] for p in inside if lines[p].kind == "copy" and lines[p].words[1] == kind}
        kept = [
            line
            for index, line in enumerate(lines)
            if not (index in inside and line.kind == "wait" and line.words[0] in ring)
        ]
        violations = check(kept)
        assert any(kind in each and other in each for each in violations), kind


@pytest.mark.extended
def test_ring_blocks_are_free_after_failed_steps(train: Runs) -> None:
    """Steps failed while ring blocks were in use."""
    lines = train("large", ONE_DEVICE, "pinned", "failures", "never", late=1)
    assert check(lines) == []


@pytest.fixture
def doctor_lines(libraries: tuple[Path, Path]) -> Callable[..., list[str]]:
    """Runs doctor_cases.py, and returns the lines that it prints."""

    def run(devices: str, transport: str, **more: str) -> list[str]:
        return process.run("doctor_cases.py", libraries, devices, transport, **more)

    return run


def test_doctor_reports_transports_and_bytes_in_flight(doctor_lines: Callable[..., list[str]]) -> None:
    """After a step, doctor() also reports the bytes in flight: a micro-batch has 2 x 6 floats of 4 bytes."""
    lines = doctor_lines("cuda:0,cuda:0,cuda:1,cpu", "auto", peers="0")
    transports = {
        "stage 0 (cuda:0) -> stage 1 (cuda:0)": "hand-over",
        "stage 1 (cuda:0) -> stage 2 (cuda:1)": "pinned",
        "stage 2 (cuda:1) -> stage 3 (cpu)": "copy",
        "stage 0 (cuda:0) -> stage 3 (cpu), skip connection": "copy",
    }
    in_flight = "; in flight at most 4 x 48 bytes forward, 4 x 48 bytes backward"
    for edge, transport in transports.items():
        found = [line.strip() for line in lines if line.strip().startswith(edge + ":")]
        assert found == [f"{edge}: {transport}", *[f"{edge}: {transport}{in_flight}"] * 2], edge
    assert "equal" in lines
    assert "  cuda:0 and cuda:1 have no peer access to each other" in lines
    assert any(line.startswith("  cuda:3: Fake GPU, 1024.0 GiB") for line in lines)
    assert f"  cuda:3: {describe_code((9, 0), build_info()['cuda_archs'])}" in lines


@pytest.mark.extended
def test_failing_peer_access_falls_back_to_pinned(doctor_lines: Callable[..., list[str]]) -> None:
    """The devices report peer access, but fail to enable it."""
    lines = doctor_lines("cuda:0,cuda:1,cuda:2,cuda:3", "auto", peers="unplugged")
    assert "equal" in lines
    assert "  stage 0 (cuda:0) -> stage 1 (cuda:1): pinned" in lines


@pytest.mark.sampled(1)
@pytest.mark.parametrize("peers", ["0", "unplugged", "0-1"])
def test_requesting_missing_peer_access_raises(peers: str, doctor_lines: Callable[..., list[str]]) -> None:
    lines = doctor_lines("cuda:0,cuda:1,cuda:1,cuda:0", "peer", peers=peers)
    assert lines == [
        "transport='peer', but cuda:0 and cuda:1 (stages 0 and 1) have no peer access to each other's "
        "memory; use 'auto', which copies through pinned host memory"
    ]
