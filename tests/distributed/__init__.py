"""Tests in several processes, over gloo on the CPU."""
