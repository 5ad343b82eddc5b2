"""The site that `make docs` builds: complete, without dead links, and readable without a network."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mkdocs
import pytest
import yaml
from mkdocs.config import load_config

from tests.docs.markdown import FENCE, ROOT
from tests.unit.test_public_api import MODULES

pytestmark = pytest.mark.xdist_group("site")
DOCS = ROOT / "docs"
API_PAGE = DOCS / "api.md"
# 404.html is for servers, with addresses from the root of the server. pipeline.html is not made from
# Markdown, and is tested in tests/browser/.
OTHER_PAGES = ("404.html", "pipeline.html")
# The tags that make a browser load something when it shows a page, and the attributes with the address.
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """What the tests need of a page: ids, links, loaded addresses, and text outside of code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.prose: list[str] = []
        self._without_prose: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])
        if tag in ("code", "pre", "script", "style"):
            self._without_prose.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._without_prose:
            self._without_prose.remove(tag)

    def handle_data(self, data: str) -> None:
        if not self._without_prose:
            self.prose += data.splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", mkdocs.__name__, "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return folder, done


@pytest.fixture(scope="module")
def pages(built: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[Path, Page]:
    site, done = built
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name not in OTHER_PAGES}


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


def documented() -> list[str]:
    return re.findall(r"^::: (\S+)$", API_PAGE.read_text(), re.MULTILINE)


def is_external(address: str) -> bool:
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def test_the_site_builds_without_a_warning(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = built
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("INFO")] == []


def test_every_page_is_built(pages: dict[Path, Page], built: tuple[Path, object]) -> None:
    expected = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    expected = {Path("index.html") if path == Path("README.html") else path for path in expected}
    assert {path.relative_to(built[0]) for path in pages} == expected


def test_links_lead_to_existing_files_and_ids(pages: dict[Path, Page], built: tuple[Path, object]) -> None:
    broken = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            if is_external(link):
                continue
            address = urlsplit(link)
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            ids = pages[target].ids | {""} if target in pages else {""}
            if not target.is_file() or unquote(address.fragment) not in ids:
                broken.append(f"{path.relative_to(built[0])}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_the_network(pages: dict[Path, Page], built: tuple[Path, object]) -> None:
    external = {address for page in pages.values() for address in page.loaded if is_external(address)}
    assert external == set()
    imported = re.compile(r"""(?:url\(|@import\s+|importScripts\()["']?((?:https?:)?//[^"')]+)""")
    for sheet in [*built[0].rglob("*.css"), *pages]:
        assert imported.findall(sheet.read_text(encoding="utf-8")) == [], sheet


def test_the_search_works_from_disk(pages: dict[Path, Page], built: tuple[Path, object]) -> None:
    """From disk, browsers load the index only as a script, and run a worker only with the shim."""
    assert (built[0] / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index")
    for path, page in pages.items():
        shim = [address for address in page.loaded if address.endswith("iframe-worker.js")]
        assert len(shim) == 1, path


def test_no_markdown_is_left_in_the_text(pages: dict[Path, Page], built: tuple[Path, object]) -> None:
    """GitHub and the site differ in what they accept, for example a list without an empty line before it."""
    syntax = re.compile(r"^\s*(?:[-*+] |\d+\. |\||```|#+ |::)|\]\(|::$|\*\*|={4}")
    left = [
        f"{path.relative_to(built[0])}: {line}"
        for path, page in pages.items()
        for line in page.prose
        if syntax.search(line)
    ]
    assert left == []


def test_nested_lists_are_indented_for_the_site() -> None:
    """Python-Markdown nests a list only if it is indented by four columns; GitHub accepts that, too."""
    item = re.compile(r"^ {1,3}(?:[-*+]|\d+\.) .*", re.MULTILINE)
    wrong = {path: item.findall(FENCE.sub("", path.read_text())) for path in DOCS.rglob("*.md")}
    assert {path: items for path, items in wrong.items() if items} == {}


def test_the_navigation_follows_the_front_page() -> None:
    """In order, and with the same groups. Titles may be shorter."""

    def flat(entries: list[dict[str, object]]) -> Iterator[str]:
        for entry in entries:
            for title, value in entry.items():
                if isinstance(value, list):
                    yield f"## {title}"
                    yield from flat(value)
                else:
                    yield str(value)

    navigation = list(flat(load_config(str(ROOT / "mkdocs.yml")).nav))
    found = re.findall(
        r"^(## .+)$|\]\(([^)]+\.(?:md|html))\)", (DOCS / "README.md").read_text(), re.MULTILINE
    )
    assert navigation == ["README.md", *(heading or page for heading, page in found)]


def test_the_api_page_lists_every_public_name() -> None:
    listed = {id(resolve(path)) for path in documented()}
    missing = [name for name in public_names() if id(resolve_public(name)) not in listed]
    assert missing == []


def resolve_public(name: str) -> object:
    module_name, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module_name), attribute)


def test_the_api_page_lists_nothing_twice_and_headings_are_public_names() -> None:
    assert len(documented()) == len(set(documented()))
    blocks = re.findall(r"^::: (\S+)\n((?: +.*\n)*)", API_PAGE.read_text(), re.MULTILINE)
    public = set(public_names())
    for path, options in blocks:
        heading = (yaml.safe_load(options) or {}).get("options", {}).get("heading", path)
        if heading != "isolate":  # a method of decorated modules
            assert heading in public, path
            assert resolve(path) is resolve_public(heading), path


def test_every_public_name_has_an_anchor(pages: dict[Path, Page], built: tuple[Path, object]) -> None:
    ids = pages[built[0] / "api.html"].ids
    assert [path for path in documented() if path not in ids] == []
    methods = [f"gpipe_fast.GPipe.{name}" for name in ("forward", "chunks", "checkpoint", "recording")]
    assert [method for method in methods if method not in ids] == []
