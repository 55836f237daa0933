"""The second half of the runs of test_clipper_resume.py, as a process of its own:

``python -m tests.resuming saved.pt finished.pt``
"""

import sys
from typing import Any

import torch

from tests import training

STEPS = 60
HALF = 30
BAD = {3: float("nan"), 17: float("inf"), 29: float("nan"), 44: float("nan")}
OPTIMIZER = {"skip": "adam-fused", "zero": "momentum-foreach"}
RUNS = [(rule, policy) for rule in training.RULES for policy in OPTIMIZER]


class Run:
    """A training run that can be saved and gone on with."""

    def __init__(self, rule: str, policy: str) -> None:
        self.params = training.parameters()
        self.optimizer = training.optimizer(OPTIMIZER[policy], self.params)
        self.clipper = training.clipper(self.params, rule, nonfinite=policy)
        self.decided: list[dict[str, Any]] = []

    def advance(self, first: int, last: int) -> None:
        for step in range(first, last):
            training.assign(self.params, GRADIENTS[step])
            stats = self.clipper.step(self.optimizer)
            names = ("threshold", "coef", "clipped", "skipped", "total_norm")
            self.decided.append({name: getattr(stats, name) for name in names})

    def save(self) -> dict[str, Any]:
        return training.snapshot(
            {
                "params": training.values(self.params),
                "optimizer": self.optimizer.state_dict(),
                "clipper": self.clipper.state_dict(),
                "decided": self.decided,
            }
        )

    def load(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.params.items():
                parameter.copy_(saved["params"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.clipper.load_state_dict(saved["clipper"])


GRADIENTS = training.stream(STEPS, bad=BAD)


def main(source: str, target: str) -> None:
    saved = torch.load(source, weights_only=True)
    finished = {}
    for rule, policy in RUNS:
        run = Run(rule, policy)
        run.load(saved[f"{rule}-{policy}"])
        run.advance(HALF, STEPS)
        finished[f"{rule}-{policy}"] = run.save()
    torch.save(finished, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
