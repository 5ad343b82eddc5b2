"""Every error and warning states what was received and what to do; docs/messages.md quotes them correctly."""

from __future__ import annotations

import ast
import functools
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpipe_fast
from tests.unit.message_cases import OF_ARGUMENTS, Case
from tests.unit.message_cases_of_fusion import OF_FUSION, WARNINGS_OF_FUSION
from tests.unit.message_cases_of_layers import OF_LAYERS, WARNINGS_OF_LAYERS
from tests.unit.message_cases_of_models import OF_MODELS, WARNINGS_OF_MODELS
from tests.unit.message_cases_of_ranks import OF_RANKS
from tests.unit.message_cases_of_streams import OF_STREAMS
from tests.unit.message_cases_of_training import OF_TRAINING
from tests.unit.message_cases_of_weights import OF_WEIGHTS

# One worker of pytest-xdist runs all cases, and so runs each of them once.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("messages")]

ERRORS = [*OF_ARGUMENTS, *OF_LAYERS, *OF_FUSION, *OF_WEIGHTS, *OF_MODELS, *OF_TRAINING, *OF_STREAMS]
ERRORS += OF_RANKS
WARNINGS = [*WARNINGS_OF_LAYERS, *WARNINGS_OF_FUSION, *WARNINGS_OF_MODELS]
PACKAGE = Path(gpipe_fast.__file__).parent
ROOT = Path(__file__).parents[2]

# The beginning of the text of each `raise` that no case triggers; of the statement if its text is no literal.
EXEMPT = {
    "raise NotImplementedError": "an abstract method, which GPipe overrides",
    "raise LayerRefused": "its text becomes the reason in another message, which cases trigger",
    "raise _PartUntraceable": "the trace of the stage catches it, and returns the reason",
    "raise _refusal": "its text becomes the reason in another message, which cases trigger",
    "a condition on sizes does not hold": "the reason why there is no template, of which users see nothing",
    "the trace has ": "a kind of result that PyTorch's tracer makes of no known layer",
    "raise first_error": "an error of the user's model",
    "raise failure": "an error of a mini-batch, raised after the results of those before",
    "raise Differs": "its text becomes the reason in another message, which cases trigger",
    "raise Unknown": "its text becomes the reason in another message, which cases trigger",
    "raise CannotLaunch": "the pass catches it, and leaves the nodes",
    "raise Conflict": "the grouping catches it, and computes the values in two kernels",
    "Triton's disk cache has no ": "`cached` catches it, and the kernel is compiled",
    "the user has no home folder": "the reason in a warning, which tests/unit/fuse/test_cubins.py triggers",
    "strides ": "a check of strides that the same file has computed",
}


@dataclass(frozen=True)
class Statement:
    """A `raise`, or a call of `warnings.warn` or `warn_user`, in the sources of gpipe_fast.

    Attributes:
        path: the file.
        lines: the first and the last line.
        kind: the exception's class; "" for a warning.
        text: the source of its text; "" if it has none.
        words: a pattern of the text, with `.*` for inserted values; None if the text is a variable.
    """

    path: str
    lines: tuple[int, int]
    kind: str
    text: str
    words: str | None

    def __str__(self) -> str:
        return f"{Path(self.path).relative_to(PACKAGE)}, line {self.lines[0]}: {self.kind} {self.text}"

    def contains(self, path: str, line: int) -> bool:
        return self.path == path and self.lines[0] <= line <= self.lines[1]

    def is_exempt_by(self, beginning: str) -> bool:
        literal = None if self.words is None else re.sub(r"\\(.)", r"\1", self.words)
        return any(text.startswith(beginning) for text in (literal or "", f"raise {self.kind}"))


def words_of(text: ast.expr) -> str | None:
    """Returns a pattern of a literal or an f-string."""
    if isinstance(text, ast.JoinedStr):
        return "".join(words_of(value) or ".*" for value in text.values)
    return re.escape(text.value) if isinstance(text, ast.Constant) and isinstance(text.value, str) else None


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {str(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def statement(path: str, node: ast.stmt | ast.expr, call: ast.expr) -> Statement:
    kind, argument = ast.unparse(call), None
    if isinstance(call, ast.Call):
        kind, argument = ast.unparse(call.func), next(iter(call.args), None)
    text = "" if argument is None else ast.unparse(argument)
    words = None if argument is None else words_of(argument)
    return Statement(path, (node.lineno, node.end_lineno or node.lineno), kind, text, words)


def raised_in(path: str, tree: ast.Module) -> Iterator[Statement]:
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None and ast.unparse(node.exc) not in caught:
            yield statement(path, node, node.exc)


def warned_in(path: str, tree: ast.Module) -> Iterator[Statement]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn_user"):
            yield statement(path, node, node)


@functools.cache
def raises() -> list[Statement]:
    return [found for path, tree in trees().items() for found in raised_in(path, tree)]


@functools.cache
def warns() -> list[Statement]:
    return [found for path, tree in trees().items() for found in warned_in(path, tree)]


@functools.cache
def own_exceptions() -> frozenset[str]:
    """Returns the classes of gpipe_fast; exceptions of these classes are caught in gpipe_fast."""
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    return frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef))


@functools.cache
def error_of(case: Case) -> tuple[str, frozenset[Statement]]:
    """Returns the text of the error that a case triggers, and the statements that it comes from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.trigger()
        except Exception as error:
            return str(error), raised_by(error)
    raise AssertionError("no error was raised")


def raised_by(error: Exception) -> frozenset[Statement]:
    """Returns the statement that raised an error, and those whose texts became a part of its text."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in trees()]
    assert own, f"the error does not come from gpipe_fast: {error!r}"
    path, line = own[-1].filename, own[-1].lineno or 0
    found = {each for each in raises() if each.contains(path, line)}
    assert found, f"{path}, line {line}, has no raise: {error!r}"
    inner = (each for each in raises() if each.kind in own_exceptions() and each.words)
    return frozenset(found | {each for each in inner if re.search(each.words or "", str(error))})


@functools.cache
def warnings_of(case: Case) -> dict[Statement, warnings.WarningMessage]:
    """Returns the warnings that a case triggers, by their statement."""
    found: dict[Statement, warnings.WarningMessage] = {}
    warn: Any = warnings.warn

    def noting(message: Any, *args: Any, stacklevel: int = 1, **kwargs: Any) -> None:
        warn(message, *args, stacklevel=stacklevel + 1, **kwargs)
        for caller in traceback.extract_stack(limit=3)[:-1]:  # `warn_user`, and its caller
            for each in warns():
                if each.contains(caller.filename, caller.lineno or 0):
                    found[each] = caught[-1]

    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "warn", noting)
        case.trigger()
    return found


def names(cases: list[Case]) -> list[str]:
    return [f"{case.received} {case.advice}".strip() for case in cases]


@pytest.mark.parametrize("case", ERRORS, ids=names(ERRORS))
def test_an_error_states_what_was_received_and_what_to_do(case: Case) -> None:
    text, _ = error_of(case)
    assert case.received in text
    assert case.advice in text


def test_the_cases_trigger_every_raise() -> None:
    covered = {statement for case in ERRORS for statement in error_of(case)[1]}
    private = {each for each in raises() if not each.text and each.kind in own_exceptions()}  # control flow
    exempt = {each: [b for b in EXEMPT if each.is_exempt_by(b)] for each in raises()}
    uncovered = [each for each in raises() if each not in covered | private and not exempt[each]]
    assert not uncovered, "\n".join(map(str, uncovered))
    stale = [
        b for b in EXEMPT if [each for each in raises() if b in exempt[each] and each not in covered] == []
    ]
    assert not stale, f"exemptions of nothing, or of what a case triggers: {stale}"


@pytest.mark.parametrize("case", WARNINGS, ids=names(WARNINGS))
def test_a_warning_states_its_place_and_what_to_do(case: Case) -> None:
    found = warnings_of(case).values()
    assert {warning.category for warning in found} == {UserWarning}
    assert any(case.received in str(w.message) and case.advice in str(w.message) for w in found)


def test_the_cases_trigger_every_warning() -> None:
    uncovered = set(warns()).difference(*(warnings_of(case) for case in WARNINGS))
    assert not uncovered, "\n".join(map(str, uncovered))


QUOTED = re.findall(r"^ *- `(.+?)`: ", (ROOT / "docs" / "messages.md").read_text(), re.MULTILINE)


def texts_in_python(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def texts() -> str:
    """Returns the string literals of gpipe_fast and csrc, with line breaks instead of inserted values."""
    sources = [path.read_text() for path in sorted((ROOT / "csrc").rglob("*.cpp"))]
    literals = (re.findall(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', source) for source in sources)
    native = [re.sub(r'"\s*"', "", literal).strip().strip('"') for found in literals for literal in found]
    return "\n".join([*native, *(text for tree in trees().values() for text in texts_in_python(tree))])


@pytest.mark.parametrize("message", QUOTED)
def test_the_guide_quotes_messages_of_the_sources(message: str) -> None:
    words = [part.strip() for part in re.split(r"<[^>]*>", message) if part.strip()]
    assert words
    assert [part for part in words if part not in texts()] == []


def test_the_guide_quotes_messages() -> None:
    assert len(QUOTED) > 30
