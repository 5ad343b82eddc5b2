"""Every error and warning states what was received and what to do; docs/messages.md quotes them correctly."""

from __future__ import annotations

import ast
import functools
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import gpipe_fast
from tests.unit.message_cases import OF_ARGUMENTS, WARNINGS_OF_DEVICES, Case
from tests.unit.message_cases_of_layers import OF_LAYERS, WARNINGS_OF_LAYERS
from tests.unit.message_cases_of_models import OF_MODELS, WARNINGS_OF_MODELS
from tests.unit.message_cases_of_ranks import OF_RANKS
from tests.unit.message_cases_of_training import OF_TRAINING

# One worker of pytest-xdist runs all cases, and so runs each of them once.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("messages")]

ERRORS = [*OF_ARGUMENTS, *OF_LAYERS, *OF_MODELS, *OF_TRAINING, *OF_RANKS]
WARNINGS = [*WARNINGS_OF_DEVICES, *WARNINGS_OF_LAYERS, *WARNINGS_OF_MODELS]
ROOT = Path(__file__).parents[2]

# The beginning of the text of each `raise` that no case triggers; of the statement if its text is no literal.
EXEMPT = {
    "raise NotImplementedError": "an abstract method, which GPipe overrides",
    "raise Untraceable": "its text becomes the reason in another message, which cases trigger",
    "raise UsesForeignTensor": "as for `Untraceable`",
    "raise _untraceable": "as for `Untraceable`",
    "raise _refusal": "its text becomes the reason in another message, which cases trigger",
    "a condition on sizes does not hold": "the reason why there is no template, of which users see nothing",
    "raise first_error": "an error of the user's model",
    "raise failure": "an error of a mini-batch, raised after the results of those before",
    "raise Unknown": "its text becomes the reason in another message, which cases trigger",
    "raise CannotLaunch": "the pass catches it, and leaves the nodes",
    "raise Conflict": "the grouping catches it, and computes the values in two kernels",
    "Triton's disk cache has no ": "`cached` catches it, and the kernel is compiled",
    "the user has no home folder": "the reason in a warning, which tests/unit/fuse/test_cubins.py triggers",
    "strides ": "a check of strides that the same file has computed",
}


class Statement(NamedTuple):
    """A `raise`, or a call of `warnings.warn` or `warn_user`, in the sources of gpipe_fast.

    Attributes:
        path: the file.
        first: the first line.
        last: the last line.
        kind: the exception's class; "" for a warning.
        has_text: whether it has an argument.
        literal: its text, with a NUL for each inserted value; "" if it is no literal.
    """

    path: str
    first: int
    last: int
    kind: str
    has_text: bool
    literal: str

    def is_in(self, message: str) -> bool:
        pattern = ".*".join(map(re.escape, self.literal.split("\0")))
        return bool(self.literal) and re.search(pattern, message, re.DOTALL) is not None

    def is_exempt_by(self, beginning: str) -> bool:
        return any(text.startswith(beginning) for text in (self.literal, f"raise {self.kind}"))


def literal_of(text: ast.expr | None) -> str:
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts).strip("\0")


def statement(path: Path, node: ast.Raise | ast.Call, call: ast.expr) -> Statement:
    has_text = isinstance(call, ast.Call) and bool(call.args)
    kind = ast.unparse(call.func if isinstance(call, ast.Call) else call) if node is not call else ""
    literal = literal_of(call.args[0]) if has_text else ""
    return Statement(str(path), node.lineno, node.end_lineno, kind, has_text, literal)


def statements(tree: ast.Module, path: Path) -> Iterator[Statement]:
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None and ast.unparse(node.exc) not in caught:
            yield statement(path, node, node.exc)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn_user"):
            yield statement(path, node, node)


TREES = {path: ast.parse(path.read_text()) for path in Path(gpipe_fast.__file__).parent.rglob("*.py")}
FOUND = [each for path, tree in TREES.items() for each in statements(tree, path)]
RAISES, WARNS = [each for each in FOUND if each.kind], [each for each in FOUND if not each.kind]
# Exceptions of these classes are caught in gpipe_fast.
OWN = {node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@functools.cache
def error_of(case: Case) -> tuple[str, frozenset[Statement]]:
    """Returns the text of a case's error, and the statements that raised it or a part of its text."""
    with warnings.catch_warnings(), pytest.raises(Exception) as caught:
        warnings.simplefilter("ignore")
        case.trigger()
    text = str(caught.value)
    own = [f for f in traceback.extract_tb(caught.value.__traceback__) if Path(f.filename) in TREES]
    assert own, f"the error does not come from gpipe_fast: {caught.value!r}"
    raised = {e for e in RAISES if e.path == own[-1].filename and e.first <= own[-1].lineno <= e.last}
    assert raised, f"{own[-1]} has no raise: {caught.value!r}"
    return text, frozenset(raised | {each for each in RAISES if each.kind in OWN and each.is_in(text)})


@functools.cache
def warnings_of(case: Case) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.trigger()
    return caught


def name(case: Case) -> str:
    return f"{case.received} {case.advice}".strip()


@pytest.mark.parametrize("case", ERRORS, ids=name)
def test_an_error_states_what_was_received_and_what_to_do(case: Case) -> None:
    text, _ = error_of(case)
    assert case.received in text
    assert case.advice in text


def test_the_cases_trigger_every_raise() -> None:
    covered = {statement for case in ERRORS for statement in error_of(case)[1]}
    control_flow = {each for each in RAISES if not each.has_text and each.kind in OWN}
    left = [each for each in RAISES if each not in covered | control_flow]
    assert [each for each in left if not any(map(each.is_exempt_by, EXEMPT))] == []
    assert [beginning for beginning in EXEMPT if not any(each.is_exempt_by(beginning) for each in left)] == []


@pytest.mark.parametrize("case", WARNINGS, ids=name)
def test_a_warning_states_its_place_and_what_to_do(case: Case) -> None:
    texts = [str(each.message) for each in warnings_of(case) if each.category is UserWarning]
    assert [text for text in texts if case.received in text and case.advice in text]


def test_the_cases_trigger_every_warning() -> None:
    """Those whose text is a variable are left out."""
    found = [str(warning.message) for case in WARNINGS for warning in warnings_of(case)]
    assert [each for each in WARNS if each.literal and not any(map(each.is_in, found))] == []


def test_the_guide_quotes_messages_of_the_sources() -> None:
    quoted = re.findall(r"^ *- `(.+?)`: ", (ROOT / "docs" / "messages.md").read_text(), re.MULTILINE)
    assert len(quoted) > 30
    sources = [path.read_text() for path in (*TREES, *(ROOT / "csrc").rglob("*.cpp"))]
    texts = re.sub(r'"\s*f?"', "", "\n".join(sources))
    parts = [part.strip() for message in quoted for part in re.split(r"<[^>]*>", message)]
    assert [part for part in parts if part not in texts] == []
