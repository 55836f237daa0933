"""`fastclip bench`: fastclip beside everybody else who clips gradients here, on this machine."""

import json as json_
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
QUICK_SECONDS = 45.0  # then no row is begun, so that the last one ends within a minute


class Measured(NamedTuple):
    run: report.Run
    interrupted: bool


def run(
    contains: str,
    quick: bool,
    every: bool,
    listed: bool,
    threads: int | None,
    backend: str | None,
    device: str,
    csv: str | None,
    plot: str | None,
    json: bool,
) -> int:
    """Measures, prints each row as soon as it is there, and writes what was asked for. Ctrl-C ends
    it with what there is, and status 130."""
    end = time.monotonic() + QUICK_SECONDS if quick else math.inf
    found = _found(contains, quick)
    rows = _chosen(found, contains, every)
    if listed:
        print(json_.dumps([row.name for row in rows]) if json else _list(rows))
        return 0
    csv_path, plot_path = _writable(csv, "--csv"), _writable(plot, "--plot")
    if plot_path is not None:
        bench_plot.require(plot_path)
    with ExitStack() as stack:
        stack.enter_context(_threads(threads))
        stack.enter_context(_backend(backend))
        _require(device)
        if left := len(found) - len(rows):
            progress(f"left out: {left} rows that take long (--all measures them, too)")
        done, interrupted = _measured(rows, _size(quick), device, quiet=json, end=end)
    if done.results and csv_path is not None:
        report.write_csv(csv_path, done)
    if done.results and plot_path is not None:
        bench_plot.write(plot_path, done)
    if json:
        print(report.as_json(done))
    if interrupted:
        progress("fastclip: interrupted")
    return 130 if interrupted else 0


def _found(contains: str, quick: bool) -> list[Row]:
    if contains:
        found = [row for row in ROWS if contains in row.name]
    elif quick:
        found = [row for row in ROWS if _is_quick(row)]
    else:
        found = ROWS
    if not found:
        workloads = ", ".join(dict.fromkeys(row.workload for row in ROWS))
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in ROWS))
        raise InputError(
            f"no row's name contains {contains!r}; names are WORKLOAD-DTYPE, then -clipped, then "
            f"-warm (both optional); workloads: {workloads}; dtypes: {dtypes}; --list shows all"
        )
    return found


def _chosen(found: Sequence[Row], contains: str, every: bool) -> list[Row]:
    """Rows that take long have to be asked for: by their whole name, or with `every`."""
    rows = [row for row in found if every or not row.big or row.name == contains]
    if not rows:
        names = ", ".join(row.name for row in found)
        raise InputError(f"these rows take long, add --all or give a whole name: {names}")
    return rows


def _list(rows: Sequence[Row]) -> str:
    return "\n".join(row.name for row in rows)


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
    new = not Path(path).exists()
    try:
        Path(path).open("ab").close()
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror}") from error
    if new:
        Path(path).unlink()
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


def _measured(rows: Sequence[Row], size: Size, device: str, quiet: bool, end: float) -> Measured:
    """No row is begun once `time.monotonic` is at `end`; those left out are named."""
    here = machine.describe()
    backend = backends.choose(torch.device(device)).name
    kernels = f"C++ ({native.simd()})" if backend == "cpu" else _place(device)
    before = _watched()
    bar = Progress(len(rows))

    def say(text: str) -> None:
        bar.clear()
        if not quiet:
            print(text, flush=True)

    if here.threads > here.cores:
        progress(f"warning: {here.threads} threads on {here.cores} cores")
    if complaint := before.complaint():
        progress(f"warning: {complaint}")
    layout = bench_table.fit([row.title for row in rows], shutil.get_terminal_size().columns)
    say(bench_table.heading(here, backend, kernels, layout))
    others, interrupted = machine.Others(), False
    results: list[runner.Result] = []
    try:
        with _silent_peers():
            for row in rows:
                if time.monotonic() >= end:
                    break
                bar.begin(row.title)
                # The targets are of the machine that the suite ran on.
                row = replace(row, at_least=None)
                results.append(runner.run(row if device == "cpu" else on(device, row), size))
                say(bench_table.line(results[-1], layout))
    except KeyboardInterrupt:
        interrupted = True
    during = others.idleness()
    bar.clear()
    if missing := rows[len(results) :]:
        why = "interrupted" if interrupted else f"{QUICK_SECONDS:g} s are over"
        progress(f"not measured, {why}: {', '.join(row.name for row in missing)}")
    say(bench_table.footing(results, during, layout))
    return Measured(report.Run(here, backend, kernels, before, during, results), interrupted)


def _watched() -> machine.Idleness:
    others = machine.Others()
    time.sleep(WATCHED)
    return others.idleness()


@contextmanager
def _silent_peers() -> Iterator[None]:
    """What other libraries log at levels below an error would stand within the table."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


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
