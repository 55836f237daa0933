"""Docstrings for the documentation: what pydoc shows as it is becomes Markdown.

An extension of griffe, by which mkdocstrings reads the package without importing it. Sessions
(``>>>``) and what is indented behind ``::`` become blocks of Python.
"""

import re
from typing import Any

from griffe import Extension, Object

_SESSION = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
_BLOCK = re.compile(r"::\n\n((?: {4}.*(?:\n|$)|\n)+)")
_PROMPT = re.compile(r"^(?:>>>|\.\.\.)(?: |$)")


def markdown(docstring: str) -> str:
    """The docstring with its code in fences."""
    return _BLOCK.sub(_fenced_block, _SESSION.sub(_fenced_session, docstring))


def _fenced_session(match: re.Match[str]) -> str:
    """Code to copy; with its prompts where it also shows what is printed."""
    lines = [line.removeprefix(match[1]) for line in match[0].splitlines()]
    only_code = all(map(_PROMPT.match, lines))
    if only_code:
        lines = [line[4:] for line in lines]
    fenced = ("```python" if only_code else "```pycon", *lines, "```")
    return "\n".join(f"{match[1]}{line}".rstrip() for line in fenced)


def _fenced_block(match: re.Match[str]) -> str:
    code = "\n".join(line[4:] for line in match[1].rstrip().splitlines())
    return f":\n\n```python\n{code}\n```\n\n"


class Docstrings(Extension):
    """What mkdocs.yml names."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
