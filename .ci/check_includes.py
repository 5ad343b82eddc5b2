"""Checks which folder of csrc/ includes which: `python .ci/check_includes.py`, from the root of the tree.

A folder includes headers of its own and of the folders that BELOW lists for it, nothing else of ours; the
engine includes no header of PyTorch, so that it builds and runs under sanitizers in seconds.
"""

import re
import sys
from pathlib import Path

# docs/architecture.md draws this. check.h, which all include, lies in csrc/ itself.
BELOW = {
    "engine": set(),
    "random": set(),
    "device": set(),
    "program": {"engine"},
    "transport": {"device"},
    "cuda": {"device", "program", "random"},
    "pipeline": {"device", "engine", "program", "transport"},
    "bindings": {"pipeline", "program"},
}
TORCH = re.compile(r"#include <(torch|ATen|c10|pybind11)/")
OURS = re.compile(r'#include "(?:([a-z_]+)/)?[a-z_]+\.h"')


def find_errors(root: Path) -> list[str]:
    """One line for every include that is not allowed."""
    errors = []
    for path in sorted(root.glob("*/*")):
        folder = path.parent.name
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path}:{number}: {folder}/"
            if folder not in BELOW:
                errors.append(f"{where} is a folder that .ci/check_includes.py does not know")
            elif folder == "engine" and TORCH.match(line):
                errors.append(f"{where} must do without PyTorch: {line}")
            elif (ours := OURS.match(line)) and ours[1] and ours[1] not in BELOW[folder] | {folder}:
                errors.append(f"{where} must not include {ours[1]}/, only {sorted(BELOW[folder])}: {line}")
    return errors


if __name__ == "__main__":
    found = find_errors(Path("csrc"))
    sys.exit("\n".join(found) or None)
