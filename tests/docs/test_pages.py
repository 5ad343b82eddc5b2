"""The pages in docs/ and the README: their Python blocks run, and their relative links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpipe_fast.from_model.calls import page as page_path
from tests.docs.markdown import BLOCK, FENCE, LINK, ROOT, TABLE

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]
# Those that pipeline models of transformers.
LONGER_PAGES = {"device_map.md", "generation.md", "not_sequential.md", "training_loops.md"}
MAX_SECONDS = 600.0

# Runs the blocks of each page whose path it reads from stdin, in a process that is forked after the imports
# of torch and gpipe_fast, because these take longer than most pages. Prints a line of JSON per page.
RUN_PAGES = """
import contextlib, io, json, os, re, sys, tempfile, traceback, warnings
import numpy, torch
import gpipe_fast
from pathlib import Path

warnings.simplefilter("ignore")


def run(page):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        namespace = {"__name__": "page"}
        blocks = re.findall(sys.argv[1], Path(page).read_text(), re.DOTALL | re.MULTILINE)
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
        os.chdir("/")


for page in sys.stdin:
    child = os.fork()
    if not child:
        error = None
        try:
            run(page.strip())
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def error_of() -> Iterator[Callable[[Path], str | None]]:
    """Yields a function that runs the blocks of a page, and returns their error."""
    # As a reader runs them: with PyTorch's own choice of threads.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        [sys.executable, "-c", RUN_PAGES, BLOCK.pattern],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pages, errors = process.stdin, process.stdout
        assert pages is not None
        assert errors is not None

        def run(page: Path) -> str | None:
            print(page, file=pages, flush=True)
            assert select.select([errors], [], [], MAX_SECONDS)[0], "the page takes too long"
            found: str | None = json.loads(errors.readline())
            return found

        yield run
        process.kill()


@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.extended) if p.name in LONGER_PAGES else p for p in PAGES_WITH_CODE],
    ids=name_of,
)
def test_the_python_blocks_of_a_page_run(page: Path, error_of: Callable[[Path], str | None]) -> None:
    error = error_of(page)
    assert error is None, error


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


def test_relative_links_lead_to_files_and_headings() -> None:
    pages = [*PAGES, ROOT / "README.md", ROOT / "examples" / "README.md"]
    assert {page: broken for page in pages if (broken := broken_links(page))} == {}


def test_tables_have_a_heading() -> None:
    """Otherwise they are shown as text, as behind a blank line."""
    for page in [*PAGES, ROOT / "README.md"]:
        for table in TABLE.findall(FENCE.sub("", page.read_text())):
            assert re.match(r"\|[-|: ]+\|$", table.splitlines()[1]), f"{page}: {table[:80]}"


def test_errors_name_pages_by_their_titles_and_paths() -> None:
    """The pages are in the package, by a symbolic link or by its data (tests/unit/test_distribution.py)."""
    source = "\n".join(path.read_text() for path in (ROOT / "gpipe_fast").rglob("*.py"))
    named = re.findall(r"see '([^']+)', \{page\('([^']+)'\)\}", source)
    assert len(named) == len(re.findall(r"\.md\b", re.sub(r"``docs/.*``", "", source))) > 0
    for title, name in named:
        assert Path(page_path(name)).read_text().startswith(f"# {title}\n"), name


def test_the_list_of_pages_is_complete() -> None:
    overview = DOCS / "README.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(overview.read_text())}
    assert linked == set(PAGES) - {overview} | {DOCS / "pipeline.html"}
