"""Builds the libraries ahead where torch and the compilers are; elsewhere makes a pure wheel.

FASTCLIP_BUILD=1 turns what stands in the way of the C++ library into an error, FASTCLIP_BUILD=0
never builds anything ahead. FASTCLIP_BUILD_CUDA says the same of the CUDA library alone,
which without it is left out, with a note, if nvcc fails.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

# By path: the environment may hold another version of fastclip.
HERE = ModuleType("fastclip_here")
HERE.__path__ = [str(Path(__file__).parent / "fastclip")]
sys.modules[HERE.__name__] = HERE
BUILD = importlib.import_module("fastclip_here._build")
BUILD_CUDA = importlib.import_module("fastclip_here._build_cuda")
# Found, not imported: the build needs torch's headers and libraries alone.
TORCH = importlib.util.find_spec("torch")

CPU, CUDA = "FASTCLIP_BUILD", "FASTCLIP_BUILD_CUDA"


def obstacle() -> str | None:
    """Why no library can be built ahead here, or None."""
    if TORCH is None or TORCH.origin is None:
        return "there is no torch in the build environment (see pip's --no-build-isolation)"
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < (2, 10):
        return f"torch {version} is older than 2.10"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded Python has no abi3 wheels"
    return BUILD.missing_compiler()


def left_out(variable: str, missing: str | None, wanted: bool = True) -> str | None:
    """Why a library is not built ahead, or None if it is; an error if the variable demands it."""
    choice = os.environ.get(variable, "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"error: {variable}={choice} is neither 0 nor 1")
    if choice == "0":
        return f"{variable}=0"
    if choice == "1" and missing:
        raise SystemExit(f"error: {variable}=1, but {missing}")
    return missing or (None if wanted or choice == "1" else f"{CPU}=0")


NOT_BUILT = {
    "_C": left_out(CPU, obstacle()),
    "_C_cuda": left_out(
        CUDA,
        None if os.environ.get(CUDA) == "0" else obstacle() or BUILD_CUDA.obstacle(),
        wanted=os.environ.get(CPU) != "0",
    ),
}


class Build(build):
    def run(self) -> None:
        for name, reason in NOT_BUILT.items():
            if reason:
                print(f"fastclip: {name} is not built ahead: {reason}")
        super().run()


class BuildLibrary(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        torch_dir = Path(TORCH.origin).parent
        cuda = ext.name.endswith("_cuda")
        try:
            if cuda:
                built = self.build_cuda(target, torch_dir)
            else:
                BUILD.build(target, torch_dir=torch_dir)
                built = "for CPUs"
        except BUILD.BuildError as error:
            if ext.optional:
                print(f"fastclip: {ext.name.split('.')[-1]} is not built ahead: {error}")
                return
            way_out = f"({CUDA if cuda else CPU}=0 installs without it)"
            raise SystemExit(f"error: {error}\n{way_out}") from None
        print(f"fastclip: {target.name} is built ahead, {built}")

    def build_cuda(self, target: Path, torch_dir: Path) -> str:
        archs, unknown = BUILD_CUDA.chosen()
        BUILD_CUDA.build(target, archs, torch_dir=torch_dir)
        built = f"for compute capability {BUILD_CUDA.render(archs)} by nvcc {BUILD_CUDA.version()}"
        if unknown:
            built += f", which does not know {BUILD_CUDA.render(unknown)}"
        return built


setup(
    packages=[*find_packages(include=["fastclip", "fastclip.*"]), "fastclip.csrc"],
    package_dir={"fastclip.csrc": "csrc"},
    ext_modules=[
        Extension(
            f"fastclip.{name}",
            [],
            py_limited_api=True,
            optional=name == "_C_cuda" and os.environ.get(CUDA) != "1",
        )
        for name, reason in NOT_BUILT.items()
        if not reason
    ],
    cmdclass={"build": Build, "build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
