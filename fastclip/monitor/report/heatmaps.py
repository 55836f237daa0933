"""Layers by steps, and the curve of clip rate against threshold, as figures of plotly."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastclip.monitor.report.figures import Figure
from fastclip.monitor.report.grid import Column, Grid, value_at
from fastclip.monitor.report.text import clean, label

ROWS = 60  # layers that are shown
LABEL = 40  # characters of a layer's name beside its row
NARROW = 16  # the same on a narrow screen
ROW_HEIGHT, AROUND = 18, 140  # pixels
DEEP = 3  # decades below the median of the norms: what is lower has the colour of the lowest above
FIRST_TICKS = -8  # decades: a share of non-finite elements below it takes the lightest colour


class Layers(NamedTuple):
    """Heat maps of a run; `shown` of `known` layers, and the layer at the top of each order."""

    norms: Figure | None
    nonfinite: Figure | None
    shown: int
    known: int
    merged: bool  # whether a column may be several steps
    faulty: tuple[str, ...]  # layers that were ever not finite, in the model's order
    attempts: bool  # whether labels of columns have attempts


def layers(grid: Grid) -> Layers | None:
    """None if the log has no layers."""
    columns = grid.columns()
    if not grid.rows:
        return None
    names = list(grid.rows)
    norms = [[value_at(column.norms, row) for column in columns] for row in range(len(names))]
    shares = [[value_at(column.nonfinite, row) for column in columns] for row in range(len(names))]
    labels = _labels(columns)
    with_norms = [row for row, values in enumerate(norms) if any(value >= 0 for value in values)]
    counted = [row for row, values in enumerate(shares) if any(value > 0 for value in values)]
    chosen = _chosen(with_norms, lambda row: (*_fault(norms[row], shares[row]), _rise(norms[row])))
    lost = _chosen(counted, lambda row: _fault(norms[row], shares[row]))
    return Layers(
        _norms([names[row] for row in chosen], labels, [norms[row] for row in chosen])
        if chosen
        else None,
        _nonfinite([names[row] for row in lost], labels, [shares[row] for row in lost])
        if lost
        else None,
        len(chosen),
        len(names) + len(grid.left_out),
        any(column.first != column.last for column in columns),
        tuple(grid.faulty()),
        any(text.endswith(")") for text in labels),
    )


def _chosen(rows: Sequence[int], badness: Callable[[int], Any]) -> list[int]:
    """The worst that fit, in the order of the model."""
    return sorted(sorted(rows, key=badness, reverse=True)[:ROWS])


def _fault(norms: Sequence[float], shares: Sequence[float]) -> tuple[int, float]:
    """How often a layer's norm was not finite, and the worst share of its elements."""
    return sum(norm == math.inf for norm in norms), max((s for s in shares if s > 0), default=0.0)


def _rise(norms: Sequence[float]) -> float:
    finite = [norm for norm in norms if 0 < norm < math.inf]
    return max(finite) / statistics.median(finite) if finite else 0.0


def _labels(columns: Sequence[Column]) -> list[str]:
    several = len({attempt for column in columns for attempt, _ in (column.first, column.last)}) > 1
    labels = []
    for column in columns:
        (attempt, first), (_, last) = column.first, column.last
        steps = str(first) if column.first == column.last else f"{first}-{last}"
        labels.append(f"{steps} ({attempt})" if several and attempt else steps)
    return labels


def _heat(names: Sequence[str], labels: list[str]) -> tuple[Figure, Figure]:
    """A trace without values, and a layout. The rows are in `trace["y"]`."""
    rows = [label(name, 120) for name in names]
    if len(set(rows)) < len(rows):  # where they were cut
        rows = [f"{place}: {row}" for place, row in enumerate(rows)]
    trace = {
        **{"type": "heatmap", "x": labels, "y": rows, "xgap": 0, "ygap": 1},
        "hoverongaps": False,
        "colorbar": {
            **{"orientation": "h", "y": 1, "yanchor": "bottom", "thickness": 10, "len": 1},
            **{"outlinewidth": 0, "ticklabelposition": "outside top"},
        },
    }
    layout = {
        "height": AROUND + ROW_HEIGHT * max(3, len(rows)),
        "xaxis": {  # without a title: plotly puts one among the labels, and captions tell
            **{"type": "category", "nticks": 8, "showgrid": False},
            **{"tickangle": 0, "range": [-0.5, len(labels) - 0.5]},
        },
        "yaxis": {
            **{"type": "category", "showgrid": False, "automargin": True},
            "range": [len(rows) - 0.5, -0.5],
            **{"tickmode": "array", "tickvals": rows},
            "ticktext": [label(short(name, LABEL)) for name in names],
        },
        "hovermode": "closest",
        "meta": {"heat": True, "narrow": [label(short(name, NARROW)) for name in names]},
    }
    return trace, layout


def short(name: str, length: int) -> str:
    """A layer's name cut to `length`: first its modules to their initials, then its beginning.

    >>> short("model.layers.10.self_attn.q_proj.weight", 20)
    'm.l.10.sa.q_proj'
    """
    parts = clean(name).split(".")
    if len(parts) > 1 and parts[-1] == "weight" and len(name) > length:
        del parts[-1]
    for place, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= length:
            break
        if not part.isdigit():
            parts[place] = "".join(word[0] for word in part.split("_") if word)
    cut = ".".join(parts)
    return cut if len(cut) <= length else f"…{cut[1 - length :]}"


def _log10(value: float) -> float | None:
    return round(math.log10(value), 3) if 0 < value < math.inf else None


def _norms(names: list[str], labels: list[str], values: list[list[float]]) -> Figure:
    trace, layout = _heat(names, labels)
    logs = [[_log10(value) for value in row] for row in values]
    known = [value for row in logs for value in row if value is not None]
    trace |= {
        "z": logs,
        "customdata": [[_shown(value) for value in row] for row in values],
        "colorscale": "Viridis",
        "hovertemplate": "%{y}<br>step %{x}<br>norm <b>%{customdata:.4~g}</b><extra></extra>",
    }
    if known:
        trace["zmin"], trace["zmax"] = _range(known)
        trace["colorbar"] |= _decades(trace["zmin"], trace["zmax"])
    lost = [
        (labels[x], trace["y"][y])
        for y, row in enumerate(values)
        for x, value in enumerate(row)
        if value == math.inf
    ]
    data = [trace]
    if lost:
        data.append(
            {
                **{"type": "scatter", "mode": "markers", "x": [x for x, _ in lost]},
                "y": [y for _, y in lost],
                "marker": {"symbol": "x", "size": 8, "color": "var(--critical)"},
                "hovertemplate": "%{y}<br>step %{x}<br>norm is not finite<extra></extra>",
            }
        )
    return {"data": data, "layout": layout}


def _nonfinite(names: list[str], labels: list[str], values: list[list[float]]) -> Figure:
    trace, layout = _heat(names, labels)
    trace |= {
        "z": [[_log10(value) for value in row] for row in values],
        "zmin": FIRST_TICKS,
        "zmax": 0,
        "customdata": [[_shown(value) for value in row] for row in values],
        "colorscale": [[0, "var(--scale-low)"], [1, "var(--critical)"]],
        "hovertemplate": "%{y}<br>step %{x}<br>share <b>%{customdata:.3~g}</b><extra></extra>",
    }
    trace["colorbar"] |= _decades(FIRST_TICKS, 0)
    return {"data": [trace], "layout": layout}


def _shown(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def lowest(norms: Figure) -> float | None:
    """The norm whose colour those below it have too; None if there are none below."""
    heat = norms["data"][0]
    known = [value for row in heat["z"] for value in row if value is not None]
    return 10 ** heat["zmin"] if known and min(known) < heat["zmin"] else None


def _range(known: Sequence[float]) -> tuple[float, float]:
    """Of colours, so that a layer whose gradient is next to nothing does not take most of it."""
    deep = statistics.median(known) - DEEP
    low, high = min(value for value in known if value >= deep), max(known)
    return (low, high) if low < high else (low - 1, high + 1)


def _decades(low: float, high: float) -> Figure:
    """Ticks of a colour bar whose scale is the decimal logarithm."""
    ticks = list(range(math.ceil(low), math.floor(high) + 1))
    stride = max(1, math.ceil(len(ticks) / 5))
    if len(ticks) < 2:
        exact = [low, (low + high) / 2, high]
        return {"tickvals": exact, "ticktext": [f"{10**tick:.2g}" for tick in exact]}
    chosen = ticks[::-1][::stride][::-1]
    texts = [f"{10**tick:g}" if -3 <= tick <= 3 else f"10<sup>{tick}</sup>" for tick in chosen]
    return {"tickvals": chosen, "ticktext": texts}


def calibration(curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]) -> Figure:
    """Clip rate against threshold, of runs with their name and colour."""
    data: list[dict[str, Any]] = []
    for name, color, curve in curves:
        data.append(
            {
                **{"type": "scatter", "mode": "lines+markers", "name": label(name)},
                "x": [float(f"{threshold:.6g}") for threshold, _ in curve],
                "y": [float(f"{rate:.6g}") for _, rate in curve],
                "line": {"color": color, "width": 1.6},
                "marker": {"color": color, "size": 8},
                "hovertemplate": "max_norm %{x:.6~g}<br>clips <b>%{y:.2%}</b>"
                + ("<extra>%{fullData.name}</extra>" if len(curves) > 1 else "<extra></extra>"),
            }
        )
    positive = all(threshold > 0 for _, _, curve in curves for threshold, _ in curve)
    rates = [0.001, 0.01, 0.1, 0.5]
    layout = {
        "xaxis": {"type": "log" if positive else "linear", "title": {"text": "max_norm"}},
        "yaxis": {
            **{"type": "log", "tickvals": rates, "ticktext": ["0.1%", "1%", "10%", "50%"]},
            **{"title": {"text": "steps clipped"}, "automargin": True},
        },
        "meta": {},
    }
    return {"data": data, "layout": layout}
