"""`train.keep_weights`: a run that keeps its weights after chosen steps."""

from deepstack.records import RunFolder
from deepstack.training import checkpoint as ckpt
from deepstack.training.plan import RunPart, RunPlan, Weights
from deepstack.training.schedule import keeps_weights


class KeptWeights(RunPart):
    """A run with `train.keep_weights`."""

    activity = "keeping the weights"

    def is_due(self, plan: RunPlan, step: int) -> bool:
        return keeps_weights(plan.config.train, step)

    def act(self, plan: RunPlan, folder: RunFolder, step: int, weights: Weights) -> None:
        """Write weights/<step>/; a resumed run leaves those that exist."""
        parts = weights()
        if plan.ranks.is_rank0:
            kept = ckpt.Checkpoint(step, parts, {"run": plan.digest})
            ckpt.write(folder, folder.kept_path(step), kept)
