"""`fastclip diagnose`: the incident playbook over a log."""

from typing import Any

from fastclip.commands import print_json
from fastclip.commands.logs import Log
from fastclip.monitor import diagnose


def run(log: str, baseline: str | None, json: bool) -> int:
    """Diagnose and print; the exit status is 0 whatever was found."""
    readers = [Log(path) for path in (log, baseline) if path is not None]
    found = diagnose(*readers)
    for reader in readers:
        reader.report_skipped()
    if json:
        print_json(_named(found))
    else:
        print(*readers, "", found, sep="\n")
    return 0


def _named(value: Any) -> Any:
    """Named tuples as dicts, through and through."""
    if hasattr(value, "_asdict"):
        return {name: _named(item) for name, item in value._asdict().items()}
    return [_named(item) for item in value] if isinstance(value, tuple) else value
