"""The measurements of one row of the CUDA benchmark, saved to a file while it runs."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch


class Findings:
    """Measurements so far, mirrored in a JSON file.

    Attributes:
        candidates: measurements by candidate; missing keys have not been measured.
        remarks: remarks on the whole row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.candidates: dict[str, dict[str, Any]] = {}
        self.remarks: list[str] = []

    def set_running(self, name: str | None) -> None:
        """Records which candidate runs now, and writes the file."""
        text = json.dumps({"at": name, "candidates": self.candidates, "remarks": self.remarks})
        temporary = self._path.with_suffix(".new")
        temporary.write_text(text)
        os.replace(temporary, self._path)

    def record(self, name: str, **found: Any) -> None:
        self.candidates.setdefault(name, {}).update(found)

    def fail(self, name: str, error: BaseException) -> None:
        """Records why a candidate failed.

        Raises:
            BaseException: the device is unusable after the failure.
        """
        self.record(name, failed=f"{type(error).__name__}: {str(error).strip()[:600]}")
        self.set_running(None)
        synchronize_and_free()


def synchronize_and_free() -> None:
    """Waits for the device and frees unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
