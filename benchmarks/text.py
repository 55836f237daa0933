"""Real text that comes with Python, for the models that are trained here."""

from pydoc_data import topics

import torch
from torch import Tensor

VOCABULARY = 128  # characters of ASCII


def text() -> tuple[Tensor, Tensor]:
    """Python's own help (`pydoc_data.topics`), and a tenth of it to judge by, as numbers below
    `VOCABULARY`."""
    written = "\n\n".join(topics.topics.values()).encode("ascii", "replace")
    whole = torch.tensor(list(written))
    held_out = len(whole) // 10
    return whole[:-held_out], whole[-held_out:]


def batch(whole: Tensor, size: int, context: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets, ``[size, context]`` each."""
    starts = torch.randint(len(whole) - context, (size, 1), generator=random)
    lines = whole[starts + torch.arange(context + 1)]
    return lines[:, :-1], lines[:, 1:]
