"""A race detector for the log of the fake runtime: happens-before by vector clocks.

Operations of one stream are ordered. A stream that waits for an event is ordered after the work that the
event recorded. An operation is ordered after all work that the host found finished before enqueuing the
operation. Two accesses to the same bytes of a device, at least one of them a write, must be ordered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# A vector clock: for each stream, how many of its operations happened before.
Clock = dict[int, int]


class Line(NamedTuple):
    """A line of the log.

    Attributes:
        number: The line's number in the log, from 1.
        thread: The number of the calling thread.
        kind: The kind of operation.
        words: The arguments of the operation.
    """

    number: int
    thread: int
    kind: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.number}: {self.kind} {' '.join(self.words)}"


def read(path: Path) -> list[Line]:
    """Reads a whole log."""
    return list(parse(path.read_text().splitlines()))


def parse(texts: Iterable[str]) -> Iterator[Line]:
    """Parses lines lazily, with or without newlines at their ends."""
    for number, text in enumerate(texts, 1):
        thread, kind, *words = text.rstrip("\n").split("\t")
        yield Line(number, int(thread), kind, tuple(words))


class StreamAccess(NamedTuple):
    """A read or write by a stream, with its position in the stream's order."""

    stream: int
    position: int
    line: Line


@dataclass
class ByteRange:
    """Consecutive bytes with the same access history.

    Attributes:
        end: The address after the last byte.
        write: The latest write.
        reads: Since that write, the latest read by each stream.
    """

    end: int
    write: StreamAccess | None = None
    reads: dict[int, StreamAccess] = field(default_factory=dict)

    def split_at(self, end: int) -> ByteRange:
        """Returns the part below an address, with a copy of the history."""
        return ByteRange(end, self.write, dict(self.reads))


class AccessHistory:
    """Byte ranges that have been accessed, by their first address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, ByteRange] = {}

    def ranges(self, begin: int, end: int) -> Iterator[ByteRange]:
        """Yields the byte ranges from `begin` to `end`, split at both; fills gaps with new ranges."""
        self._split_at(begin)
        self._split_at(end)
        at = begin
        for start in self._starts[bisect_left(self._starts, begin) : bisect_left(self._starts, end)]:
            if at < start:
                yield self._new(at, start)
            yield self._ranges[start]
            at = self._ranges[start].end
        if at < end:
            yield self._new(at, end)

    def reset(self, begin: int, end: int) -> None:
        """Clears the history of memory that was allocated or freed."""
        for byte_range in self.ranges(begin, end):
            byte_range.write, byte_range.reads = None, {}

    def _new(self, begin: int, end: int) -> ByteRange:
        self._starts.insert(bisect_left(self._starts, begin), begin)
        self._ranges[begin] = ByteRange(end)
        return self._ranges[begin]

    def _split_at(self, at: int) -> None:
        index = bisect_right(self._starts, at) - 1
        if index < 0:
            return
        begin = self._starts[index]
        byte_range = self._ranges[begin]
        if begin < at < byte_range.end:
            self._starts.insert(index + 1, at)
            self._ranges[begin], self._ranges[at] = byte_range.split_at(at), byte_range


class Checker:
    """The race detector's state while it reads a log.

    Attributes:
        violations: Descriptions of the races and other errors found so far.
    """

    def __init__(self, may_wait: bool) -> None:
        self.violations: list[str] = []
        self._may_wait = may_wait
        self._clocks: dict[int, Clock] = {}
        self._events: dict[tuple[int, int], Clock] = {}
        self._host: Clock = {}
        self._host_version = 0  # counts the updates of the host's clock
        self._host_version_of_stream: dict[int, int] = {}  # the version that each stream's clock includes
        self._memory = AccessHistory()
        self._blocks: dict[int, tuple[int, int]] = {}  # by first address: end and device
        self._device_of: dict[int, int] = {}  # device by stream
        self._compute_streams: dict[int, Line] = {}  # stream -> its first compute line
        self._copy_streams: dict[int, Line] = {}
        self._step: Line | None = None
        self._peers: set[tuple[int, int]] = set()

    def process(self, line: Line) -> None:
        """Processes the next line."""
        getattr(self, "_" + line.kind.replace(" ", "_"), self._unknown_kind)(line)

    def check(self, lines: Iterable[Line]) -> list[str]:
        """Processes all lines, and returns the violations."""
        for line in lines:
            self.process(line)
        self.check_stream_roles()
        return self.violations

    def check_stream_roles(self) -> None:
        """Checks that no stream copies and computes; clears the roles, since pipelines share pool streams."""
        for stream in sorted(self._compute_streams.keys() & self._copy_streams.keys()):
            self.violations.append(
                f"stream {stream} copies between devices ({self._copy_streams[stream]}) and computes "
                f"({self._compute_streams[stream]})"
            )
        self._compute_streams.clear()
        self._copy_streams.clear()

    def _unknown_kind(self, line: Line) -> None:
        raise ValueError(f"unknown kind of line: {line}")

    # Streams and events.

    def _stream(self, line: Line) -> None:
        stream, device = map(int, line.words)
        self._device_of[stream] = device

    def _advance(self, stream: int) -> tuple[Clock, int]:
        """Advances the stream's clock by one operation; returns the clock and the operation's position."""
        clock = self._clocks.setdefault(stream, {})
        if self._host_version_of_stream.get(stream) != self._host_version:
            self._host_version_of_stream[stream] = self._host_version
            _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock, clock[stream]

    def _record(self, line: Line) -> None:
        stream, event, count = map(int, line.words)
        clock, _ = self._advance(stream)
        self._events[event, count] = dict(clock)
        self._events.pop((event, count - 1), None)  # no later wait can refer to it

    def _launch(self, line: Line) -> None:
        """Ignores the launch of a graph, whose operations follow as lines."""

    def _wait(self, line: Line) -> None:
        stream, event, count = map(int, line.words[:3])  # the call site may follow
        clock, _ = self._advance(stream)
        _join(clock, self._events.get((event, count), {}))

    def _finished_event(self, line: Line) -> None:
        event, count = map(int, line.words)
        self._join_host(self._events.get((event, count), {}))

    def _finished_stream(self, line: Line) -> None:
        self._join_host(self._clocks.get(int(line.words[0]), {}))

    def _join_host(self, clock: Clock) -> None:
        _join(self._host, clock)
        self._host_version += 1

    def _synchronize_event(self, line: Line) -> None:
        self._finished_event(line)
        self._check_host_wait(line)

    def _synchronize_stream(self, line: Line) -> None:
        self._finished_stream(line)
        self._check_host_wait(line)

    def _synchronize_device(self, line: Line) -> None:
        for stream, clock in self._clocks.items():
            if self._device_of.get(stream) == int(line.words[0]):
                self._join_host(clock)
        self._check_host_wait(line)

    def _check_host_wait(self, line: Line) -> None:
        if self._step is not None and not self._may_wait and "may wait" not in self._step.words:
            self.violations.append(f"the host waits within a step: {line}")

    def _mark(self, line: Line) -> None:
        word = line.words[0]
        if word == "begin":
            self._step = line
        elif word == "end":
            self._step = None
        elif word == "plan":
            self.check_stream_roles()

    def _peer(self, line: Line) -> None:
        """Records that one device has access to another's memory from now on."""
        self._peers.add((int(line.words[0]), int(line.words[1])))

    # Memory.

    def _malloc(self, line: Line) -> None:
        device, pointer, size = line.words
        begin = int(pointer, 16)
        self._blocks[begin] = (begin + int(size), int(device))
        self._memory.reset(begin, begin + int(size))

    def _free(self, line: Line) -> None:
        begin = int(line.words[0], 16)
        end, _ = self._blocks.pop(begin)
        self._memory.reset(begin, end)

    def _read(self, line: Line) -> None:
        stream, pointer, size = line.words
        self._access(line, int(stream), [(pointer, int(size), False)])
        self._compute_streams.setdefault(int(stream), line)

    def _write(self, line: Line) -> None:
        stream, pointer, size = line.words
        self._access(line, int(stream), [(pointer, int(size), True)])
        self._compute_streams.setdefault(int(stream), line)

    def _memset(self, line: Line) -> None:
        stream, pointer, size = line.words
        self._access(line, int(stream), [(pointer, int(size), True)])

    def _kernel(self, line: Line) -> None:
        """Reports a kernel that did not run: its accesses are unknown. Those of others have lines."""
        if line.words[2:] != ("run",):
            self.violations.append(f"a kernel was launched, which the fake runtime does not run: {line}")

    def _copy(self, line: Line) -> None:
        stream, kind, to, source, size = line.words
        accesses = [(source, int(size), False), (to, int(size), True)]
        # Pageable host memory is only accessed during the call.
        self._access(
            line, int(stream), [a for a, where in zip(accesses, kind[::2], strict=True) if where != "h"]
        )
        if kind == "d2d" and self._step is not None and self._device(to) != self._device(source):
            self._copy_streams.setdefault(int(stream), line)
            if (self._device(source), self._device(to)) not in self._peers:
                self.violations.append(f"copy between devices without peer access: {line}")

    def _device(self, pointer: str) -> int:
        address = int(pointer, 16)
        return next(device for begin, (end, device) in self._blocks.items() if begin <= address < end)

    def _access(self, line: Line, stream: int, accesses: Sequence[tuple[str, int, bool]]) -> None:
        clock, position = self._advance(stream)
        own = StreamAccess(stream, position, line)
        for pointer, size, writes in accesses:
            begin = int(pointer, 16)
            races: set[StreamAccess] = set()
            for byte_range in self._memory.ranges(begin, begin + size):
                for other in _conflicts(byte_range, writes):
                    if clock.get(other.stream, 0) < other.position:
                        races.add(other)
                if writes:
                    byte_range.write, byte_range.reads = own, {}
                else:
                    byte_range.reads[stream] = own
            for other in sorted(races, key=lambda access: access.line.number):
                self.violations.append(f"race: ({line}) is not ordered after ({other.line})")


def _conflicts(byte_range: ByteRange, writes: bool) -> list[StreamAccess]:
    found = [] if byte_range.write is None else [byte_range.write]
    if writes:
        found += byte_range.reads.values()
    return found


def _join(clock: Clock, other: Clock) -> None:
    for stream, position in other.items():
        if clock.get(stream, 0) < position:
            clock[stream] = position


def check(lines: Iterable[Line], may_wait: bool = False) -> list[str]:
    """Returns the violations in a log.

    Args:
        lines: The whole log. A mark that begins a step can allow the host to wait in that step.
        may_wait: Allows the host to wait in every step, as it must if a stage on the CPU receives tensors.
    """
    return Checker(may_wait).check(lines)
