"""Two runs beside each other, over the steps they share."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from statistics import median

from fastclip.monitor import robust
from fastclip.monitor.bands import CALM, JUDGED, WINDOW, K
from fastclip.monitor.diagnosis.gathering import Gathering
from fastclip.monitor.diagnosis.result import Compared
from fastclip.monitor.records import StepRecord
from fastclip.monitor.windows import EMPTY, Ordered

SAMPLE = 8192  # values a sample holds at most
HELD = 10_000  # records of a log that wait, for a rollback may still take them back
TAIL = 100  # steps that "final" means

Pair = tuple[StepRecord | None, StepRecord | None]


def newest(log: Iterable[StepRecord], held: int = HELD) -> Iterator[StepRecord]:
    """Of each step the record of its newest attempt, without rows of layers.

    Where a log goes back, what it had from there on is left out, whether it was run again or not.
    A log that goes back by more than `held` records goes back here, too.
    """
    waiting: deque[StepRecord] = deque()
    for record in log:
        while waiting and waiting[-1].step >= record.step:
            waiting.pop()
        waiting.append(record if record.layers is None else replace(record, layers=None))
        if len(waiting) > held:
            yield waiting.popleft()
    yield from waiting


def in_step(log: Iterable[StepRecord], baseline: Iterable[StepRecord]) -> Iterator[Pair]:
    """All records of both, in order; two of the same step are a pair.

    Where a log goes back it goes on alone until it is level again.
    """
    left, right = iter(log), iter(baseline)
    one, other = next(left, None), next(right, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one.step < other.step):
            yield one, None
            one = next(left, None)
        elif one is None or other.step < one.step:
            yield None, other
            other = next(right, None)
        else:
            yield one, other
            one, other = next(left, None), next(right, None)


class Sample:
    """Quantiles of a series in bounded memory: of every value, of every second, fourth, ... of
    long ones. Values that are None or not finite are left out."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._every = 1
        self._count = 0

    def add(self, value: float | None) -> None:
        if value is None or not isfinite(value):
            return
        if self._count % self._every == 0:
            self._values.append(value)
            if len(self._values) == SAMPLE:
                del self._values[1::2]
                self._every *= 2
        self._count += 1

    def quantile(self, share: float) -> float | None:
        """The smallest value with at least `share` of them at or below it."""
        ordered = sorted(self._values)
        place = max(0, -int(-share * len(ordered) // 1) - 1)
        return ordered[place] if ordered else None


class Share:
    """How often a flag is set, of the records that have it."""

    def __init__(self) -> None:
        self._set = self._count = 0

    def add(self, flag: bool | None) -> None:
        if flag is not None:
            self._set += flag
            self._count += 1

    def value(self) -> float | None:
        return self._set / self._count if self._count else None


class Side:
    """What one run did over the shared steps."""

    def __init__(self) -> None:
        self.losses, self.norms, self.updates = Sample(), Sample(), Sample()
        self.products, self.seconds = Sample(), Sample()
        self.final: deque[float] = deque(maxlen=TAIL)
        self.clipped, self.skipped = Share(), Share()
        self._clock: tuple[int, float] | None = None

    def add(self, record: StepRecord) -> None:
        self.losses.add(record.loss)
        if record.loss is not None:
            self.final.append(record.loss)
        self.norms.add(record.grad_norm)
        self.clipped.add(record.clipped)
        self.skipped.add(record.skipped)
        if not record.skipped:
            self.updates.add(record.update_ratio)
            lr, coef, norm = record.lr, record.clip_coef, record.grad_norm
            if lr is not None and coef is not None and norm is not None:
                self.products.add(lr * coef * norm)
        self._time(record)

    def _time(self, record: StepRecord) -> None:
        time = record.batch.get("time") if isinstance(record.batch, Mapping) else None
        if isinstance(time, bool) or not isinstance(time, int | float):
            return
        if self._clock is not None and record.step > self._clock[0]:
            self.seconds.add((time - self._clock[1]) / (record.step - self._clock[0]))
        self._clock = record.step, time

    def final_loss(self) -> float | None:
        """The median of the last ones; NaN if half of them are not finite."""
        if not self.final:
            return None
        # As the largest of all: a median with NaN in it would depend on their places.
        middle = median(value if isfinite(value) else float("inf") for value in self.final)
        return middle if isfinite(middle) else float("nan")


class Parting:
    """Where a run's losses lie above the band of the baseline's last 100, if they do."""

    def __init__(self) -> None:
        self._windows = Ordered(WINDOW)
        self._window = EMPTY
        self.judged = self.above = self._row = 0
        self.first: tuple[int, float, float] | None = None  # step, loss, the baseline's median
        self.last: int | None = None
        self.apart: int | None = None  # since when so many in a row are above as end an excursion
        self._since = 0

    def add(self, step: int, loss: float | None, good: float | None) -> None:
        if loss is None or good is None or not isfinite(good):
            return
        self._window, values = self._windows.take(self._window)
        if len(values) >= JUDGED:
            self.judged += 1
            log = loss > 0 and values[0] > 0
            if not isfinite(loss) or robust.exceeds(values, loss, K, log):
                self._outside(step, loss, robust.median(values))
            else:
                self._row = 0
        self._window = self._windows.push(self._window, values, good)

    def _outside(self, step: int, loss: float, middle: float) -> None:
        self.above += 1
        self.last = step
        self.first = self.first or (step, loss, middle)
        self._since = self._since if self._row else step
        self._row += 1
        if self._row == CALM and self.apart is None:
            self.apart = self._since


class Comparison:
    """The two runs; `add` takes the pairs of `in_step` of what is `newest` in both."""

    def __init__(self) -> None:
        self.log, self.baseline = Side(), Side()
        self.shared = 0
        self._parting = Parting()

    def add(self, record: StepRecord, good: StepRecord) -> None:
        self.shared += 1
        self.log.add(record)
        self.baseline.add(good)
        self._parting.add(record.step, record.loss, good.loss)

    def rows(self, log: Gathering, baseline: Gathering) -> tuple[Compared, ...]:
        """Every quantity, also those that a log lacks."""
        if not self.shared:
            none = "the logs have no step in common: only the runs as a whole are compared"
            rows = [Compared("steps in common", 0, 0, none)]
        else:
            rows = [Compared("steps in common", self.shared, self.shared), *self._shared()]
        return (*rows, *_recoveries(log, baseline))

    def _shared(self) -> Iterator[Compared]:
        one, other = self.log, self.baseline
        for name, side in (("loss", "losses"), ("raw gradient norm", "norms")):
            shares = (0.5,) if name == "loss" else (0.5, 0.9, 0.99, 1.0)
            for share in shares:
                label = {0.5: "median", 1.0: "largest"}.get(share, f"{share:.0%} quantile")
                first, second = (getattr(of, side).quantile(share) for of in (one, other))
                yield Compared(f"{name}, {label}", first, second)
            if name == "loss":
                last = f"loss, median of the last {TAIL}"
                yield Compared(last, one.final_loss(), other.final_loss(), self._parted())
        yield Compared("share of steps clipped", one.clipped.value(), other.clipped.value())
        yield Compared("share of steps skipped", one.skipped.value(), other.skipped.value())
        yield _updates(one, other)
        yield Compared(
            *("seconds a step, median", one.seconds.quantile(0.5), other.seconds.quantile(0.5)),
            "" if one.seconds.quantile(0.5) else 'needs a time: batch={"time": time.time(), ...}',
        )

    def _parted(self) -> str:
        parting = self._parting
        if not parting.judged:
            return "where they part is not known: too few losses in common"
        if parting.first is None:
            return f"never above the baseline's band at {parting.judged:,} steps"
        step, loss, middle = parting.first
        text = (
            f"above the baseline's band at {parting.above:,} of {parting.judged:,} steps, first at "
            f"step {step} ({loss:.6g} against {middle:.6g}), last at step {parting.last}"
        )
        if parting.apart is None:
            return f"{text}; never {CALM} in a row"
        return f"{text}; the runs part at step {parting.apart} ({CALM} in a row)"


def _updates(one: Side, other: Side) -> Compared:
    values = one.updates.quantile(0.5), other.updates.quantile(0.5)
    if None not in values:
        return Compared("effective update, median", *values, "update_ratio, skipped steps left out")
    values = one.products.quantile(0.5), other.products.quantile(0.5)
    if None in values:
        note = "needs update_ratio, or lr, clip_coef and grad_norm"
        return Compared("effective update, median", *values, note)
    note = "lr x clip_coef x grad_norm, for lack of update_ratio; skipped steps left out"
    return Compared("effective update, median", *values, note)


def _recoveries(log: Gathering, baseline: Gathering) -> Iterator[Compared]:
    def value(run: Gathering, of: Callable[[Counter[int]], int]) -> int | None:
        return of(run.outside) if run.counts["loss"] else None

    for name, of, note in (
        ("times the loss left and came back", Counter.total, "over the whole of each log"),
        ("recovery after these, the longest", _longest, "losses outside before one was inside"),
    ):
        yield Compared(name, value(log, of), value(baseline, of), note)


def _longest(outside: Counter[int]) -> int:
    return max(outside, default=0)
