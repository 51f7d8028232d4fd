"""The package of W&B, quiet, and the names that it allows."""

import os
from typing import Any

FORBIDDEN = r"[/\\#?%:]"  # in the name of a project


def quiet_wandb() -> tuple[Any, Any]:
    """Return the module of W&B and settings with which it prints and measures nothing else."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    quiet = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
    )
    return wandb, quiet
