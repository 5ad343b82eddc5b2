"""Programs that test_lifetime.py runs in processes of their own; their names and arguments are below."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from reference import collect, leaf, loop_step, pipeline, pipeline_step, unequal
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gpipe_fast import GPipe

K, M = 3, 4
# Longer than anything here takes, and than PyTorch may wait for threads of its own at exit.
DEADLINE_SECONDS = 20.0


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)),
        *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
    )


def num_threads() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/task"))


torch.set_num_threads(1)
model = layers()
pipe = GPipe(model, [2, 2, 2], chunks=M)
x = torch.randn(8, 6)
outputs: list[Tensor] = []


def leave_everything_behind(how: str) -> None:
    """Ends with a pipeline, a loss that waits for its backward, and a half-used graph, all global."""
    pipe(x).sum().backward()
    outputs.append(pipe(x))
    outputs.append(pipe(x).sum())
    outputs[-1].backward(retain_graph=True)
    if how == "exception":
        raise LookupError("as planned")
    if how == "exit":
        sys.exit(3)


def report(children: list[str]) -> None:
    """Prints what ended otherwise than with 0 and without a word."""
    for number, child in enumerate(children):
        if child:
            print(f"child {number}: {child}")
    print(f"{len(children)} children")
    sys.stdout.flush()


def in_child(body: Callable[[], object]) -> str:
    """Runs this in a child that then exits as every program does; what there is to say about its end."""
    with tempfile.TemporaryFile("w+") as stderr:
        child = os.fork()
        if child == 0:
            os.dup2(stderr.fileno(), 2)
            body()
            sys.exit(0)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                stderr.seek(0)
                said = stderr.read().strip()
                last = said.rpartition("\n")[2]
                return f"status {os.waitstatus_to_exitcode(status)}: {last}" if status or said else ""
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
        return "hangs"


def daemon(how: str, count: str) -> None:
    """Children that end while a daemon thread of theirs trains."""
    pipe(x).sum().backward()

    def steps() -> None:
        while True:
            with suppress(RuntimeError if how == "catches" else ()):
                pipe(x).sum().backward()

    def child(seconds: float) -> None:
        if how == "slow":
            pipe._pipeline.disturb(0, 5000)
        for _ in range(3 if how == "several" else 1):
            threading.Thread(target=steps, daemon=True).start()
        time.sleep(0.05 + seconds)

    report([in_child(partial(child, 0.0007 * i)) for i in range(int(count))])


def step_is_right(pipe: GPipe) -> None:
    """From the buffers that the first step met."""
    model.load_state_dict(start)
    wrong = unequal(pipeline_step(pipe, x), expected)
    assert not wrong, wrong


start = {name: value.clone() for name, value in model.state_dict().items()}
expected = loop_step(model, x, M)


def keep_busy(longest_delay_us: int) -> None:
    """Has another thread take one step after the other from now on."""
    pipe._pipeline.disturb(0, longest_delay_us)
    threading.Thread(target=lambda: [pipe(x) for _ in range(10**6)], daemon=True).start()
    time.sleep(0.1)


def forks(state: str, count: str) -> None:
    """Children that train, of a parent whose pipeline is new, used, half-way, or busy with a step, or delayed."""

    def child() -> None:
        before = num_threads()
        pipe._pipeline.disturb()
        if state == "half":
            result = collect(pipe, leaf(x), outputs[0])
            names = [name for name in expected if name.startswith("gradient of")]
            assert not unequal({n: result[n] for n in names}, {n: expected[n] for n in names})
        else:
            step_is_right(pipe)
            step_is_right(pipe)
        assert num_threads() == before + K, (num_threads(), before)
        if state == "used":
            step_is_right(GPipe(model, [4, 2], chunks=M))

    if state != "new":
        step_is_right(pipe)
    if state == "half":
        outputs.append(pipeline(pipe, x))
    if state in ("busy", "delayed"):
        keep_busy(0 if state == "busy" else 2000)
    children = []
    for number in range(int(count)):
        time.sleep(0.0003 * number)
        children.append(in_child(child))
        if state == "used":
            step_is_right(pipe)
    report(children)
    os._exit(0)  # busy as it may be


def forks_to_end(_: str, count: str) -> None:
    """Children that only end, of a parent in which a step is under way."""
    pipe(x)
    keep_busy(2000)
    report([in_child(lambda: None) for _ in range(int(count))])
    os._exit(0)


class Features(Dataset[Tensor]):
    """Mini-batches that go through a pipeline where they are loaded."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            return extractor(torch.randn(8, 6, generator=generator))


extractor = GPipe(layers()[:2].eval(), [1, 1], chunks=2)


def data_loader(num_workers: str, _: str) -> None:
    """Trains on what forked workers load; prints a fingerprint of the parameters."""
    trained = GPipe(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), [2, 1], chunks=M)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    extractor(x)
    context = "fork" if num_workers != "0" else None
    loader = DataLoader(
        Features(), batch_size=None, num_workers=int(num_workers), multiprocessing_context=context
    )
    for _epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            trained(batch).square().mean().backward()
            optimizer.step()
    print([p.double().sum().item().hex() for p in trained.parameters()])


PROGRAMS = {
    "leave": leave_everything_behind,
    "daemon": daemon,
    "forks": forks,
    "forks_to_end": forks_to_end,
    "data_loader": data_loader,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
