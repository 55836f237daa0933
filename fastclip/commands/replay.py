"""`fastclip replay`: what the default detectors say about a log, however long that is."""

import shutil
import sys
import textwrap
from collections.abc import Iterable
from itertools import count
from tempfile import SpooledTemporaryFile

from fastclip.commands import as_json
from fastclip.commands.logs import Log, counted
from fastclip.monitor import Event, Monitor
from fastclip.monitor.bands import CALM
from fastclip.monitor.incidents import Incident, incidents, merged

SHOWN = 50  # incidents that are printed
INDENT = 10
SPOOLED = 1 << 20  # bytes of JSON that are held in memory


def run(log: str, json: bool) -> int:
    """Replay and print; the exit status is 0 whatever was found."""
    reader = Log(log)
    monitor = Monitor()
    events = monitor.replayed(reader)
    if json:
        _print_json(reader, events)
    else:
        attempts = (monitor.attempt for _ in count())  # of the event that was asked for last
        text = _text(reader, events, attempts)
        reader.report_skipped()
        print(text)
    return 0


def _print_json(log: Log, events: Iterable[Event]) -> None:
    """As `print_json` has it. Events wait in a file, because nothing is printed of a log that turns
    out to be unreadable, and what is counted comes first."""
    with SpooledTemporaryFile(SPOOLED, "w+", encoding="ascii") as listed:
        number = 0
        for number, event in enumerate(events, 1):
            listed.write(",\n" if number > 1 else "\n")
            listed.write(textwrap.indent(as_json(vars(event)), " " * 4))
        log.report_skipped()
        counts = f'"records": {log.records},\n  "skipped_lines": {log.skipped_lines}'
        print(f'{{\n  {counts},\n  "events": [', end="")
        end = "\n  ]\n}" if number else "]\n}"
        listed.seek(0)
        shutil.copyfileobj(listed, sys.stdout)
        print(end, flush=True)


def _text(log: Log, events: Iterable[Event], attempts: Iterable[int]) -> str:
    parts = incidents(events, CALM, attempts)
    if not parts:
        return f"{log}\nno events"
    # As many steps as it takes to log the records that end an excursion: known only now.
    gap = CALM * max(1.0, (log.last - log.first) / log.records)
    found = merged(parts, gap)
    n_events = sum(incident.events for incident in found)
    lines = [str(log), f"{counted(n_events, 'event')}, {counted(len(found), 'incident')}"]
    for incident in found[:SHOWN]:
        lines += ["", *_incident(incident)]
    if len(found) > SHOWN:
        lines += ["", f"and {len(found) - SHOWN:,} more; --json gives every event"]
    return "\n".join(lines)


def _incident(incident: Incident) -> list[str]:
    steps = f"step {incident.first}"
    if incident.last != incident.first:
        steps = f"steps {incident.first} to {incident.last}, {incident.events} events"
    if incident.attempt:
        steps += f", attempt {incident.attempt}"
    onset = f"onset {incident.onset} ({incident.onset_metric})"
    kinds = ", ".join(incident.kinds)
    what = f"{incident.level:<{INDENT}}{steps}, {onset}: {kinds}"
    indent = " " * INDENT
    message = textwrap.fill(incident.message, 79, initial_indent=indent, subsequent_indent=indent)
    return [what, message]
