"""Benchmarks: `python -m bench` runs them, prints their tables and keeps them in bench/results."""

import warnings

# Some benchmarks deliberately use pipelines with few micro-batches.
warnings.filterwarnings("ignore", message=".* micro-batch(es)? on .* stages leaves? the stages idle")
