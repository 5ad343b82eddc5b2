"""Bits, races and transports of pipelines on the fake CUDA runtime.

tests/fake_cuda/runtime/ is preloaded in place of the CUDA runtime; the CPU's operators compute. With
FAKE_CUDA_DEFER, a stream's work runs only when a caller waits for it, in a random order that streams and
events allow (runtime/deferred.h), so a missing wait gives wrong bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from gpipe_fast import build_info
from gpipe_fast.reports.doctor import describe_code
from gpipe_fast.schedule import SCHEDULES
from tests.fake_cuda.fake_devices import FOUR_DEVICES, ONE_DEVICE, WITH_CPU
from tests.fake_cuda.race_detector import Line, check

ALL_MODELS = (
    "mlp/skips/several/batch norm/dropout/tied/python/convolutions/convolutions, channels last",
    "never",
    "except_last",
    "always",
)
IN_STEPS = ("mlp/skips/batch norm/dropout/python/convolutions/convolutions, channels last", "own_streams")
TWO_DEVICES_IN_TURN = "cuda:0,cuda:1,cuda:0,cuda:1"
CASES_PER_TEST = 100
UNPLUGGED = "CUDA cannot enable it for cuda:0: peer access is not supported between these two devices"

Train = Callable[..., list[Line]]


@pytest.fixture
def train(logged: Callable[..., list[Line]]) -> Train:
    """Trains models, checks their bits, and returns the log."""

    def run(models: str, devices: str, *words: str, late: int = 1, **more: str) -> list[Line]:
        return logged("train_models.py", models, devices, *words, expected=["equal"], late=late, **more)

    return run


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (WITH_CPU, ("several/batch norm/python", "except_last")),
        (FOUR_DEVICES, ("mlp/skips/dropout", "1f1b", "always")),
        *(
            pytest.param(devices, words, marks=pytest.mark.extended)
            for devices, words in (
                *((each, ALL_MODELS) for each in (FOUR_DEVICES, ONE_DEVICE, WITH_CPU)),
                *((FOUR_DEVICES, (*IN_STEPS, each, "except_last")) for each in SCHEDULES),
                (TWO_DEVICES_IN_TURN, (*IN_STEPS, "interleaved", "never")),
                (ONE_DEVICE, (*IN_STEPS, "zb-h1", "always")),
                (WITH_CPU, (*IN_STEPS, "1f1b", "except_last")),
                # Also in a backward: its thread has only one caller stream, and waits for the work on all.
                *((each, ("mlp", "own_streams", "never")) for each in (FOUR_DEVICES, ONE_DEVICE, WITH_CPU)),
                *((each, ("skips", "failures", "except_last")) for each in (FOUR_DEVICES, WITH_CPU)),
                (ONE_DEVICE, ("large", "pinned", "failures", "never")),  # while ring blocks are in use
            )
        ),
    ],
    ids=str,
)
def test_models_equal_the_plain_loop_without_races(
    devices: str, words: tuple[str, ...], train: Train
) -> None:
    assert check(train(words[0], devices, *words[1:])) == []


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.extended)])
def test_random_pipelines_keep_the_bits_when_work_is_deferred(
    count: int, run: Callable[..., list[str]]
) -> None:
    assert run("train_models.py", "random", "0", str(count), defer=4, late=2, limit=900) == ["equal"]


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 10 * CASES_PER_TEST, CASES_PER_TEST))
def test_many_random_pipelines_have_no_race_or_wrong_bit(
    first: int, train: Train, run: Callable[..., list[str]]
) -> None:
    words = ("random", str(first), str(CASES_PER_TEST))
    assert check(train(*words, late=first, limit=900)) == []
    assert run("train_models.py", *words, defer=first + 1, limit=900) == ["equal"]


def lines_in_steps(lines: Sequence[Line]) -> list[int]:
    """Returns the indices of lines in steps that did not make a plan."""
    indices, inside = [], False
    for index, line in enumerate(lines):
        if line.kind == "mark":
            inside = line.words[0] == "begin"
        elif inside:
            indices.append(index)
    return indices


def without_waits(lines: Sequence[Line], stream: str) -> list[Line]:
    """Returns the lines without the waits of a stream within steps."""
    left_out = {p for p in lines_in_steps(lines) if lines[p].kind == "wait" and lines[p].words[0] == stream}
    return [line for index, line in enumerate(lines) if index not in left_out]


def device_copies(lines: Sequence[Line]) -> list[int]:
    """Returns the indices of copies from device memory to device memory in steps."""
    return [p for p in lines_in_steps(lines) if lines[p].kind == "copy" and lines[p].words[1] == "d2d"]


def test_the_checker_detects_changes_of_a_log(train: Train) -> None:
    """Without waits, event queries of the allocator, or copy streams, or with a wait of the host."""
    lines = train("mlp", FOUR_DEVICES, "except_last")
    inside = lines_in_steps(lines)
    waits = {lines[p].words[0] for p in inside if lines[p].kind == "wait"}
    copying = {lines[p].words[0] for p in device_copies(lines)}
    computing = {lines[p].words[0] for p in inside if lines[p].kind in ("read", "write")}
    assert len(waits & copying) >= 3, "copy streams wait for the tensors that they copy"
    assert len(waits & computing) >= 4, "stages wait for the tensors that they receive"
    for stream in waits & (copying | computing):
        assert check(without_waits(lines, stream)), f"stream {stream} needs no wait"
    assert check([line for line in lines if line.kind != "finished event"])
    index = random.Random(0).choice(device_copies(lines))
    moved = lines[index]._replace(words=(min(computing), *lines[index].words[1:]))
    changed = check([*lines[:index], moved, *lines[index + 1 :]])
    assert any("copies between devices" in violation for violation in changed)
    waiting = Line(0, 0, "synchronize device", ("1",))
    changed = check([*lines[: inside[5]], waiting, *lines[inside[5] :]])
    assert any("the host waits" in violation for violation in changed)


def copy_kinds(lines: Sequence[Line]) -> set[str]:
    """Returns the kinds of copies in steps: source2target, of device (d), pinned (p), pageable memory (h)."""
    return {lines[p].words[1] for p in lines_in_steps(lines) if lines[p].kind == "copy"}


def copy_streams(lines: Sequence[Line]) -> set[str]:
    """Returns the streams that copy between device memory in steps, and do not compute."""
    return {lines[p].words[0] for p in device_copies(lines)} - {
        lines[p].words[0] for p in lines_in_steps(lines) if lines[p].kind in ("read", "write")
    }


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["peer", "pinned"])
@pytest.mark.parametrize("devices", [FOUR_DEVICES, ONE_DEVICE])
def test_a_forced_transport_carries_all_copies(devices: str, transport: str, train: Train) -> None:
    lines = train("skips/several/tied/python", devices, transport, "except_last")
    assert check(lines) == []
    by_host = {"d2p", "p2d"} <= copy_kinds(lines)
    assert by_host == (transport == "pinned")
    assert bool(copy_streams(lines)) == (transport == "peer"), "copies have own streams, also on one device"


def test_doctor_reports_transports_and_bytes_in_flight(run: Callable[..., list[str]]) -> None:
    """After a step, doctor() also reports the bytes in flight: a micro-batch has 2 x 6 floats of 4 bytes."""
    lines = run("doctor_cases.py", "cuda:0,cuda:0,cuda:1,cpu", "auto", peers="0")
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("peers", ["0", "unplugged", "0-1"])
def test_requesting_missing_peer_access_raises(peers: str, run: Callable[..., list[str]]) -> None:
    fault = f" ({UNPLUGGED})" if peers == "unplugged" else ""
    assert run("doctor_cases.py", "cuda:0,cuda:1,cuda:1,cuda:0", "peer", peers=peers) == [
        "transport='peer', but cuda:0 and cuda:1 (stages 0 and 1) have no peer access to each other's "
        f"memory{fault}; use 'auto', which copies through pinned host memory"
    ]
