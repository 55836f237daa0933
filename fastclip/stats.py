"""What one read of the gradients says about them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastclip import table as tables
from fastclip.gradients import Gradients
from fastclip.ranks import Contributions, rank_stats, said
from fastclip.ranks import RankStats as RankStats

FIELDS = (
    *("names", "numel", "norms", "max_abs", "nan_count", "inf_count", "zero_count", "total_norm"),
    *("coef", "clipped", "skipped", "found_inf", "nonfinite_count", "threshold"),
)
SHOWN = 20  # rows of a printed table

By = Literal["norm", "max_abs", "nonfinite", "zero"]


class LayerStats(NamedTuple):
    """One row of `GradStats`, in Python numbers.

    Attributes:
        name: of the parameter, or its position.
        numel: elements.
        norm: of the order of the statistics.
        max_abs: the largest finite magnitude, 0 if there is none.
        nan: elements that are NaN.
        inf: elements that are infinite.
        zero: elements that are zero.
    """

    name: str
    numel: int
    norm: float
    max_abs: float
    nan: int
    inf: int
    zero: int


@dataclass(frozen=True, eq=False, repr=False)
class GradStats:
    """What `grad_stats` or a `GradClipper` measured, on the gradients' device until `cpu` is used.

    Of n gradients, all before clipping and without a loss scale:

    | attribute         | shape       | meaning                                                   |
    |-------------------|-------------|-----------------------------------------------------------|
    | `names`           | n str       | of the parameters, or positions "0", "1", ...             |
    | `numel`           | n int       | numbers of elements                                       |
    | `norms`           | ``[n]``     | ``sum(abs(x)**p) ** (1 / p)``, p the order `norm_type`    |
    | `max_abs`         | ``[n]``     | the largest finite magnitude, 0 if there is none          |
    | `nan_count`       | ``[n]``     | elements that are NaN                                     |
    | `inf_count`       | ``[n]``     | elements that are infinite                                |
    | `zero_count`      | ``[n]``     | elements that are zero                                    |
    | `total_norm`      | 0-d         | the same of all gradients as one vector                   |
    | `nonfinite_count` | 0-d         | elements that are NaN or infinite                         |
    | `threshold`       | 0-d, ``[n]``| what `coef` was computed from                             |
    | `coef`            | 0-d, ``[n]``| what gradients are multiplied by                          |
    | `clipped`         | 0-d bool    | whether a coefficient is under 1                          |
    | `skipped`         | 0-d bool    | whether the step was left out                             |
    | `found_inf`       | 0-d float32 | 1.0 where the step should not be taken as it is, else 0.0 |
    | `loss_scale`      | 0-d float32 | that a clipper's step took out, or None                   |
    | `inv_scale`       | 0-d float32 | 1 over it, or None                                        |

    `threshold` and `coef` are ``[n]`` of rules that clip each tensor. `threshold` is inf where a
    rule did not bind, or the rule's `max_norm` if it has one. Of a clipper with
    ``nonfinite="zero"``, `norms` and `total_norm` are of what is left, while the counts and
    `nonfinite` say what was found.

    `fastclip.grad_stats` decides nothing: there `coef` is 1, `threshold` inf, `clipped` and
    `skipped` are false, and `found_inf` tells whether an element is not finite.

    Norms, maxima and coefficients are float32, float64 where any gradient is; counts are int64.
    Nothing waits for the device but `cpu`. `layers`, `worst`, `nonfinite`, `by_rank`, `grouped` and
    `as_dict` are for an object on the host and raise `RuntimeError` elsewhere.

    Of gradients that several processes hold (DTensors, process groups) all this is of the whole
    tensors, and the same on every process; `by_rank` tells what each one held.
    """

    names: tuple[str, ...]
    numel: tuple[int, ...]
    table: Tensor
    norm_type: float
    total_norm: Tensor
    coef: Tensor
    threshold: Tensor
    clipped: Tensor
    skipped: Tensor
    found_inf: Tensor
    contributions: Contributions | None = None  # of several processes that made the table
    inv_scale: Tensor | None = None

    @classmethod
    def measured(
        cls, found: Gradients, table: Tensor, norm_type: float, dtype: torch.dtype
    ) -> "GradStats":
        """Statistics of gradients that nothing has been done to. `dtype` is that of the norms."""
        total = tables.total_norm(table, norm_type).to(dtype)
        if not found.names:
            total = torch.zeros_like(total)  # as clip_grad_norm_ returns, whatever the order
        false = torch.zeros((), dtype=torch.bool, device=table.device)
        return cls(
            found.names,
            found.numel,
            table,
            norm_type,
            total_norm=total,
            coef=torch.ones_like(total),
            threshold=torch.full_like(total, math.inf),
            clipped=false,
            skipped=false,
            found_inf=tables.found_nonfinite(table).to(torch.float32),
            contributions=found.contributions,
        )

    @classmethod
    def decided(
        cls,
        found: Gradients,
        table: Tensor,
        norm_type: float,
        dtype: torch.dtype,
        total: Tensor,
        coef: Tensor,
        threshold: Tensor,
        skipped: Tensor,
        found_inf: Tensor,
        inv_scale: Tensor | None = None,
    ) -> "GradStats":
        """Statistics of gradients that a clipper has decided about. `dtype` is that of the norms;
        the numbers may be in any."""
        clipped = coef < 1
        return cls(
            found.names,
            found.numel,
            table,
            norm_type,
            total_norm=total.to(dtype),
            coef=coef.to(dtype),
            threshold=threshold.to(dtype),
            clipped=clipped.any() if clipped.dim() else clipped,
            skipped=skipped,
            found_inf=found_inf.to(torch.float32),
            contributions=found.contributions,
            inv_scale=inv_scale,
        )

    @property
    def norms(self) -> Tensor:
        return tables.norms(self.table, self.norm_type).to(self.total_norm.dtype)

    @property
    def max_abs(self) -> Tensor:
        return self.table[:, tables.MAX_ABS].to(self.total_norm.dtype)

    @property
    def nan_count(self) -> Tensor:
        return self.table[:, tables.NAN].to(torch.int64)

    @property
    def inf_count(self) -> Tensor:
        return self.table[:, tables.INF].to(torch.int64)

    @property
    def zero_count(self) -> Tensor:
        return self.table[:, tables.ZERO].to(torch.int64)

    @property
    def nonfinite_count(self) -> Tensor:
        return self.table[:, tables.NAN : tables.INF + 1].sum().to(torch.int64)

    @property
    def loss_scale(self) -> Tensor | None:
        return None if self.inv_scale is None else self.inv_scale.reciprocal()

    def cpu(self) -> "GradStats":
        """The same on the host, by one packed copy; itself if it is there already."""
        if self._on_host:
            return self
        names = _TENSORS if self.inv_scale is None else (*_TENSORS, "inv_scale")
        parts = [getattr(self, name) for name in names]
        held = self.contributions
        parts.extend([] if held is None else (held.tables, held.present))
        packed = torch.cat([part.to(torch.float64).reshape(-1) for part in parts]).cpu()
        pieces = packed.split([part.numel() for part in parts])
        on_host = [
            piece.view(part.shape).to(part.dtype) for part, piece in zip(parts, pieces, strict=True)
        ]
        if held is not None:
            *on_host, every, present = on_host
            held = Contributions(held.ranks, every, present)
        return replace(self, contributions=held, **dict(zip(names, on_host, strict=True)))

    def layers(self) -> list[LayerStats]:
        """One `LayerStats` per gradient, in order."""
        self._require_host("layers()")
        columns = (self.norms, self.max_abs, self.nan_count, self.inf_count, self.zero_count)
        rows = zip(self.names, self.numel, *(c.tolist() for c in columns), strict=True)
        return [LayerStats(*row) for row in rows]

    def worst(self, k: int = 5, by: By = "norm") -> list[LayerStats]:
        """The `k` layers with the largest `by`: ``"norm"``, ``"max_abs"``, ``"nonfinite"``, the
        number of such elements, or ``"zero"``, the share of zeros.

        NaN comes before infinity and that before numbers; ties stay in order. Raises `ValueError`
        for another `by` and for a negative `k`.
        """
        keys: dict[str, Callable[[LayerStats], float]] = {
            "norm": lambda layer: layer.norm,
            "max_abs": lambda layer: layer.max_abs,
            "nonfinite": lambda layer: layer.nan + layer.inf,
            "zero": lambda layer: layer.zero / max(layer.numel, 1),
        }
        if by not in keys:
            raise ValueError(f"by must be one of {', '.join(map(repr, keys))}, got {by!r}")
        if k < 0:
            raise ValueError(f"k must be at least 0, got {k}")

        def rank(layer: LayerStats) -> tuple[bool, float]:
            value = keys[by](layer)
            return (False, 0.0) if math.isnan(value) else (True, -value)

        return sorted(self.layers(), key=rank)[:k]

    def nonfinite(self) -> list[str]:
        """The names of the gradients with a NaN or an infinity, in order; under
        ``nonfinite="zero"`` those that had one, though no norm shows it."""
        return [layer.name for layer in self.layers() if layer.nan or layer.inf]

    def by_rank(self) -> list[RankStats]:
        """What each process held, before it was combined with what the others did: its replicas and
        its shards. In one process, and with DDP, where gradients are averaged before they are seen,
        one entry, of this process.
        """
        self._require_host("by_rank()")
        held = {_this_rank(): self.table}
        if self.contributions is not None:
            ranks, every = self.contributions[:2]
            held = dict(zip(ranks, every, strict=True))
        p, dtype = self.norm_type, self.total_norm.dtype
        return [rank_stats(rank, own, self.names, p, dtype) for rank, own in held.items()]

    def grouped(self, depth: int | Callable[[str], str] = 1) -> "GradStats":
        """The same by module: gradients whose names agree in the first `depth` parts, or for which
        ``depth(name)`` is equal, become one row. A name of fewer parts stands for itself.

        A coefficient or threshold per tensor becomes the smallest of its group. Raises `ValueError`
        for a `depth` under 1.
        """
        self._require_host("grouped()")
        if not callable(depth) and depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        members: dict[str, list[int]] = {}
        for row, name in enumerate(self.names):
            key = depth(name) if callable(depth) else ".".join(name.split(".")[:depth])
            members.setdefault(key, []).append(row)
        groups = list(members.values())
        held = self.contributions
        if held is not None and groups:
            every = [self._grouped(table, groups) for table in held.tables]
            present = torch.stack([held.present[group].any() for group in groups])
            held = Contributions(held.ranks, torch.stack(every), present)
        return replace(
            self,
            contributions=held,
            names=tuple(members),
            numel=tuple(sum(self.numel[row] for row in group) for group in groups),
            table=self._grouped(self.table, groups) if groups else self.table,
            coef=_smallest(self.coef, groups),
            threshold=_smallest(self.threshold, groups),
        )

    def _grouped(self, table: Tensor, groups: Sequence[list[int]]) -> Tensor:
        return torch.stack([tables.combine(table[group], self.norm_type) for group in groups])

    def as_dict(self) -> dict[str, Any]:
        """Every field as plain Python values: lists, floats, ints and bools."""
        self._require_host("as_dict()")
        values = {name: getattr(self, name) for name in FIELDS}
        return {
            name: value.tolist() if isinstance(value, Tensor) else list(value)
            for name, value in values.items()
        }

    def __str__(self) -> str:
        if not self._on_host:
            return f"{self!r}: .cpu() brings it to the host"
        return _printed(self)

    def __repr__(self) -> str:
        return f"<GradStats of {len(self.names)} gradients on {self.table.device}>"

    @property
    def _on_host(self) -> bool:
        return all(getattr(self, name).device.type == "cpu" for name in _TENSORS)

    def _require_host(self, what: str) -> None:
        if not self._on_host:
            raise RuntimeError(
                f"{what} needs numbers on the host, and these statistics are on "
                f"{self.table.device}: call it on stats.cpu()"
            )


_TENSORS = ("table", "total_norm", "coef", "threshold", "clipped", "skipped", "found_inf")


def _smallest(values: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    if values.dim() == 0 or not groups:
        return values
    return torch.stack([values[list(group)].amin() for group in groups])


def _this_rank() -> int:
    distributed = torch.distributed
    initialised = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if initialised else 0


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _where(stats: GradStats) -> str:
    """Who holds elements that are not finite."""
    if stats.contributions is None:
        return ""
    ranks = {rank for row in stats.contributions.offenders() for rank in row}
    return f" (on {said(ranks)})" if ranks else ""


def _printed(stats: GradStats) -> str:
    kind = {2.0: "L2", 1.0: "L1", math.inf: "inf"}.get(stats.norm_type, f"p={stats.norm_type:g}")
    bad = int(stats.nonfinite_count)
    facts = [
        _counted(len(stats.names), "gradient"),
        _counted(sum(stats.numel), "element"),
        f"{kind} norm {float(stats.total_norm):.6g}",
        f"{_counted(bad, 'element')} not finite{_where(stats)}" if bad else "all finite",
    ]
    if stats.clipped:
        facts.append(f"clipped by {float(stats.coef.min()):.4g}")
    if stats.skipped:
        facts.append("step skipped")
    lines = [", ".join(facts)]
    layers = stats.layers() if len(stats.names) <= SHOWN else stats.worst(SHOWN)
    if not layers:
        return lines[0]
    width = min(max(len(layer.name) for layer in layers), 40)
    width = max(width, len("name"))
    lines.append(
        f"{'name':<{width}} {'elements':>13} {'norm':>11} {'max|x|':>11} "
        f"{'NaN':>7} {'inf':>7} {'zeros':>6}"
    )
    for layer in layers:
        name = layer.name if len(layer.name) <= width else "..." + layer.name[3 - width :]
        zeros = layer.zero / max(layer.numel, 1)
        lines.append(
            f"{name:<{width}} {layer.numel:>13,} {layer.norm:>11.4g} {layer.max_abs:>11.4g} "
            f"{layer.nan:>7,} {layer.inf:>7,} {zeros:>6.0%}"
        )
    if len(layers) < len(stats.names):
        lines.append(f"... the {SHOWN} largest norms; {len(stats.names) - SHOWN} more")
    return "\n".join(lines)
