"""Parts of training that few runs have: each is a `RunPart`, and the loop names none of them."""

from collections.abc import Callable, Iterator

from deepstack.model.build import Built
from deepstack.training.parts.kept_weights import KeptWeights
from deepstack.training.parts.penalty import Penalty
from deepstack.training.parts.start import start_of
from deepstack.training.plan import RunPart, RunPlan


def parts_of(plan: RunPlan) -> Iterator[RunPart]:
    """Yield the parts for which the settings of a run ask.  Raises ConfigError if one is wrong."""
    if start := start_of(plan.config, plan.task.vocab_size):
        yield start
    if plan.config.train.spectral_penalty:
        yield Penalty()
    if plan.config.train.keep_weights:
        yield KeptWeights()


def added_gradient(plan: RunPlan, built: Built) -> Callable[[], None] | None:
    """Return the function that adds the gradients of all parts of a run, or None without any."""
    functions = [add for part in plan.parts if (add := part.gradient(plan, built))]

    def add_all() -> None:
        for add in functions:
            add()

    return add_all if functions else None
