"""Searches scheme and learning rate with Optuna; each trial is a run in results/optuna.

    pip install optuna
    python examples/optuna_study.py model.depth=24 train.steps=200

The arguments are settings of all runs.  The same command goes on where an earlier one stopped,
because a finished run is not trained again.
"""

import sys
from pathlib import Path

import optuna

import deepstack

CONFIG = Path(__file__).parents[1] / "configs" / "quick.yaml"


def validation_loss(trial: optuna.Trial) -> float:
    """Train with the settings that Optuna suggests and return the last validation loss."""
    scheme = trial.suggest_categorical("scheme", ["post_ln", "pre_ln", "deepnorm"])
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    settings = [*sys.argv[1:], f"model.scheme={scheme}", f"train.lr={lr:.3g}"]
    run = deepstack.train(deepstack.load_config(CONFIG, settings), study="optuna")
    trial.set_user_attr("run", str(run.path))
    if run.state == "diverged":
        raise optuna.TrialPruned("diverged")
    return float(run.evals["loss"].iloc[-1])


if __name__ == "__main__":
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(validation_loss, n_trials=12)
    print(study.best_params, study.best_value, study.best_trial.user_attrs["run"])
