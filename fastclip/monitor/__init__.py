"""The host tier: records of a run, detectors of what goes wrong, and the log of it.

Nothing in here needs torch, and importing it does not import it: a log is replayed anywhere::

    with Monitor(sinks=[JSONL("run.jsonl")]) as monitor:
        events = monitor.observe(step=step, loss=loss, stats=stats)  # in the training loop
    events = Monitor().replay("run.jsonl")  # the same again, later

One's own detector is a class with two methods: `init` gives a state, and a call makes of a state
and a record the next state and a list of events. States are plain immutable data; the Monitor saves
them under `kind` and `metric`, and fills in the onset of events. This one, with math and the three
names it takes from here imported, tells when the loss has not improved for 1,000 records, and every
1,000 after that::

    class Plateau:
        kind, metric = "plateau", "loss"

        def init(self):
            return math.inf, 0  # the best loss, and records since

        def __call__(self, state, record):
            best, since = state
            if record.loss is not None and record.loss < best:  # false for NaN
                return (record.loss, 0), []
            if (since + 1) % 1000:
                return (best, since + 1), []
            text = f"no loss below {best:.4g} for {since + 1} records"
            event = Event(record.step, self.kind, "info", self.metric, best, message=text)
            return (best, since + 1), [event]

    monitor = Monitor([*default_detectors(), Plateau()])
"""

from importlib import import_module

TYPE_CHECKING = False

if TYPE_CHECKING:
    from fastclip.monitor.batch import NonFiniteOrigin as NonFiniteOrigin
    from fastclip.monitor.batch import PrecisionReport as PrecisionReport
    from fastclip.monitor.batch import compare_precisions as compare_precisions
    from fastclip.monitor.batch import find_first_nonfinite as find_first_nonfinite
    from fastclip.monitor.calibration import Calibration as Calibration
    from fastclip.monitor.calibration import suggest_max_norm as suggest_max_norm
    from fastclip.monitor.detectors import ClipRate as ClipRate
    from fastclip.monitor.detectors import Detector as Detector
    from fastclip.monitor.detectors import Drift as Drift
    from fastclip.monitor.detectors import LossScaleDrop as LossScaleDrop
    from fastclip.monitor.detectors import NonFinite as NonFinite
    from fastclip.monitor.detectors import RobustSpike as RobustSpike
    from fastclip.monitor.detectors import Skips as Skips
    from fastclip.monitor.detectors import Spike as Spike
    from fastclip.monitor.detectors import Sustained as Sustained
    from fastclip.monitor.detectors import default_detectors as default_detectors
    from fastclip.monitor.diagnosis.diagnose import diagnose as diagnose
    from fastclip.monitor.diagnosis.result import Diagnosis as Diagnosis
    from fastclip.monitor.layers import LayerTable as LayerTable
    from fastclip.monitor.log import JSONL as JSONL
    from fastclip.monitor.monitor import Monitor as Monitor
    from fastclip.monitor.observed import Watch as Watch
    from fastclip.monitor.records import Event as Event
    from fastclip.monitor.records import LayerRow as LayerRow
    from fastclip.monitor.records import StepRecord as StepRecord
    from fastclip.monitor.recovery import Checkpoint as Checkpoint
    from fastclip.monitor.recovery import Recovery as Recovery
    from fastclip.monitor.recovery import Rollback as Rollback
    from fastclip.monitor.recovery import RollbackPolicy as RollbackPolicy
    from fastclip.monitor.sinks.console import Console as Console
    from fastclip.monitor.sinks.contract import Sink as Sink
    from fastclip.monitor.sinks.mlflow import MLflow as MLflow
    from fastclip.monitor.sinks.tensorboard import TensorBoard as TensorBoard
    from fastclip.monitor.sinks.wandb import WandB as WandB
    from fastclip.monitor.telemetry import Telemetry as Telemetry
    from fastclip.monitor.watches.activations import ActivationWatch as ActivationWatch
    from fastclip.monitor.watches.parameters import ParameterWatch as ParameterWatch

__all__ = [
    "JSONL",
    "ActivationWatch",
    "Calibration",
    "Checkpoint",
    "ClipRate",
    "Console",
    "Detector",
    "Diagnosis",
    "Drift",
    "Event",
    "LayerRow",
    "LayerTable",
    "LossScaleDrop",
    "MLflow",
    "Monitor",
    "NonFinite",
    "NonFiniteOrigin",
    "ParameterWatch",
    "PrecisionReport",
    "Recovery",
    "RobustSpike",
    "Rollback",
    "RollbackPolicy",
    "Sink",
    "Skips",
    "Spike",
    "StepRecord",
    "Sustained",
    "Telemetry",
    "TensorBoard",
    "WandB",
    "Watch",
    "compare_precisions",
    "default_detectors",
    "diagnose",
    "find_first_nonfinite",
    "suggest_max_norm",
]

_MODULES = {
    "batch": ("NonFiniteOrigin", "PrecisionReport", "compare_precisions", "find_first_nonfinite"),
    "calibration": ("Calibration", "suggest_max_norm"),
    "detectors": (
        *("ClipRate", "Detector", "Drift", "LossScaleDrop", "NonFinite", "RobustSpike"),
        *("Skips", "Spike", "Sustained", "default_detectors"),
    ),
    "diagnosis.diagnose": ("diagnose",),
    "diagnosis.result": ("Diagnosis",),
    "layers": ("LayerTable",),
    "log": ("JSONL",),
    "monitor": ("Monitor",),
    "observed": ("Watch",),
    "records": ("Event", "LayerRow", "StepRecord"),
    "recovery": ("Checkpoint", "Recovery", "Rollback", "RollbackPolicy"),
    "sinks.console": ("Console",),
    "sinks.contract": ("Sink",),
    "sinks.mlflow": ("MLflow",),
    "sinks.tensorboard": ("TensorBoard",),
    "sinks.wandb": ("WandB",),
    "telemetry": ("Telemetry",),
    "watches.activations": ("ActivationWatch",),
    "watches.parameters": ("ParameterWatch",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take __getattr__ to mean that every name exists

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"fastclip.monitor.{_HOME[name]}"), name)
        globals()[name] = value  # the next access does not come through here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
