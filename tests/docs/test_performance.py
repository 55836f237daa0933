"""Every number of docs/performance.md is that of a CSV under benchmarks/results."""

import csv
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from benchmarks.lines import fit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
TEXT = " ".join(PAGE.split())

Row = dict[str, str]

CLIPS = (
    *("gpt2-small-float32", "gpt2-small-bfloat16", "gpt2-small-float16", "gpt2-small-mixed"),
    *("gpt2-small-float32-clipped", "gpt2-small-bfloat16-clipped", "gpt2-small-float16-clipped"),
    *("gpt2-small-float32-inf", "gpt2-xl-bfloat16", "gpt2-xl-bfloat16-clipped"),
    *("moe-20k/256-bfloat16", "moe-20k/256-bfloat16-clipped"),
    *("2000x1024-float32-warm", "2000x1024-float32-clipped-warm", "2000x1-float32-warm"),
    *("statistics-gpt2-small", "amp-float32-clipped", "amp-float16-clipped"),
)
STEPS = (
    *("step-adamw-read", "step-adamw-read-clipped", "rule-zclip-fixed", "rule-logz-fixed"),
    *("rule-autoclip-fixed", "rule-adagc-fixed", "rule-agc-fixed", "read-rate"),
)


@cache
def rows(name: str) -> tuple[Row, ...]:
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


def only(file: str, **values: str) -> Row:
    (found,) = (r for r in rows(file) if all(r[key] == value for key, value in values.items()))
    return found


def ours(name: str) -> Row:
    return only("suite", name=name, side="fastclip")


def digits(value: str | float, n: int = 3) -> str:
    """`n` significant ones, with thousands apart."""
    rounded = float(f"{float(value):.{n - 1}e}")
    whole = len(str(int(abs(rounded)))) if abs(rounded) >= 1 else 0
    decimals = max(0, n - whole)
    return f"{rounded:,.{decimals}f}"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marked = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in marked) + "\n"


def clips() -> str:
    lines = []
    for name in CLIPS:
        row = ours(name)
        spread = f"{digits(row['ratio_p20'])} to {digits(row['ratio_p80'])}"
        share, best = "host", ""
        if row["of_floor"]:
            share, best = f"{float(row['of_floor']):.0%}", digits(row["limit"])
        lines.append([f"`{name}`", digits(row["ratio"]), spread, digits(row["ms"]), share, best])
    return table(
        ["row", "torch / fastclip", "20th to 80th", "ms", "of the limit", "best possible"], lines
    )


def steps() -> str:
    lines = []
    for name in STEPS:
        row = ours(name)
        cost = 1 / float(row["ratio"])
        spread = f"{1 / float(row['ratio_p80']):.2f} to {1 / float(row['ratio_p20']):.2f}"
        lines.append([f"`{name}`", row["baseline"], f"{cost:.2f}", spread])
    return table(["row", "beside", "fastclip takes", "20th to 80th"], lines)


def scaling(sweep: str, side: str, clips: bool = False) -> dict[int, Row]:
    key = "n_tensors" if sweep == "tensors" else "n_bytes"
    return {
        int(row[key]): row
        for row in rows("scaling")
        if (row["sweep"], row["side"], row["clips"]) == (sweep, side, str(clips))
    }


def tensors() -> str:
    torch, fastclip = scaling("tensors", "torch"), scaling("tensors", "fastclip")
    lines = [
        [f"{n:,}", digits(torch[n]["us"]), digits(fastclip[n]["us"]), digits(row["ratio"])]
        for n, row in fastclip.items()
        if n in (1, 100, 1000, 10_000, 100_000)
    ]
    return table(["tensors", "torch, us", "fastclip, us", "torch / fastclip"], lines)


def sizes() -> str:
    lines = []
    sides = ("sum", "aminmax", "mul_")
    probes = {side: scaling("bytes", side) for side in sides}
    clipped = scaling("bytes", "fastclip", clips=True)
    for n, row in scaling("bytes", "fastclip").items():
        if n >= 1 << 20:
            read = min(float(probes[side][n]["us"]) for side in ("sum", "aminmax"))
            rates = [n / 1e3 / each for each in (float(row["us"]), read)]
            ratios = [digits(one["ratio"]) for one in (row, clipped[n])]
            size = f"{n >> 20:,} MiB" if n < 1 << 30 else f"{n >> 30} GiB"
            lines.append([size, *(digits(rate) for rate in rates), *ratios])
    header = ["gradients", "GB/s", "torch's best read", "torch / fastclip", "the same, clipped"]
    return table(header, lines)


def training() -> str:
    lines = []
    for row in rows("training"):
        clip = [digits(row["clip_ms"]), f"{float(row['clip_share']):.1%}"] if row["clip_ms"] else []
        lines.append([row["variant"], digits(row["step_ms"], 4), *(clip or ["", ""])])
    return table(["a step with", "ms", "of it clipping, ms", "share"], lines)


def watching() -> str:
    lines = [
        [
            f"`observe`, {int(row['layers_of_model']):,} gradients",
            "telemetry",
            digits(row["observe"]),
        ]
        for row in rows("telemetry")
    ]
    lines += [
        [f"sink `{row['sink']}`, {what[row['record']]}", "sinks", digits(row["us"])]
        for what in [{"numbers": "a record", "layers": "one with rows of layers"}]
        for row in rows("sinks")
        if row["sink"] in ("JSONL", "TensorBoard", "WandB")
    ]
    lines.append(
        ["`Recovery.handle`, no event", "recovery", digits(rows("recovery")[0]["handle_us"])]
    )
    return table(["each step", "CSV", "us on the host"], lines)


def watches() -> str:
    lines = [
        [f"{row['task']}, {row['side'].removeprefix('watched, ')}", digits(row["over_plain"])]
        for row in rows("watches")
        if row["side"] != "plain"
    ]
    return table(["what is watched", "over the same, not watched"], lines)


def recovery() -> str:
    lines = [
        [row["millions"], digits(row["mb"]), *(digits(row[each]) for each in SAVED)]
        for row in rows("recovery")
    ]
    return table(["million parameters", "MB", *SAVED], lines)


SAVED = ("sync", "stall", "write", "load")


def processes() -> str:
    lines = [
        [
            *(row["title"], row["ranks"], digits(row["ratio"])),
            *(row["fastclip_collectives"], f"{int(row['fastclip_bytes']):,}"),
        ]
        for row in rows("distributed")
    ]
    return table(["what", "ranks", "baseline / fastclip", "collectives", "bytes"], lines)


def plan() -> str:
    lines = [
        [f"{int(row['gradients']):,}", *(digits(row[each]) for each in ("hit", "moved", "new"))]
        for row in rows("plan")
        if row["gradients"] in ("1", "148", "1000", "5000")
    ]
    return table(["gradients", "where they were, us", "moved, us", "new sizes, us"], lines)


TABLES: tuple[Callable[[], str], ...] = (
    *(clips, steps, tensors, sizes, training, watching, watches, recovery, processes, plan),
)


@pytest.mark.parametrize("made", TABLES, ids=lambda made: made.__name__)
def test_the_page_has_the_table_of_the_csv(made: Callable[[], str]) -> None:
    assert made() in PAGE


def test_what_is_said_in_short() -> None:
    names = [f"gpt2-small-{each}" for each in ("float32", "float16")]
    free, acting = ([digits(ours(n + end)["ratio"]) for n in names] for end in ("", "-clipped"))
    assert f"{free[0]} times as long in float32 and {free[1]} times in float16" in TEXT
    assert f"{acting[0]} and {acting[1]} times when it has" in TEXT


def test_the_lines_through_the_tensors() -> None:
    said = []
    for side in ("fastclip", "torch"):
        points = scaling("tensors", side)
        line = fit(list(points), [float(row["us"]) for row in points.values()])
        said += [digits(line.fixed), digits(line.slope)]
    fixed, slope, torch_fixed, torch_slope = said
    assert f"costs fastclip {fixed} us a call and {slope} us a tensor" in TEXT
    assert f"torch {torch_fixed} and {torch_slope} (" in TEXT


def test_one_thread() -> None:
    row = only("scaling", sweep="threads", side="fastclip", clips="True", threads="1")
    assert f"On one thread a clip of GPT-2 small that acts is {digits(row['ratio'])[:-1]}" in TEXT


def test_memory() -> None:
    used = [row["extra_bytes"] for row in rows("suite") if row["side"] == "fastclip"]
    assert f"took at most {max(int(each) for each in used if each) >> 10} KiB of memory" in TEXT


def test_the_training_run() -> None:
    first, *others = rows("training")
    assert f"A GPT of {int(first['parameters']) / 1e6:.1f} million parameters" in TEXT
    assert f"{first['tokens']} characters a step" in TEXT
    farthest = max(float(row["farthest_from_torch"]) for row in others)
    assert f"losses agree within {farthest:.5f}." in TEXT


def test_what_torch_leaves_unused() -> None:
    for name in ("gpt2-small-float16", "gpt2-small-float32-inf"):
        sides = [row for row in rows("suite") if row["name"] == name]
        assert all(float(r["of_floor"]) < 0.1 for r in sides if r["side"].startswith("torch"))
    assert "float16 and infinity norms at less than a tenth of what memory allows" in TEXT


def test_a_clip_adds_no_collective_to_ddp() -> None:
    steps = [row for row in rows("distributed") if row["name"].startswith("ddp")]
    assert len(steps) == 6
    assert all(row["baseline_collectives"] == row["fastclip_collectives"] for row in steps)


def test_rows_of_layers_in_the_log() -> None:
    row = only("sinks", sink="JSONL", record="layers")
    assert f"those of the log come to {float(row['us']) / 100:.0f} us a step" in TEXT


def test_what_is_said_of_losses_is_in_the_tables() -> None:
    agc, read = (1 / float(ours(name)["ratio"]) for name in ("rule-agc-fixed", "read-rate"))
    assert f"reads gradients and parameters: {agc:.2f} times a fixed threshold" in TEXT
    assert f"reads are {read:.2f} times torch's best" in TEXT


def test_the_pictures_are_those_of_the_csvs() -> None:
    assert all(f"(speed-{name}.svg)" in PAGE for name in ("ratio", "bandwidth", "host", "training"))


def test_the_machine_of_all_figures() -> None:
    names = ("suite", "scaling", "training", "telemetry", "sinks", "watches", "recovery", "plan")
    for name in (*names, "distributed"):
        threads = "1" if name in ("telemetry", "plan", "distributed") else "2"
        for row in rows(name):
            about = row["cpu"], row["cores"], row["simd"], row["last_level_cache"], row["torch"]
            assert about == ("AMD EPYC", "2", "AVX512", "L3 32768K", "2.13.0+cpu")
            assert row["threads"] == threads or row.get("sweep") == "threads"


def test_bytes_are_what_the_rows_say() -> None:
    for name in CLIPS:
        row = ours(name)
        passes = int(row["reads"]) + 2 * int(row["writes"])  # what is written is read before
        assert passes == (3 if row["clips"] == "True" else 1)


def test_the_lists() -> None:
    small, large, moe = (
        ours(f"{name}-bfloat16") for name in ("gpt2-small", "gpt2-xl", "moe-20k/256")
    )
    elements = int(small["n_bytes"]) / 2e6
    assert f"GPT-2 small has {small['n_tensors']} tensors and {elements:.0f} million" in TEXT
    assert f"XL {int(large['n_bytes']) / 2e9:.2f} billion" in TEXT
    assert f"(`moe`) {int(moe['n_tensors']):,} tensors" in TEXT
