"""Benchmarks: `python -m benchmarks.cpu`. How they are taken and read: benchmarks/README.md."""
