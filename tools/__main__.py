"""`python -m tools NAME ...` makes tables of what is counted, compiled or computed, in bench/results."""

import sys

from bench.__main__ import TOOLS, run

run(TOOLS, sys.argv[1:])
