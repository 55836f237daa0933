"""`fastclip bench`: fastclip beside everybody else who clips gradients here, on this machine."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import fastclip
from fastclip import backends
from fastclip.backends import native
from fastclip.benchmarking import functions, machine, report, runner
from fastclip.benchmarking.contest import FULL, Contest, Row, Size
from fastclip.benchmarking.measure import Side
from fastclip.commands import InputError, bench_plot, bench_table, progress
from fastclip.commands.progress_bar import Progress

ROWS = [row for row in functions.ROWS if row.clips is not None]
QUICK_WORKLOADS = ("resnet50", "gpt2-small", "2000x1024")
QUICK_DTYPES = ("float32", "bfloat16")
# Of the memory there is: gradients, their copies and the copies that other libraries make.
MEMORY_SHARE = 0.5
WATCHED = 0.5  # seconds before anything runs: is the machine idle?


def run(
    contains: str,
    quick: bool,
    threads: int | None,
    backend: str | None,
    device: str,
    csv: str | None,
    plot: str | None,
    json: bool,
) -> int:
    """Measures, prints each row as soon as it is there, and writes what was asked for."""
    rows = _chosen(contains, quick)
    csv_path, plot_path = _writable(csv, "--csv"), _writable(plot, "--plot")
    if plot_path is not None:
        bench_plot.require(plot_path)
    with ExitStack() as stack:
        stack.enter_context(_threads(threads))
        stack.enter_context(_backend(backend))
        _require(device)
        done = _measured(rows, _size(quick), device, quiet=json)
    if csv_path is not None:
        report.write_csv(csv_path, done)
    if plot_path is not None:
        bench_plot.write(plot_path, done)
    if json:
        print(report.as_json(done))
    return 0


def _chosen(contains: str, quick: bool) -> list[Row]:
    if contains:
        rows = [row for row in ROWS if contains in row.name]
    elif quick:
        rows = [row for row in ROWS if _is_quick(row)]
    else:
        rows = [row for row in ROWS if not row.big]
    if not rows:
        workloads = ", ".join(dict.fromkeys(row.workload for row in ROWS))
        raise InputError(
            f"no row's name contains {contains!r}; names are WORKLOAD-DTYPE or "
            f"WORKLOAD-DTYPE-clipped, and the workloads are {workloads}"
        )
    return rows


def _is_quick(row: Row) -> bool:
    common = row.workload in QUICK_WORKLOADS and row.dtype in QUICK_DTYPES and not row.warm
    return common and row.name == f"{row.workload}-{row.dtype}{'-clipped' if row.clips else ''}"


def _size(quick: bool) -> Size:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = FULL.seconds / 3 if quick else FULL.seconds
    return replace(FULL, seconds=seconds, memory_bytes=int(MEMORY_SHARE * memory))


def _writable(path: str | None, option: str) -> Path | None:
    if path is None:
        return None
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"the folder of {option} {path} does not exist")
    return Path(path)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    if count is not None and count < 1:
        raise InputError(f"--threads must be at least 1, got {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _backend(name: str | None) -> Iterator[None]:
    with ExitStack() as stack:
        if name is not None:
            try:
                stack.enter_context(fastclip.backend(name))
            except RuntimeError as error:
                raise InputError(" ".join(str(error).split())) from error
        yield


def _require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here")
    try:
        backends.choose(torch.device(device))
    except RuntimeError as error:
        raise InputError(" ".join(str(error).split())) from error


def _measured(rows: Sequence[Row], size: Size, device: str, quiet: bool) -> report.Run:
    here = machine.describe()
    backend = backends.choose(torch.device(device)).name
    kernels = f"C++ ({native.simd()})" if backend == "cpu" else _place(device)
    others = machine.Others()
    time.sleep(WATCHED)
    before = others.idleness()
    if here.threads > here.cores:
        progress(f"warning: {here.threads} threads on {here.cores} cores")
    bar = Progress(len(rows))
    results: list[runner.Result] = []

    def say(text: str) -> None:
        bar.clear()
        if not quiet:
            print(text, flush=True)

    say(bench_table.heading(here, backend, kernels))
    for row in rows:
        bar.begin(row.title)
        results.append(runner.run(row if device == "cpu" else on(device, row), size))
        say(bench_table.line(results[-1]))
    during = others.idleness()
    say(bench_table.footing(results, during))
    return report.Run(here, backend, kernels, before, during, results)


def _place(device: str) -> str:
    return "plain PyTorch" if device == "cpu" else torch.cuda.get_device_name()


def on(device: str, row: Row) -> Row:
    """The row on a GPU: a call begins when the device is idle and is timed until it is done. The
    rates of memory, which are taken without waiting, are left out."""

    def build(size: Size) -> Contest:
        with torch.device(device):  # not around what is timed: it makes every call of torch slower
            contest = row.build(size)
        return replace(contest, sides=[_waiting(side) for side in contest.sides])

    return replace(row, build=build, reads=0, writes=0)


def _waiting(side: Side) -> Side:
    def before() -> None:
        if side.before is not None:
            side.before()
        torch.cuda.synchronize()

    def call() -> object:
        result = side.run()
        torch.cuda.synchronize()
        return result

    return Side(side.name, call, before, side.check)
