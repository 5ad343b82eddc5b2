"""Checks the includes between folders of csrc/. Run `python .ci/check_includes.py` from the repository root.

Of this project's headers, a folder may include its own and those of the folders that ALLOWED_INCLUDES lists
for it. The engine must not include PyTorch headers, so that its tests build and run under sanitizers in
seconds.
"""

import re
import sys
from pathlib import Path

# docs/architecture.md shows these dependencies as a diagram. Every folder may include csrc/check.h.
ALLOWED_INCLUDES = {
    "engine": set(),
    "random": set(),
    "device": set(),
    "program": {"engine"},
    "transport": {"device"},
    "cuda": {"device", "program", "random"},
    "pipeline": {"device", "engine", "program", "transport"},
    "bindings": {"pipeline", "program", "transport"},
}
TORCH_INCLUDE = re.compile(r"#include <(torch|ATen|c10|pybind11)/")
PROJECT_INCLUDE = re.compile(r'#include "(?:([a-z_]+)/)?[a-z_]+\.h"')


def find_errors(root: Path) -> list[str]:
    """Returns one line for every forbidden include."""
    errors = []
    for path in sorted(root.glob("*/*")):
        folder = path.parent.name
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path}:{number}: {folder}/"
            if folder not in ALLOWED_INCLUDES:
                errors.append(
                    f"{where} is not a folder listed in .ci/check_includes.py: add it to ALLOWED_INCLUDES"
                )
            elif folder == "engine" and TORCH_INCLUDE.match(line):
                errors.append(f"{where} must not include PyTorch headers: {line}")
            elif (
                (ours := PROJECT_INCLUDE.match(line))
                and ours[1]
                and ours[1] not in ALLOWED_INCLUDES[folder] | {folder}
            ):
                errors.append(
                    f"{where} must not include {ours[1]}/, only {sorted(ALLOWED_INCLUDES[folder])}: {line}"
                )
    return errors


if __name__ == "__main__":
    found = find_errors(Path("csrc"))
    sys.exit("\n".join(found) or None)
