"""Checkpoints, rollbacks, and what a run that was rolled back is spared."""

from fastclip.monitor.recovery.policy import Checkpoint as Checkpoint
from fastclip.monitor.recovery.policy import Rollback as Rollback
from fastclip.monitor.recovery.policy import RollbackPolicy as RollbackPolicy
from fastclip.monitor.recovery.recovery import Recovery as Recovery

__all__ = ["Checkpoint", "Recovery", "Rollback", "RollbackPolicy"]
