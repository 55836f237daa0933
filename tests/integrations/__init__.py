"""Tests against the frameworks themselves, with tiny models on the CPU."""
