"""`fastclip report`: a log, or two beside each other, as one HTML page."""

import os
from collections.abc import Sequence
from pathlib import Path

from fastclip.commands import InputError, print_json
from fastclip.commands.logs import Log, counted
from fastclip.monitor.report import Run, page, plotly_source
from fastclip.monitor.report.facts import names


def run(log: str, other: str | None, output: str | None, json: bool) -> int:
    """Read, write the page, and say where it is."""
    paths = [log] if other is None else [log, other]
    try:
        plotly = plotly_source()
    except ImportError as error:
        raise InputError(str(error)) from error
    target = _target(paths, output)
    runs = [_read(path, name) for path, name in zip(paths, names(paths), strict=True)]
    _write(target, page(runs, plotly))
    if json:
        first, *rest = [{"records": one.records, "events": one.events} for one in runs]
        print_json({"report": str(target), **first, **({"other": rest[0]} if rest else {})})
    else:
        told = (f"{counted(one.records, 'record')}, {counted(one.events, 'event')}" for one in runs)
        print(f"{target}: {'; '.join(told)}")
    return 0


def _target(logs: Sequence[str], output: str | None) -> Path:
    """Where the page goes; refused if it would replace a log, or something that is no file."""
    target = _beside(logs[0]) if output is None else Path(output)
    for log in logs:
        if _same(target, log):
            raise InputError(f"the report would replace the log {log!r}; choose another with -o")
    try:
        if target.exists() and not target.is_file():
            raise InputError(f"cannot write {str(target)!r}: it is not a file")
        if not target.parent.is_dir():
            folder = str(target.parent)
            raise InputError(f"cannot write {str(target)!r}: there is no folder {folder!r}")
    except OSError as error:  # a name too long, or a folder nobody may look into
        raise InputError(f"cannot write {str(target)!r}: {error.strerror}") from error
    return target


def _beside(log: str) -> Path:
    try:
        if Path(log).is_dir():
            raise InputError(f"cannot read {log!r}: Is a directory")
        if Path(log).exists() and not Path(log).is_file():
            raise InputError(f"{log!r} is not a file to put the report beside; choose one with -o")
    except OSError as error:
        raise InputError(f"cannot read {log!r}: {error.strerror}") from error
    return Path(log).with_suffix(".html")


def _same(target: Path, log: str) -> bool:
    try:
        return target.samefile(log)
    except OSError:  # one of them is not there
        return False


def _read(path: str, name: str) -> Run:
    made = Run(name)
    reader = Log(path, made.amend)
    for record in reader:
        made.add(record)
    made.finish()
    made.skipped_lines = reader.skipped_lines
    reader.report_skipped()
    return made


def _write(target: Path, text: str) -> None:
    """All of it or nothing: readers see the old page or the new one."""
    kept = Path(os.path.realpath(target))  # where a link leads, too
    unfinished = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(kept)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {str(target)!r}: {error.strerror}") from error
