"""The report page in a browser: what it draws, zoom, moves, tooltips and tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_fast.reports.blame import CAUSES
from gpipe_fast.reports.page import report_page
from gpipe_fast.schedule import Kind, Simulation, simulate
from tests.browser.drawn import is_too_wide, low_contrasts, texts, unnamed_controls

pytestmark = pytest.mark.xdist_group("browser")


def data_of(found: Simulation) -> dict[str, Any]:
    """Returns the data of a report page from a simulation, as if it were recorded."""
    path = {*found.critical_path}
    stages = []
    for stage, actions in enumerate(found.schedule.stages):
        gaps = [0.0, *(t for a in actions for t in (found.begins[a], found.ends[a])), found.time]
        idle = [(b, e) for b, e in zip(gaps[::2], gaps[1::2], strict=True) if e - b > 1e-9]
        kept = {Kind.F: 1e6, Kind.B: -1e6, Kind.W: -1e6}
        totals = itertools.accumulate(kept.get(action.kind, 0.0) for action in actions)
        blocks = [
            {"name": str(a), "kind": a.kind.value, "microbatch": a.microbatch, "critical": a in path}
            | {"begin": found.begins[a], "end": found.ends[a]}
            for a in actions
        ]
        causes = itertools.cycle(CAUSES)
        stages.append(
            {
                "name": f"stage {stage}",
                "actions": blocks,
                "waits": [{"name": "0SEND_F0", "begin": b, "end": (b + e) / 2} for b, e in idle],
                "idle": [{"begin": b, "end": e, "cause": next(causes)} for b, e in idle],
                "memory": [[found.ends[a], total] for a, total in zip(actions, totals, strict=True)],
            }
        )
    arrows = [
        {"from": [send.stage, found.ends[send]], "to": [receive.stage, found.ends[receive]]}
        for receive, send in found.schedule.waits().items()
        if receive.kind in (Kind.RECV_F, Kind.RECV_B)
    ]
    return {
        "headline": "step 0.1 s <&>",
        "unit": "s",
        "begin": 0.0,
        "end": found.time,
        "stages": stages,
        "arrows": arrows,
        "between": [[found.time * 0.5, found.time * 0.6]],
        "tables": [
            {"caption": "Stages", "headers": ["stage", "busy ms"], "rows": [[0, "1.0"], [1, "<2.0>"]]},
            {"caption": "Advice", "headers": ["a", "b"], "rows": [["a", "model.chunks = 8"]], "code": [1]},
        ],
    }


def recorded(num_stages: int, num_microbatches: int) -> Simulation:
    seconds = [0.01 + 0.002 * (stage % 3) for stage in range(num_stages)]
    return simulate(
        "gpipe", num_stages, num_microbatches, forward=seconds, backward=0.02, transfer=0.001, latency=0.001
    )


@pytest.fixture
def open_report(open_file: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that opens a report of a number of stages and micro-batches."""

    def opened(num_stages: int = 3, num_microbatches: int = 4, **options: Any) -> Any:
        file = tmp_path / "report.html"
        data = data_of(recorded(num_stages, num_microbatches))
        file.write_text(report_page(data, "A recorded step"), encoding="utf-8")
        return open_file(file, **options)

    return opened


def view(page: Any) -> list[float]:
    """Returns the times at the left and at the right end of the timeline."""
    found: list[float] = page.evaluate("timeline.view")
    return found


def hover(page: Any, time: float, y: float) -> str:
    """Moves the mouse to a time and a height of the timeline, and returns the tooltip."""
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + page.evaluate("time => timeline.x(time)", time), box["y"] + y)
    text: str = page.locator("#tooltip").inner_text()
    return text


def test_the_page_shows_actions_names_tables_and_code(open_report: Callable[..., Any]) -> None:
    page = open_report()
    assert {"F0", "F3", "R0", "B0", "I2", "stage 2", "max 3.8 MiB", "loss"} <= {*texts(page)}
    legend = page.locator("#legend").inner_text()
    others = [
        "forward",
        "recompute",
        "weight gradients",
        "critical path",
        "send or receive",
        "loss",
        "memory",
    ]
    assert [name for name in (*(f"idle: {cause}" for cause in CAUSES), *others) if name not in legend] == []
    assert page.title() == page.locator("h1").inner_text() == "A recorded step"
    assert page.locator("#headline").inner_text() == "step 0.1 s <&>"
    assert page.locator("caption").all_inner_texts() == ["Stages", "Advice"]
    assert page.locator("td").all_inner_texts()[:4] == ["0", "1.0", "1", "<2.0>"]
    assert page.locator("code").inner_text() == "model.chunks = 8"
    page.get_by_role("button", name="Copy").click()
    assert page.evaluate("getSelection().toString()") == "model.chunks = 8"
    with page.expect_download() as saved:
        page.locator("#save").click()
    assert saved.value.suggested_filename == "step.png"
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")


def test_zoom_and_move_by_buttons_keys_wheel_and_mouse(open_report: Callable[..., Any]) -> None:
    page = open_report()
    end = recorded(3, 4).time
    for step in ("#zoom-in", "#zoom-in", "#zoom-out"):
        page.locator(step).click()
    assert view(page) == pytest.approx([end / 4, end * 3 / 4])
    page.locator("#zoom-fit").click()
    assert view(page) == pytest.approx([0, end])
    timeline = page.locator("#timeline")
    timeline.focus()
    timeline.press("+")
    assert view(page) == pytest.approx([end / 6, end * 5 / 6])
    timeline.press("ArrowRight")
    assert view(page) == pytest.approx([end / 6 + end / 15, end * 5 / 6 + end / 15])
    timeline.press("ArrowLeft")
    timeline.press("-")
    assert view(page) == pytest.approx([0, end])
    hover(page, end / 3, 30)
    page.mouse.wheel(0, -400)
    page.wait_for_function("!timeline.isWhole")
    left, right = view(page)
    assert (end / 3 - left) / (right - left) == pytest.approx(1 / 3, abs=0.01)
    hover(page, (left + right) / 2, 30)
    page.mouse.down()
    box = timeline.bounding_box()
    page.mouse.move(box["x"] + page.evaluate("timeline.x(timeline.view[0])"), box["y"] + 30)
    page.mouse.up()
    assert view(page)[0] == pytest.approx((left + right) / 2, rel=0.02)
    timeline.press("0")
    assert view(page) == pytest.approx([0, end])


def test_zoom_by_pinch(open_report: Callable[..., Any]) -> None:
    page = open_report(width=390)
    page.evaluate(
        """() => {
          const { canvas } = timeline;
          canvas.setPointerCapture = () => {};
          const box = canvas.getBoundingClientRect();
          const send = (type, pointerId, x) => {
            const place = { clientX: box.left + x, clientY: box.top + 30 };
            canvas.dispatchEvent(new PointerEvent(type, { pointerId, pointerType: "touch", ...place }));
          };
          send("pointerdown", 1, 150);
          send("pointerdown", 2, 200);
          send("pointermove", 2, 250);
          send("pointerup", 1, 150);
          send("pointerup", 2, 250);
        }"""
    )
    left, right = view(page)
    assert right - left == pytest.approx(recorded(3, 4).time / 2)


def test_tooltips_of_actions_waits_idle_time_and_memory(open_report: Callable[..., Any]) -> None:
    page = open_report()
    found = recorded(3, 4)
    top = page.evaluate("timeline.top(1)")
    first = next(a for a in found.schedule.stages[1] if a.kind is Kind.F)
    begin, end = found.begins[first], found.ends[first]
    text = hover(page, (begin + end) / 2, top + 10)
    what = "1F0: stage 1, forward of micro-batch 0"
    assert text == f"{what}, 12.0 ms, from {begin * 1e3:.1f} ms; on the critical path"
    assert hover(page, begin / 4, top + 10).startswith("stage 1 waits for 0SEND_F0: ")
    assert hover(page, begin * 0.8, top + 10).startswith("stage 1 is idle (fill and drain): ")
    assert hover(page, end * 1.3, top + page.evaluate("timeline.bar") + 8) == "stage 1 keeps 977 KiB"
    page.mouse.move(5, 5)
    assert page.locator("#tooltip").is_hidden()


def test_actions_are_read_by_keyboard(open_report: Callable[..., Any]) -> None:
    page = open_report()
    timeline, tooltip = page.locator("#timeline"), page.locator("#tooltip")
    timeline.focus()
    timeline.press(".")
    assert tooltip.inner_text().startswith("0F0: stage 0, forward")
    timeline.press(".")
    assert tooltip.inner_text().startswith("0SEND_F0: stage 0, sends")
    timeline.press(",")
    timeline.press("ArrowDown")
    assert tooltip.inner_text().startswith("1RECV_F0") or tooltip.inner_text().startswith("1F0")
    timeline.press("Escape")
    assert tooltip.is_hidden()
    assert unnamed_controls(page) == []


def test_light_and_dark_in_a_narrow_window(open_report: Callable[..., Any]) -> None:
    page = open_report(8, 32, color_scheme="dark", width=390)
    assert not is_too_wide(page)
    tables = "[...document.querySelectorAll('.tables .panel')]"
    assert page.evaluate(f"{tables}.filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)") == []
    image = page.evaluate("timeline.canvas.toDataURL()")
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        assert low_contrasts(page) == {}
    # The browser reports the change when it next draws a frame.
    page.wait_for_function("image => timeline.canvas.toDataURL() !== image", arg=image)


def test_many_actions_are_drawn_only_where_they_are_visible(open_report: Callable[..., Any]) -> None:
    """8 stages and 150 micro-batches have more than 7,000 actions, of which a zoom shows few."""
    found = recorded(8, 150)
    assert len(found.ends) > 7_000
    page = open_report(8, 150)
    count = """() => {
      let drawn = 0;
      const { drawBlock } = Timeline.prototype;
      timeline.drawBlock = function (...block) { drawn += 1; drawBlock.apply(this, block); };
      timeline.draw();
      delete timeline.drawBlock;
      return drawn;
    }"""
    assert page.evaluate(count) > 2_000
    page.evaluate("end => timeline.zoom(1000, end / 2)", found.time)
    assert 0 < page.evaluate(count) < 200
    assert any(text.startswith("B") or text.startswith("R") for text in texts(page))
