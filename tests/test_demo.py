"""The demonstration: the loss-spike experiment's values, and the digits."""

import json
import math
import subprocess
import sys
from decimal import ROUND_HALF_UP, Context, Decimal

import pytest
import torch

from fastclip.cli import main
from fastclip.commands import demo, demo_digits, demo_experiment
from fastclip.commands.demo_digits import Data, Result
from fastclip.commands.demo_experiment import MODES, Row

# As published, each number with the digits it was given with: mode, step, loss, norm, weight.
TABLE = [
    ("fp16 + GradScaler", 5, "0.0415578", "0.407715", "0.195693"),
    ("fp16 + GradScaler", 6, "inf", "inf", "0.195693"),
    ("fp16 + GradScaler", 7, "0.0382902", "0.391357", "0.187866"),
    ("bf16, no clipping", 5, "0.0416574", "0.408203", "0.195703"),
    ("bf16, no clipping", 6, "3.78536e8", "3.892314e9", "-7.784628e7"),
    ("bf16, no clipping", 7, "6.02093e15", "1.551892e8", "-7.474250e7"),
    ("bf16 + clip 1.0", 6, "3.78536e8", "3.892314e9", "0.175703"),
    ("bf16 + clip 1.0", 7, "0.0308990", "0.351563", "0.168672"),
]


def significant(text: str) -> int:
    return len(text.split("e")[0].lstrip("-0.").replace(".", ""))


def same(value: float, text: str) -> bool:
    """Whether `value`, rounded to the digits that `text` has, is `text`."""
    rounding = Context(prec=significant(text), rounding=ROUND_HALF_UP)
    return rounding.create_decimal(value) == Decimal(text)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], Row]:
    return {(row.mode, row.step): row for mode in MODES for row in demo_experiment.run(mode)}


@pytest.mark.parametrize(("mode", "step", "loss", "norm", "weight"), TABLE)
def test_experiment_gives_the_published_values(
    mode: str,
    step: int,
    loss: str,
    norm: str,
    weight: str,
    rows: dict[tuple[str, int], Row],
) -> None:
    row = rows[mode, step]
    assert same(row.loss, loss), row
    assert same(row.norm, norm), row
    assert same(row.weight, weight), row


def test_the_comparison_can_fail() -> None:
    assert significant("0.0308990") == 6
    assert significant("-7.474250e7") == 7
    assert same(0.03089904785, "0.0308990")
    assert not same(0.0308996, "0.0308990")
    assert not same(math.inf, "3.78536e8")


def test_only_the_scalers_bad_step_is_skipped(rows: dict[tuple[str, int], Row]) -> None:
    assert len(rows) == len(MODES) * demo_experiment.STEPS
    assert [key for key, row in rows.items() if row.skipped] == [("fp16 + GradScaler", 6)]
    before, bad = (rows["fp16 + GradScaler", step] for step in (5, 6))
    assert bad.weight == before.weight  # bitwise


def test_clipping_does_not_get_in_the_scalers_way(rows: dict[tuple[str, int], Row]) -> None:
    """unscale_, clip, step, update with a threshold that binds nowhere: the same run."""
    clipped = demo_experiment.run(MODES[0]._replace(max_norm=1.0))
    assert clipped == [row for row in rows.values() if row.mode == MODES[0].name]


def test_experiment_is_repeatable_and_leaves_the_random_state(
    rows: dict[tuple[str, int], Row],
) -> None:
    state = torch.get_rng_state()
    again = demo_experiment.run(MODES[1])
    assert again == [row for row in rows.values() if row.mode == MODES[1].name]
    assert torch.equal(torch.get_rng_state(), state)


def test_experiment_text(rows: dict[tuple[str, int], Row]) -> None:
    text = demo.experiment_text(list(rows.values()))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert ["6", "inf", "inf", "0.1956933", "skipped"] in words
    assert ["6", "3.785359e+08", "3.892314e+09", "-7.784628e+07"] in words
    assert ["7", "0.03089905", "0.3515625", "0.1686719"] in words
    assert "the weight goes to -7.78e+07" in text


@pytest.fixture(scope="module")
def data() -> Data:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    return demo_digits.load()


@pytest.fixture(scope="module")
def results(data: Data) -> list[Result]:
    return [demo_digits.train(setting, data) for setting in demo_digits.SETTINGS]


def test_digits_data(data: Data) -> None:
    assert (len(data.train_x), len(data.test_x)) == (1437, 360)
    assert (data.train_x.min().item(), data.train_x.max().item()) == (0.0, 1.0)
    assert set(data.test_y.tolist()) == set(range(10))


def test_clipping_saves_the_digits(results: list[Result]) -> None:
    clean, unclipped, clipped = results
    assert clean.final > 0.95
    assert unclipped.before == clean.before  # the same run up to the bad batch
    assert unclipped.after < 0.3
    assert unclipped.final < 0.2  # ten classes: this is guessing
    assert clipped.after > clipped.before - 0.1
    assert clipped.final > 0.95


def test_the_bad_step_stands_out(results: list[Result]) -> None:
    _, unclipped, _ = results
    stats = unclipped.stats_bad
    names = [
        f"{layer}.{kind}" for layer in ("hidden1", "hidden2", "head") for kind in ("weight", "bias")
    ]
    assert list(stats.names) == names
    assert stats.worst(1)[0].name == "head.weight"
    before, bad = unclipped.stats_before.total_norm.item(), stats.total_norm.item()
    assert bad > 1000 * before
    combined = math.sqrt(sum(layer.norm**2 for layer in stats.layers()))
    assert bad == pytest.approx(combined, rel=1e-6)


def test_training_is_repeatable_and_leaves_no_trace(data: Data, results: list[Result]) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    again = demo_digits.train(demo_digits.SETTINGS[2], data)
    assert again[:4] == results[2][:4]
    assert again.stats_bad.as_dict() == results[2].stats_bad.as_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_digits_text(results: list[Result]) -> None:
    text = demo.digits_text(results)
    assert max(map(len, text.splitlines())) <= 80
    assert str(results[1].stats_bad) in text
    assert "head.weight stood out: its norm, " in text
    assert "the fault is in the inputs" in " ".join(text.split())
    assert f"{results[1].final:.1%}" in text


def test_no_verdict_on_an_ordinary_step(results: list[Result]) -> None:
    assert "fault" not in demo.digits_text([results[0]] * 3)


@pytest.mark.parametrize("arguments", [["demo"], ["demo", "--json"]])
def test_demo_without_scikit_learn(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # what makes `import sklearn` fail
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(arguments) == 2
    out, errors = capsys.readouterr()
    last = errors.splitlines()[-1]
    assert last.startswith("fastclip: the digits need scikit-learn")
    assert 'pip install "torch-fastclip[demo]"' in last
    if "--json" in arguments:
        document = json.loads(out)
        assert len(document["experiment"]) == 36
        assert document["digits"] is None
    else:
        assert "bf16 + clip 1.0" in out


def refuse(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


def test_demo_json_is_one_document(results: list[Result]) -> None:

    done = subprocess.run(
        [sys.executable, "-m", "fastclip", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0
    document = json.loads(done.stdout, parse_constant=refuse)
    bad = next(row for row in document["experiment"] if row["skipped"])
    assert (bad["mode"], bad["step"], bad["norm"]) == ("fp16 + GradScaler", 6, "inf")
    assert [run["run"] for run in document["digits"]] == [result.name for result in results]
    assert document["digits"][1]["worst"] == "head.weight"
    assert document["digits"][2]["accuracy_final"] == results[2].final
    assert done.stderr.splitlines()[-1] == "[6/6] digits, bad batch, clipped to 1.0: 20 epochs"
