"""What runs the pages notices what is wrong with one, and docstrings become Markdown."""

from pathlib import Path

import pytest

from tests.docs import pages
from tests.printed import assert_alike
from tools.site_docstrings import markdown

FENCE = "```"


def ran(text: str, folder: Path, patch: pytest.MonkeyPatch) -> pages.Ran:
    """A page of that text, with ''' for fences."""
    patch.setattr(pages, "DOCS", folder)
    (folder / "page.md").write_text(text.replace("'''", FENCE), encoding="utf-8")
    return pages.run("page.md", folder)


GOOD = {
    "in order": "'''python\na = 1\n'''\n\n'''python\nprint(a)\n'''\n\nprints\n\n'''\n1\n'''\n",
    "alike": "'''python\nprint(1.001)\n'''\n\nprints, up to the last digits,\n\n'''\n1.0\n'''\n",
    "diff": "'''python\na = 1\n'''\n\n'''diff\n-a = None\n+a += 1\n assert a == 2\n'''\n",
    "diff before all": "'''diff\n-a = None\n+a += 1\n'''\n",
    "in a list": "1. One:\n\n    '''python\n    if True:\n        print(1)\n    '''\n",
    "several processes": "'''python\n# torchrun --nproc-per-node=2\nfail\n'''\n",
    "console": "'''console\n$ fastclip --version\nfastclip 0.1.0\n'''\n",
    "help": "'''console\n$ fastclip replay --help\n'''\n",
    "pickled": "'''python\nimport pickle\n\n\nclass A: ...\n\n\npickle.dumps(A())\n'''\n",
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_what_is_right(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(text, tmp_path, monkeypatch)


BAD = {
    "raises": ("'''python\n1 / 0\n'''\n", ZeroDivisionError),
    "prints another word": (GOOD["in order"].replace("'''\n1\n", "'''\none\n"), AssertionError),
    "prints another number": (GOOD["alike"].replace("\n1.0\n", "\n1.1\n"), AssertionError),
    "prints alike, not the same": (
        GOOD["alike"].replace(", up to the last digits,", ""),
        AssertionError,
    ),
    "nothing was run": ("prints\n\n'''\n1\n'''\n", AssertionError),
    "wrong diff": (GOOD["diff"].replace("+a += 1", "+a += 2"), AssertionError),
    "warns": ("'''python\nimport warnings\n\nwarnings.warn('no')\n'''\n", UserWarning),
    "exit status": ("'''console\n$ fastclip replay missing.jsonl\n'''\n", AssertionError),
    "another version": (GOOD["console"].replace("p 0", "p 7"), AssertionError),
    "another program": ("'''console\n$ ls\n'''\n", AssertionError),
}


@pytest.mark.parametrize(("text", "error"), BAD.values(), ids=BAD)
def test_what_is_wrong(
    text: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error):
        ran(text, tmp_path, monkeypatch)


def test_a_traceback_names_the_line_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        ran("# Title\n\n'''python\na = 1\nb = a / 0\n'''\n", tmp_path, monkeypatch)
    assert caught.traceback[-1].lineno + 1 == 5
    assert str(caught.traceback[-1].path).endswith("page.md")


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("norm 1,000.4 of [2, 3]", True),
        ("norm 1,020 of [2, 3]", False),
        ("norm 1,000 of [2, 4]", False),
        ("size 1,000 of [2, 3]", False),
        ("norm nan of [2, 3]", False),
        ("norm 1,000 of [2, 3]\n", True),
        ("norm 1,000 of [2, 3]\nmore", False),
    ],
)
def test_alike(printed: str, same: bool) -> None:
    if same:
        assert_alike(printed, "norm 1,000 of [2, 3]")
    else:
        with pytest.raises(AssertionError):
            assert_alike(printed, "norm 1,000 of [2, 3]")


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (
            "A.\n\n>>> a = 1\n>>> f(\n...     a)\n\nB.",
            "A.\n\n'''python\na = 1\nf(\n    a)\n'''\n\nB.",
        ),
        ("A.\n\n>>> f()\n1\n\nB.", "A.\n\n'''pycon\n>>> f()\n1\n'''\n\nB."),
        ("A::\n\n    b = 1\n\n    c\n\nD.", "A:\n\n'''python\nb = 1\n\nc\n'''\n\nD."),
        ("A ``b`` and `c`.", "A ``b`` and `c`."),
    ],
    ids=["session", "session with output", "block", "text"],
)
def test_docstrings(docstring: str, expected: str) -> None:
    assert markdown(docstring) == expected.replace("'''", FENCE)
