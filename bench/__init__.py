"""Benchmarks: `python -m bench` runs them, prints their tables and keeps them in bench/results."""
