"""Hooks of mkdocs: what the pages of the documentation get beside their own Markdown.

* There is no page for a server's errors.
* CONTRIBUTING.md and CHANGELOG.md are pages of it.
* Files of the repository that a page links to (results, examples) are copied beside the pages.
* A block with ``$ fastclip ... --help`` gets what that prints.
"""

import os
import posixpath
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fastclip.cli import main as fastclip

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
COPIES = "repository"  # the folder of the site with copies of files

_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[#)])")
_HELP = re.compile(r"^\$ (fastclip(?: \w+)? --help)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    config.theme.static_templates.discard("404.html")  # for a server: its links begin with a slash


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, PAGES[name], abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(str(page.file.abs_src_path)).relative_to(ROOT).as_posix()

    def linked(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return match[1] + _target(path, page.file.src_uri, match[2], config, files)

    done, end = [], 0
    for fence in _FENCE.finditer(markdown):
        done += [_LINK.sub(linked, markdown[end : fence.start()]), _HELP.sub(_helped, fence[0])]
        end = fence.end()
    return "".join([*done, _LINK.sub(linked, markdown[end:])])


def _target(path: str, page: str, link: str, config: MkDocsConfig, files: Files) -> str:
    """What a page of the site links to for a path of the repository."""
    inside = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
    if inside is None and (ROOT / path).is_file():
        # As text a browser shows them, and mkdocs makes no page of one in Markdown.
        inside = f"{COPIES}/{path}" + (".txt" if path.endswith((".md", ".py")) else "")
        if files.get_file_from_path(inside) is None:
            files.append(File.generated(config, inside, abs_src_path=str(ROOT / path)))
    return link if inside is None else posixpath.relpath(inside, posixpath.dirname(page) or ".")


def _helped(match: re.Match[str]) -> str:
    out = StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"  # argparse asks it how wide a terminal is
    try:
        with redirect_stdout(out):
            fastclip(match[1].split()[1:])
    except SystemExit:  # how argparse ends
        pass
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return f"{match[0]}\n{out.getvalue().rstrip()}"
