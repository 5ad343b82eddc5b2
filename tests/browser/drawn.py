"""What a page shows: the texts on its canvases, its contrasts, and controls without a name."""

from __future__ import annotations

from typing import Any

_TEXTS = """() => {
  const texts = [];
  const prototype = CanvasRenderingContext2D.prototype;
  const { fillText } = prototype;
  prototype.fillText = function (text, ...place) {
    if (this.globalAlpha === 1) texts.push(String(text));
    fillText.call(this, text, ...place);
  };
  timeline.resize();
  prototype.fillText = fillText;
  return texts;
}"""

# Text, and what may be behind it.
_PAIRS = {
    "ink": ("ground", "panel"),
    "muted": ("ground", "panel"),
    "accent": ("ground", "panel"),
    "memory": ("panel", "idle", "memory-area"),
    "on-accent": ("accent",),
    "on-idle": (
        "idle",
        *(f"cause-{c}" for c in ("fill-and-drain", "imbalance", "transfer", "recompute", "Python", "host")),
    ),
    "on-block": ("F", "R", "B", "I", "W"),
    "ground": ("ink",),  # the tooltip
}


def texts(page: Any) -> list[str]:
    """Draws again, and returns the texts on the canvases."""
    found: list[str] = page.evaluate(_TEXTS)
    return found


def low_contrasts(page: Any) -> dict[str, float]:
    """Returns the pairs of colours of text and ground whose contrast (WCAG 2.2) is below 4.5.

    While the picture plays, what is still to come is mixed with the panel's colour.
    """
    names = {*_PAIRS, *(name for others in _PAIRS.values() for name in others)}
    program = "names => names.map(name => [name, timeline.colour(name)])"
    colours = dict(page.evaluate(program, sorted(names)))
    faded = page.evaluate("FADED")
    for name in (*_PAIRS["on-idle"], *_PAIRS["on-block"]):
        colours[f"faded {name}"] = _mixed(colours[name], colours["panel"], faded)
    found = {}
    for text, grounds in _PAIRS.items():
        for ground in (*grounds, *(f"faded {g}" for g in grounds if f"faded {g}" in colours)):
            low, high = sorted((_luminance(colours[text]), _luminance(colours[ground])))
            contrast = (high + 0.05) / (low + 0.05)
            if contrast < 4.5:
                found[f"{text} on {ground}"] = round(contrast, 2)
    return found


def _mixed(colour: str, ground: str, part: float) -> str:
    pairs = ((int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part * c + (1 - part) * g):02x}" for c, g in pairs)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def unnamed_controls(page: Any) -> list[str]:
    """Returns the controls that a screen reader could not name."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas, [role=slider]")]
          .filter((each) => !each.getAttribute("aria-label") && !each.labels?.length)
          .filter((each) => !each.textContent.trim())
          .map((each) => each.outerHTML)"""
    )
    return found


def is_too_wide(page: Any) -> bool:
    """Returns whether the page scrolls sideways."""
    found: bool = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return found
