"""Tests of the Triton backend: what needs the interpreter runs in processes of its own."""
