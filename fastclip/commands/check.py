"""`fastclip check`: every available backend against the float64 reference, over the case table."""

import time
from dataclasses import asdict, dataclass, field

import torch

from fastclip import backends
from fastclip.commands import InputError, print_json, progress
from fastclip.testing import trials
from fastclip.testing.cases import BACKEND_CASES, Case
from fastclip.testing.variants import Variant, variants

CLIP_NORMS = {2.0, float("inf"), 3.0}
SHOWN = 20  # mismatches printed per backend


@dataclass
class Result:
    """What became of one backend."""

    backend: str
    cases: int = 0
    comparisons: int = 0
    worst: float = 0.0
    mismatches: list[str] = field(default_factory=list)
    unavailable: str | None = None

    @property
    def verdict(self) -> str:
        if self.unavailable:
            return f"not available: {self.unavailable}"
        return f"{len(self.mismatches)} MISMATCHES" if self.mismatches else "ok"

    def note(self, what: str, error: float) -> None:
        """One comparison; above 1 it is a mismatch."""
        self.comparisons += 1
        self.worst = max(self.worst, error)
        if not error <= 1:
            self.mismatches.append(f"{what}: {error:.3g} x tolerance")


def _check_case(variant: Variant, case: Case, result: Result) -> None:
    with variant.open() as backend:
        for p in variant.norm_types:
            error = trials.measure(backend, case, p, variant.device)
            result.note(f"{case.id} measure p={p:g}", error)
        for p in sorted(CLIP_NORMS & set(variant.norm_types)):
            error = trials.clip(backend, case, p, variant.device)
            result.note(f"{case.id} clip_ p={p:g}", error)
        result.note(f"{case.id} scale_", trials.scale(backend, case, variant.device))


def check_variant(variant: Variant, cases: tuple[Case, ...] = BACKEND_CASES) -> Result:
    """All cases on one backend."""
    result = Result(variant.id, unavailable=variant.unavailable)
    if variant.unavailable:
        return result
    for i, case in enumerate(cases):
        if case.cpu_only and variant.device != "cpu":
            continue
        if i % 100 == 0:
            progress(f"{variant.id}: {i} of {len(cases)} cases")
        _check_case(variant, case, result)
        result.cases += 1
    return result


def _table(results: list[Result]) -> str:
    lines = [f"{'backend':<16}{'cases':>7}{'comparisons':>13}{'worst error':>13}  result"]
    for r in results:
        if r.unavailable:
            lines.append(f"{r.backend:<16}{'-':>7}{'-':>13}{'-':>13}  {r.verdict}")
        else:
            row = f"{r.backend:<16}{r.cases:>7}{r.comparisons:>13}{r.worst:>13.3g}  {r.verdict}"
            lines.append(row)
    lines.append(
        "worst error: in units of the tolerance against a float64 reference; 1 is the limit"
    )
    for r in results:
        shown = r.mismatches[:SHOWN]
        lines += [f"  {r.backend}: {mismatch}" for mismatch in shown]
        if len(r.mismatches) > SHOWN:
            lines.append(f"  {r.backend}: and {len(r.mismatches) - SHOWN} more")
    return "\n".join(lines)


def _chosen(backend: str | None) -> list[Variant]:
    """All, or those of one backend, which then has to be usable."""
    if backend is None:
        return variants()
    try:
        backends.get(backend)
    except RuntimeError as error:
        raise InputError(" ".join(str(error).split())) from error
    return [variant for variant in variants() if variant.backend == backend]


def run(json: bool, backend: str | None = None) -> int:
    """Check, print, and return the exit status: 1 on any mismatch."""
    chosen = _chosen(backend)
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for lists as small as these: half the time
    try:
        results = [check_variant(variant) for variant in chosen]
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - start
    ok = not any(result.mismatches for result in results)
    if json:
        rows = [asdict(result) | {"result": result.verdict} for result in results]
        print_json({"ok": ok, "seconds": round(seconds, 1), "backends": rows})
    else:
        print(_table(results))
        print(f"{'all right' if ok else 'MISMATCH'}, {seconds:.1f} s")
    return 0 if ok else 1
