"""`python -m tools.on_gpu [phase ...]`, which `make gpu` calls."""

import sys

from tools.on_gpu.phases import main

main(sys.argv[1:])
