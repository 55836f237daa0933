"""What is to be known of a run at a glance."""

from collections.abc import Sequence

from fastclip.monitor.incidents import of_clip_rates
from fastclip.monitor.records import LEVELS
from fastclip.monitor.report.run import Extreme, Run
from fastclip.monitor.report.text import clean, count, escape, listed, number, share

# Facts that are left out where they are so in every run.
NOTHING = ("Layers not finite", "Steps skipped", "Lines skipped")
TRIVIAL = {"Attempts": ("1", ""), **dict.fromkeys(NOTHING, ("0", ""))}


def verdict(runs: Sequence[Run]) -> str:
    return "\n".join(_verdict(run, len(runs) > 1) for run in runs)


def _verdict(run: Run, several: bool) -> str:
    whose = f"<b>{escape(run.name)}</b>: " if several else ""
    if not run.episodes:
        return f'<p class="verdict">{whose}No events: every detector stayed silent.</p>'
    levels = [episode.incident.level for episode in run.episodes]
    highest = max(levels, key=LEVELS.index)
    gravest = [one for one in run.episodes if one.incident.level == highest]
    others = [one for one in gravest if not of_clip_rates(one.incident)] or gravest
    first = others[0]
    number_of = f"{count(len(levels), 'incident')}, {levels.count(highest):,} of them {highest}"
    if levels.count(highest) == len(levels):
        number_of = count(len(levels), f"{highest} incident" if highest != "warn" else "warning")
    beside = " beside the clip rate" if len(others) < len(gravest) else ""
    which = f"The first {_called(highest)}{beside} began" if len(levels) > 1 else "It began"
    return (
        f'<p class="verdict {highest}">{whose}<b>{number_of}.</b> {which} at step {first.onset} '
        f"({escape(first.incident.onset_metric)}): {escape(first.incident.message)}.</p>"
    )


def _called(level: str) -> str:
    return "warning" if level == "warn" else f"{level} one"


def facts(runs: Sequence[Run]) -> str:
    """A list of facts; of two runs, both values under each."""
    columns = [dict(_facts(run)) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    items = []
    for label in labels:
        if all(column.get(label, TRIVIAL.get(label)) == TRIVIAL.get(label) for column in columns):
            continue
        values = []
        for place, column in enumerate(columns, 1):
            value, note = column.get(label, ("\N{EN DASH}", ""))
            dot = f'<span class="dot run{place}"></span>' if len(runs) > 1 else ""
            small = f"<small>{note}</small>" if note else ""
            values.append(f"<dd>{dot}<b>{value}</b>{small}</dd>")
        items.append(f"<div><dt>{label}</dt>{''.join(values)}</div>")
    return f'<h2>At a glance</h2><dl class="facts">{"".join(items)}</dl>'


def _facts(run: Run) -> list[tuple[str, tuple[str, str]]]:
    """Labels with a value and a note, all of them HTML."""
    found = [("Records", (f"{run.records:,}", f"steps {run.first} to {run.last}"))]
    found.append(("Attempts", (f"{len(run.attempts):,}", _went_back(len(run.attempts) - 1))))
    for name, label in (("loss", "Worst loss"), ("grad_norm", "Largest gradient norm")):
        if name in run.series or name in run.lost:
            found.append((label, _extreme(run.worst[name])))
    if run.final_loss is not None:
        found.append(("Last loss", (number(run.final_loss), "")))
    if run.clipped_known:
        rate = share(run.clipped, run.clipped_known)
        found.append(("Steps clipped", (rate, f"of {count(run.clipped_known, 'step')}")))
    if run.grid.rows:
        faulty = run.grid.faulty()
        notes = [listed(faulty, 2)] if faulty else []
        if run.unlocated:
            notes.append(f"not known for {count(run.unlocated, 'record')} with such elements")
        found.append(("Layers not finite", (f"{len(faulty):,}", escape("; ".join(notes)))))
    skipped = share(run.skipped, run.records) if run.skipped else ""
    found.append(("Steps skipped", (f"{run.skipped:,}", skipped)))
    levels = [f"{run.levels[level]:,} {level}" for level in LEVELS[::-1] if run.levels[level]]
    incidents = f"in {count(len(run.episodes), 'incident')}" if run.episodes else ""
    found.append(("Events", (", ".join(levels) or "none", incidents)))
    unread = "no records" if run.skipped_lines else ""
    found.append(("Lines skipped", (f"{run.skipped_lines:,}", unread)))
    return found


def _went_back(times: int) -> str:
    told = "a step was not after the one before: a resume or a rollback"
    return f"{count(times, 'time')} {told}" if times else ""


def _extreme(extreme: Extreme) -> tuple[str, str]:
    if not extreme.nonfinite:
        return number(extreme.value), f"at step {extreme.step}"
    lost = (
        f"not finite in {count(extreme.nonfinite, 'record')}, "
        f"first at step {extreme.first_nonfinite}"
    )
    if extreme.value > float("-inf"):
        return number(extreme.value), f"at step {extreme.step}; {lost}"
    return "not finite", lost


def names(paths: Sequence[str]) -> list[str]:
    """What runs are called: the names of their files, or the paths if those are the same."""
    from pathlib import Path

    short = [clean(Path(path).name) for path in paths]
    return short if len(set(short)) == len(short) else [clean(path) for path in paths]
