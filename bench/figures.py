"""Writes the figures of README and docs anew, when tables of results have changed: the end of `make results`.

A figure is from the file of bench/results that its paragraph names, by name or by the command that writes it;
if it names none, or is a table, from those that its section names before. Where the committed file has the
figure, the page gets what the new file has in the same row and column, rounded as before. A figure
that fits several cells equally well is printed, for a person to correct.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from bench.measure import RESULTS, ROOT

NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\w|[.,]\d)")
_NAMED = re.compile(r"([\w-]+)\.md`|ARGS=\"?([\w -]+)|-m (?:bench|tools) ([\w-]+)")
_MACHINE = re.compile(r"^(?P<machine>[^;\n]+?), \d+ cores;", re.MULTILINE)
# Markdown that holds no figure of a paragraph: code, and the addresses of links.
_NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)")


@dataclass(frozen=True)
class Place:
    """Where a figure is in a file of results: what its row begins with, and which such row it is."""

    heading: str
    row: str
    repeated: int
    column: str
    number: int

    def words(self) -> set[str]:
        return words_of(f"{self.heading} {self.row} {self.column}")


Places = Mapping[Place, str]


def words_of(text: str) -> set[str]:
    """Returns the words and numbers of a text, in lower case."""
    return set(re.findall(r"[a-z]+|\d+(?:\.\d+)?", text.lower()))


def cells(line: str) -> list[str]:
    """Returns the cells of a row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def places_of(text: str) -> dict[Place, str]:
    """Returns the figures of the tables of a file of results."""
    found: dict[Place, str] = {}
    heading, columns = "", None
    seen: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        if not line.startswith("|"):
            columns = None
        elif columns is None:
            columns = cells(line)
        elif not set(line) <= set("|-: "):
            row = cells(line)
            measured = (i for i, cell in enumerate(row) if "." in cell and NUMBER.match(cell))
            label = " ".join(row[: max(next(measured, len(row)), 1)])
            seen[heading, label] += 1
            for column, cell in zip(columns, row, strict=True):
                for number, match in enumerate(NUMBER.finditer(cell)):
                    found[Place(heading, label, seen[heading, label], column, number)] = match[0]
    return found


def value(figure: str) -> Decimal:
    return Decimal(figure.replace(",", ""))


def rounded(figure: str, like: str) -> str:
    """Returns a figure with as many decimals, and with commas, as another has."""
    decimals = len(like.partition(".")[2])
    return f"{value(figure):{',' if ',' in like else ''}.{decimals}f}"


@dataclass
class Change:
    """A figure of a page, its context, and what takes its place: None if several cells are equally likely."""

    old: str
    new: str | None
    context: str


class Figures:
    """The old and the new figures of all files of results.

    Attributes:
        changes: what `rewritten` has found so far.
    """

    def __init__(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        self._files = {
            name: (places_of(text), places_of(new[name])) for name, text in old.items() if name in new
        }
        self._machines = {
            name: (before["machine"], after["machine"])
            for name in self._files
            if (before := _MACHINE.search(old[name])) and (after := _MACHINE.search(new[name]))
        }
        self.changes: list[Change] = []

    def _named(self, text: str) -> list[str]:
        words = " ".join(part for match in _NAMED.findall(text) for part in match).split()
        return sorted({*words, *(word.replace("-", "_") for word in words)} & self._files.keys())

    def rewritten(self, page: str) -> str:
        """Returns a page with the new figures."""
        parts = re.split(r"(^```.*?^```$)", page, flags=re.DOTALL | re.MULTILINE)
        parts[::2] = [self._rewritten_text(part) for part in parts[::2]]
        return "".join(parts)

    def _rewritten_text(self, text: str) -> str:
        blocks = re.split(r"(\n\n+)", text)
        introduction = ""  # of the section, before the block
        for index, block in enumerate(blocks):
            if block.startswith("#"):
                introduction = ""
            if block.startswith("|"):
                blocks[index] = self._table(block, introduction, self._named(introduction))
            else:
                blocks[index] = self._prose(block, self._named(block) or self._named(introduction))
                introduction += block
        return "".join(blocks)

    def _table(self, block: str, introduction: str, files: list[str]) -> str:
        header, separator, *lines = block.splitlines(keepends=True)
        columns = cells(header)
        for number, line in enumerate(lines):
            row = line.split("|")  # the first and the last are empty
            for index in range(2, len(row) - 1):
                context = f"{row[1]} {columns[index - 1]}"
                begins_with_figure = row[index].lstrip()[:1].isdigit()
                row[index] = self._replaced(row[index], files, context, introduction, begins_with_figure)
            lines[number] = "|".join(row)
        return "".join((header, separator, *lines))

    def _prose(self, block: str, files: list[str]) -> str:
        for before, after in {self._machines[name] for name in files if name in self._machines}:
            block = block.replace(before, after)

        return self._replaced(block, files, None, "", False)

    def _replaced(self, text: str, files: list[str], context: str | None, further: str, whole: bool) -> str:
        """Replaces figures of files, told apart by what a context and, less so, `further` say.

        Without a context, it is the text around each. Unless `whole`, figures without decimals are left.
        """
        skipped = [match.span() for match in _NO_FIGURES.finditer(text)]

        def replacement(match: re.Match[str]) -> str:
            inside = any(begin <= match.start() < end for begin, end in skipped)
            if inside or not (whole or "." in match[0]):
                return match[0]
            near = context or text[max(match.start() - 80, 0) : match.end() + 80]
            found = self._choices(match[0], files, near, further)
            if not found or found == {match[0]}:
                return match[0]
            new = found.pop() if len(found) == 1 else None
            self.changes.append(Change(match[0], new, " ".join(near.split())))
            return new or match[0]

        return NUMBER.sub(replacement, text)

    def _choices(self, figure: str, files: list[str], context: str, further: str) -> set[str]:
        """Returns what may take a figure's place, by the cells that share most words with its context."""
        near, far = words_of(context), words_of(further)
        scores: dict[tuple[int, int, int], set[str]] = {}
        for file in files:
            old, new = self._files[file]
            for place, measured in old.items():
                if place in new and rounded(measured, figure) == figure:
                    words = place.words()
                    # Of a median and its percentiles, the median is quoted.
                    score = (len(words & near), len(words & far), -place.number)
                    scores.setdefault(score, set()).add(rounded(new[place], figure))
        return scores[max(scores)] if scores else set()


def committed(path: Path) -> str:
    """Returns a file of the last commit."""
    command = ["git", "show", f"HEAD:{path.relative_to(ROOT)}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def pages() -> Iterator[Path]:
    """Yields the pages that quote results."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def main() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=RESULTS, capture_output=True, text=True, check=True
    )
    new = {Path(name).stem: (RESULTS / name).read_text() for name in listed.stdout.split()}
    figures = Figures({name: committed(RESULTS / f"{name}.md") for name in new}, new)
    for page in pages():
        text = page.read_text()
        rewritten = figures.rewritten(text)
        if rewritten != text:
            page.write_text(rewritten)
        for change in figures.changes:
            what = change.new or "?, several cells have this figure"
            print(f"{page.relative_to(ROOT)}: {change.old} -> {what} ({change.context[:120]})")
        figures.changes.clear()


if __name__ == "__main__":
    main()
