"""Tests for a machine with a GPU: `make test-gpu`. Elsewhere they are skipped."""
