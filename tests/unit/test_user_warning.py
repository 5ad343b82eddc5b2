"""Warnings point to the user's line, and are silenced where a setting is tried for the user."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from gpipe_fast.user_warning import no_warnings_of_idle_stages, warn_user, warns_of_idle_stages


def function_in(module: str, code: str, **names: Any) -> Any:
    """Returns the function ``called`` of code that is executed as part of a module."""
    scope = {"__name__": module, **names}
    exec(compile(code, f"{module}.py", "exec"), scope)
    return scope["called"]


def test_a_warning_points_to_the_innermost_line_outside_of_libraries() -> None:
    inner = function_in("gpipe_fast.inner", "def called(): warn('text')", warn=warn_user)
    in_torch = function_in("torch.nn.modules.module", "def called(): inner()", inner=inner)
    outer = function_in("gpipe_fast", "def called(): inner()", inner=in_torch)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        outer()
        # A package whose name merely begins with that of a library is a user's.
        function_in("torchvision.models", "\n\ndef called(): inner()", inner=outer)()
    assert [(str(each.message), each.filename, each.lineno) for each in found] == [
        ("text", __file__, found[0].lineno),
        ("text", "torchvision.models.py", 3),
    ]


def test_warnings_of_idle_stages_end_with_the_outermost_block_of_the_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(warns_of_idle_stages()))
    assert warns_of_idle_stages()
    with pytest.raises(KeyError), no_warnings_of_idle_stages():
        with no_warnings_of_idle_stages():
            pass
        assert not warns_of_idle_stages()
        thread.start()
        thread.join()
        raise KeyError
    assert warns_of_idle_stages()
    assert found == [True]
