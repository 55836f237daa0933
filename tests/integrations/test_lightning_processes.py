"""Lightning in processes of their own: both distributions, neither, and two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FIT = """
import sys
import torch
from torch.utils.data import DataLoader
import {name} as lightning
before = set(sys.modules)
import fastclip.integrations.lightning as integration

assert integration.Callback is lightning.Callback
added = {{each.partition(".")[0] for each in set(sys.modules) - before}}
frameworks = {{"lightning", "pytorch_lightning", "transformers", "accelerate"}}
assert not frameworks & added, added

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(self.net.weight)
        torch.nn.init.zeros_(self.net.bias)
        self.automatic_optimization = {automatic}

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - 10).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0, fused=True)
"""

ONE = """
module = Module()
callback = integration.GradClipCallback(max_norm=0.5)
trainer = lightning.Trainer(
    accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
)
trainer.fit(module, DataLoader(torch.ones(4, 4), batch_size=4))
moved = torch.cat([each.detach().flatten() for each in module.parameters()]).norm()
assert abs(moved - 0.5) < 1e-6, moved
print("clipped")
"""

MISSING = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Without())
import importlib.util
importlib.util.find_spec = lambda name: None
import fastclip.integrations.lightning
"""

RANKS = """
from fastclip.monitor import Event, Monitor

class Alarm:
    kind, metric = "alarm", "loss"
    def init(self):
        return 0
    def __call__(self, state, record):
        if record.step < 2 or torch.distributed.get_rank() == 0:
            return state, []
        return state, [Event(record.step, self.kind, "critical", self.metric, record.loss)]

def run():
    module = Module()
    norms = []
    class Seen(lightning.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grads = torch.cat([each.grad.flatten() for each in pl_module.parameters()])
            norms.append(float(grads.double().norm()))
    callback = integration.GradClipCallback(
        max_norm=0.5, monitor=Monitor([Alarm()]), on_critical="stop"
    )
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp_fork", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Seen(), callback], use_distributed_sampler=True,
    )
    class Ending(lightning.Callback):
        def on_train_end(self, trainer, pl_module):
            weights = torch.cat([each.detach().flatten() for each in pl_module.parameters()])
            every = [torch.zeros_like(weights) for _ in range(2)]
            torch.distributed.all_gather(every, weights)
            assert torch.equal(*every)
            assert norms[0] > 5, norms
            assert all(abs(norm - 0.5) < 1e-6 for norm in clipped), clipped
            assert trainer.global_step == 3, trainer.global_step  # rank 1 stops both
            print("rank", trainer.global_rank, "agrees", flush=True)
    clipped = []
    class After(lightning.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grads = torch.cat([each.grad.flatten() for each in pl_module.parameters()])
            clipped.append(float(grads.double().norm()))
    trainer.callbacks += [After(), Ending()]
    trainer.fit(module, DataLoader(torch.randn(40, 4), batch_size=4))

run()
"""

SHARDS = """
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

class Sharded(Module):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)  # the fused one takes no DTensors

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            batch.fill_(float("nan"))

class Ending(lightning.Callback):
    def on_train_end(self, trainer, pl_module):
        weights = [each.detach().full_tensor().flatten() for each in pl_module.parameters()]
        moved = torch.cat(weights).double().norm()
        assert abs(moved - 0.5) < 1e-6, moved  # by the first step; the second was skipped
        assert int(callback.clippers[0].counters()["skipped"]) == 1
        print("rank", trainer.global_rank, "agrees", flush=True)

callback = integration.GradClipCallback(max_norm=0.5)
trainer = lightning.Trainer(
    accelerator="cpu", strategy=ModelParallelStrategy(2, 1), devices=2, max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[callback, Ending()],
)
trainer.fit(Sharded(), DataLoader(torch.ones(16, 4), batch_size=4))
"""


def python(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    script = folder / "run.py"  # which Lightning starts again for the second rank
    script.write_text(code)
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **_kept()},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _kept() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("FASTCLIP")}


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_each_distribution(name: str, tmp_path: Path) -> None:
    done = python(FIT.format(name=name, automatic=True) + ONE, tmp_path)
    assert done.stdout == "clipped\n", done.stderr


def test_without_lightning(tmp_path: Path) -> None:
    done = python(MISSING, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: fastclip.integrations.lightning needs lightning: pip install lightning"
    )


@pytest.mark.slow
@pytest.mark.parametrize("code", [RANKS, SHARDS], ids=["DDP", "FSDP 2"])
def test_two_ranks(code: str, tmp_path: Path) -> None:
    done = python(FIT.format(name="lightning.pytorch", automatic=True) + code, tmp_path)
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 agrees", "rank 1 agrees"], done.stderr
