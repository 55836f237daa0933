"""The folder `interpreted` is for processes with TRITON_INTERPRET=1; see test_interpreter.py."""

from fastclip.backends import triton as backend

collect_ignore = [] if backend.interpreted() else ["interpreted"]
