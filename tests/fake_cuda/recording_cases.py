"""Records steps on devices; run by test_recording.py with the fake runtime preloaded.

`recording_cases.py OPERATORS NANOSECONDS`: a copy takes so long for each byte. Prints what is wrong, or
"right".
"""

from __future__ import annotations

import sys

import torch

from gpipe_fast import GPipe
from gpipe_fast.recording import Recording
from gpipe_fast.schedule import TRANSFERS, Kind
from tests.fake_cuda.fake_devices import load
from tests.fake_cuda.train_models import WIDTH, layers_of

SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)


def wrong(recording: Recording, copy_seconds: float) -> list[str]:
    """Returns what is wrong with a recording."""
    found = []
    latest = recording.latest
    report = recording.report()
    for action, event in latest.items():
        if action.kind in SENDS and not (event.begin == event.end and event.transit >= copy_seconds):
            found.append(f"{action}: {event}")
        if action.kind in RECEIVES and event.begin != event.end:
            found.append(f"{action} took {event.end - event.begin}")
        if action.kind not in TRANSFERS and not event.end > event.begin:
            found.append(f"{action} took no time")
    for arrow in report.timeline()["arrows"]:
        if arrow["to"][1] - arrow["from"][1] < copy_seconds - 2e-3:  # clocks of two devices
            found.append(f"arrived before it was copied: {arrow}")
    if abs(sum(report.stages[0]) / report.step - 1) > 0.01:
        found.append(f"the times of a stage add up to {sum(report.stages[0])} of {report.step}")
    if copy_seconds and not report.blame["transfer"] > 0.5:
        found.append(f"blame: {report.blame}")
    return found


def main() -> None:
    operators, nanoseconds = sys.argv[1:]
    copy_seconds = int(nanoseconds) * 1e-9 * 2 * WIDTH * 4  # of two samples
    load(operators, deterministic=False)
    layers, devices = torch.nn.Sequential(*layers_of("mlp")), ["cuda:0", "cuda:1"]
    model = GPipe(layers, [4, 4], devices=devices, chunks=4, checkpoint="never")
    x = torch.randn(8, WIDTH, device="cuda:0")
    differences: list[str] = []
    for step in (lambda: model(x).sum().backward(), lambda: model.step(x, loss_fn=torch.sum, normalizer=1)):
        for _ in range(2):
            with model.recording() as recording:
                step()
        differences += wrong(recording, copy_seconds)
    print("\n".join(differences) or "right")


if __name__ == "__main__":
    main()
