"""A small Trainer on real text: a GPT-2 of 100,000 random parameters, 8 windows of 32 characters
a step."""

from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from examples.train import Text

WINDOW = 32
BATCH = 8
STEPS = 50
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "max_grad_norm": 0,
    "dataloader_pin_memory": False,
}


class Windows(Dataset[dict[str, Tensor]]):
    """The text in pieces that follow each other; `labels` are the same characters."""

    def __init__(self, data: Tensor, count: int) -> None:
        self.windows = data[: count * WINDOW].view(count, WINDOW)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[place], "labels": self.windows[place]}


TEXT = Text()
TRAINING = Windows(TEXT.training, 640)  # 80 steps an epoch
VALIDATION = Windows(TEXT.validation, 16)


def model(**config: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": WINDOW}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(vocab_size=TEXT.vocabulary, **sizes | config))


def trainer(
    folder: Path, *callbacks: Any, kind: Any = Trainer, net: Any = None, **changed: Any
) -> Any:
    options = {
        name: changed.pop(name)
        for name in ("optimizers", "compute_loss_func", "train_dataset")
        if name in changed
    }
    options.setdefault("train_dataset", TRAINING)
    return kind(
        model() if net is None else net,
        TrainingArguments(str(folder), **ARGUMENTS | changed),
        eval_dataset=VALIDATION,
        callbacks=list(callbacks),
        **options,
    )


def logged(trained: Any, name: str) -> list[Any]:
    """The values of an entry of the log, in order."""
    return [entry[name] for entry in trained.state.log_history if name in entry]


def spoiled(net: GPT2LMHeadModel, steps: Collection[int], factor: float) -> GPT2LMHeadModel:
    """A model whose losses are multiplied by `factor` in some of its forward passes in training."""
    calls = count()

    def spoil(module: Any, inputs: Any, outputs: Any) -> None:
        if module.training and next(calls) in steps:
            outputs["loss"] = outputs["loss"] * factor

    net.register_forward_hook(spoil)
    return net
