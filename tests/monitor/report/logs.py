"""Logs to report on, and what a reader sees of the page."""

import html
import json
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fastclip.monitor import JSONL, LayerRow, StepRecord
from fastclip.monitor.report import Run
from tests.monitor.making import changed, healthy, incident_log, times

NAMES = tuple(
    f"model.layers.{block}.{part}.weight"
    for block in range(12)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "norm")
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def layers(step: int, faulty: Iterable[str] = ()) -> tuple[LayerRow, ...]:
    """Norms that grow with depth; those of some layers are NaN."""
    noise = random.Random(step)
    return tuple(
        LayerRow(
            name,
            norm=math.nan if name in faulty else noise.lognormvariate(0.02 * place - 2, 0.3),
            nonfinite=1e-4 if name in faulty else 0.0,
        )
        for place, name in enumerate(NAMES)
    )


@cache
def eventful() -> tuple[StepRecord, ...]:
    """Something of everything, layers every 50 steps, and twice a return to earlier steps."""
    faulty = {500: NAMES[30:34], 1100: NAMES[30:34]}
    records = [
        replace(record, layers=layers(record.step, faulty.get(record.step, ())))
        if record.step % 50 == 0
        else record
        for record in incident_log()
    ]
    calm = [
        replace(record, loss=record.loss / 1.3)
        if record.loss is not None and 1500 <= record.step < 1900
        else record
        for record in records
    ]
    return (
        *records[:1601],
        *(replace(record, attempt=1) for record in calm[1400:1801]),
        *(replace(record, attempt=2) for record in calm[1700:]),
    )


def always_clipped() -> list[StepRecord]:
    """A threshold that is too low, a spike at step 250 and a NaN at step 320."""
    clipped = [replace(record, clipped=True) for record in healthy(400)]
    return changed(clipped, ([250], "loss", times(3)), ([320], "grad_norm", math.nan))


def hostile() -> list[StepRecord]:
    """Names and batches that would run, draw or break something if they were not escaped."""
    rows = (
        LayerRow(HOSTILE, 0.5, 1.0, 0.0),
        LayerRow("<b>bold</b>&amp;", math.inf, 1.0, 0.5),
        LayerRow("var(--fg)", 1.0, 1.0, 0.0),
        LayerRow("%{x} half \ud800 \u202e \x00", 2.0, 1.0, 0.0),
    )
    return [
        replace(
            record, batch={HOSTILE: ["\"'%{x}"]}, layers=rows if record.step % 10 == 0 else None
        )
        for record in incident_log(800)
    ]


def baseline() -> list[StepRecord]:
    return [
        replace(record, layers=layers(record.step) if record.step % 100 == 0 else None)
        for record in healthy(2000, seed=9)
    ]


def saved(path: Path, records: Iterable[StepRecord], amended: Iterable[StepRecord] = ()) -> str:
    log = JSONL(path)
    for record in records:
        log.write(record, [])
    for record in amended:
        log.amend(record)
    return str(path)


def read(records: Iterable[StepRecord], name: str = "run.jsonl") -> Run:
    made = Run(name)
    for record in records:
        made.add(record)
    made.finish()
    return made


@cache
def run_of(log: Callable[[], Iterable[StepRecord]]) -> Run:
    """Read once for all tests that only look at it: `eventful`, say."""
    return read(log())


def plain(document: str) -> str:
    """The text of a page: without scripts, styles and tags."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", document, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def figures(document: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', document)
    assert found
    return {figure["id"]: figure for figure in json.loads(found[1])}
