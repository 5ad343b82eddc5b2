"""A test has the name and the place of its module: tests/unit mirrors gpipe_fast, csrc and kernels.

The test of ``gpipe_fast/lower/split.py`` is ``tests/unit/lower/test_split.py``; tests of an aspect are in
``test_split_ASPECT.py`` beside it. The test of ``csrc/pipeline/minibatch.cpp`` is
``tests/unit/csrc/pipeline/test_minibatch.py``.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMERICS = Path("tests/unit/kernels/numerics")  # also has tests of regions and families

# Tests without a module: of the whole tree, and of contracts that all of csrc keeps.
OF_THE_TREE = {
    Path(f"tests/unit/{name}.py")
    for name in (
        "csrc/test_no_interpreter",
        "kernels/test_numerics",
        "test_architecture",
        "test_build",
        "test_contributing",
        "test_distribution",
        "test_installed",
        "test_interrupted_first_call",
        "test_layout",
        "test_messages",
        "test_public_api",
        "test_readme",
        "test_smoke",
        "torch_private/test_uses",
    )
}


def place_of(source: Path) -> Path:
    """Returns the path that the test of a module, a package or a source of csrc has."""
    inner = source.relative_to(ROOT / "gpipe_fast" if source.is_relative_to(ROOT / "gpipe_fast") else ROOT)
    inner = inner.parent if inner.stem == "__init__" else inner
    return Path("tests/unit") / inner.parent / f"test_{inner.stem}.py"


def test_every_test_has_the_name_of_a_module_or_an_entry() -> None:
    folders = (ROOT / "gpipe_fast", ROOT / "gpipe_fast" / "kernels", ROOT / "csrc")
    sources = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    places = set(map(place_of, sources))
    tests = {path.relative_to(ROOT) for path in (ROOT / "tests" / "unit").rglob("test_*.py")}
    aspects = {
        test for test in tests for own in places & tests if test.match(f"{own.parent}/{own.stem}_*.py")
    }
    others = {test for test in tests - places - aspects if not test.is_relative_to(NUMERICS)}
    assert others == OF_THE_TREE
