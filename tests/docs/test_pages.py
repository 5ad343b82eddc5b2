"""The pages in docs/ and the README: their Python blocks run, and their relative links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import BLOCK, FENCE, LINK, ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]

# Runs the blocks of each page in order, in a process that is forked after the imports of torch and
# gpipe_fast, because these imports take longer than most pages. Prints a line of JSON per page.
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


for page in sys.argv[2:]:
    child = os.fork()
    if not child:
        error = None
        try:
            run(page)
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([page, error]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def errors_by_page() -> dict[str, str | None]:
    command = [sys.executable, "-c", RUN_PAGES, BLOCK.pattern, *map(str, PAGES_WITH_CODE)]
    # As a reader runs them: with PyTorch's own choice of threads.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(lines) == len(PAGES_WITH_CODE), finished.stderr[-2000:]
    return dict(lines)


@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)
def test_the_python_blocks_of_a_page_run(page: Path, errors_by_page: dict[str, str | None]) -> None:
    assert errors_by_page[str(page)] is None, errors_by_page[str(page)]


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_the_list_of_pages_is_complete() -> None:
    overview = DOCS / "README.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(overview.read_text())}
    assert linked == set(PAGES) - {overview} | {DOCS / "pipeline.html"}
