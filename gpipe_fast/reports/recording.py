"""Recordings: the measured begin and end of every action, and of every wait at a slot.

If a pipeline has several processes, each has the events of its own stages, and the worker of a stage
elsewhere receives here what that stage sends. So the process that sends knows when a SEND ends, and the one
that receives when the tensor arrives::

    process 0   0SEND_F2 ──┐ end
    process 1              └─── transit ─── 0SEND_F2 ──┐ end, then 1RECV_F2
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gpipe_fast.layers.quantized import stored_bytes
from gpipe_fast.lower.steps import Launch
from gpipe_fast.reports.blame import Phase
from gpipe_fast.reports.events import Event, PythonTime
from gpipe_fast.reports.report import Report, StageSizes
from gpipe_fast.reports.timeline import sender_of
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.python_layers import timing_layers
from gpipe_fast.runtime.runner import Runner
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.schedule import BACKWARD, TRANSFERS, Action, Schedule
from gpipe_fast.trace.joint_graph import parameters_of

# The capacity for events per stage, at about 100 bytes per event: enough for a step of 5,400 micro-batches.
MAX_EVENTS = 65536

_HOW_TO_RECORD = "call the model inside 'with model.recording() as recording:', and read it after the block"


class Recording:
    """The events of a block of code, available after the block.

    Durations and the bubble refer to one training step, or to one forward; if several ran, to the latest.
    The user's loss runs between forward and backward, so the time between them is not counted. ``print``
    shows the report.

    Attributes:
        stages: events by stage, in order of time.
        kernels: for each stage, the sorted names of the Triton kernels that its programs launch.
        rank_of: the rank of each stage; stages of one rank take turns. Empty: each stage is a rank.
        sizes: for each stage, the bytes of its parameters and of their gradients.
        python: the times of layers that ran in Python, in the latest step. With several processes, none do.
        clock_error: seconds by which differences between times of two processes are wrong at most: half the
            shortest round trip of a message, or more if neither process is the first. 0 in one process.
    """

    def __init__(self) -> None:
        self.stages: tuple[tuple[Event, ...], ...] = ()
        self.kernels: tuple[tuple[str, ...], ...] = ()
        self.rank_of: tuple[int, ...] = ()
        self.sizes: tuple[StageSizes, ...] = ()
        self.python: tuple[PythonTime, ...] = ()
        self.clock_error = 0.0

    @property
    def latest(self) -> dict[Action, Event]:
        """The events of the latest forward and of the latest backward after it, by stage and time."""
        actions = [e for stage in self.stages for e in stage if not e.is_wait]
        forward = max((e.run for e in actions if not _is_backward(e)), default=0)
        backward = max((e.run for e in actions if _is_backward(e) and e.run >= forward), default=forward)
        return {e.action: e for e in actions if e.run == (backward if _is_backward(e) else forward)}

    def seconds(self) -> dict[Action, float]:
        """Returns the seconds that each action took, without its wait."""
        return {action: event.end - event.begin for action, event in self.latest.items()}

    def phases(self) -> list[Schedule]:
        """Returns the recorded schedules: one for each engine run of the step.

        A call and its backward are two runs: the forwards, and the backwards if any ran. A `GPipe.step` is
        one run.

        Raises:
            ValueError: the recording holds no whole step.
        """
        if not self.latest:
            raise ValueError(f"the recording holds no step: {_HOW_TO_RECORD}")
        latest, rank_of = self.latest, self._rank_of
        is_shared = len({*rank_of}) < len(self.stages)
        in_time = sorted(latest, key=lambda action: latest[action].begin) if is_shared else list(latest)
        rows = [tuple(a for a in in_time if rank_of[a.stage] == rank) for rank in sorted({*rank_of})]
        num_microbatches = max(a.microbatch for a in latest) + 1
        try:
            whole = Schedule(tuple(rows), num_microbatches, slots=num_microbatches)
        except ValueError as error:
            raise ValueError(f"the latest step of the recording is not whole: {error}") from error
        is_whole = self._is_one_call or not self.has_backward
        return [whole] if is_whole else [whole.forward_part(), whole.backward_part()]

    @property
    def has_backward(self) -> bool:
        """Whether the latest step has backwards."""
        return any(map(_is_backward, self.latest.values()))

    def span(self) -> float:
        """Returns the seconds from the first begin to the last end, summed over forward and backward.

        Raises:
            ValueError: the recording holds no whole step.
        """
        return sum(end - begin for begin, end in (run.window for run in self._runs()))

    def bubble(self) -> float:
        """Returns the fraction of the ranks' time in which they computed nothing.

        Raises:
            ValueError: the recording holds no whole step.
        """
        return self.report().bubble

    @property
    def _rank_of(self) -> Sequence[int]:
        """The rank of each stage in the latest step; in a forward or backward alone, each stage is one."""
        return self.rank_of if self.rank_of and self._is_one_call else range(len(self.stages))

    @property
    def _is_one_call(self) -> bool:
        """Whether forward and backward of the latest step are one run."""
        kinds = {_is_backward(event) for event in self.latest.values()}
        return len(kinds) == 2 and len({event.run for event in self.latest.values()}) == 1

    def report(self) -> Report:
        """Returns where the time of the latest step goes, or of the latest forward.

        Raises:
            ValueError: the recording holds no whole step.
        """
        return report_of(self)

    def _runs(self, undisturbed: Mapping[Action, float] = MappingProxyType({})) -> list[Phase]:
        latest = self.latest
        waits = [event for stage in self.stages for event in stage if event.is_wait]
        found = []
        for schedule in self.phases():
            own = {action: latest[action] for action in schedule.order()}
            runs = {event.run for event in own.values()}
            python = [each for each in self.python if each.action in own]
            waited = [event for event in waits if event.run in runs]
            alone = {action: undisturbed[action] for action in own if undisturbed}
            found.append(Phase(schedule, own, waited, python, alone))
        return found

    def __str__(self) -> str:
        """Returns the text of the report, then the kernels of each stage."""
        try:
            report = self.report()
        except ValueError as error:
            return f"Recording: {error}"
        kernels = [f"stage {i} launches {', '.join(names)}" for i, names in enumerate(self.kernels) if names]
        return "\n\n".join([str(report), *(["\n".join(kernels)] if kernels else [])])

    def critical_path(self) -> float:
        """Returns the minimum seconds of the step: its schedule simulated with the measured durations.

        Raises:
            ValueError: the recording holds no whole step.
        """
        return sum(phase.replay().time for phase in self._runs())


def report_of(recording: Recording, undisturbed: Mapping[Action, float] = MappingProxyType({})) -> Report:
    """Returns the report of a recording, as `Recording.report` does.

    Args:
        recording: the recording.
        undisturbed: the durations of actions if nothing else runs on the machine; empty if unknown.
    """
    return Report.of(recording._runs(undisturbed), recording.sizes, recording.clock_error)


def _is_backward(event: Event) -> bool:
    return event.action.kind in BACKWARD


def kernel_names(stages: Sequence[Stage], compiled: Iterable[CompiledStage]) -> tuple[tuple[str, ...], ...]:
    """Returns, for each stage, the sorted names of the kernels that its programs launch."""
    names: list[set[str]] = [set() for _ in stages]
    for each in compiled:
        if each.stage.whole in stages:
            found = names[stages.index(each.stage.whole)]
            for lowered in each.traced.lowered.values():
                for program in (lowered.forward, lowered.backward):
                    steps = () if program is None else program.steps
                    found.update(step.launch.name for step in steps if isinstance(step, Launch))
    return tuple(tuple(sorted(each)) for each in names)


def stage_sizes(stages: Sequence[Stage]) -> tuple[StageSizes, ...]:
    """Returns the sizes of the tensors of each stage."""
    sizes = []
    for stage in stages:
        parameters = parameters_of(stage.layers)
        gradients = sum(stored_bytes(p.grad) for p in parameters if p.grad is not None)
        sizes.append(StageSizes(sum(map(stored_bytes, parameters)), gradients))
    return tuple(sizes)


def _rank_of(runner: Runner) -> tuple[int, ...]:
    """Returns the ranks of the stages in the latest step, if several stages form one; else nothing."""
    plan = runner.runners[-1].planner.latest
    if plan is None or not plan.is_step or plan.schedule.ranks == plan.schedule.stages:
        return ()
    return tuple(plan.schedule.rank_of[stage] for stage in range(plan.schedule.num_stages))


@contextlib.contextmanager
def record(runner: Runner) -> Iterator[Recording]:
    """Records the actions that the pipeline of a runner runs inside the block; see `GPipe.recording`."""
    pipeline, processes, recording = runner.pipeline, runner.processes, Recording()
    with processes.reporting():
        if pipeline.recorded():
            raise RuntimeError(
                "this module is being recorded already; recordings cannot be nested: leave the first "
                "model.recording() block before you begin another"
            )
        pipeline.record(MAX_EVENTS)
        with timing_layers() as times:
            try:
                yield recording
            finally:
                events = pipeline.events()
                pipeline.record(0)
                recording.stages = tuple(tuple(_event(*values) for values in stage) for stage in events)
                own_stages = {stage for each in runner.runners for stage in each.stages}
                latest = {(t.action, t.layer): t for t in times if t.stage in own_stages}
                recording.python = tuple(PythonTime(Action.parse(t.action), *t[2:]) for t in latest.values())
                recording.kernels = kernel_names(runner.stages, runner.planner.compiler.lowered())
                recording.rank_of = _rank_of(runner)
                recording.sizes = stage_sizes(runner.stages)
        if processes.is_mesh:
            exchange_stages(
                recording, runner.own_stages, processes.exchange, receives_in_recv=processes.by_nccl
            )


def _event(name: str, is_wait: bool, begin: int, end: int, *others: int) -> Event:
    """Returns an event from the extension's, with times in nanoseconds."""
    run, boundary, saved, scratch, transit = others
    times = begin * 1e-9, end * 1e-9
    return Event(Action.parse(name), is_wait, *times, run, boundary, saved, scratch, transit * 1e-9)


# The offset of a process's clock to that of the first and the maximum error of the offset, in nanoseconds;
# and what the process passes.
Part = tuple[tuple[int, int], Any]


def exchange_stages(
    recording: Recording,
    own: Collection[int],
    exchange: Callable[[Any], Sequence[Part]],
    receives_in_recv: bool,
) -> None:
    """Gives a recording the events of all stages.

    Args:
        recording: what this process has recorded.
        own: its stages.
        exchange: returns what all processes pass.
        receives_in_recv: whether a stage receives tensors of other processes in its RECV, as on GPUs.
    """
    arrivals = _waits_of_receives if receives_in_recv else _receives
    passed = {
        "events": [_values(event) for stage in own for event in recording.stages[stage]],
        "arrivals": list(arrivals(recording, own)),
        "others": [(stage, recording.kernels[stage], recording.sizes[stage]) for stage in own],
    }
    merge(recording, exchange(passed))


def merge(recording: Recording, parts: Sequence[Part]) -> None:
    """Gives a recording what all processes have passed. Matches their runs from the last one backwards."""
    runs = [sorted({values[4] for values in part["events"]}) for _, part in parts]
    total = max(map(len, runs))
    # Since a run that has failed may have begun in some processes only, runs are numbered from the last.
    number = [{run: total - i for i, run in enumerate(reversed(own))} for own in runs]
    arrived = {
        (action, number[rank].get(run)): time + offset * 1e-9
        for rank, ((offset, _), part) in enumerate(parts)
        for action, run, time in part["arrivals"]
    }
    found: dict[int, list[Event]] = {stage: [] for _, part in parts for stage, *_ in part["others"]}
    for rank, ((offset, _), part) in enumerate(parts):
        for action, is_wait, begin, end, run, *others in part["events"]:
            times = begin + offset * 1e-9, end + offset * 1e-9
            event = Event(Action.parse(action), is_wait, *times, number[rank][run], *others)
            if not is_wait and (action, event.run) in arrived:
                event = replace(event, transit=max(0.0, arrived[action, event.run] - event.end))
            found[event.action.stage].append(event)
    recording.stages = tuple(tuple(found[stage]) for stage in sorted(found))
    of_stages = sorted(each for _, part in parts for each in part["others"])
    recording.kernels = tuple(tuple(kernels) for _, kernels, _ in of_stages)
    recording.sizes = tuple(StageSizes(*sizes) for *_, sizes in of_stages)
    recording.clock_error = sum(sorted(error for (_, error), _ in parts)[-2:]) * 1e-9


def _values(event: Event) -> tuple[Any, ...]:
    _, *others = vars(event).values()
    return str(event.action), *others


def _receives(recording: Recording, own: Collection[int]) -> Iterator[tuple[str, int, float]]:
    """Yields each SEND of a stage elsewhere, with its run and the time at which the tensor has arrived."""
    for stage, events in enumerate(recording.stages):
        for event in events:
            if stage not in own and event.action.kind in TRANSFERS and not event.is_wait:
                yield str(event.action), event.run, event.end + event.transit


def _waits_of_receives(recording: Recording, own: Collection[int]) -> Iterator[tuple[str, int, float]]:
    """As `_receives`, of tensors that a RECV has waited for; others came earlier."""
    for stage in own:
        for event in recording.stages[stage]:
            send = sender_of(event.action)
            if send is not None and send.stage not in own and event.is_wait and event.end > event.begin:
                yield str(send), event.run, event.end
