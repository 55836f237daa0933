"""The table of incidents, each with the events it is made of."""

import json
from collections.abc import Sequence

from fastclip.monitor.report.evidence import Episode, Witness
from fastclip.monitor.report.parts import sign
from fastclip.monitor.report.run import Run
from fastclip.monitor.report.text import count, escape, number

SHOWN = 300  # incidents in the table
TALL = 10  # incidents from which on the table scrolls in itself
OPEN = 3  # so few incidents have their evidence unfolded at once
BATCH = 80  # characters of a batch's description

HEAD = """\
<thead role="rowgroup"><tr role="row">
<th scope="col" role="columnheader" class="no">No.</th>
<th scope="col" role="columnheader" class="lv">Level</th>
<th scope="col" role="columnheader" class="st">Steps</th>
<th scope="col" role="columnheader" class="on">Onset</th>
<th scope="col" role="columnheader">What happened</th>
</tr></thead>"""


def incidents_section(runs: Sequence[Run]) -> str:
    if not any(run.episodes for run in runs):
        return ""
    parts = ['<section id="incidents"><h2>Incidents</h2>']
    for place, run in enumerate(runs, 1):
        if not run.episodes:
            continue
        if len(runs) > 1:
            parts.append(f'<h3><span class="dot run{place}"></span>{escape(run.name)}</h3>')
        parts.append(_table(run, f"{'AB'[place - 1]}" if len(runs) > 1 else ""))
    return "\n".join([*parts, "</section>"])


def _table(run: Run, letter: str) -> str:
    shown = run.shown(SHOWN)
    opened = " open" if len(run.episodes) <= OPEN else ""
    several = len(run.attempts) > 1
    rows = "\n".join(_incident(f"{letter}{n}", one, several, opened) for n, one in shown)
    card = 'class="card tall" tabindex="0"' if len(shown) > TALL else 'class="card"'
    left = len(run.episodes) - len(shown)
    more = (
        f'<p class="quiet">{left:,} more incidents of lower levels or later are left out here; '
        "<code>fastclip replay --json</code> gives every event.</p>"
        if left
        else ""
    )
    hint = (
        f'<p class="quiet">{count(len(shown), "incident")}; the table scrolls.</p>'
        if len(shown) > TALL
        else ""
    )
    return (
        f'{hint}<div {card}><table class="incidents" role="table" '
        f'aria-label="Incidents of {escape(run.name)}">{HEAD}\n'
        f'<tbody role="rowgroup">{rows}</tbody></table>{more}</div>'
    )


def _incident(name: str, episode: Episode, several: bool, opened: str) -> str:
    it = episode.incident
    steps = str(it.first) if it.first == it.last else f"{it.first} to {it.last}"
    if several:
        steps += f"<small>attempt {it.attempt}</small>"
    kinds = escape(", ".join(it.kinds))
    return (
        f'<tr class="incident" role="row">'
        f'<th scope="row" role="rowheader">{name}</th>'
        f'<td role="cell"><span class="level {it.level}">{sign(it.level)}{it.level}</span></td>'
        f'<td role="cell" class="steps">{_word("step", it.first != it.last)}{steps}</td>'
        f'<td role="cell" class="steps"><span class="word">onset </span>{episode.onset} '
        f"<small>{escape(it.onset_metric)}</small></td>"
        f'<td role="cell" class="what">{escape(it.message)}<small>{kinds}</small>'
        f"{_evidence(episode, opened)}</td></tr>"
    )


def _word(word: str, several: bool) -> str:
    return f'<span class="word">{word}{"s" if several else ""} </span>'


def _evidence(episode: Episode, opened: str) -> str:
    witnesses = episode.witnesses()
    batches = any(witness.batch is not None for witness in witnesses)
    total = episode.incident.events
    of = f" ({len(witnesses)} of them shown)" if len(witnesses) < total else ""
    head = "".join(
        f'<th scope="col"{kind}>{title}</th>'
        for title, kind in (
            *(("Step", ""), ("Detector", ""), ("Metric", ""), ("Value", ' class="n"')),
            *(("Baseline", ' class="n"'), ("Level", "")),
            *([("Batch", "")] if batches else []),
        )
    )
    rows = "".join(_witness(witness, batches) for witness in witnesses)
    return (
        f"<details{opened}><summary>Evidence: {count(total, 'event')}{of}</summary>"
        f'<div class="scroll" role="region" tabindex="0" aria-label="Evidence"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _witness(witness: Witness, batches: bool) -> str:
    event = witness.event
    baseline = "" if event.baseline is None else number(event.baseline)
    batch = ""
    if batches:
        told = "" if witness.batch is None else json.dumps(witness.batch, ensure_ascii=False)
        batch = f"<td>{escape(told, BATCH)}</td>"
    return (
        f"<tr><td>{event.step}</td><td>{escape(event.kind)}</td><td>{escape(event.metric)}</td>"
        f'<td class="n">{number(event.value)}</td><td class="n">{baseline}</td>'
        f"<td>{event.level}</td>{batch}</tr>"
    )
