"""Training that is killed at random moments and goes on, until enough have been killed:

``python -m tests.monitor.recovery.killing --kills 200``

A run trains a small network with checkpoints and one rollback, in a process forked from this one.
It is killed (SIGKILL) at a moment drawn from the time that an undisturbed run takes, started again
on what it left, and so on until it ends by itself. What it ends with must be, bit for bit, what
the undisturbed run ends with.
"""

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from fastclip.monitor import RollbackPolicy
from tests.monitor.recovery.making import Run

STOP = 40
POLICY = RollbackPolicy(confirm=3, lr_steps=10)


class Outcome(NamedTuple):
    kills: int
    runs: int  # that came to their end
    in_a_save: int  # kills after which there was a checkpoint in part


def train(folder: Path, asynchronous: bool) -> None:
    """One process's life; what it ends with is in `end.json`."""
    run = Run(folder, POLICY, poisoned={17}, every=2, width=64, asynchronous=asynchronous)
    run.advance(STOP)
    rollbacks = [list(rollback) for rollback in run.recovery.rollbacks]
    (folder / "end.json.part").write_text(json.dumps([run.bits(), rollbacks]))
    (folder / "end.json.part").rename(folder / "end.json")


def forked(folder: Path, asynchronous: bool, seconds: float | None) -> bool:
    """Let a process train for so long at most; whether it was killed."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            warnings.simplefilter("error")  # no checkpoint may be found damaged
            train(folder, asynchronous)
            status = 0
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, f"the run in {folder} failed: see above"
    return killed


def kill(kills: int, folder: Path, seed: int = 0) -> Outcome:
    """Kill that often; `AssertionError` if a run fails or ends with other bits."""
    draw = random.Random(seed)
    # What torch imports at its first step (two seconds), it imports here and not in every process.
    Run(folder / "first").advance(1)
    expected, lasts = {}, {}
    for asynchronous in (False, True):
        whole = folder / f"whole-{asynchronous}"
        begun = time.perf_counter()
        assert not forked(whole, asynchronous, None)
        lasts[asynchronous] = time.perf_counter() - begun
        expected[asynchronous] = (whole / "end.json").read_text()
    assert expected[False] == expected[True]
    done = runs = in_a_save = 0
    while done < kills:
        asynchronous = runs % 2 == 1
        target = folder / f"run-{runs}"
        while True:
            moment = draw.uniform(0, lasts[asynchronous]) if done < kills else None
            if not forked(target, asynchronous, moment):
                break
            done += 1
            in_a_save += bool(list(target.glob("*.tmp")))
        assert (target / "end.json").read_text() == expected[asynchronous], f"run {runs} differs"
        shutil.rmtree(target)
        runs += 1
    return Outcome(done, runs, in_a_save)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # In memory, where there is such a folder: syncing a busy disk takes most of the time otherwise,
    # and what a killed process had written stays either way.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        outcome = kill(arguments.kills, Path(folder), arguments.seed)
    print(
        f"{outcome.kills} kills, {outcome.in_a_save} of them in the middle of a write: "
        f"{outcome.runs} runs came to their end, each with the bits of the undisturbed one"
    )


if __name__ == "__main__":
    main()
