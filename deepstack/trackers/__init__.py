"""The logs of runs in the formats of trackers: TensorBoard, W&B, MLflow and trackio.

Values of layers become summaries over layers and heat maps: never one key for each layer.
"""

from deepstack.trackers.export import export_logs
from deepstack.trackers.tensorboard import EventLog, require_tensorboard
from deepstack.trackers.values import heat_maps, layer_summaries, scalars, settings

__all__ = [
    "EventLog",
    "export_logs",
    "heat_maps",
    "layer_summaries",
    "require_tensorboard",
    "scalars",
    "settings",
]
