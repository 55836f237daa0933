"""No test of a framework asks its hub for anything, or finds the settings of another one."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(
        1
    )  # models of 100,000 parameters wait for the threads longer than for sums


@pytest.fixture(autouse=True)
def _own_state() -> None:
    """accelerate keeps the settings of the first Trainer of a process, and refuses others."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
