"""The site that `make docs` builds: without a warning, readable without a network, with every public name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import mkdocs
import pytest

from tests.docs.markdown import ROOT
from tests.unit.test_public_api import MODULES

pytestmark = pytest.mark.xdist_group("site")
# The tags that make a browser load something when it shows a page, and the attributes with the address.
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """The ids of a page, and the addresses that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if values.get(LOADED.get(tag, "")):
            self.loaded.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site; a broken link, a missing page or another warning is an error (see mkdocs.yml)."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", mkdocs.__name__, "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("INFO")] == []
    return folder


def test_the_site_is_readable_and_searchable_without_a_network(site: Path) -> None:
    imported = re.compile(r"""(?:url\(|@import\s+|importScripts\()["']?((?:https?:)?//[^"')]+)""")
    pages = [path for path in site.rglob("*.html") if path.name not in ("404.html", "pipeline.html")]
    assert len(pages) == len([*(ROOT / "docs").rglob("*.md")])
    for path in pages:
        loaded = Page(path).loaded
        assert [address for address in loaded if urlsplit(address).scheme or urlsplit(address).netloc] == []
        # From disk, browsers run a worker, such as the search's, only with the shim.
        assert len([address for address in loaded if address.endswith("iframe-worker.js")]) == 1, path
    for path in [*site.rglob("*.css"), *pages]:
        assert imported.findall(path.read_text(encoding="utf-8")) == [], path
    # Browsers load the index from disk only as a script.
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index")


def test_copy_buttons_copy_no_prompt(site: Path) -> None:
    """The theme marks a block while it reads its visible text; prompts and output are hidden meanwhile."""
    style = (site / "stylesheets" / "site.css").read_text(encoding="utf-8")
    assert re.search(r"\[data-md-copying\] \.gp,\s*\[data-md-copying\] \.go \{\s*display: none;", style)
    (script,) = (site / "assets" / "javascripts").glob("bundle.*.min.js")
    assert 'setAttribute("data-md-copying"' in script.read_text(encoding="utf-8")
    assert '<span class="gp">$ </span>' in (site / "index.html").read_text(encoding="utf-8")


def public_names() -> Iterator[str]:
    for module_name in MODULES:
        yield from (f"{module_name}.{name}" for name in importlib.import_module(module_name).__all__)


def resolve(path: str) -> object:
    """Returns the object at a path of modules and attributes. Modules come before functions of their name."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def resolve_public(name: str) -> object:
    module_name, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module_name), attribute)


def test_the_api_page_has_every_public_name_once(site: Path) -> None:
    documented = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert len(documented) == len(set(documented))
    listed = {id(resolve(path)) for path in documented}
    assert [name for name in public_names() if id(resolve_public(name)) not in listed] == []
    ids = Page(site / "api.html").ids
    methods = [f"gpipe_fast.GPipe.{name}" for name in ("forward", "chunks", "checkpoint", "recording")]
    assert [path for path in [*documented, *methods] if path not in ids] == []
