"""A pytest plugin that hides Triton, which CPU-only builds of torch lack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class WithoutTriton(PathFinder):
    """Finds every module that Python finds on its path, except Triton's."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "triton":
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[:] = [WithoutTriton if finder is PathFinder else finder for finder in sys.meta_path]
