"""`make wheel-beside`: the wheel in dist/ beside the newest transformers, accelerate and Lightning.

Installing it changes nothing else there, importing it or one of its integrations loads nothing that
was not asked for, and the tests of the integrations pass. Then: every extra can be installed.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tools.wheel import CONSTRAINTS, DIST, ROOT, WORK, environment, install, metadata, said

FRAMEWORKS = ("transformers", "accelerate", "lightning")
# What somebody who imports the integration of that name has asked for.
ASKED = {
    "torch": "import torch",
    "transformers": "from transformers import TrainerCallback",
    "lightning": "import lightning.pytorch",
}
TEST_PACKAGES = ("hypothesis", "pytest", "tensorboard")
TESTS = ("tests/integrations", "-m", "not slow")
LOADED = "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make wheel-beside", description=(__doc__ or "").split("\n")[0]
    )
    parser.parse_args(arguments)
    wheels = list(DIST.glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"error: there are {len(wheels)} wheels in {DIST}: make wheel")
    [wheel] = wheels
    torch = next(line for line in CONSTRAINTS.read_text().split() if line.startswith("torch=="))
    programs = environment("beside", torch, *FRAMEWORKS)
    python = programs / "python"
    add(wheel, programs)
    for name, framework in ASKED.items():
        own = loaded(python, f"import fastclip.integrations.{name}") - loaded(python, framework)
        expect(f"what fastclip.integrations.{name} imports", own, {"fastclip"})
    install(programs, "--constraint", CONSTRAINTS, *TEST_PACKAGES)
    run_tests(python)
    for extra in metadata(wheel).get_all("Provides-Extra") or ():
        asked = f"torch-fastclip[{extra}] @ {wheel.as_uri()}"
        dry = ("--dry-run", "--ignore-installed", "--constraint", CONSTRAINTS)
        install(programs, *dry, asked)
    return 0


def add(wheel: Path, programs: Path) -> None:
    """Install the wheel; SystemExit if that changes another package or `import` loads one."""
    python = programs / "python"
    before, bare = frozen(python), loaded(python, "")
    print(*sorted(before), sep="\n")
    install(programs, wheel)
    gone = before - frozen(python)
    come = {line.split(" @ ")[0] for line in frozen(python) - before}
    expect("what was removed or replaced", gone, set())
    expect("what was installed", come, {"torch-fastclip"})
    new = loaded(python, "import fastclip") - bare - set(sys.stdlib_module_names)
    expect("what fastclip imports", new, {"fastclip"})


def frozen(python: Path) -> set[str]:
    return set(said(python, "-m", "pip", "--disable-pip-version-check", "freeze").splitlines())


def loaded(python: Path, statement: str) -> set[str]:
    """The packages and modules in memory after it."""
    return set(said(python, "-c", statement + LOADED).split())


def expect(what: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise SystemExit(f"error: {what}: {sorted(found)} instead of {sorted(expected)}")
    print(f"{what}: {', '.join(sorted(found)) or 'nothing'}")


def run_tests(python: Path) -> None:
    """Those of the repository that train small models, from where fastclip is the installed one."""
    folder = WORK / "tests-beside"
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("tests", "examples"):
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "pyproject.toml", folder)
    if subprocess.run([python, "-m", "pytest", "-q", *TESTS], cwd=folder).returncode:
        raise SystemExit(f"error: tests fail beside the newest {', '.join(FRAMEWORKS)}")


if __name__ == "__main__":
    sys.exit(main())
