"""The size of the validation set where `train.eval_batches` is 'auto'.

| quantity  | rule                                                                              |
|-----------|-----------------------------------------------------------------------------------|
| budget    | 3/4 of the sequences that are trained on between two evaluations                  |
| positions | as many as the budget predicts, but at least 1,024 and at most 8,192              |
| sequences | those of the positions, rounded up to whole passes of 2,048 tokens                |

A training step passes its few tokens forward, backward and forward over the probe; an evaluation
passes 2,048 tokens forward at a time.  Per sequence, a step takes about 7.5 times as long at width
32, and 3 times at large widths, where sequences are long and 8,192 positions are few sequences.  So
the budget lengthens a run by about a tenth.

The rule counts shapes, steps and evaluations and times nothing, so it is the same on all machines.
It leaves depth out on purpose: all depths of a study have the same validation set.  So do its seeds
and schemes.  The interval between evaluations decides, and not the number of steps, so that a run
that is extended goes on with the set of its parent.
"""

from collections.abc import Sequence

from deepstack.config.schema import Config, Train

LEAST, MOST = 1024, 8192
"""Predicted positions of a validation set."""
SHARE = 3 / 4
"""Sequences of an evaluation over the sequences that are trained on until the next one."""
TOKENS_AT_ONCE = 2**11
"""Tokens of a forward pass of an evaluation on a CPU."""


MOST_READ = 2
"""Times that a run may read its training text without a warning."""


def validation_sequences(config: Config, inputs: int, predicted: float) -> int:
    """Return the number of sequences in the validation set of a run.

    inputs: tokens that the model reads of a sequence.
    predicted: positions of a sequence that are predicted, the mean over sequences.
    """
    train = config.train
    if train.eval_batches != "auto":
        return train.eval_batches * train.batch_size
    budget = SHARE * evaluation_interval(train) * train.batch_size * predicted
    positions = min(max(budget, LEAST), MOST)
    at_once = max(1, TOKENS_AT_ONCE // inputs)
    return at_once * max(1, round_up(positions / predicted / at_once))


def evaluation_interval(train: Train) -> int:
    """Return the steps between two evaluations of a run."""
    return min(train.eval_every or train.steps, train.steps)


def reading_text(times: Sequence[float]) -> str:
    """Return how often runs read their training text, with a warning above MOST_READ times."""
    ends = min(times), max(times)
    least, most = (f"{end:.2g}" if end < 10 else f"{end:,.0f}" for end in ends)
    text = f"the text is read {least if least == most else f'{least} to {most}'} times"
    if max(times) <= MOST_READ:
        return text
    return (
        f"{text}: above {MOST_READ} a model may learn it by heart; give a larger one (task.path, "
        "or task.source=stdlib), or fewer steps"
    )


def round_up(number: float) -> int:
    """Return the least whole number that is not below a number by more than a rounding."""
    return int(-(-(number - 1e-9) // 1))
