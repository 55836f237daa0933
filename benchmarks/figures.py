"""What each picture shows, from the rows of a CSV. No torch; matplotlib is imported in `style`."""

from collections.abc import Sequence
from typing import Any

from benchmarks import style
from benchmarks.lines import fit
from benchmarks.records import Row, number

OURS = "fastclip"
READS, SCALE = ("sum", "aminmax"), "mul_"
PANELS = ("not clipped", "clipped")
KIB = 1 << 10


def ratio(rows: Sequence[Row]) -> Any:
    """torch's time over fastclip's by workload and dtype, beside what memory allows."""
    rows = [row for row in rows if row["sweep"] == "workloads" and row["side"].startswith(OURS)]
    names = list(dict.fromkeys(row["workload"] for row in rows))
    figure, panels = style.panels(2, height=1.3 + 0.42 * len(names))
    for clipped, axes in enumerate(panels):
        axes.grid(visible=False)
        axes.grid(axis="x", **style.GRID)
        axes.axvline(1, color=style.TEXT, linewidth=1)
        for place in range(1, len(names)):
            axes.axhline(place - 0.5, **style.GRID)
        shown = [row for row in rows if int(row["clipped"]) == clipped]
        for row in shown:
            _ratio_mark(axes, row, names.index(row["workload"]))
        axes.set_xscale("log", base=2)
        axes.set_title(PANELS[clipped])
        axes.set_xlabel("torch's time / fastclip's")
    ends = [number(row, end) for row in rows for end in ("ratio_low", "ratio_high")]
    high = style.ratio_axis(panels, min(ends), max(ends))
    for row in rows:
        _limit_mark(panels[int(row["clipped"])], row, names.index(row["workload"]), high)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.45, -0.55)
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    style.ratio_legend(figure, list(dtypes), list(dict.fromkeys(row["side"] for row in rows)))
    style.caption(figure, rows)
    return figure


def _ratio_mark(axes: Any, row: Row, place: int) -> None:
    """A dot on the stretch from the 20th to the 80th percentile."""
    look = style.DTYPES[row["dtype"]]
    y = place + look.offset
    low, middle, high = (number(row, end) for end in ("ratio_low", "ratio", "ratio_high"))
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
    for clipped, (axes, limit) in enumerate(zip(panels, limits, strict=True)):
        axes.plot(*zip(*sorted(limit.items()), strict=True), label="limit", **style.LIMIT)
        for side, chosen in _sides(rows, clipped).items():
            xs = [number(row, "n_bytes") for row in chosen]
            ends = ("us", "us_high", "us_low")  # the longest time is the lowest rate
            middle, low, high = (
                [x / number(row, end) / 1e3 for x, row in zip(xs, chosen, strict=True)]
                for end in ends
            )
            _curve(axes, side, xs, middle, low, high)
        axes.set_title(PANELS[clipped])
        axes.set_xlabel("bytes of all gradients, float32, four tensors")
        style.byte_axis(axes)
    panels[0].set_ylabel("gradients clipped (GB/s)")
    panels[0].set_ylim(bottom=0)
    style.legend(panels[0], loc="upper left")
    style.caption(figure, rows)
    return figure


def host(rows: Sequence[Row]) -> Any:
    """Microseconds a call against the number of tensors, so small that the host decides."""
    rows = [row for row in rows if row["sweep"] == "tensors"]
    field = "host_us" if "host_us" in rows[0] else "us"
    figure, panels = style.panels(2, height=3.3)
    for clipped, axes in enumerate(panels):
        for side, chosen in _sides(rows, clipped).items():
            xs = [number(row, "n_tensors") for row in chosen]
            middle, low, high = (
                [number(row, field + end) for row in chosen] for end in ("", "_low", "_high")
            )
            line = fit(xs, middle)
            words = f"{side}: {line.fixed:.0f} us + {line.slope:.2f} us a tensor"
            _curve(axes, side, xs, middle, low, high, label=words)
        axes.set_title(PANELS[clipped])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("tensors of 16 elements, float32")
        style.legend(axes, loc="upper left")
    panels[0].set_ylabel("one call (us)")
    style.caption(figure, rows)
    return figure


def training(summary: Sequence[Row], curves: Sequence[Row]) -> Any:
    """Step time by variant, and the losses of all of them on top of each other."""
    figure, (left, right) = style.panels(2, height=3.0, share_y=False)
    names = [row["variant"] for row in summary]
    for place, row in enumerate(summary):
        step = number(row, "step_ms")
        clip = number(row, "clip_ms") if row["clip_ms"] else 0.0
        colour = style.VARIANTS[place]
        left.barh(place, step - clip, color=colour, alpha=0.45, height=0.6)
        left.barh(place, clip, left=step - clip, color=colour, height=0.6)
        ends = [[step - number(row, "step_ms_low")], [number(row, "step_ms_high") - step]]
        left.errorbar(step, place, xerr=ends, color=style.TEXT, linewidth=1, capsize=2.5)
        share = f", {number(row, 'clip_share'):.1%} of it clipping" if row["clip_share"] else ""
        left.annotate(
            f"{step:.1f} ms{share}",
            (0, place),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=style.SMALL,
        )
        steps = [row for row in curves if row["variant"] == names[place]]
        right.plot(
            [number(row, "step") for row in steps],
            [number(row, "loss") for row in steps],
            color=colour,
            linestyle=style.DASHES[place],
            linewidth=4.5 - 1.2 * place,  # what lies below stays visible
            label=names[place],
        )
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("one training step (ms); dark: clipping")
    left.grid(axis="x", **style.GRID)
    right.set_xlabel("step")
    right.set_ylabel("training loss (nats per character)")
    style.legend(right, loc="upper right")
    style.caption(figure, summary)
    return figure


def _sides(rows: Sequence[Row], clipped: int) -> dict[str, list[Row]]:
    """The rows of those that clip, by name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["ratio"] and int(row["clipped"]) == clipped:
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
