"""`fastclip diagnose`: the page, the JSON, faults and exit statuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastclip.cli import main
from fastclip.monitor import JSONL, Diagnosis, diagnose
from fastclip.monitor.diagnosis.result import Evidence
from tests.monitor.diagnosis.cases import CASES, SINGLE, Case
from tests.monitor.making import healthy, incident_log, require_refused
from tests.monitor.test_commands import saved

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def log(tmp_path: Path) -> str:
    return saved(tmp_path / "run.jsonl", CASES["gradient-first"].records(0))


REAL = """\
{path}: 3,094 records, steps 1 to 23405

A. Symptom: isolated
   The loss left its normal band and came back by itself.
   Onset: step 2425 (loss).
   * the loss left its band and came back: 6 times, steps 2425 to 5875
       1 loss outside, the worst 3.26475; inside again at step 2430
       step 2425: loss 3.26475 (against 2.677); step 3735: loss 2.76472
       (against 2.495); step 4050: loss 5.11474 (against 2.468); ...
   ? Not enough evidence: there is no grad_norm in the log: whether the
     gradient moved before the loss (gradient rather than isolated or
     sustained) is not known.

B. Boundary: none
   The log shows none.

C. Interventions
   1. Watch, and do nothing disruptive: no rollback, no other learning rate, no
      other data. Keep the Monitor and its log on; `fastclip report LOG` shows
      the spikes in context.

D. Checks
   1. Diagnose again in a few thousand steps: still isolated, and not more
      often. Act when Sustained or Drift fires, or when the gradient norm
      starts to move first.
   2. So that the next log can tell: monitor.observe(step=step, loss=loss,
      stats=clipper.step(optimizer)).
"""


def test_the_page_of_a_real_run(tmp_path: Path, capsys: Capture) -> None:
    path = saved(tmp_path / "mixtral.jsonl", SINGLE["real-run"].records(0))
    assert main(["diagnose", path]) == 0
    assert capsys.readouterr() == (REAL.format(path=path), "")


def test_json_has_the_fields(log: str, tmp_path: Path, capsys: Capture) -> None:
    good = saved(tmp_path / "good.jsonl", healthy(1200, 7))
    assert main(["diagnose", log, "--baseline", good, "--json"]) == 0
    out, err = capsys.readouterr()
    found, expected = json.loads(out), diagnose(JSONL(log), JSONL(good))
    assert (list(found), err) == (list(Diagnosis._fields), "")
    for name in ("symptom", "boundary", "onset", "onset_metric"):
        assert found[name] == getattr(expected, name)
    for name in ("interventions", "checks", "unjudged"):
        assert found[name] == list(getattr(expected, name))
    assert [list(row) for row in found["evidence"]] == [[*Evidence._fields]] * 4
    for one, evidence in zip(found["evidence"], expected.evidence, strict=True):
        assert one["records"] == [seen._asdict() for seen in evidence.records]
        assert one["batches"] == (evidence.batches and list(evidence.batches))
        plain = evidence._replace(records=(), batches=None)._asdict()
        assert one | {"records": (), "batches": None} == plain
    assert found["comparison"] == [row._asdict() for row in expected.comparison]


def test_json_is_strict(tmp_path: Path, capsys: Capture) -> None:
    path = saved(tmp_path / "run.jsonl", incident_log())
    assert main(["diagnose", path, "--json"]) == 0
    found = json.loads(
        capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert found["evidence"][0]["records"][0] == {
        "step": 500,
        "attempt": 0,
        "metric": "loss",
        "value": "nan",
        "baseline": None,
    }


@pytest.mark.parametrize("name", [*CASES, *SINGLE])
def test_every_page_is_readable(name: str) -> None:
    """No line is too wide, no place is left open, and the phases are there in order."""
    case: Case = (CASES | SINGLE)[name]
    text = str(diagnose(case.records(0), healthy(300, 7)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 79
    assert "{" not in text.replace('batch={"time"', "")
    assert [line[:2] for line in lines if line[:1].strip()] == ["A.", "B.", "C.", "D."]


def test_a_page_with_a_baseline(log: str, tmp_path: Path, capsys: Capture) -> None:
    good = saved(tmp_path / "good.jsonl", healthy(1200, 7), garbage="torn")
    assert main(["diagnose", log, "--baseline", good]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{log}: 1,200 records, steps 0 to 1199\n{good}: 1,200 records")
    assert "                                               this log      baseline\n" in out
    assert err == f"{good}, line 1201: skipped, not a record: Expecting value (character 1)\n"


WRONG = {
    "diagnose": "the following arguments are required: LOG",
    "diagnose {missing}": "cannot read '{missing}': No such file or directory",
    "diagnose {empty}": "there are no records in '{empty}'\n",
    "diagnose {garbage} --json": "there are no records in '{garbage}': no line of it is a record\n",
    "diagnose {log} --baseline": "argument --baseline: expected one argument",
    "diagnose {log} --baseline {missing}": "cannot read '{missing}': No such file or directory",
    "diagnose {log} --baseline {garbage}": "there are no records in '{garbage}': no line of it",
    "diagnose {log} --good {log}": "unrecognized arguments: --good {log}",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_input_is_one_line_and_status_2(
    arguments: str, log: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_text("nonsense\n[]\n\n" * 30)
    names = ("missing", "empty", "garbage")
    paths = {name: str(tmp_path / name) for name in names} | {"log": log}
    require_refused(arguments.format(**paths), WRONG[arguments].format(**paths), capsys)


def test_works_where_there_is_no_torch(log: str, tmp_path: Path) -> None:
    text = """raise ModuleNotFoundError("No module named 'torch'", name="torch")\n"""
    (tmp_path / "torch.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "fastclip", "diagnose", log, "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["symptom"] == "gradient"
