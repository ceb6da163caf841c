"""Benchmarks: ``python -m bench.NAME`` from the checkout; see docs/performance.md."""
