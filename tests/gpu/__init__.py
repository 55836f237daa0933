"""Tests of what is above the backends on a GPU: `make test-gpu`. Elsewhere they are skipped."""
