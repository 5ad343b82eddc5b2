"""Tables, and reports made of lines and tables: as text, as HTML for a notebook, and as plain data."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from tabulate import tabulate


class Table(NamedTuple):
    """A table of a report.

    Attributes:
        caption: a line above it; may be empty.
        headers: the headers.
        rows: the cells of each row.
        texts: the headers of columns with text, which are aligned left as the first one; others right.
    """

    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Collection[str] = ()

    def text(self) -> str:
        """Returns the table for a terminal."""
        first = self.headers[0]
        aligned = ["left" if h == first or h in self.texts else "right" for h in self.headers]
        aligns = aligned if self.rows else None  # tabulate has no columns to align
        table = tabulate(self.rows, self.headers, "simple", colalign=aligns, disable_numparse=True)
        return f"{self.caption}\n{table}" if self.caption else str(table)

    def html(self) -> str:
        """Returns the table for a notebook."""
        caption = f"{_paragraph(self.caption)}\n" if self.caption else ""
        return caption + str(tabulate(self.rows, self.headers, "html", disable_numparse=True))


class Printed:
    """Base of reports, dataclasses which ``print`` shows as text and notebooks as HTML."""

    _properties: ClassVar[tuple[str, ...]] = ()  # those that `to_dict` has besides the attributes

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as numbers, strings, lists and dicts, for JSON. Times are in seconds."""
        found: dict[str, Any] = plain(self)
        return found | {name: getattr(self, name) for name in self._properties}

    def _parts(self) -> Iterable[str | Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(part if isinstance(part, str) else part.text() for part in self._parts())

    def _repr_html_(self) -> str:
        return "\n".join(_paragraph(p) if isinstance(p, str) else p.html() for p in self._parts())


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text, quote=False)}</p>"  # code keeps its quotes


def plain(value: Any) -> Any:
    """Returns a report as dicts, lists, strings and numbers, which ``json.dumps`` accepts."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def failure(error: Exception) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def ms(seconds: float) -> str:
    """Returns a time in milliseconds, for a table."""
    return f"{seconds * 1e3:.3f}"


def others_running(load: float, processors: int) -> str:
    """Returns a line about other programs, if they leave too few processors; else nothing.

    Args:
        load: the average number of threads that want a processor.
        processors: how many there are.
    """
    if load <= processors:
        return ""
    return f"Other programs are running: a load of {load:.1f} on {processors} processors. Times mean little."


def size(count: float) -> str:
    """Returns a number of bytes in the largest unit of which it is at least one, for a table."""
    for unit, exponent in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**exponent:
            return f"{count / 2**exponent:.2f} {unit}"
    return f"{count:.0f} B"
