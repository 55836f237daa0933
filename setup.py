"""Builds the C++ library ahead where torch and a compiler are; elsewhere a pure wheel that builds it at first use.

FASTCLIP_BUILD=1 turns anything that stands in the way into an error; FASTCLIP_BUILD=0 never builds ahead.
"""

import importlib.metadata
import importlib.util
import os
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Loaded by path: the fastclip package of the environment may be another version.
SPEC = importlib.util.spec_from_file_location("fastclip_build", ROOT / "fastclip" / "_build.py")
assert SPEC is not None and SPEC.loader is not None
BUILD = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BUILD)
# Found, not imported: a build needs its headers and libtorch alone.
TORCH = importlib.util.find_spec("torch")


def obstacle() -> str | None:
    """Why the library cannot be built ahead here, or None."""
    if TORCH is None or TORCH.origin is None:
        return "torch is not installed in the build environment (pip's --no-build-isolation shows it yours)"
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < (2, 10):
        return f"torch {version} is older than 2.10"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded Python has no stable ABI"
    return BUILD.missing_compiler()


def wanted() -> bool:
    choice = os.environ.get("FASTCLIP_BUILD", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"error: FASTCLIP_BUILD={choice} is neither 0 nor 1")
    reason = obstacle() if choice != "0" else "FASTCLIP_BUILD=0"
    if choice == "1" and reason:
        raise SystemExit(f"error: FASTCLIP_BUILD=1, but {reason}")
    return reason is None


class BuildLibrary(build_ext):
    def build_extension(self, ext: Extension) -> None:
        BUILD.build(Path(self.get_ext_fullpath(ext.name)), torch_dir=Path(TORCH.origin).parent)


setup(
    packages=[*find_packages(include=["fastclip", "fastclip.*"]), "fastclip.csrc"],
    package_dir={"fastclip.csrc": "csrc"},
    ext_modules=[Extension("fastclip._C", [], py_limited_api=True)] if wanted() else [],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if wanted() else {},
)
