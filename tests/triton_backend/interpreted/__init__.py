"""Tests for a process with TRITON_INTERPRET=1."""
