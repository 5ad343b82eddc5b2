"""Happens-before by search: for each line of a short log, the set of all lines that happen before it.

Sets of lines are integers with one bit per line. They take more memory than the vector clocks of
race_detector.py, but show for each wait which order it adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

from tests.fake_cuda.race_detector import Line

STREAM_OPERATIONS = ("record", "wait", "read", "write", "memset", "copy")


def _accesses(line: Line) -> list[tuple[int, int, bool]]:
    """Returns the memory accesses of a line: begin, end, and whether it writes."""
    if line.kind in ("read", "write", "memset"):
        _, pointer, size = line.words
        found = [(pointer, size, line.kind != "read")]
    elif line.kind == "copy":
        _, kind, to, source, size = line.words
        found = [(source, size, False)] * (kind[0] != "h") + [(to, size, True)] * (kind[2] != "h")
    else:
        found = []
    return [(int(pointer, 16), int(pointer, 16) + int(size), writes) for pointer, size, writes in found]


class HappensBefore:
    """The happens-before relation of a log in which no memory is freed."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.conflicts = self._conflicts()
        self._records = {tuple(line.words[1:]): i for i, line in enumerate(lines) if line.kind == "record"}
        self._device_of = {line.words[0]: line.words[1] for line in lines if line.kind == "stream"}

    def _conflicts(self) -> list[int]:
        """Returns for each line the earlier lines that access the same bytes, where one of the two writes."""
        accesses = [(i, *access) for i, line in enumerate(self.lines) for access in _accesses(line)]
        edges = sorted({at for _, begin, end, _ in accesses for at in (begin, end)})
        parts = {at: index for index, at in enumerate(edges)}
        read: defaultdict[int, int] = defaultdict(int)
        written: defaultdict[int, int] = defaultdict(int)
        conflicts = [0] * len(self.lines)
        for i, begin, end, writes in accesses:
            for part in range(parts[begin], parts[end]):
                conflicts[i] |= (read[part] | written[part]) if writes else written[part]
                (written if writes else read)[part] |= 1 << i
        return [earlier & ~(1 << i) for i, earlier in enumerate(conflicts)]

    def predecessors(self, without: Container[int] = ()) -> list[int]:
        """Returns for each line the lines that happen before it, leaving out the waits in `without`."""
        predecessors = [0] * len(self.lines)
        stream: defaultdict[str, int] = defaultdict(int)  # the stream's operations and their predecessors
        host = 0
        for i, line in enumerate(self.lines):
            if line.kind in STREAM_OPERATIONS:
                own = line.words[0]
                predecessors[i] = stream[own] | host
                if line.kind == "wait" and i not in without:
                    record = self._records.get(tuple(line.words[1:3]))
                    predecessors[i] |= predecessors[record] | 1 << record if record is not None else 0
                stream[own] = predecessors[i] | 1 << i
            elif i not in without:
                host |= self._host_predecessors(line, predecessors, stream)
        return predecessors

    def _host_predecessors(self, line: Line, predecessors: Sequence[int], stream: dict[str, int]) -> int:
        """Returns the lines that the host knows to be finished after a query or synchronization."""
        action, _, target = line.kind.partition(" ")
        if action not in ("finished", "synchronize"):
            return 0
        if target == "event":
            record = self._records.get(tuple(line.words))
            return predecessors[record] | 1 << record if record is not None else 0
        if target == "stream":
            return stream[line.words[0]]
        return _union(done for own, done in stream.items() if self._device_of[own] == line.words[0])

    def unordered(self, predecessors: Sequence[int]) -> list[int]:
        """Returns the lines that race with an earlier line."""
        return [i for i, known in enumerate(predecessors) if self.conflicts[i] & ~known]

    def why_redundant(self, wait: int, others_left_out: Collection[int] = ()) -> str:
        """Returns why leaving out a wait, and others, causes no race; empty if it causes one."""
        predecessors, without = self.predecessors(), self.predecessors({wait, *others_left_out})
        if self.unordered(without):
            return ""
        unique = predecessors[wait] & ~without[wait]  # lines that only this wait orders before it
        after = [i for i in range(wait, len(self.lines)) if predecessors[i] >> wait & 1]
        if not any(self.conflicts[i] & predecessors[wait] for i in after):
            return "no later line conflicts with the lines that it waits for"
        if not any(self.conflicts[i] & unique for i in after):
            return "later lines conflict only with lines that were already ordered"
        stream = self.lines[wait].words[0]
        pairs = [(i, j) for j in after for i in _bits(self.conflicts[j] & unique)]
        return " and ".join(
            sorted({self._other_order({wait, *others_left_out}, i, j, without, stream) for i, j in pairs})
        )

    def _other_order(
        self, left_out: set[int], first: int, second: int, predecessors: Sequence[int], stream: str
    ) -> str:
        """Returns what else orders two conflicting lines if some waits of a stream are left out."""
        if self.lines[first].words[0] == self.lines[second].words[0]:
            return "the conflicting line is on the same stream"
        waits = [i for i in _bits(predecessors[second]) if i not in left_out and self.lines[i].kind == "wait"]
        records = [(i, self._records.get(tuple(self.lines[i].words[1:3]))) for i in waits]
        others = [i for i, r in records if r is not None and (predecessors[r] | 1 << r) >> first & 1]
        if any(self.lines[i].words[0] == stream for i in others):
            return "the stream waits again"
        if others:
            return "the conflicting line is on another stream, which waits"
        found = [
            i for i in range(first, second) if self.lines[i].kind.startswith(("finished", "synchronize"))
        ]
        unexplained = self.predecessors({*left_out, *found})[second] >> first & 1
        assert not unexplained, f"{self.lines[min(left_out)]}: the order is unexplained"
        return "the host found the work finished"


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found
