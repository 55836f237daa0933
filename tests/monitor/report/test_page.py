"""The page: what its text says, that it is safe and complete in itself, and how large it gets."""

import base64
import gzip
import hashlib
import html
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from fastclip.monitor import LayerRow, StepRecord
from fastclip.monitor.report import Run, page
from fastclip.monitor.report.incidents_table import SHOWN
from fastclip.monitor.report.thinning import BUCKETS
from tests.monitor.making import changed, healthy, incident_log, mixtral, times
from tests.monitor.report.logs import (
    HOSTILE,
    NAMES,
    always_clipped,
    baseline,
    eventful,
    figures,
    hostile,
    plain,
    read,
    run_of,
)

PLOTLY = "window.Plotly = {};  // stands for four megabytes"


def document(*runs: Run) -> str:
    return page(runs, PLOTLY)


class Elements(HTMLParser):
    """The elements of a document in order, with their attributes; fails where they do not nest."""

    VOID = frozenset({"meta", "br"})
    DRAWN = frozenset({"path", "circle"})  # elements of SVG that end themselves

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.DRAWN
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_text_has_the_main_numbers() -> None:
    run = run_of(eventful)
    text = plain(document(run))
    for expected in (
        "run.jsonl",
        f"Records {len(eventful()):,} steps 0 to 1999",
        "Attempts 3 2 times a step was not after the one before: a resume or a rollback",
        "Worst loss 7.6969 at step 150; not finite in 3 records, first at step 500",
        "Largest gradient norm 2.27386 at step 920; not finite in 1 record, first at step 502",
        f"Layers not finite 4 {NAMES[30]}, {NAMES[31]} and 2 more",
        "Steps skipped 1",
    ):
        assert expected in text
    for episode in run.episodes:
        incident = episode.incident
        steps = (
            f"step {incident.first}"
            if incident.first == incident.last
            else (f"steps {incident.first} to {incident.last}")
        )
        told = f"{steps} attempt {incident.attempt} onset {episode.onset} {incident.onset_metric}"
        assert f"{told} {incident.message} {', '.join(incident.kinds)}" in text


def test_a_calm_run() -> None:
    text = plain(document(read(healthy(200))))
    assert "No events: every detector stayed silent." in text
    assert "Incidents" not in text
    assert "Attempts" not in text
    assert "No threshold to suggest: a clip rate of 0.01 needs at least 1000 gradient norms" in text


def test_the_banner_names_another_incident_than_the_clip_rate() -> None:
    records = always_clipped()
    text = plain(document(read(records)))
    assert "3 incidents, 1 of them critical. The first critical one began at step 320" in text
    assert "100 % of the last 100 steps were clipped" in text
    assert (
        "2 warnings. The first warning beside the clip rate began at step 250 (loss): loss"
        in plain(document(read(records[:320])))
    )
    assert "1 warning. It began at step 99 (clipped): 100 % of" in plain(
        document(read(records[:250]))
    )


def test_sections_without_data_are_left_out() -> None:
    made = document(run_of(mixtral))
    assert list(figures(made)) == ["chart-loss"]
    titles = re.findall(r"<h2>(.*?)</h2>", made)
    assert titles == ["At a glance", "Incidents", "Over steps"]
    assert re.findall(r'<a href="#(\w+)">', made) == ["incidents", "steps"]
    bare = document(read([StepRecord(0), StepRecord(1)]))
    assert figures(bare) == {}


def test_calibration_in_words_and_in_a_chart() -> None:
    noisy = [
        replace(r, grad_norm=(r.grad_norm or 0) * (3 if r.step > 1000 else 1))
        for r in healthy(2000)
    ]
    made = document(read(noisy))
    text = plain(made)
    assert "no fixed threshold fits both; an adaptive rule" in text
    assert re.search(r"max_norm=[\d.]+ would clip 1.00% of 2,000 such steps", text)
    curve = figures(made)["calibration"]["data"][0]
    assert curve["y"] == sorted(curve["y"], reverse=True) or curve["y"] == sorted(curve["y"])
    assert 0.5 in curve["y"]


def test_evidence_has_value_baseline_and_batch() -> None:
    run = run_of(incident_log)
    text = plain(document(run))
    event = run.episodes[0].witnesses()[0].event
    assert (
        f"{event.step} {event.kind} loss {event.value:.6g} {event.baseline:.6g} warn {event.step}"
        in text
    )


def test_two_runs_beside_each_other() -> None:
    made = document(read(eventful(), "one.jsonl"), read(baseline(), "two.jsonl"))
    text = plain(made)
    assert "one.jsonl beside two.jsonl" in text
    assert "two.jsonl : No events" in text or "two.jsonl: No events" in text
    assert (
        "Attempts 3 2 times a step was not after the one before: a resume or a rollback 1" in text
    )
    assert {"layers-norms-1", "layers-norms-2", "layers-nonfinite-1"} <= set(figures(made))
    assert {trace["name"] for trace in figures(made)["chart-lr"]["data"]} == {
        "one.jsonl",
        "two.jsonl",
    }


def test_hostile_text_is_only_text() -> None:
    run = read(hostile(), f"{HOSTILE}.jsonl")
    elements = Elements(document(run)).found
    assert not {"img", "iframe"} & {tag for tag, _ in elements}
    scripts = [attributes for tag, attributes in elements if tag == "script"]
    assert scripts == [
        {"type": "application/json", "id": "figures"},
        {"type": "text/plain", "id": "plotly"},
        {},
    ]
    assert not [name for _, found in elements for name in found if name.startswith("on")]
    text = plain(document(run))
    assert HOSTILE in text
    assert "\x00" not in text
    assert "\u202e" not in document(run)
    for figure in figures(document(run)).values():  # plotly takes its labels for HTML
        for trace in figure["data"]:
            assert "<" not in trace.get("name", "") + "".join(map(str, trace.get("y", [])))
        assert "<b>" not in str(figure["layout"])


def test_nothing_comes_from_elsewhere() -> None:
    made = document(run_of(eventful))
    elements = Elements(made).found
    for tag, attributes in elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    style = re.search(r"<style>(.*?)</style>", made, re.DOTALL)
    assert style
    assert not re.search(r"url\(|@import|@font-face", style[1])


def test_the_policy_lets_these_two_scripts_run_and_no_other() -> None:
    made = document(read(healthy(10)))
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="(.*?)"', made)[0])
    script = re.findall(r"<script>(.*?)</script>", made, re.DOTALL)[0]
    expected = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, PLOTLY)
    ]
    assert re.findall(r"'sha256-(.*?)'", policy) == expected
    assert policy.startswith("default-src 'none';")
    packed = re.findall(r'id="plotly">(.*?)</script>', made)[0]
    assert gzip.decompress(base64.b64decode(packed)).decode() == PLOTLY


def test_headings_tables_and_charts_are_accessible() -> None:
    elements = Elements(document(run_of(eventful))).found
    levels = [int(tag[1]) for tag, _ in elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(found.get("scope") in ("col", "row") for tag, found in elements if tag == "th")
    plots = [found for _, found in elements if found.get("class") == "plot"]
    assert plots
    assert all(found["role"] == "img" for found in plots)
    assert all(re.search(r"\d", found["aria-label"] or "") for found in plots)


def test_faults_of_records_without_rows_are_not_denied() -> None:
    clean = (LayerRow("a", 1.0, 1.0, 0.0), LayerRow("b", 1.0, 1.0, 0.0))
    faulty = (clean[0], LayerRow("b", math.inf, 1.0, 0.25))
    records = [
        replace(record, layers=clean if record.step == 10 else None) for record in healthy(60)
    ]
    records = changed(records, ([20, 30, 40], "nonfinite_count", 5))
    run = read(records)
    text = plain(document(run))
    denied = "In the steps logged with layers none had gradient elements that are not finite."
    left = "3 records with such elements came without rows that say in which layers."
    assert f"{denied} {left}" in text
    assert "Layers not finite 0 not known for 3 records with such elements" in text
    for step in (19, 20):
        run.amend(replace(records[step], layers=faulty if step == 20 else clean))
    text = plain(document(run))
    assert "Not finite in 1 layer: b. 2 records with such elements came without rows" in text
    assert "Layers not finite 1 b; not known for 2 records with such elements" in text
    assert denied not in text
    located = read(changed(records, ([20, 30, 40], "layers", faulty)))
    text = plain(document(located))
    assert "Not finite in 1 layer: b. Columns" in text
    assert "without rows" not in text


def test_captions_of_heat_maps_explain_what_is_not_obvious() -> None:
    rows = (LayerRow("a", 1.0), LayerRow("b", 0.5), LayerRow("c", 1e-7))
    records = [StepRecord(step, 1.0, layers=rows) for step in range(5)]
    text, attempts = plain(document(read(records))), "A number in parentheses after a step"
    assert "Norms below 0.5 have its colour; pointing at one tells it." in text
    assert attempts not in text
    again = [*records, *(StepRecord(step, 1.0, layers=rows[:2]) for step in range(3, 6))]
    made = document(read(again))
    assert f"{attempts} is its attempt." in plain(made)
    steps = ["0", "1", "2", "3", "4", "3 (1)", "4 (1)", "5 (1)"]
    assert figures(made)["layers-norms-1"]["data"][0]["x"] == steps


def test_many_incidents_are_cut_to_those_that_matter() -> None:
    spikes = (range(200, 7000, 20), "grad_norm", times(60))
    records = changed(healthy(7000), spikes, ([6500], "loss", float("nan")))
    run = read(records)
    assert len(run.episodes) > SHOWN
    made = document(run)
    assert made.count('<tr class="incident"') == SHOWN
    assert f"{len(run.episodes) - SHOWN:,} more incidents" in plain(made)
    assert "loss is nan" in plain(made)
    assert f"{SHOWN} incidents; the table scrolls." in plain(made)


@pytest.mark.parametrize("count", [2, 1000])
def test_the_largest_page_leaves_room_for_plotly(count: int) -> None:
    """Everything at once, twice: with the 2 MB of plotly it has to stay below 5 MB."""
    name = "model.decoder.blocks.some_rather_long_name_of_a_module"
    rows = tuple(
        LayerRow(f"{name}.{place}.weight", 0.123456 + place, 1.0, 1e-5) for place in range(count)
    )
    length = 4 * BUCKETS  # all buckets are full
    spikes = (range(200, length, 15), "grad_norm", times(60))
    records = [
        replace(record, layers=rows if record.step % 20 == 0 else None, attempt=record.step // 2000)
        for record in changed(healthy(length), spikes)
    ]
    run = read(records)
    assert len(document(run, run)) < 2_900_000
