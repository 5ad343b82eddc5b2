"""The command that makes docs/pipeline.html: ``python -m gpipe_fast.reports.page docs/pipeline.html``."""

from __future__ import annotations

import sys
from pathlib import Path

from gpipe_fast.reports.page import pipeline_page

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m gpipe_fast.reports.page FILE.html")
    Path(sys.argv[1]).write_text(pipeline_page(), encoding="utf-8")
