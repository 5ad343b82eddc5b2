"""An extension of griffe, which reads the docstrings for docs/api.md.

The docstrings mark literal blocks by ``::``, as in reStructuredText; Markdown needs only the indentation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)
LONE_MARK = re.compile(r"^::\n", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Converts literal blocks, and shows inherited properties that ``__init__`` sets as properties."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Runs when griffe has loaded all modules of a package."""
        self._convert(pkg)

    def _convert(self, where: griffe.Module | griffe.Class) -> None:
        if where.is_class:
            _remove_assignments_to_inherited_properties(where)
        for member in where.members.values():
            if member.is_alias:
                continue
            if member.docstring is not None:
                member.docstring.value = LITERAL_BLOCK.sub(":", LONE_MARK.sub("", member.docstring.value))
            if member.is_module or member.is_class:
                self._convert(member)


def _remove_assignments_to_inherited_properties(cls: griffe.Class) -> None:
    """Without this, ``self.chunks = chunks`` in ``__init__`` hides the base class's property."""
    inherited = {
        name
        for base in cls.mro()
        for name, member in base.members.items()
        if member.is_attribute and "property" in member.labels
    }
    for name in [name for name, member in cls.members.items() if member.is_attribute and name in inherited]:
        if cls.members[name].docstring is None:
            del cls.members[name]
