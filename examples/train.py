"""Train a small GPT on English text, and have the run watched: a complete, ordinary script.

    python examples/train.py --out runs/first        # half a minute on two cores
    python examples/train.py --out runs/first --steps 800 --resume
    fastclip report runs/first/run.jsonl             # makes runs/first/run.html

The text is the reference manual that comes with Python. Lines marked `fastclip` are all that it
adds to the loop; docs/monitoring.md explains them.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastclip import GradClipper
from fastclip.monitor import JSONL, ActivationWatch, Event, Monitor, ParameterWatch, Telemetry

CONTEXT = 64  # characters
BATCH = 16
EVERY = 100  # steps between two checkpoints, and between two looks at the validation text


class Text:
    """Characters as numbers, the last tenth of them for validation."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        characters = sorted(set(text))
        number = {character: place for place, character in enumerate(characters)}
        self.vocabulary = len(characters)
        data = torch.tensor([number[character] for character in text])
        self.training, self.validation = data.split([cut := len(data) * 9 // 10, len(data) - cut])

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, ``[BATCH, CONTEXT]``: always the same ones under the same number."""
        return _drawn(self.training, torch.Generator().manual_seed(number))

    def validation_batches(self, count: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return (_drawn(self.validation, generator) for _ in range(count))


def _drawn(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator)
    windows = data[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


class GPT(nn.Module):
    """A decoder of pre-norm transformer blocks."""

    def __init__(self, vocabulary: int, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validated(model: nn.Module, text: Text) -> float:
    losses = [cross_entropy(model, batch) for batch in text.validation_batches()]
    return torch.stack(losses).mean().item()


def schedule(step: int) -> float:
    """The learning rate over its maximum: up for 50 steps, then falling as 1 / sqrt(step)."""
    return min((step + 1) / 50, math.sqrt(50 / (step + 1)))


def train(out: Path, steps: int, seed: int = 0, resume: bool = False) -> None:
    torch.manual_seed(seed)
    text = Text()
    model = GPT(text.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    clipper = GradClipper(model, max_norm=1.0)  # fastclip
    activations = ActivationWatch(model)  # fastclip: measures in the forward pass
    parameters = ParameterWatch(model, every=20)  # fastclip: measures the update
    monitor = Monitor(  # fastclip
        sinks=[JSONL(out / "run.jsonl")],
        telemetry=Telemetry(layers_every=20),
        watches=[activations, parameters],
    )

    # No random number is drawn in the loop, and batches are numbered: this is all there is to save.
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"clipper": clipper, "monitor": monitor}  # fastclip
    checkpoint = out / "checkpoint.pt"
    first = load(checkpoint, state) if resume else 0
    told: set[tuple[str, str]] = set()

    with monitor:  # fastclip: whatever happens inside, nothing that was measured is lost
        for step in range(first, steps):
            done = step + 1
            optimizer.zero_grad()
            loss = cross_entropy(model, text.batch(step))
            loss.backward()
            lr = scheduler.get_last_lr()[0]  # of this update: before scheduler.step()
            with parameters:  # fastclip
                stats = clipper.step(optimizer)  # fastclip: in place of optimizer.step()
            scheduler.step()
            val_loss = validated(model, text) if done % EVERY == 0 else None
            events = monitor.observe(  # fastclip
                step=step, loss=loss, val_loss=val_loss, stats=stats, lr=lr, batch=step
            )
            told = tell(events, told)
            if val_loss is not None:
                print(f"step {done}: loss {loss.item():.3f}, validation {val_loss:.3f}")
            if done % EVERY == 0 or done == steps:
                save(checkpoint, done, state)
    tell(monitor.flush(), told)  # of the last two steps, where numbers come from a device


def tell(events: Iterable[Event], told: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Print events, of an alarm that lasts the first; returns what the next call is told."""
    now = set()
    for event in events:
        now.add((event.kind, event.metric))
        if (event.kind, event.metric) not in told:
            print(f"step {event.step}: {event.level}: {event.message}")
    return now


def save(path: Path, step: int, state: dict[str, Any]) -> None:
    """All of it or nothing: a run that is killed meanwhile still has the checkpoint before."""
    held = {name: part.state_dict() for name, part in state.items()}
    torch.save({"step": step, **held}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load(path: Path, state: dict[str, Any]) -> int:
    """The step to go on with."""
    saved = torch.load(path, weights_only=True)
    for name, part in state.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/example"), help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=400, help="in all; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    options = parser.parse_args()
    log, checkpoint = options.out / "run.jsonl", options.out / "checkpoint.pt"
    if options.resume and not checkpoint.exists():
        parser.error(f"there is no {checkpoint} to resume from")
    if not options.resume and log.exists():
        parser.error(f"{log} has a run in it: --resume goes on with it, or choose another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    train(**vars(options))
    print(f"now: fastclip report {log}")


if __name__ == "__main__":
    main()
