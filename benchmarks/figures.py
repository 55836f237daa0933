"""What each picture shows, from the rows of a CSV. No torch; matplotlib is imported in `style`."""

from collections.abc import Sequence
from typing import Any

from benchmarks import style
from benchmarks.lines import fit
from benchmarks.records import Row, clips, number

OURS = "fastclip"
READS, SCALE = ("sum", "aminmax"), "mul_"
PANELS = ("not clipped", "clipped")
# A cache that still holds a part of what was read lets a clip exceed the second.
LIMITS = ("limit: torch's best read", "reference: that, then its mul_")
RANGE = "from the 20th to the 80th percentile"


def ratio(rows: Sequence[Row]) -> Any:
    """torch's time over fastclip's by workload and dtype, beside what memory allows."""
    rows = [row for row in rows if row["ratio"] and row["clips"] and row["workload"]]
    rows = [row for row in rows if row["side"].startswith(OURS)]
    rows = [row for row in rows if not row["name"].startswith("amp-")]  # of the same lists
    names = list(dict.fromkeys(map(_workload, rows)))
    figure, panels = style.panels(2, height=1.2 + 0.36 * len(names))
    for clipped, axes in zip((False, True), panels, strict=True):
        axes.grid(visible=False)
        axes.grid(axis="x", **style.GRID)
        axes.axvline(1, color=style.TEXT, linewidth=1)
        for place in range(1, len(names)):
            axes.axhline(place - 0.5, **style.GRID)
        shown = [row for row in rows if clips(row) == clipped]
        for row in shown:
            _ratio_mark(axes, row, names.index(_workload(row)))
        axes.set_xscale("log", base=2)
        axes.set_title(PANELS[clipped])
        axes.set_xlabel("torch's time / fastclip's")
    ends = [number(row, end) for row in rows for end in ("ratio_p20", "ratio_p80")]
    high = style.ratio_axis(panels, min(ends), max(ends))
    for row in rows:
        _limit_mark(panels[clips(row)], row, names.index(_workload(row)), high)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.45, -0.55)
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    sides, limits = dict.fromkeys(row["side"] for row in rows), any(row["limit"] for row in rows)
    style.ratio_legend(figure, list(dtypes), list(sides), limits)
    style.caption(figure, rows, f"dots: medians; bars: {RANGE}")
    return figure


def _workload(row: Row) -> str:
    """What a line is called: the list, and what is special about the row."""
    special = ", cached" * (row.get("warm") == "True") + ", inf norm" * row["name"].endswith("-inf")
    return row["workload"] + special


def _ratio_mark(axes: Any, row: Row, place: int) -> None:
    """A dot on the stretch from the 20th to the 80th percentile."""
    look = style.DTYPES[row["dtype"]]
    y = place + look.offset
    low, middle, high = (number(row, end) for end in ("ratio_p20", "ratio", "ratio_p80"))
    axes.plot([low, high], [y, y], color=look.colour, linewidth=2, solid_capstyle="butt", alpha=0.6)
    face = "white" if row["side"] in style.HOLLOW else look.colour
    axes.plot(middle, y, "o", color=look.colour, markerfacecolor=face, markersize=5)


def _limit_mark(axes: Any, row: Row, place: int, high: float) -> None:
    """A tick; at the edge an arrow where the limit lies beyond it."""
    if not row["limit"]:
        return
    look, limit = style.DTYPES[row["dtype"]], number(row, "limit")
    beyond = limit > high
    axes.plot(
        min(limit, high * 0.97),
        place + look.offset,
        marker=">" if beyond else "|",
        markersize=3 if beyond else 7,
        color=look.colour,
    )


def bandwidth(rows: Sequence[Row]) -> Any:
    """GB/s of gradients against their bytes, not clipped and clipped, under what torch's own
    operations reach on as many bytes."""
    rows = [row for row in rows if row["sweep"] == "bytes"]
    figure, panels = style.panels(2, height=3.3)
    read = _best(rows, READS)
    scale = _best(rows, (SCALE,))
    limits = (read, {n: 1 / (1 / read[n] + 1 / scale[n]) for n in read})
    for clipped, axes, limit in zip((False, True), panels, limits, strict=True):
        name = LIMITS[clipped]
        axes.plot(*zip(*sorted(limit.items()), strict=True), label=name, **style.LIMIT)
        for side, chosen in _sides(rows, clipped).items():
            xs = [number(row, "n_bytes") for row in chosen]
            ends = ("us", "us_p80", "us_p20")  # the longest time is the lowest rate
            middle, low, high = (
                [x / number(row, end) / 1e3 for x, row in zip(xs, chosen, strict=True)]
                for end in ends
            )
            _curve(axes, side, xs, middle, low, high)
        axes.set_title(PANELS[clipped])
        axes.set_xlabel("bytes of all gradients, float32, four tensors")
        axes.set_ylabel("bytes of gradients / time (GB/s)")
        style.byte_axis(axes)
        style.legend(axes, loc="upper left")
    panels[0].set_ylim(bottom=0)
    style.caption(figure, rows, f"lines: medians; bands: {RANGE}")
    return figure


def host(rows: Sequence[Row]) -> Any:
    """Microseconds a call against the number of tensors, so small that the host decides."""
    rows = [row for row in rows if row["sweep"] == "tensors"]
    field = "host_us" if "host_us" in rows[0] else "us"
    figure, panels = style.panels(2, height=3.3)
    for clipped, axes in zip((False, True), panels, strict=True):
        for side, chosen in _sides(rows, clipped).items():
            xs = [number(row, "n_tensors") for row in chosen]
            middle, low, high = (
                [number(row, field + end) for row in chosen] for end in ("", "_p20", "_p80")
            )
            line = fit(xs, middle)
            words = f"{side}: {line.fixed:.0f} us + {line.slope:.2f} us a tensor"
            _curve(axes, side, xs, middle, low, high, label=words)
        axes.set_title(PANELS[clipped])
        style.plain_log(axes)
        axes.set_xlabel("tensors of 16 elements, float32")
        style.legend(axes, loc="upper left")
    panels[0].set_ylabel("one call (us)")
    style.caption(figure, rows, f"lines: medians; bands: {RANGE}")
    return figure


def training(summary: Sequence[Row], curves: Sequence[Row]) -> Any:
    """Step time by variant, and the losses of all of them on top of each other."""
    figure, (left, right) = style.panels(2, height=3.4, share_y=False)
    for place, row in enumerate(summary):
        _step_bar(left, row, place)
        steps = [one for one in curves if one["variant"] == row["variant"]]
        right.plot(
            [number(one, "step") for one in steps],
            [number(one, "loss") for one in steps],
            color=style.VARIANTS[place],
            linestyle=style.DASHES[place],
            linewidth=4.5 - 1.2 * place,  # what lies below stays visible
            label=row["variant"],
        )
    left.set_yticks(range(len(summary)), map(_step_label, summary))
    left.invert_yaxis()
    left.set_xlabel("one training step (ms); dark: clipping")
    left.grid(visible=False)
    left.grid(axis="x", **style.GRID)
    right.set_xlabel("step")
    right.set_ylabel("training loss (nats per character)")
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    style.caption(figure, summary, f"bars: medians; whiskers: {RANGE}")
    return figure


def _step_bar(axes: Any, row: Row, place: int) -> None:
    """The whole step, its end dark for what clipping adds, and how far the 20th and the 80th
    percentile are. A difference below nothing is noise: it is written beside it, and has no bar."""
    step, colour = number(row, "step_ms"), style.VARIANTS[place]
    clip = max(0.0, number(row, "clip_ms")) if row["clip_ms"] else 0.0
    axes.barh(place, step - clip, color=colour, alpha=0.35, height=0.7)
    axes.barh(place, clip, left=step - clip, color=colour, height=0.7)
    ends = [[step - number(row, "step_ms_low")], [number(row, "step_ms_high") - step]]
    axes.errorbar(step, place, xerr=ends, color=style.TEXT, linewidth=1, capsize=2)


def _step_label(row: Row) -> str:
    """The numbers beside the bar, as the printed table has them."""
    lines = [row["variant"], f"{number(row, 'step_ms'):.1f} ms"]
    if row["clip_ms"]:
        clip, share = number(row, "clip_ms"), number(row, "clip_share")
        lines.append(f"clipping {clip:.2f} ms, {share:.1%}")
    return "\n".join(lines)


def _sides(rows: Sequence[Row], clipped: bool) -> dict[str, list[Row]]:
    """The rows of those that clip, by name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["ratio"] and clips(row) == clipped:
            found.setdefault(row["side"], []).append(row)
    return found


def _best(rows: Sequence[Row], names: tuple[str, ...]) -> dict[float, float]:
    """The best rate of torch's operations `names` by bytes, in GB/s."""
    best: dict[float, float] = {}
    for row in rows:
        if row["side"] in names:
            n_bytes = number(row, "n_bytes")
            rate = n_bytes / number(row, "us") / 1e3
            best[n_bytes] = max(rate, best.get(n_bytes, 0.0))
    return best


def _curve(
    axes: Any,
    side: str,
    xs: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    label: str | None = None,
) -> None:
    """Medians, and the 20th to 80th percentiles behind them."""
    colour = style.colour(side)
    axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(xs, middle, color=colour, marker="o", markersize=3.5, label=label or side)
