"""Pages of docs/: their blocks, and what comes of running them in order.

* ``python``: run, all of a page in one namespace; not one with `torchrun` in a comment, which is
  for several processes and is run in tests/distributed.
* ``diff``: behind a block that was run, what is there afterwards is run: lines with + and those
  without a sign. ``udiff`` is coloured alike and not run: what it changes is not here.
* ``console``: lines ``$ fastclip ...`` and ``$ python -m ...`` are run and have to exit with 0.
  Other lines are what the one before them prints.
* A block without a language behind "prints, up to the last digits,", alone in its paragraph, is
  what the block before it printed; behind "prints" it is so to the letter.
"""

import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastclip.cli import main
from tests.printed import assert_alike

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

_FENCE = re.compile(r"^( *)(```+) *([\w-]*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_SEVERAL = re.compile(r"#.*\btorchrun\b")
_EXACT, _ALIKE = "prints", "prints, up to the last digits,"


@dataclass(frozen=True)
class Block:
    """A fence of a page."""

    language: str
    code: str
    line: int  # of the page, where the code begins, from 1
    before: str  # the paragraph before it, if no other block is between

    @property
    def for_several(self) -> bool:
        return self.language == "python" and _SEVERAL.search(self.code) is not None

    @property
    def says(self) -> str | None:
        """How it says what was printed, if it does."""
        return self.before if not self.language and self.before in (_EXACT, _ALIKE) else None


@dataclass
class Ran:
    """What the blocks of a page leave behind."""

    folder: Path
    names: dict[str, Any]
    printed: list[str] = field(default_factory=list)  # by each block that was run
    logged: list[str] = field(default_factory=list)  # by the logger "fastclip"


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    content, end = text(page), 0
    for fence in _FENCE.finditer(content):
        indent, _, language, code = fence.groups()
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        before = content[end : fence.start()].rstrip("\n").rpartition("\n\n")[2].strip()
        line = content.count("\n", 0, fence.start(4)) + 1
        yield Block(language, code, line, " ".join(before.split()))
        end = fence.end()


def run(page: str, folder: Path) -> Ran:
    """Run the blocks of a page in a folder, and compare what is printed with what is shown.

    Of anything that fails the place is told, as of a module that is the page.
    """
    module = ModuleType("docs_" + re.sub(r"\W", "_", page.removesuffix(".md")))
    done = Ran(folder, vars(module))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, module.__name__, module)  # where pickle looks for its classes
        _keep_log(patch, done.logged)
        for block in blocks(page):
            if block.language == "console":
                done.printed.append("".join(_console(block, page)))
            elif (code := _code(block, bool(done.printed))) is not None:
                done.printed.append(_printed(code, block.line, page, done.names))
            elif (how := block.says) is not None:
                assert done.printed, f"{page}:{block.line}: no block before it was run"
                _compare(done.printed[-1], block.code, how == _ALIKE)
    return done


def _keep_log(patch: pytest.MonkeyPatch, logged: list[str]) -> None:
    handler = logging.Handler()
    patch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    logger = logging.getLogger("fastclip")
    patch.setattr(logger, "handlers", [*logger.handlers, handler])


def _code(block: Block, begun: bool) -> str | None:
    """What is to be run of a block, None: nothing."""
    if block.language == "python":
        return None if block.for_several else block.code
    if block.language == "diff" and begun:
        lines = block.code.splitlines()
        return "\n".join("" if line.startswith("-") else line[1:] for line in lines)
    return None


def _printed(code: str, line: int, page: str, names: dict[str, Any]) -> str:
    out = StringIO()
    placed = "\n" * (line - 1) + code  # a traceback tells the line of the page
    with redirect_stdout(out):
        exec(compile(placed, str(DOCS / page), "exec", dont_inherit=True), names)
    return out.getvalue()


def _console(block: Block, page: str) -> Iterator[str]:
    """What each command of a block prints."""
    first, *commands = re.split(r"^\$ ", block.code, flags=re.MULTILINE)
    assert not first, f"{page}:{block.line}: a console block begins with a command"
    for command in commands:
        line, _, shown = command.partition("\n")
        printed = _command(line, f"{page}:{block.line}")
        if shown.strip():
            _compare(printed, shown, alike=True)
        yield printed


def _command(line: str, place: str) -> str:
    program, *arguments = shlex.split(line, comments=True)
    if program == "fastclip":
        out = StringIO()
        with redirect_stdout(out):
            try:
                status: object = main(arguments)
            except SystemExit as end:  # of --help
                status = end.code
        printed = out.getvalue()
    else:
        assert (program, arguments[:1]) == ("python", ["-m"]), f"{place}: cannot run {line}"
        ended = subprocess.run(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=False
        )
        status, printed = ended.returncode, ended.stdout
    assert status in (0, None), f"{place}: {line} exits with {status}"
    return printed


def _compare(printed: str, shown: str, alike: bool) -> None:
    if alike:
        assert_alike(printed, shown)
    else:
        assert printed == shown
