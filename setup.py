"""Builds the C++ library ahead where torch and a compiler are; elsewhere makes a pure wheel.

FASTCLIP_BUILD=1 turns what stands in the way into an error; FASTCLIP_BUILD=0 never builds ahead.
"""

import importlib.metadata
import importlib.util
import os
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# By path: the environment may hold another version of fastclip.
BUILD_FILE = Path(__file__).parent / "fastclip/_build.py"
SPEC = importlib.util.spec_from_file_location("_build", BUILD_FILE)
BUILD = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BUILD)
# Found, not imported: the build needs torch's headers and libraries alone.
TORCH = importlib.util.find_spec("torch")


def obstacle() -> str | None:
    """Why the library cannot be built ahead here, or None."""
    if TORCH is None or TORCH.origin is None:
        return "there is no torch in the build environment (see pip's --no-build-isolation)"
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < (2, 10):
        return f"torch {version} is older than 2.10"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded Python has no abi3 wheels"
    return BUILD.missing_compiler()


def build_ahead() -> bool:
    choice = os.environ.get("FASTCLIP_BUILD", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"error: FASTCLIP_BUILD={choice} is neither 0 nor 1")
    reason = "it is not wanted" if choice == "0" else obstacle()
    if choice == "1" and reason:
        raise SystemExit(f"error: FASTCLIP_BUILD=1, but {reason}")
    return reason is None


class BuildLibrary(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            BUILD.build(Path(self.get_ext_fullpath(ext.name)), torch_dir=Path(TORCH.origin).parent)
        except BUILD.BuildError as error:
            raise SystemExit(f"error: {error}\n(FASTCLIP_BUILD=0 installs without it)") from None


setup(
    packages=[*find_packages(include=["fastclip", "fastclip.*"]), "fastclip.csrc"],
    package_dir={"fastclip.csrc": "csrc"},
    ext_modules=[Extension("fastclip._C", [], py_limited_api=True)] if build_ahead() else [],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
