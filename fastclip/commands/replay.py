"""`fastclip replay`: what the default detectors say about a log."""

import textwrap

from fastclip.commands import print_json
from fastclip.commands.logs import Log, counted
from fastclip.monitor import Event, Monitor
from fastclip.monitor.bands import CALM
from fastclip.monitor.incidents import Incident, incidents

SHOWN = 50  # incidents that are printed
INDENT = 10


def run(log: str, json: bool) -> int:
    """Replay and print; the exit status is 0 whatever was found."""
    reader = Log(log)
    monitor = Monitor()
    events: list[Event] = []
    attempts: list[int] = []  # of each event
    for record in reader:
        new = monitor.replay((record,))
        events += new
        attempts += [monitor.attempt] * len(new)
    reader.report_skipped()
    if json:
        print_json(
            {
                "records": reader.records,
                "skipped_lines": reader.skipped_lines,
                "events": [vars(event) for event in events],
            }
        )
    else:
        print(_text(reader, events, attempts))
    return 0


def _text(log: Log, events: list[Event], attempts: list[int]) -> str:
    if not events:
        return f"{log}\nno events"
    # As many steps as it takes to log the records that end an excursion.
    gap = CALM * max(1.0, (log.last - log.first) / log.records)
    found = incidents(events, gap, attempts)
    lines = [str(log), f"{counted(len(events), 'event')}, {counted(len(found), 'incident')}"]
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
