"""A replayed graph uses only memory that something keeps alive: the graphs' pool, or blocks that are in use.

The last lines of csrc/pipeline/captured.h list the tensors outside of the pool, and what keeps each alive.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import pytest

from tests.fake_cuda.fake_devices import FOUR_DEVICES, ONE_DEVICE
from tests.fake_cuda.race_detector import Line

# The words of a log line that are addresses on devices, followed by the number of bytes.
ADDRESSES = {"read": (1,), "write": (1,), "memset": (1,), "copy": (2, 3)}


def accesses_of_freed_memory(lines: list[Line]) -> list[str]:
    """Returns the accesses of launches outside of the memory that was in use before the step.

    Launches of the step that captures are not checked: what the capture allocates was not in use before.
    """
    found = []
    blocks: dict[int, int] = {}  # end by first address
    new_streams: set[str] = set()
    launched: set[str] = set()  # the streams of the latest launches
    num_steps = first_launch = 0
    for line in lines:
        match line.kind, line.words:
            case "mark", ("pipeline",):
                num_steps = first_launch = 0
            case "mark", ("living",):
                num_steps += 1
                blocks = {}
            case "mark", ("block", begin, size):
                blocks[int(begin, 16)] = int(begin, 16) + int(size)
            case "stream", (stream, _):
                new_streams.add(stream)
            case "launch", _:
                launched |= new_streams
                first_launch = first_launch or num_steps
        if line.kind != "stream" and line.kind != "launch":
            new_streams = set()
        if line.kind not in ADDRESSES or line.words[0] not in launched or num_steps == first_launch:
            continue
        starts = sorted(blocks)
        size = int(line.words[-1])
        for index, address in enumerate(int(line.words[at], 16) for at in ADDRESSES[line.kind]):
            on_host = line.kind == "copy" and line.words[1][2 * (1 - index)] == "p"
            at = bisect_right(starts, address) - 1
            if not on_host and (at < 0 or address + size > blocks[starts[at]]):
                found.append(str(line))
    assert num_steps > first_launch > 0, "no graph was launched"
    return found


@pytest.mark.parametrize(
    ("models", "devices", "words"),
    [
        ("skips/batch norm", ONE_DEVICE, ("except_last", "frozen", "deferred")),
        *(
            pytest.param(models, devices, words, marks=pytest.mark.extended)
            for models, devices, words in (
                ("skips/batch norm/dropout/tied/convolutions", ONE_DEVICE, ("always",)),
                ("skips/batch norm/dropout/tied/convolutions", FOUR_DEVICES, ("except_last", "frozen")),
                ("skips/dropout/tied", FOUR_DEVICES, ("never",)),
                ("skips/batch norm", ONE_DEVICE, ("except_last", "inference")),
                # The graph keeps the zeros with which a mini-batch's statistics begin.
                ("batch norm", FOUR_DEVICES, ("except_last", "deferred")),
                ("batch norm", FOUR_DEVICES, ("except_last", "deferred", "inference")),
            )
        ),
    ],
    ids=str,
)
def test_graphs_use_living_memory(
    models: str, devices: str, words: tuple[str, ...], logged: Callable[..., list[Line]]
) -> None:
    lines = logged("train_models.py", models, devices, "captured", "living", *words, expected=["equal"])
    assert accesses_of_freed_memory(lines) == []
