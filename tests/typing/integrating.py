"""The integrations: a patch, and callbacks for the trainers of two frameworks."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from transformers import TrainerCallback
from typing_extensions import assert_type

from fastclip.integrations import lightning, transformers
from fastclip.integrations.torch import Patch, patch
from fastclip.monitor import JSONL, Monitor, RollbackPolicy
from fastclip.rules import ZClip

with patch() as patched:
    assert_type(patched, Patch)
patched = patch()
patched.undo()

monitor = Monitor(sinks=[JSONL("run.jsonl")])
callback = transformers.GradClipCallback(
    1.0, nonfinite="skip", monitor=monitor, on_critical=RollbackPolicy(confirm=50), layers=2
)
trained: TrainerCallback = callback
assert_type(transformers.GradClipCallback(rule=ZClip()), transformers.GradClipCallback)
assert_type(transformers.block_of("h.0.attn.weight"), str)
assert_type(lightning.block_of("h.0.attn.weight"), str)

other = lightning.GradClipCallback(
    lambda step: 1.0, monitor=[monitor], log_every=10, on_critical="stop", keep=2, layers=None
)
watched: Callback = other
Trainer(callbacks=[other])
