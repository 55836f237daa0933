"""What is said to contributors is true: commands and paths are there, forms are well-formed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fastclip
from fastclip.cli import COMMANDS
from fastclip.testing.cases import BACKEND_CASES

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
CHANGES = (ROOT / "CHANGELOG.md").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FOLDERS = ("fastclip", "tests", "csrc", "benchmarks", ".ci", "docs")

yaml: Any = pytest.importorskip("yaml")  # pre-commit brings it along
LINES = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    for line in block.splitlines()
]


def code(text: str) -> list[str]:
    """What stands in single backticks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def targets() -> set[str]:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    return set(phony.split())


def test_every_target_of_make_exists() -> None:
    named = {line.split()[1] for line in [*LINES, *code(GUIDE)] if line.startswith("make ")}
    assert {"test", "lint", "bench", "gate"} <= named
    assert named <= targets()


def test_every_command_exists() -> None:
    forms = " ".join(path.read_text("utf-8") for path in FORMS)
    named = re.findall(r"fastclip (\w+) --json", f"{GUIDE} {forms}")
    assert set(named) == {"check", "doctor"} <= set(COMMANDS)


@pytest.mark.parametrize("line", [line for line in LINES if "pytest" in line])
def test_a_pytest_command_finds_tests(line: str) -> None:
    _, *arguments = shlex.split(line)
    run = subprocess.run(
        [sys.executable, *arguments, "--collect-only", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_paths_and_links_are_there() -> None:
    paths = [text for text in code(GUIDE) if text.split("/")[0] in FOLDERS and "/" in text]
    links = re.findall(r"\]\(([^)#]+)", GUIDE)
    assert len(paths) > 10
    assert len(links) > 4
    assert [path for path in [*paths, *links] if not (ROOT / path).exists()] == []


def test_numbers_of_the_guide() -> None:
    assert f"has {len(BACKEND_CASES)} lists" in GUIDE
    sizes = (ROOT / "tools" / "sizes.py").read_text("utf-8")
    assert "Files have at most 400 lines, functions 50" in GUIDE
    assert "FILE_LINES = 400\nFUNCTION_LINES = 50" in sizes


def test_the_markers_are_those_of_pytest() -> None:
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    (markers,) = re.findall(r"^markers = \[\n(.*?)^\]", settings, re.MULTILINE | re.DOTALL)
    names = re.findall(r'"(\w+):', markers)
    assert sorted(names) == ["alone", "slow"]
    assert all(f"`{name}` for" in GUIDE for name in names)


def test_before_a_commit_runs_what_lint_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert config == {
        "repos": [
            {
                "repo": "local",
                "hooks": [
                    {
                        "id": "lint",
                        "name": "make lint",
                        "entry": "make lint",
                        "language": "system",
                        "always_run": True,
                        "pass_filenames": False,
                    }
                ],
            }
        ]
    }
    assert "lint" in targets()


def test_the_configuration_is_one_for_pre_commit() -> None:
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_this_version_has_its_section() -> None:
    sections = re.findall(r"^## \[(.+?)\]", CHANGES, re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert sections[1] == fastclip.__version__
    assert len(set(sections)) == len(sections)


def test_the_changelog_names_what_there_is() -> None:
    public = {name: getattr(fastclip, name) for name in fastclip.__all__}
    names = [name for name, value in public.items() if not isinstance(value, ModuleType | str)]
    said = set(re.findall(r"\w+", CHANGES))
    assert len(names) > 8
    assert [name for name in [*names, *COMMANDS] if name not in said] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_well_formed(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    assert (
        {"name", "description", "body"} <= form.keys() <= {"name", "description", "labels", "body"}
    )
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        needed = {"markdown": {"value"}, "dropdown": {"label", "options"}}
        assert needed.get(field["type"], {"label"}) <= field["attributes"].keys()
        assert field.keys() <= {"type", "id", "attributes", "validations"}
    required = [field["id"] for field in fields if field.get("validations", {}).get("required")]
    assert required


@pytest.mark.parametrize("kind", ["bug", "numerics"])
def test_reports_bring_what_doctor_says(kind: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{kind}.yml").read_text("utf-8"))
    (doctor,) = [field for field in form["body"] if field.get("id") == "doctor"]
    assert "`fastclip doctor --json`" in doctor["attributes"]["label"]
    assert doctor["validations"] == {"required": True}


def test_there_is_a_form_for_each_kind() -> None:
    assert [path.stem for path in FORMS] == ["bug", "config", "feature", "numerics"]
    assert (ROOT / ".github" / "pull_request_template.md").is_file()
