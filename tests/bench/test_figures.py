"""`bench.figures` writes figures of pages anew from new tables, and leaves all other numbers."""

from __future__ import annotations

from bench.figures import Figures

RESULTS = """# Steps

AMD EPYC, 2 cores; torch 2.14; commit 1234567.

|   chunks | candidate   | ms: median [p20, p80]   |   MiB |
|----------|-------------|-------------------------|-------|
|        8 | ours        | 4.17 [4.11, 4.20]       |    53 |
|       16 | ours        | 7.73 [7.69, 7.77]       |    84 |
|        8 | loop        | 5.17 [5.06, 5.25]       |    84 |

## No recomputation

| candidate   |   ms |
|-------------|------|
| ours        | 4.17 |
"""
NEW = (
    RESULTS.replace("AMD EPYC", "Xeon")
    .replace("4.17 [4.11, 4.20]       |    53", "5.04 [5.00, 5.10]       |    50")
    .replace("7.73 [7.69, 7.77]       |    84", "9.99 [9.90, 10.1]       |    81")
    .replace("|    84 |", "|    90 |")
    .replace("| 4.17 |", "| 4.99 |")
)
PAGE = """# Page

On an AMD EPYC (`make bench ARGS="a step"`), everything recomputed:

| | ours | loop |
|---|---|---|
| chunks 8, ms | 4.2 | 5.17 |
| chunks 16, MiB | 84 | |

With 16 chunks ours takes 7.7 ms of version 7.73.1, and `7.73` of a program stays.

## No recomputation

Ours takes 4.17 ms (`step.md`). A ratio of 0.33 is in no table.

```python
x = 4.17  # step.md
```

## Elsewhere

4.17 is no result.
"""
EXPECTED = (
    PAGE.replace("AMD EPYC", "Xeon")
    .replace("| 4.2 | 5.17 |", "| 5.0 | 5.17 |")
    .replace("MiB | 84 |", "MiB | 81 |")
    .replace("takes 7.7 ms", "takes 10.0 ms")
    .replace("takes 4.17 ms", "takes 4.99 ms")
)


def test_figures_follow_their_rows_and_columns() -> None:
    figures = Figures({"step": RESULTS}, {"step": NEW})
    assert figures.rewritten(PAGE) == EXPECTED
    assert [(change.old, change.new) for change in figures.changes] == [
        ("4.2", "5.0"),
        ("84", "81"),
        ("7.7", "10.0"),
        ("4.17", "4.99"),
    ]
    page = "It takes 4.17 ms (`step.md`).\n"  # of several cells
    assert figures.rewritten(page) == page
    assert figures.changes[-1].new is None


def test_numbers_in_the_words_of_a_cell_are_no_figures() -> None:
    old = "| a | ms | MiB |\n|---|---|---|\n| model | 1.5 | 12 |\n"
    figures = Figures({"a-b": old}, {"a-b": old.replace("12", "13")})
    page = "See `a-b.md`.\n\n| | |\n|---|---|\n| size | 12 MiB |\n| kind | GPT-12 of 12 blocks |\n"
    assert figures.rewritten(page) == page.replace("12 MiB", "13 MiB")


def test_a_setting_with_a_decimal_tells_rows_apart() -> None:
    """As in frontier.md, where several settings have one ratio."""
    old = (
        "| kind | candidate | ms | ratio |\n|---|---|---|---|\n"
        "| step | checkpoint=0.25 | 5.5 | 1.12 |\n| step | plain loop | 5.6 | 1.12 |\n"
    )
    new = old.replace("5.5 | 1.12", "6.1 | 1.16").replace("5.6 | 1.12", "6.2 | 1.17")
    page = "Beside a plain loop (`frontier.md`):\n\n| | ratio |\n|---|---|\n| `checkpoint=0.25` | 1.12 |\n"
    assert Figures({"frontier": old}, {"frontier": new}).rewritten(page) == page.replace("1.12", "1.16")
