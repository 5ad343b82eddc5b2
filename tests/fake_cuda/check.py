"""Reads what the fake runtime has logged, and looks for what a GPU would not be bound to do in that order.

Happens-before, by vector clocks: what is on one stream is in order; a stream that waits for an event comes
after what was recorded; and whatever a thread puts on a stream comes after all that the host has found
finished before. Of two accesses to the same bytes of a device, of which one writes, one must come before the
other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# By stream, how many of its lines are known to be done.
Clock = dict[int, int]


class Line(NamedTuple):
    """A line of the log.

    Attributes:
        number: in the log, from 1.
        thread: whose call it was.
        kind: what was called.
        words: what it was called with.
    """

    number: int
    thread: int
    kind: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.number}: {self.kind} {' '.join(self.words)}"


def read(path: Path) -> list[Line]:
    """The whole log."""
    return list(parse(path.read_text().splitlines()))


def parse(texts: Iterable[str]) -> Iterator[Line]:
    """Lines as they come, with or without what ends them."""
    for number, text in enumerate(texts, 1):
        thread, kind, *words = text.rstrip("\n").split("\t")
        yield Line(number, int(thread), kind, tuple(words))


class Access(NamedTuple):
    """That a stream, at a place in its order, reads or writes."""

    stream: int
    place: int
    line: Line


@dataclass
class Span:
    """Bytes with one history.

    Attributes:
        end: the address behind them.
        write: the last one.
        reads: since then, the last one of each stream.
    """

    end: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    def cut(self, end: int) -> Span:
        """The part up to an address, with the same history."""
        return Span(end, self.write, dict(self.reads))


class Memory:
    """Spans that have been accessed, by where they begin."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._spans: dict[int, Span] = {}

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Those between two addresses, cut where these are; new ones where nothing was accessed yet."""
        self._cut(begin)
        self._cut(end)
        at = begin
        for start in self._begins[bisect_left(self._begins, begin) : bisect_left(self._begins, end)]:
            if at < start:
                yield self._new(at, start)
            yield self._spans[start]
            at = self._spans[start].end
        if at < end:
            yield self._new(at, end)

    def forget(self, begin: int, end: int) -> None:
        """Of memory that was given back: whoever gets it begins anew."""
        for span in self.spans(begin, end):
            span.write, span.reads = None, {}

    def _new(self, begin: int, end: int) -> Span:
        self._begins.insert(bisect_left(self._begins, begin), begin)
        self._spans[begin] = Span(end)
        return self._spans[begin]

    def _cut(self, at: int) -> None:
        index = bisect_right(self._begins, at) - 1
        if index < 0:
            return
        begin = self._begins[index]
        span = self._spans[begin]
        if begin < at < span.end:
            self._begins.insert(index + 1, at)
            self._spans[begin], self._spans[at] = span.cut(at), span


class Checker:
    """What is known while the log is read.

    Attributes:
        faults: what is wrong, in words.
    """

    def __init__(self, may_wait: bool) -> None:
        self.faults: list[str] = []
        self._may_wait = may_wait
        self._clocks: dict[int, Clock] = {}
        self._events: dict[tuple[int, int], Clock] = {}
        self._host: Clock = {}
        self._host_news = 0  # how often something was added to it
        self._heard: dict[int, int] = {}  # by stream, how much of that it has
        self._memory = Memory()
        self._blocks: dict[int, tuple[int, int]] = {}  # of memory: where they end, and on which device
        self._device_of: dict[int, int] = {}  # by stream
        self._computing: dict[int, Line] = {}  # streams, and one line for which they are
        self._copying: dict[int, Line] = {}
        self._step: Line | None = None
        self._peers: set[tuple[int, int]] = set()

    def take(self, line: Line) -> None:
        """Reads one line, the next."""
        getattr(self, "_" + line.kind.replace(" ", "_"), self._other)(line)

    def check(self, lines: Iterable[Line]) -> list[str]:
        """Reads all lines; returns the faults."""
        for line in lines:
            self.take(line)
        self.check_roles()
        return self.faults

    def check_roles(self) -> None:
        """Of streams, in the pipelines that there were; those that come get theirs from the same pool."""
        for stream in sorted(self._computing.keys() & self._copying.keys()):
            self.faults.append(
                f"stream {stream} copies between devices ({self._copying[stream]}) and computes "
                f"({self._computing[stream]})"
            )
        self._computing.clear()
        self._copying.clear()

    def _other(self, line: Line) -> None:
        raise ValueError(f"nobody knows what this is: {line}")

    # Streams and events.

    def _stream(self, line: Line) -> None:
        stream, device = map(int, line.words)
        self._device_of[stream] = device

    def _place(self, stream: int) -> tuple[Clock, int]:
        """The stream's clock, advanced by one line."""
        clock = self._clocks.setdefault(stream, {})
        if self._heard.get(stream) != self._host_news:
            self._heard[stream] = self._host_news
            _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock, clock[stream]

    def _record(self, line: Line) -> None:
        stream, event, count = map(int, line.words)
        clock, _ = self._place(stream)
        self._events[event, count] = dict(clock)
        self._events.pop((event, count - 1), None)  # nobody can wait for it any more

    def _launch(self, line: Line) -> None:
        """Of a graph: its lines come next."""

    def _wait(self, line: Line) -> None:
        stream, event, count = map(int, line.words[:3])  # and perhaps where it is called
        clock, _ = self._place(stream)
        _join(clock, self._events.get((event, count), {}))

    def _finished_event(self, line: Line) -> None:
        event, count = map(int, line.words)
        self._host_knows(self._events.get((event, count), {}))

    def _finished_stream(self, line: Line) -> None:
        self._host_knows(self._clocks.get(int(line.words[0]), {}))

    def _host_knows(self, clock: Clock) -> None:
        _join(self._host, clock)
        self._host_news += 1

    def _synchronize_event(self, line: Line) -> None:
        self._finished_event(line)
        self._within_step(line)

    def _synchronize_stream(self, line: Line) -> None:
        self._finished_stream(line)
        self._within_step(line)

    def _synchronize_device(self, line: Line) -> None:
        for stream, clock in self._clocks.items():
            if self._device_of.get(stream) == int(line.words[0]):
                self._host_knows(clock)
        self._within_step(line)

    def _within_step(self, line: Line) -> None:
        if self._step is not None and not self._may_wait and "may wait" not in self._step.words:
            self.faults.append(f"the host waits within a step: {line}")

    def _mark(self, line: Line) -> None:
        word = line.words[0]
        if word == "begin":
            self._step = line
        elif word == "end":
            self._step = None
        elif word == "plan":
            self.check_roles()

    def _peer(self, line: Line) -> None:
        """One device reaches another's memory from now on."""
        self._peers.add((int(line.words[0]), int(line.words[1])))

    # Memory.

    def _malloc(self, line: Line) -> None:
        device, pointer, size = line.words
        begin = int(pointer, 16)
        self._blocks[begin] = (begin + int(size), int(device))
        self._memory.forget(begin, begin + int(size))

    def _free(self, line: Line) -> None:
        begin = int(line.words[0], 16)
        end, _ = self._blocks.pop(begin)
        self._memory.forget(begin, end)

    def _read(self, line: Line) -> None:
        stream, pointer, size = line.words
        self._access(line, int(stream), [(pointer, int(size), False)])
        self._computing.setdefault(int(stream), line)

    def _write(self, line: Line) -> None:
        stream, pointer, size = line.words
        self._access(line, int(stream), [(pointer, int(size), True)])
        self._computing.setdefault(int(stream), line)

    def _memset(self, line: Line) -> None:
        stream, pointer, size = line.words
        self._access(line, int(stream), [(pointer, int(size), True)])

    def _kernel(self, line: Line) -> None:
        """What it accesses nobody knows; no operator should get here."""
        self.faults.append(f"a kernel that does not run here was launched: {line}")

    def _copy(self, line: Line) -> None:
        stream, kind, to, source, size = line.words
        accesses = [(source, int(size), False), (to, int(size), True)]
        # The memory of the host that is not pinned is read or written while the call lasts.
        self._access(
            line, int(stream), [a for a, where in zip(accesses, kind[::2], strict=True) if where != "h"]
        )
        if kind == "d2d" and self._step is not None and self._device(to) != self._device(source):
            self._copying.setdefault(int(stream), line)
            if (self._device(source), self._device(to)) not in self._peers:
                self.faults.append(f"no device reaches the other's memory: {line}")

    def _device(self, pointer: str) -> int:
        address = int(pointer, 16)
        return next(device for begin, (end, device) in self._blocks.items() if begin <= address < end)

    def _access(self, line: Line, stream: int, accesses: Sequence[tuple[str, int, bool]]) -> None:
        clock, place = self._place(stream)
        own = Access(stream, place, line)
        for pointer, size, writes in accesses:
            begin = int(pointer, 16)
            against: set[Access] = set()
            for span in self._memory.spans(begin, begin + size):
                for other in _conflicts(span, writes):
                    if clock.get(other.stream, 0) < other.place:
                        against.add(other)
                if writes:
                    span.write, span.reads = own, {}
                else:
                    span.reads[stream] = own
            for other in sorted(against, key=lambda access: access.line.number):
                self.faults.append(f"nothing makes ({line}) come after ({other.line})")


def _conflicts(span: Span, writes: bool) -> list[Access]:
    found = [] if span.write is None else [span.write]
    if writes:
        found += span.reads.values()
    return found


def _join(clock: Clock, other: Clock) -> None:
    for stream, place in other.items():
        if clock.get(stream, 0) < place:
            clock[stream] = place


def check(lines: Iterable[Line], may_wait: bool = False) -> list[str]:
    """What is wrong in a log.

    Args:
        lines: all of it. A mark that begins a step may say that the host may wait within.
        may_wait: the host may wait within a step, as it must for what a stage on the CPU receives.
    """
    return Checker(may_wait).check(lines)
