"""Every block of every page runs and prints what is said; and every page is in the navigation."""

import re
from pathlib import Path

import pytest

from tests.docs.checks import CHECKS
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, run

SEVERAL = {page for page in PAGES if any(block.for_several for block in blocks(page))}
RUN_ELSEWHERE = {"distributed.md", "monitoring.md"}  # in tests/distributed
ALSO = {"contributing.md", "changelog.md"}  # made of files in the root, by tools/site_hooks.py


# torch 2.13's own, where it compiles an optimizer.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, tmp_path: Path) -> None:
    ran = run(page, tmp_path)
    if page in CHECKS:
        CHECKS[page](ran)


def test_blocks_for_several_processes_are_run_elsewhere() -> None:
    assert SEVERAL == RUN_ELSEWHERE


def test_every_check_has_its_page() -> None:
    assert CHECKS.keys() <= set(PAGES)


def test_the_navigation_has_every_page_once() -> None:
    nav = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(nav) == sorted({*PAGES, *ALSO})


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_title(page: str) -> None:
    first = (DOCS / page).read_text(encoding="utf-8").partition("\n")[0]
    assert re.fullmatch(r"# \S.*", first)
