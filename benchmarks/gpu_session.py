"""Races on one card: who failed, what the limits are, and the rows of the CSV."""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_clock import Clock, Times
from benchmarks.gpu_sides import MULTI_TENSOR, clip_sides, rates, step_sides
from benchmarks.gpu_works import Plan, Work
from benchmarks.problems import RATES, both, made_on
from fastclip.benchmarking.measure import Side, Spread, paired_ratios, rounds_for, spread

ROOM = 0.8  # of the free memory may be taken
CLIP = 4  # gradients, parameters, and the two tensors behind the rates
ADAM = 6  # gradients, their originals, parameters, two moments, and as much again to work with

Row = dict[str, object]


@dataclass(frozen=True)
class Card:
    """The GPU, or in tests what plays it: `cuda` is `torch.cuda` or has its functions."""

    name: str
    device: str = "cuda"
    cuda: Any = torch.cuda

    def has_room_for(self, work: Work) -> bool:
        held = ADAM if work.sweep == "steps" else CLIP
        return held * work.n_bytes <= ROOM * self.cuda.mem_get_info()[0]

    def clock(self, n_bytes: int) -> Clock:
        """One that writes twice the L2 cache first, if `n_bytes` could stay in as much."""
        cache = int(self.cuda.get_device_properties(0).L2_cache_size)
        if n_bytes > 2 * cache:
            return Clock(None, self.cuda)
        return Clock(torch.empty(2 * cache, dtype=torch.uint8, device=self.device).zero_, self.cuda)

    def extra_bytes(self, side: Side) -> int:
        """Memory of the device at its peak in one call, above what was taken before it."""
        if side.before is not None:
            side.before()
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        before = self.cuda.memory_allocated()
        result = side.run()
        self.cuda.synchronize()
        extra = int(self.cuda.max_memory_allocated() - before)
        if side.check is not None:
            side.check(result)
        return extra


@dataclass(frozen=True)
class Limits:
    """Rates of torch's own operations on a large tensor, in bytes of it a second."""

    read: float
    scale: float
    copy: float

    def floor_us(self, n_bytes: int, clips: bool) -> float:
        """The least time for a read, and for a clip a read and write in place."""
        return 1e6 * n_bytes * (1 / self.read + clips / self.scale)

    def share_of_copy(self, n_bytes: int, clips: bool, us: float) -> float:
        """Bytes read, and for a clip read and written once more, over the time, as a share of the
        bytes that a copy reads and writes."""
        return (3 if clips else 1) * n_bytes / (us * 1e-6) / (2 * self.copy)


def limits(card: Card, probe: int) -> Limits:
    sides = rates(probe, card.device)
    clock = Clock(None, card.cuda)
    clock.race(sides, 2)
    times = clock.race(sides, 10)
    rate = {name: probe / (spread(times[name].device).median * 1e-6) for name in RATES}
    return Limits(max(rate["sum"], rate["aminmax"]), rate["mul_"], rate["copy_"])


class Race:
    """One list of gradients and who competes on it; `extra` is their memory, once tried."""

    def __init__(self, card: Card, work: Work, clips: bool, absent: Mapping[str, str]) -> None:
        self.card = card
        self.problem = both(made_on(card.device, work.shapes, work.dtypes))[clips]
        make = step_sides if work.sweep == "steps" else clip_sides
        self.sides = make(self.problem, absent)
        if work.sweep == "bytes" and not clips:
            self.sides += rates(self.problem.n_bytes, card.device)
        self.clock = card.clock(self.problem.n_bytes)
        self.extra: dict[str, int] = {}

    def try_out(self, side: Side) -> None:
        self.clock.host_us(side)  # the first call compiles
        self.extra[side.name] = self.card.extra_bytes(side)

    def run(self, plan: Plan) -> tuple[int, dict[str, Times]]:
        """How many rounds there were, and their times."""
        start = time.monotonic()
        self.clock.race(self.sides, 1)
        spent = time.monotonic() - start
        rounds = rounds_for(spent, plan.seconds, plan.least_rounds, plan.most_rounds)
        return rounds, self.clock.race(self.sides, rounds)


@dataclass
class Session:
    """What is missing on the card, and what failed of torch and of fastclip."""

    card: Card
    plan: Plan
    limits: Limits
    absent: dict[str, str]
    faults: list[str] = field(default_factory=list)

    def measure(self, work: Work) -> Iterator[Row]:
        """Not clipped, then clipped: one row a competitor. Nothing if torch fails."""
        for clips in (False, True):
            race = self._race(work, clips)
            if race is not None:
                yield from self._rows(work, clips, race)

    def _race(self, work: Work, clips: bool) -> Race | None:
        """Whoever fails is left out, and the others start over on fresh gradients."""
        absent = dict(self.absent)
        while "torch" not in absent:
            race = None  # what the last one held is free before the next is made
            name = "torch"  # without gradients it cannot be measured either
            try:
                race = Race(self.card, work, clips, absent)
                for side in race.sides:
                    name = side.name
                    race.try_out(side)
                return race
            # One that fails must not take the others with it, whatever it raises.
            except Exception as error:
                absent[name] = str(error)
                self._failed(f"{work.name}, {work.dtype}{', clipped' * clips}", name, error)
        return None

    def _rows(self, work: Work, clips: bool, race: Race) -> Iterator[Row]:
        n_bytes = race.problem.n_bytes
        rounds, times = race.run(self.plan)
        place = {
            "sweep": work.sweep,
            "name": f"{work.name}-{work.dtype}{'-clipped' * clips}",
            "workload": work.name,
            "clips": clips,
            "n_tensors": len(work.shapes),
            "n_bytes": n_bytes,
            "dtype": work.dtype,
            "rounds": rounds,
        }
        for name, extra in race.extra.items():
            numbers = self._numbers(work, clips, n_bytes, name, times)
            yield {**place, "side": name, "extra_bytes": extra, **numbers}

    def _numbers(
        self, work: Work, clips: bool, n_bytes: int, name: str, times: dict[str, Times]
    ) -> Row:
        own, torchs = times[name], times["torch"]
        device = spread(own.device)
        row = {**_spread("us", device), **_spread("host_us", spread(own.host))}
        races, moves = name not in RATES, name not in RATES and work.sweep != "steps"
        ratio = spread(paired_ratios(own.device, torchs.device)) if races else None
        host_ratio = spread(paired_ratios(own.host, torchs.host)) if races else None
        floor = self.limits.floor_us(n_bytes, clips) if moves else None
        return {
            **row,
            **_spread("ratio", ratio),
            **_spread("host_ratio", host_ratio),
            "limit": floor and spread(torchs.device).median / floor,
            "floor_us": floor,
            "share_of_copy": self.limits.share_of_copy(n_bytes, clips, device.median)
            if moves
            else None,
        }

    def _failed(self, where: str, name: str, error: Exception) -> None:
        words = f"{where}: {name} left out, {type(error).__name__}: {error}"
        print(words, file=sys.stderr, flush=True)
        if name not in MULTI_TENSOR:
            self.faults.append(words)


def _spread(name: str, values: Spread | None) -> Row:
    low, median, high = values or (None, None, None)
    return {name: median, f"{name}_p20": low, f"{name}_p80": high}
