"""The site is whole: no link leads nowhere, nothing is fetched, and every public name is there."""

import ast
import importlib
import io
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from fastclip.cli import COMMANDS, main
from tests.docs.html import parsed
from tests.docs.pages import DOCS, PAGES, ROOT
from tests.docs.site import COMMAND

# Where a page may send a reader: papers, and the documentation of what fastclip works with.
OUTSIDE = re.compile(
    r"https://(arxiv\.org/abs/|doi\.org/|docs\.pytorch\.org/|huggingface\.co/docs/"
    r"|lightning\.ai/docs/|(keepachangelog|semver)\.(com|org)/)"
)
BUILT = [page.removesuffix(".md") + ".html" for page in PAGES]
BUILT += ["contributing.html", "changelog.html"]
MODULES = [f"fastclip{part}" for part in ("", ".backends", ".distributed", ".monitor", ".rules")]
COMMANDS_WITH_HELP = ("", *COMMANDS)


def test_make_builds_what_is_tested() -> None:
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")[2]
    assert f"$(PY) {' '.join(COMMAND)}\n" in rule


def test_mkdocs_is_content(built: tuple[Path, str]) -> None:
    assert built[1] == ""


def test_every_page_is_built(site: Path) -> None:
    assert sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html")) == sorted(
        BUILT
    )


@pytest.mark.parametrize("page", BUILT)
def test_links(site: Path, page: str) -> None:
    found = parsed(site / page)
    assert found.links
    for link in {*found.links, *found.loaded}:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            assert OUTSIDE.match(link), link
            continue
        target = site / page
        if parts.path:
            target = (site / page).parent / unquote(parts.path)
        assert target.exists(), link
        if parts.fragment and target.suffix == ".html":
            assert unquote(parts.fragment) in parsed(target.resolve()).anchors, link


@pytest.mark.parametrize("page", BUILT)
def test_nothing_is_fetched_from_elsewhere(site: Path, page: str) -> None:
    found = parsed(site / page)
    assert found.loaded
    assert [link for link in found.loaded if urlsplit(link).netloc] == []
    # For these the theme's script would fetch a library.
    assert "mermaid" not in found.classes


def test_style_sheets_fetch_nothing(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert len(sheets) >= 3
    for sheet in sheets:
        found = re.findall(r"url\(([^)]*)\)|@import", sheet.read_text(encoding="utf-8"))
        assert [url for url in found if not url.strip("\"'").startswith(("data:", "#"))] == []


def public() -> list[set[str]]:
    """For each public object, the names under which it may be had."""
    names: dict[int, set[str]] = defaultdict(set)
    for name in MODULES:
        module = importlib.import_module(name)
        names[id(module)].add(name)
        for each in module.__all__:
            value = getattr(module, each)
            if each != "__version__":
                own = isinstance(value, ModuleType)
                names[id(value)].add(value.__name__ if own else f"{name}.{each}")
    return [*names.values(), *({name} for name in integrated())]


def integrated() -> Iterator[str]:
    """The integrations and their public names, read: to import them takes every framework."""
    for path in (ROOT / "fastclip" / "integrations").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = f"fastclip.integrations.{path.stem}"
                yield module
                yield from (f"{module}.{name}" for name in ast.literal_eval(node.value))


def test_every_public_name_has_one_entry(site: Path) -> None:
    anchors = [name for page in BUILT for name in parsed(site / page).anchors]
    entries = {
        min(names): [anchor for anchor in anchors if anchor in names]
        for names in public()
        if names != {"fastclip"}
    }
    assert len(entries) > 60
    assert "fastclip.integrations.torch.patch" in entries
    assert {name: found for name, found in entries.items() if len(found) != 1} == {}


def test_nothing_private_has_an_entry(site: Path) -> None:
    anchors = [name for page in BUILT for name in parsed(site / page).anchors]
    private = [name for name in anchors if name.startswith("fastclip.") and "._" in name]
    assert set(private) <= {"fastclip.monitor.Detector.__call__"}


@pytest.mark.parametrize("command", COMMANDS_WITH_HELP)
def test_the_help_of_a_command_is_shown(
    site: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = (site / "api" / "command-line.html").read_text(encoding="utf-8")
    shown = re.sub(r"<[^>]*>", "", text)
    for line in out.getvalue().splitlines():
        assert line.strip() in shown.replace("&gt;", ">").replace("&quot;", '"')


@pytest.mark.parametrize("page", PAGES)
def test_addresses_in_the_text_are_of_the_same_few_places(page: str) -> None:
    found = re.findall(r"\bhttps?://[^\s)>`]+", (DOCS / page).read_text(encoding="utf-8"))
    assert [address for address in found if not OUTSIDE.match(address)] == []
