"""`fastclip doctor`: what fastclip finds on this machine, and why it chose what it chose.

Every question is asked on its own, so that a broken answer is one line of the report and hides no
other. The exit status is 1 only if no backend works at all.
"""

import importlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastclip import __version__
from fastclip.commands import print_json

T = TypeVar("T")

OPTIONAL = ("triton", "scikit-learn")
VARIABLES = tuple(
    f"FASTCLIP_{name}" for name in ("BACKEND", "BUILD", "BUILD_CUDA", "CACHE", "SIMD")
)
ALSO_READ = (
    *("CUDA_HOME", "CXX", "MAX_JOBS", "OMP_NUM_THREADS"),
    *("TORCH_CUDA_ARCH_LIST", "TRITON_INTERPRET"),
)
SIMD = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq")
SIMD_ARM = ("asimd", "asimdhp", "bf16", "sve", "sve2")


class Probe:
    """Asks one question at a time and keeps the problems met on the way."""

    def __init__(self) -> None:
        self.problems: list[dict[str, str]] = []

    def note(self, what: str, problem: object) -> None:
        entry = {"what": what, "problem": " ".join(str(problem).split())}
        if entry not in self.problems:
            self.problems.append(entry)

    def ask(self, what: str, question: Callable[[], T]) -> T | None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return question()
            except Exception as error:  # whatever is broken here is what the user came to see
                self.note(what, f"{type(error).__name__}: {error}")
                return None
            finally:
                for warning in caught:
                    self.note(what, warning.message)


def run(json: bool) -> int:
    report = collect()
    if json:
        print_json(report)
    else:
        encoding = sys.stdout.encoding or "utf-8"  # what it cannot say is escaped, not a crash
        print(render(report).encode(encoding, "backslashreplace").decode(encoding))
    return 0 if _working(report) and report["choice"] is not None else 1


def collect() -> dict[str, Any]:
    """Everything doctor knows, as plain values; what could not be found out is None."""
    probe = Probe()
    probe.ask("torch", _import_torch)
    available = probe.ask("backends", _available)
    simd, library = None, None
    if (available or {}).get("cpu", "unknown") is None:
        simd = probe.ask("SIMD level", lambda: _native().simd())
        library = probe.ask("native library", lambda: _native().description())
    environment = probe.ask("environment", lambda: _environment(probe)) or {}
    return {
        "versions": {
            "fastclip": __version__,
            "python": platform.python_version(),
            **{name: probe.ask(name, partial(_version, name)) for name in ("torch", *OPTIONAL)},
        },
        "platform": probe.ask("platform", platform.platform),
        "cpu": probe.ask("CPU", _cpu_model),
        "cpu_features": probe.ask("CPU features", _cpu_features),
        "cores": probe.ask("cores", _cores),
        "threads": probe.ask("threads", _threads),
        "simd_level": simd,
        "native_library": library,
        "cuda_library": probe.ask("CUDA library", _cuda_library),
        "compiler": probe.ask("compiler", _compiler),
        "cuda_compiler": probe.ask("CUDA compiler", _cuda_compiler),
        "gpu_support": probe.ask("GPU support", _gpu_support),
        "gpus": probe.ask("GPUs", _gpus),
        "backends": available,
        "choice": probe.ask("automatic choice", _choice),
        "environment": environment,
        "problems": probe.problems,
    }


def _import_torch() -> None:
    with warnings.catch_warnings():
        # torch's own word on a machine without NumPy, which fastclip does not need.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        importlib.import_module("torch")


def _working(report: dict[str, Any]) -> list[str]:
    return [name for name, reason in (report["backends"] or {}).items() if reason is None]


def _backends() -> Any:
    return importlib.import_module("fastclip.backends")


def _native() -> Any:
    return importlib.import_module("fastclip.backends.native")


def _available() -> dict[str, str | None]:
    return dict(_backends().available())


def _choice() -> dict[str, dict[str, str]]:
    return {
        device: {"backend": name, "reason": reason}
        for device, (name, reason) in _backends().explain().items()
    }


def _version(package: str) -> str | None:
    """From the package's metadata: nothing is imported for it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo(key: str) -> str | None:
    """A field of the first processor in /proc/cpuinfo; None where there is no such thing."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    flags = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return [name for name in SIMD + SIMD_ARM if name in flags]


def _cores() -> int | None:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))  # a container may see fewer than the machine has
    return os.cpu_count()


def _threads() -> int:
    threads: int = importlib.import_module("torch").get_num_threads()
    return threads


def _compiler() -> str:
    build = importlib.import_module("fastclip._build")
    command: str | None = build.compiler()
    if command is None:
        return f"none: {build.missing_compiler()}"
    said = subprocess.run(
        [*shlex.split(command), "--version"], capture_output=True, text=True, timeout=20
    )
    if said.returncode != 0:
        raise RuntimeError(f"{command} --version: status {said.returncode}: {said.stderr}")
    return f"{command}: {(said.stdout.splitlines() or ['no version'])[0]}"


def _cuda_compiler() -> str:
    build = importlib.import_module("fastclip._build_cuda")
    reason: str | None = build.missing_nvcc()
    return f"none: {reason}" if reason else f"nvcc {build.version()}, {build.nvcc()}"


def _cuda_library() -> str:
    cuda = importlib.import_module("fastclip.backends.cuda")
    usable = _available().get("cuda", "unknown") is None
    return str(cuda.description() if usable else cuda.built_ahead())


def _gpu_support() -> str:
    torch = importlib.import_module("torch")
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def _gpus() -> list[str]:
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [
            f"{gpu.name} ({gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB)"
            for gpu in devices
        ]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        return [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return []


def _environment(probe: Probe) -> dict[str, str]:
    for name in sorted(os.environ):
        if name.startswith("FASTCLIP_") and name not in VARIABLES:
            probe.note("environment", f"{name} is not a variable that fastclip reads")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("FASTCLIP_") or name in ALSO_READ
    }


def _entry(label: str, text: str) -> str:
    return textwrap.fill(
        text,
        79,
        initial_indent=f"{label:<14}",
        subsequent_indent=" " * 14,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render(report: dict[str, Any]) -> str:
    lines = ["fastclip doctor", "", *_machine_lines(report)]
    if report["backends"] is not None:
        lines += ["", "backends"]
        for name, reason in report["backends"].items():
            lines.append(_entry(f"  {name}", "available" if reason is None else f"no: {reason}"))
    if report["choice"] is not None:
        lines += ["", "choice"]
        for device, choice in report["choice"].items():
            reason = choice["reason"]
            if report["native_library"]:  # already shown, with its long path
                reason = reason.replace(report["native_library"], "the native library above")
            lines.append(_entry(f"  {device}", f"{choice['backend']}: {reason}"))
    lines.append("")
    lines += [_entry("problem", line) for line in _problem_lines(report)]
    return "\n".join([*lines, _closing(report)])


def _problem_lines(report: dict[str, Any]) -> list[str]:
    """One line a problem, however many questions met it."""
    met: dict[str, list[str]] = {}
    for entry in report["problems"]:
        met.setdefault(entry["problem"], []).append(entry["what"])
    return [f"{', '.join(where)}: {problem}" for problem, where in met.items()]


def _machine_lines(report: dict[str, Any]) -> list[str]:
    unknown = "unknown"
    versions = {
        name: f"{name} {version or 'not installed'}" for name, version in report["versions"].items()
    }
    optional = [versions.pop(name) for name in OPTIONAL]
    gpus = unknown if report["gpus"] is None else ", ".join(report["gpus"] or ["none found"])
    variables = [f"{name}={value}" for name, value in report["environment"].items()]
    features = " ".join(report["cpu_features"] or ["none known"])
    return [
        _entry("versions", ", ".join(versions.values())),
        _entry("optional", ", ".join(optional)),
        _entry("platform", report["platform"] or unknown),
        _entry("cpu", f"{report['cpu'] or unknown}, {report['cores'] or unknown} cores usable"),
        _entry("threads", f"{report['threads'] or unknown} (torch.get_num_threads)"),
        _entry("simd", f"{report['simd_level'] or 'none'} in use; the CPU has {features}"),
        _entry("gpu", f"{gpus} (this torch: {report['gpu_support'] or unknown})"),
        _entry("compiler", report["compiler"] or "unknown"),
        _entry("cuda compiler", report["cuda_compiler"] or "unknown"),
        _entry("native", report["native_library"] or "not loaded"),
        _entry("cuda", report["cuda_library"] or "unknown"),
        _entry("environment", ", ".join(variables) or "nothing set"),
    ]


def _closing(report: dict[str, Any]) -> str:
    working = _working(report)
    if not working:
        return "No backend works: fastclip cannot run here."
    if report["choice"] is None:
        return "With these settings every call would fail: see the problem above."
    lines = [f"fastclip runs here; backends that work: {', '.join(working)}."]
    if "cpu" not in working:
        lines.append("With the backend cpu it would be faster: see above what that misses.")
    if report["problems"]:
        lines.append("There are problems: see above.")
    return "\n".join(lines)
