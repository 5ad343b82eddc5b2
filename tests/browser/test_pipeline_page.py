"""docs/pipeline.html in a browser: every control has its effect, and the numbers are those of `simulate`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_fast import simulate
from gpipe_fast.schedule import SCHEDULES
from tests.browser.drawn import is_too_wide, low_contrasts, texts, unnamed_controls

pytestmark = pytest.mark.xdist_group("browser")
PAGE = Path(__file__).parents[2] / "docs" / "pipeline.html"
BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.fixture
def page(open_file: Callable[..., Any]) -> Any:
    """The page, at its second caption: K = 4, M = 8, no recompute."""
    page = open_file(PAGE)
    page.get_by_role("button", name="2: Cut the mini-batch").click()
    return page


def shown(page: Any) -> dict[str, float]:
    """Returns the figures that the page shows: milliseconds, a factor, percent and bytes."""
    figures = {}
    for name, text in page.evaluate("page.shown()").items():
        number, _, unit = text.rstrip("%").partition(" ")
        figures[name] = float(number) * BYTES.get(unit, 1)
    return figures


def position(page: Any) -> float:
    """Returns the present time of the animation as a share of all."""
    found: float = page.evaluate("page.state.position / page.timeline.data.end")
    return found


def random_settings(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "K": draw.randint(1, 8),
        "M": draw.randint(1, 32),
        "checkpoint": draw.choice(["always", "except_last", "never"]),
        "schedule": draw.choice([*SCHEDULES]),
        "costs": [draw.choice([1, round(draw.uniform(0.2, 3), 1)]) for _ in range(8)],
        "latency": draw.choice([0, draw.randint(1, 20) / 2]),
        "overhead": draw.randint(0, 20) / 4,
    }


def test_the_numbers_are_those_of_the_line_of_python(page: Any) -> None:
    settings = [random_settings(seed) for seed in range(50)]
    program = """all => all.map((each) => {
      page.set(each);
      return [byId("simulate").textContent, page.shown(), byId("memory-note").textContent];
    })"""
    for each, (line, figures, note) in zip(settings, page.evaluate(program, settings), strict=True):
        schedule, found = each["schedule"], eval(line, {"simulate": simulate})
        one_device = 300 + 2 * each["overhead"]
        numbers = {name: float(text.rstrip("%").split()[0]) for name, text in figures.items()}
        assert numbers["time"] == pytest.approx(found.time, abs=0.051), each
        assert numbers["speedup"] == pytest.approx(one_device / found.time, abs=0.0051), each
        assert numbers["bubble"] == pytest.approx(100 * found.bubble, abs=0.051), each
        value, unit = figures["memory"].split()
        memory = float(value) * BYTES[unit]
        num_stages = 2 if schedule == "interleaved" else 1  # of a device
        low, high = max(found.peak_bytes), num_stages * max(found.peak_bytes)
        assert low * 0.99 - 0.06e9 <= memory <= high * 1.01 + 0.06e9, each
        if num_stages == 1:
            assert note.startswith(f"peak of a device; {max(found.kept)} micro-batch"), each
            assert memory == pytest.approx(
                found.peak_bytes[0] if len(found.peak_bytes) == 1 else high, rel=0.06
            )


def test_the_note_says_why_the_bubble_is_not_that_of_the_formula(page: Any) -> None:
    before = page.evaluate("({ ...page.state })")
    for change, reason in [
        ({"checkpoint": "always"}, "recompute fills waiting time"),
        ({"costs": [1, 1, 2, 1, 1, 1, 1, 1]}, "a slow stage"),
        ({"latency": 2}, "latency"),
        ({"schedule": "interleaved"}, "another schedule"),
        ({"schedule": "1f1b"}, ""),  # the same bubble
        ({"overhead": 3, "M": 5}, ""),
    ]:
        page.evaluate("settings => page.set(settings)", before | change)
        assert page.locator("#bubble-note").inner_text().partition("Here: ")[2] == reason


def test_every_control_changes_its_setting(page: Any) -> None:
    for control, value in [("K", "8"), ("M", "32"), ("latency", "5"), ("overhead", "3")]:
        page.locator(f"#{control}").fill(value)
        assert str(page.evaluate("name => page.state[name]", control)) == value
    for control, values in [("checkpoint", ["always", "except_last"]), ("schedule", SCHEDULES)]:
        for value in values:
            page.locator(f"#{control}").select_option(value)
            assert page.evaluate("name => page.state[name]", control) == value
            assert f'"{value}"' in page.locator("#simulate").inner_text()
    assert len(page.evaluate("page.timeline.data.stages")) == int(page.evaluate("page.state.K"))


def test_the_balance_by_mouse_touch_and_keyboard(open_file: Callable[..., Any]) -> None:
    page = open_file(PAGE, has_touch=True)
    page.get_by_role("button", name="2: Cut the mini-batch").click()
    slider = page.get_by_role("slider", name="Cost of stage 2")
    slider.scroll_into_view_if_needed()
    before = shown(page)["time"]
    box = slider.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + box["height"] * 2 / 3)
    page.mouse.down()
    page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 3)
    page.mouse.up()
    assert page.evaluate("page.state.costs")[:4] == [1, 1, 2, 1]
    assert slider.get_attribute("aria-valuetext") == "cost 2, 40% of the work"
    assert shown(page)["time"] > before
    page.touchscreen.tap(box["x"] + 5, box["y"] + box["height"] / 2)
    assert page.evaluate("page.state.costs[2]") == 1.5
    slider.focus()
    for key, cost in [("ArrowUp", 1.6), ("ArrowLeft", 1.5), ("PageUp", 2), ("End", 3), ("Home", 0.2)]:
        slider.press(key)
        assert page.evaluate("page.state.costs[2]") == cost
    page.get_by_role("button", name="Equal").click()
    assert shown(page)["time"] == before


def test_play_pause_step_and_scrub(open_file: Callable[..., Any]) -> None:
    clock = "window.now = 0; performance.now = () => 1000 * window.now;"
    page = open_file(PAGE, script=clock, reduced_motion="no-preference")
    assert page.locator("#play").inner_text() == "Play"
    page.get_by_role("button", name="2: Cut the mini-batch").click()
    assert page.locator("#play").inner_text() == "Pause"  # a caption plays
    page.locator("#play").click()
    assert position(page) == 0
    play_for = """seconds => new Promise((done) => {
      requestAnimationFrame(() => {
        window.now += seconds;
        requestAnimationFrame(() => requestAnimationFrame(done));
      });
    })"""
    page.locator("#play").click()
    page.locator("#again").click()  # while it plays
    page.evaluate(play_for, 3)
    assert position(page) == pytest.approx(3 / 12)
    page.evaluate(play_for, 6)
    assert position(page) == pytest.approx(9 / 12)
    assert page.locator("#scrub").input_value() == "750"
    page.locator("#play").click()
    page.evaluate(play_for, 3)
    assert position(page) == pytest.approx(9 / 12)
    page.locator("#play").click()
    page.evaluate(play_for, 3)
    assert position(page) == 1
    assert page.locator("#play").inner_text() == "Play"
    assert "Update" in page.locator("#status").inner_text()
    page.locator("#scrub").fill("500")
    assert position(page) == pytest.approx(0.5)
    begins = page.evaluate("page.simulation().ranks.flat().flatMap((a) => [a.begin, a.end])")
    at = page.evaluate("page.state.position")
    page.locator("#step").click()
    assert page.evaluate("page.state.position") == min(time for time in begins if time > at)
    page.locator("#back").click()
    assert page.evaluate("page.state.position") == max(time for time in begins if time <= at)


def test_nothing_moves_by_itself_and_the_status_describes_the_time(page: Any) -> None:
    assert position(page) == 0  # the system asks for less motion
    assert not page.evaluate("page.state.playing")
    page.evaluate("page.seek(0.01)")
    text = "Devices at work: 1 of 4. Micro-batches with a complete gradient: {} of 8."
    assert text.format(0) in page.locator("#status").inner_text()
    page.evaluate("page.seek(page.simulation().time - 0.01)")
    assert text.format(7) in page.locator("#status").inner_text()


def test_the_picture_names_what_it_draws(page: Any) -> None:
    found = texts(page)
    names = {f"{kind}{m}" for kind in "FB" for m in range(8)}
    assert names | {"fill", "bubble", "drain", "update", "stage 3", "25% of work", "max 1.1 GiB"} <= {*found}
    page.locator("#schedule").select_option("zb-h1")
    assert (
        page.evaluate("new Set(page.timeline.data.stages.flatMap(s => s.actions.map(a => a.kind))).size") == 3
    )
    assert "weight gradients" in page.locator("#legend").inner_text()


def test_the_picture_is_scrubbed_zoomed_and_read(page: Any) -> None:
    timeline = page.locator("#timeline")
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    at = page.evaluate("[page.timeline.x(50), page.timeline.top(0) + 10]")
    page.mouse.click(box["x"] + at[0], box["y"] + at[1])
    assert page.evaluate("page.state.position") == pytest.approx(50, abs=0.2)
    assert "stage 0 is idle (bubble)" in page.locator("#tooltip").inner_text()
    page.mouse.wheel(0, -300)  # without Ctrl, the page scrolls
    page.keyboard.down("Control")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Control")
    page.wait_for_function("!page.timeline.isWhole")
    length = page.evaluate("page.timeline.view[1] - page.timeline.view[0]")
    assert length == pytest.approx(page.evaluate("page.timeline.data.end") / math.e)
    page.locator("#zoom-fit").click()
    assert page.evaluate("page.timeline.isWhole")
    timeline.focus()
    for _ in range(2):
        timeline.press("ArrowDown")
    assert "1F0: stage 1, forward of micro-batch 0" in page.locator("#tooltip").inner_text()


def test_every_caption_sets_the_picture_that_it_explains(page: Any) -> None:
    page.get_by_role("button", name="1: One stage").click()
    assert page.locator("#previous").is_disabled()
    seen = []
    for number in range(1, 7):
        current = page.locator("#steps [aria-current=step]").inner_text()
        state = page.evaluate("page.state")
        text = " ".join(page.locator("#tour-text").inner_text().split())
        seen.append((current, state["M"], state["checkpoint"], state["costs"][2]))
        figures = page.evaluate("page.shown()")
        if number in (1, 2, 6):
            assert figures["speedup"] in text
        if number == 2:
            assert figures["bubble"] in text
        if number == 4:
            assert figures["memory"] in text
            assert figures["time"] in text
        if number < 6:
            page.locator("#next").click()
    assert seen == [
        ("1", 1, "never", 1),
        ("2", 8, "never", 1),
        ("3", 4, "never", 1),
        ("4", 8, "always", 1),
        ("5", 16, "never", 1),
        ("6", 16, "never", 2),
    ]
    assert page.locator("#next").is_disabled()
    assert page.locator("#differs").inner_text() == ""
    page.locator("#M").fill("3")
    assert "You changed the settings" in page.locator("#differs").inner_text()
    page.locator("#again").click()
    assert page.locator("#differs").inner_text() == ""
    assert page.evaluate("page.state.M") == 16
    page.locator("#previous").click()
    assert page.locator("#steps [aria-current=step]").inner_text() == "5"


def test_the_fifth_caption_names_the_best_number_of_micro_batches(page: Any) -> None:
    page.get_by_role("button", name="5: How many").click()
    text = page.locator("#tour-text").inner_text()
    arguments = page.evaluate(
        "Array.from({length: 32}, (_, i) => page.argumentsOf({...page.state, M: i + 1}))"
    )
    times = [simulate(each.pop("schedule"), **each).time for each in arguments]
    best = times.index(min(times)) + 1
    assert f"the best is M = {best}." in " ".join(text.split())
    assert best < 16 < 32
    assert times[31] > times[15]


def test_light_and_dark(open_file: Callable[..., Any]) -> None:
    page = open_file(PAGE, color_scheme="dark")
    for scheme, ground in (("dark", "rgb(21, 23, 27)"), ("light", "rgb(250, 249, 246)")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        assert low_contrasts(page) == {}


def test_every_control_is_named_and_reached_by_keyboard(page: Any) -> None:
    assert unnamed_controls(page) == []
    page.evaluate("document.activeElement.blur()")
    expected = page.locator("button:enabled, input, select, [tabindex='0'], a").count()
    seen = set()
    for _ in range(expected + 1):  # once, the focus leaves the page
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement !== document.body"):
            seen.add(page.evaluate("document.activeElement.outerHTML"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert len(seen) == expected


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_into_its_window(open_file: Callable[..., Any], width: int) -> None:
    page = open_file(PAGE, width=width)
    cut = """[...document.querySelectorAll("button, dd, dt, label, p, select")].filter(
      (each) => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline"
    ).map((each) => each.outerHTML)"""
    for settings in ({"K": 4, "M": 8}, {"K": 8, "M": 32}, {"K": 1, "M": 1}):
        page.evaluate("settings => page.set(settings)", settings)
        assert not is_too_wide(page)
        assert page.evaluate(cut) == []
