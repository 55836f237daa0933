"""The pictures show what the CSVs hold, with units, and are the same whenever they are drawn."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import figures, plots, style
from benchmarks.problems import RATES
from benchmarks.records import RESULTS, Row, read, write

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib, of the extra bench, is not installed", allow_module_level=True)

MACHINE = {
    "date": "2026-01-02T03:04Z",
    "commit": "abc1234",
    "cpu": "Some CPU",
    "cores": "2",
    "last_level_cache": "L3 32768K",
    "simd": "AVX2",
    "torch": "2.13.0",
    "threads": "2",
}
CAPTION = "Some CPU, 2 cores, L3 32 MiB, AVX2, 2 threads; torch 2.13.0, commit abc1234, 2026-01-02"


def race(name: str, side: str, clips: bool | str, ratio: float, **more: str) -> Row:
    workload, dtype, *_ = name.split("-")
    ends = {"ratio": f"{ratio}", "ratio_p20": f"{ratio * 0.9}", "ratio_p80": f"{ratio * 1.1}"}
    row = {"name": name, "side": side, "workload": workload, "dtype": dtype, "clips": str(clips)}
    return {**row, **ends, "limit": "3.0", "warm": "False", **more, **MACHINE}


def suite() -> list[Row]:
    return [
        race("gpt2-float32", "fastclip", False, 2.5),
        race("gpt2-float32", "torch foreach", False, 1.0),
        race("gpt2-float32-clipped", "fastclip", True, 0.9),
        race("gpt2-float16", "fastclip", False, 7.0, limit="99"),
        race("small-float32-warm", "fastclip", False, 5.0, limit="", warm="True"),
        race("gpt2-float32-inf", "fastclip", False, 8.0),
        race("statistics-gpt2", "fastclip", "", 70.0),
        race("step-adamw", "fastclip", "", 70.0, workload=""),
    ]


def point(sweep: str, side: str, clips: bool, count: int, n_bytes: int, us: float) -> Row:
    where = {"sweep": sweep, "side": side, "clips": str(clips), "n_tensors": str(count)}
    times = {"n_bytes": str(n_bytes), "us": f"{us}", "us_p20": f"{us / 2}", "us_p80": f"{us * 2}"}
    ratio = "" if side in RATES else "2.0"
    return {**where, **times, "ratio": ratio, **MACHINE}


def scaling() -> list[Row]:
    rows = []
    for clips in (False, True):
        for side, slow in (("torch", 2.0), ("fastclip", 1.0)):
            rows += [
                point("tensors", side, clips, n, 64 * n, slow * (10 + n)) for n in (1, 10, 1000)
            ]
            rows += [point("bytes", side, clips, 4, n, slow * n / 1e4) for n in (1 << 10, 1 << 30)]
    rows += [
        point("bytes", side, False, 1, n, n / 2e4) for side in RATES for n in (1 << 10, 1 << 30)
    ]
    return rows


def training() -> tuple[list[Row], list[Row]]:
    step = {"step_ms": "100", "step_ms_low": "98", "step_ms_high": "105"}
    nothing = {"clip_ms": "", "clip_share": ""}
    some = {"clip_ms": "8.0", "clip_share": "0.08"}
    below = {"clip_ms": "-0.5", "clip_share": "-0.005"}  # noise
    names = ("no clipping", "torch", "fastclip.clip_grad_norm_", "GradClipper.step")
    summary: list[Row] = [
        {"variant": name, **step, **clip, **MACHINE}
        for name, clip in zip(names, (nothing, some, some, below), strict=True)
    ]
    losses: list[Row] = [
        {"variant": name, "step": str(n), "loss": f"{5 - n}"} for n in range(3) for name in names
    ]
    return summary, losses


def texts(figure: object) -> str:
    """All that is written in it, line by line."""
    from matplotlib.text import Text

    found = figure.findobj(Text)  # type: ignore[attr-defined]
    return "\n".join(text.get_text() for text in found)


def sizes(path: Path) -> tuple[float, float]:
    """Width and height of an SVG in pixels, of which 96 are 72 points."""
    (opening,) = re.findall(r"<svg [^>]*>", path.read_text())
    found = {
        name: float(points) * 96 / 72
        for name, points in re.findall(r'(width|height)="([\d.]+)pt"', opening)
    }
    return found["width"], found["height"]


def written(folder: Path) -> Path:
    write(folder / "suite.csv", suite())
    write(folder / "scaling.csv", scaling())
    summary, curves = training()
    write(folder / "training.csv", summary)
    write(folder / "training-curves.csv", curves)
    return folder


# What is in them


def test_ratios_are_those_of_fastclip_by_workload_and_dtype_losses_too() -> None:
    figure = figures.ratio(suite())
    alone, clipped = figure.axes
    names = [label.get_text() for label in alone.get_yticklabels()]
    assert names == ["gpt2", "small, cached", "gpt2, inf norm"]
    dots = {
        float(line.get_xdata()[0])
        for axes in (alone, clipped)
        for line in axes.lines
        if line.get_marker() == "o"
    }
    assert dots == {2.5, 0.9, 7.0, 5.0, 8.0}
    assert [line.get_xdata()[0] for line in clipped.lines if line.get_marker() == "o"] == [0.9]
    for axes in (alone, clipped):
        assert axes.get_xlabel() == "torch's time / fastclip's"
        assert axes.get_xlim()[0] < 0.5
        assert any(list(line.get_xdata()) == [1, 1] for line in axes.lines)
    written = texts(figure)
    assert all(words in written for words in ("torch is faster", "what memory allows", CAPTION))


def test_a_limit_is_a_tick_and_beyond_the_edge_an_arrow() -> None:
    marks = {
        str(line.get_marker()): float(line.get_xdata()[0])
        for line in figures.ratio(suite()).axes[0].lines
        if line.get_marker() in ("|", ">")
    }
    assert marks["|"] == 3.0
    assert 8.0 < marks[">"] < 99


def test_without_limits_there_is_no_tick_and_no_word_of_it() -> None:
    figure = figures.ratio([{**row, "limit": ""} for row in suite()])
    assert "what memory allows" not in texts(figure)
    assert not any(line.get_marker() in ("|", ">") for axes in figure.axes for line in axes.lines)


def test_the_caption_names_every_commit_and_the_days() -> None:
    later = {**MACHINE, "commit": "def5678", "date": "2026-02-01T00:00Z"}
    assert style.about([later, MACHINE, later]).endswith(
        "torch 2.13.0, commit def5678 / abc1234, 2026-01-02 to 2026-02-01"
    )
    assert style.about([MACHINE, MACHINE]) == CAPTION


def test_bandwidth_is_bytes_over_time_under_the_limit_of_torchs_own_operations() -> None:
    alone, clipped = figures.bandwidth(scaling()).axes
    curves = {line.get_label(): list(line.get_ydata()) for line in alone.lines}
    assert curves["torch"] == pytest.approx([5.0, 5.0])
    assert curves["fastclip"] == pytest.approx([10.0, 10.0])
    assert curves["limit: torch's best read"] == pytest.approx([20.0, 20.0])
    limit = next(line for line in clipped.lines if "mul_" in line.get_label())
    assert list(limit.get_ydata()) == pytest.approx([10.0, 10.0])  # a read, then one in place
    assert alone.get_ylabel() == "bytes of gradients / time (GB/s)"
    assert clipped.get_ylabel() == alone.get_ylabel()
    ticks = [label.get_text() for label in alone.get_xticklabels()]
    assert ticks == ["1 KiB", "32 KiB", "1 MiB", "32 MiB", "1 GiB"]


def test_host_cost_has_its_fixed_part_and_its_slope() -> None:
    figure = figures.host(scaling())
    written = texts(figure)
    assert "fastclip: 10 us + 1.00 us a tensor" in written
    assert "torch: 20 us + 2.00 us a tensor" in written
    assert figure.axes[0].get_ylabel() == "one call (us)"


def test_host_cost_on_a_gpu_is_that_of_the_host() -> None:
    ends = {"host_us": "7", "host_us_p20": "6", "host_us_p80": "8", "card": "Some GPU"}
    rows = [{**row, **ends} for row in scaling()]
    figure = figures.host(rows)
    assert list(figure.axes[0].lines[0].get_ydata()) == [7.0] * 3
    assert "Some GPU; torch 2.13.0, commit abc1234, 2026-01-02" in texts(figure)


def test_training_has_the_time_of_a_step_and_the_losses_of_all() -> None:
    figure = figures.training(*training())
    left, right = figure.axes
    widths = [(bar.get_x(), bar.get_width()) for bar in left.patches]
    assert widths == [(0, 100), (100, 0), (0, 92), (92, 8), (0, 92), (92, 8), (0, 100), (100, 0)]
    for line in right.lines:
        assert list(line.get_ydata()) == [5, 4, 3]
    assert len(right.lines) == 4
    words = texts(figure)
    assert "100.0 ms\nclipping 8.00 ms, 8.0%" in words
    assert "clipping -0.50 ms, -0.5%" in words
    assert left.get_xlabel() == "one training step (ms); dark: clipping"
    assert right.get_ylabel() == "training loss (nats per character)"


# How they look


def contrast(first: str, second: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio, of colours as #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read_and_the_background_is_opaque(tmp_path: Path) -> None:
    assert contrast(style.TEXT, "#ffffff") > 7
    assert contrast(style.MUTED, "#ffffff") > 4.5
    style.save(figures.host(scaling()), tmp_path / "a.svg")
    assert "fill: #ffffff" in (tmp_path / "a.svg").read_text()


def test_they_are_as_wide_as_a_readme(tmp_path: Path) -> None:
    assert plots.main(["--results", str(written(tmp_path)), "--folder", str(tmp_path)]) == 0
    for picture in plots.PICTURES:
        width, height = sizes(tmp_path / f"{picture.name}.svg")
        assert width == pytest.approx(826, abs=2)
        assert 200 < height < 900


def test_drawing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    results = written(tmp_path)
    for folder in ("first", "second"):
        assert plots.main(["--results", str(results), "--folder", str(tmp_path / folder)]) == 0
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
    assert len(list((tmp_path / "first").iterdir())) == len(plots.PICTURES)


# The command


def status(arguments: Sequence[str]) -> object:
    with pytest.raises(SystemExit) as stop:
        plots.main(arguments)
    return stop.value.code


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("suite.csv", "make bench writes it"),
        ("scaling.csv", "make bench-scaling writes it"),
        ("training-curves.csv", "make bench-training writes it"),
    ],
)
def test_a_picture_of_nothing_is_one_clear_line(
    missing: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (written(tmp_path) / missing).unlink()
    out = tmp_path / "docs"
    assert status(["--results", str(tmp_path), "--folder", str(out)]) == 2
    assert f"{tmp_path / missing} does not exist: {words}" in capsys.readouterr().err
    assert not out.exists()


def test_a_card_that_was_not_measured_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(["--gpu", "gpu-none.csv"]) == 2
    assert "gpu-none.csv does not exist: make bench-gpu writes it" in capsys.readouterr().err


def test_without_matplotlib_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.plots.importlib.util.find_spec", lambda name: None)
    assert status([]) == 2
    assert "matplotlib, of the extra bench, is not installed" in capsys.readouterr().err


def test_drawing_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from benchmarks import plots;"
        f"plots.main(['--results', {str(written(tmp_path))!r}, '--folder', {str(tmp_path)!r}]);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# What is committed


@pytest.mark.parametrize("picture", plots.PICTURES, ids=lambda picture: picture.name)
def test_performance_shows_each_picture_as_its_csv_has_it(
    picture: plots.Picture, tmp_path: Path
) -> None:
    name = f"{picture.name}.svg"
    assert f"({name})" in (plots.DOCS / "performance.md").read_text()
    style.save(picture.draw(*(read(RESULTS / one) for one in picture.sources)), tmp_path / name)
    drawn = (tmp_path / name).read_text()
    assert drawn.count("<path") == (plots.DOCS / name).read_text().count("<path")
    assert sizes(tmp_path / name) == sizes(plots.DOCS / name)
