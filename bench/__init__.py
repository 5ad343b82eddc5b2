"""Benchmarks: `python -m bench` runs them, prints their tables and keeps them in bench/results."""

import warnings

# Some pipelines here are short on purpose.
warnings.filterwarnings("ignore", message=".* micro-batch(es)? on .* stages leaves? the stages idle")
