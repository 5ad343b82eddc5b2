"""Streams of mini-batches on fake devices; run by test_streams.py with the fake runtime preloaded.

`stream_cases.py OPERATORS MODELS DEVICES WORD...`: compares the results of `GPipe.stream` with those of
calls, for models of train_models.py. Words: ``own_streams``: the caller uses own streams; ``between``: calls,
which are captured and replayed as graphs, run between results; ``failures``: workers are delayed, and failing
and abandoned streams run first; ``peer`` and ``pinned``: force a transport. Prints the differences, or
"equal".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.runtime.settings import TRANSPORTS
from tests.fake_cuda.fake_devices import caller_streams, load, mark
from tests.fake_cuda.train_models import CHUNKS, MAX_DELAY_US, batch_of, layers_of
from tests.internals import inject_delays, inject_failure

NUMBER = 7


def inputs(first: Tensor) -> Iterator[Tensor]:
    """Yields inputs that are computed just before."""
    for number in range(NUMBER):
        yield first + number / 4


def run_failing_streams(pipe: GPipe, x: Tensor, seed: int) -> None:
    """Runs streams that end early, whose tensors are freed immediately, while work may be in flight."""
    for action in ("2F11", "1SEND_F14", "3RECV_F9"):
        inject_failure(pipe, action, after=1, seed=seed, max_delay_us=MAX_DELAY_US)
        with pytest.raises(ValueError, match="injected"):
            for y in pipe.stream(inputs(x), depth=4):
                y.add_(1)
    inject_delays(pipe, seed, MAX_DELAY_US)
    for number, y in enumerate(pipe.stream(inputs(x), depth=4)):
        y.add_(1)
        if number == 1:
            break


def differences(model: str, devices: Sequence[str], words: Sequence[str]) -> list[str]:
    transport = next((word for word in words if word in TRANSPORTS), "auto")
    layers = nn.Sequential(*layers_of(model))
    between = "between" in words
    pipe = GPipe(
        layers, [2] * len(devices), devices=devices, chunks=CHUNKS, transport=transport, capture=between
    )
    if model != "dropout":
        pipe.eval()
    may_wait = model == "python" or "cpu" in devices or between
    x = batch_of(model).to(devices[0])
    found = []
    mark("plan")
    for turn in range(3):
        with torch.no_grad():
            torch.manual_seed(turn)
            expected = [pipe(each).cpu() for each in inputs(x)]
        if "failures" in words:
            run_failing_streams(pipe, x, turn)
        torch.manual_seed(turn)
        results = []
        mark("begin\tmay wait" if may_wait else "begin")
        for y in pipe.stream(inputs(x), depth=1 + 2 * turn):
            results.append(y.clone())
            y.zero_()
            if between:
                with torch.no_grad():
                    pipe(x)
        mark("end")
        for number, (y, wanted) in enumerate(zip(results, expected, strict=True)):
            if not torch.equal(y.cpu(), wanted):
                found.append(f"{model}, turn {turn}: mini-batch {number}")
        with torch.no_grad():  # overwrites everything that the stream has read, without synchronization
            x.add_(0.1)
            for parameter in pipe.parameters():
                parameter.mul_(0.9)
    return found


def main() -> None:
    operators, models, names, *words = sys.argv[1:]
    devices = names.split(",")
    load(operators, deterministic=False)
    found = []
    with caller_streams(devices if "own_streams" in words else ()):
        for model in models.split("/"):
            torch.manual_seed(0)
            found += differences(model, devices, words)
    print("; ".join(found) or "equal")


if __name__ == "__main__":
    main()
