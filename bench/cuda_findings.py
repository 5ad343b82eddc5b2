"""What one row of the CUDA benchmark has measured so far, kept in a file while it runs."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch


class Findings:
    """What is known so far, in a file.

    Attributes:
        candidates: by name; what is not known of one is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.candidates: dict[str, dict[str, Any]] = {}
        self.remarks: list[str] = []

    def at(self, name: str | None) -> None:
        """Says who is at work."""
        text = json.dumps({"at": name, "candidates": self.candidates, "remarks": self.remarks})
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        os.replace(beside, self._path)

    def note(self, name: str, **found: Any) -> None:
        self.candidates.setdefault(name, {}).update(found)

    def fail(self, name: str, error: BaseException) -> None:
        """Says why there is no more of a candidate.

        Raises:
            BaseException: the same, where the device is of no more use to others either.
        """
        self.note(name, failed=f"{type(error).__name__}: {str(error).strip()[:600]}")
        self.at(None)
        settle()


def settle() -> None:
    """Waits for the device, and gives back what nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
