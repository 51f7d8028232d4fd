"""Describes the result of a run or a sweep in words, and names the next command."""

import shlex
from collections.abc import Sequence

from deepstack.base.text import signed_text
from deepstack.records import Run
from deepstack.records.run import visible_folders
from deepstack.runs.best import Best, bests_of, by_success
from deepstack.runs.outcomes import CLEAR, FAR, Result, result_of, task_sentence
from deepstack.runs.runs import Runs
from deepstack.runs.series import COMPARED_WITH
from deepstack.runs.settings import scheme_label
from deepstack.runs.statistics import distinct_levels
from deepstack.runs.words import count_text, lead_sentence

MOST_GROUPS = 8  # settings, and depths, up to which a sweep has a finding


def run_finding(run: Run) -> str | None:
    """Return one sentence on how a run ended, or None if nothing is known to compare with."""
    subject = f"{scheme_label(run)} with {run.get('model.depth')} layers"
    if run.state == "diverged":
        return f"{subject} diverged at step {run.status.get('step')}."
    end = result_of(run)
    loss, floor = end.loss, end.floor
    trained = run.state == "done" and run.get("train.steps")
    if not trained or loss is None or floor is None:
        return None
    values, guess = f"{loss:.2f} against {floor:.2f} nats", guess_of(run)
    if end.share is not None:
        values += f"; {signed_text(100 * end.share, 0)} % of what can be learnt"
    if end.outcome == "above":
        return f"{subject} ends {by(loss - floor, end)} above {guess} ({values})."
    if end.outcome == "trained":
        gain = by(floor - loss, end)
        return f"{subject} has learned from context: {gain} below {guess} ({values})."
    if end.start is not None and loss < floor and abs(loss - end.start) < CLEAR:
        return f"{subject} has learned nothing: its loss ends as it began ({values})."
    if end.error is not None and floor - loss > end.error:
        less = by(floor - loss, end)
        return f"{subject} has not clearly learned from context: {less} below {guess} ({values})."
    if end.half_width is not None and loss - floor - end.half_width < -FAR:
        side = f"{by(abs(loss - floor), end)} {'below' if loss < floor else 'above'} {guess}"
        return (
            f"{subject} may have learned from context: it ends {side}, and its validation set is "
            f"too small to tell ({values}); raise train.eval_batches."
        )
    where = f"level with {guess}"
    if end.half_width is not None and loss - floor - end.half_width > CLEAR:
        where = f"{by(loss - floor, end)} above {guess}"
    return f"{subject} has learned nothing from context: it ends {where} ({values})."


def by(nats: float, end: Result) -> str:
    """Return a distance from the loss without context, with its error: '0.47 ± 0.02 nats'."""
    error = "" if end.error is None else f" ± {end.error:.2f}"
    return f"{nats:.2f}{error} nats"


def next_command(run: Run, words: Sequence[str]) -> str:
    """Return the command to type after `deepstack WORDS`, which trained this run.

    It trains another scheme, or plots the study once that has a second scheme, or after --extend,
    which changes no scheme.
    """
    scheme, study = run.get("model.scheme"), run.path.parent
    # The name of a run's folder begins with its scheme: scheme-d48-s0-398b60.
    others = [path.name for path in visible_folders(study) if path.name.count("-") >= 3]
    is_one_scheme = all(name.startswith(f"{scheme}-") for name in others)
    is_extended = any(word.startswith("--extend") for word in words)
    if not is_one_scheme or is_extended or run.get("model.scheme_options"):
        return shlex.join(["deepstack", "plot", str(study)])
    other = next(name for name in COMPARED_WITH if name != scheme)
    unchanged = [word for word in words if not word.startswith("model.scheme=")]
    return shlex.join(["deepstack", *unchanged, f"model.scheme={other}"])


def sweep_finding(runs: Sequence[Run]) -> list[str]:
    """Return a line per depth with the settings that learned from context, and the margin.

    Of several learning rates of a setting and depth, it is the best one.  The margin is the lead of
    the best setting at the greatest depth.
    """
    known = Runs(run for run in runs if run.damage() is None and result_of(run).outcome)
    depths: dict[int, list[Best]] = {}
    bests = bests_of(known.results.values())
    for one in bests:
        depths.setdefault(one.depth, []).append(one)
    if not known or max(len(depths), *map(len, depths.values())) > MOST_GROUPS:
        return []
    rates = any(one.is_chosen for of_depth in depths.values() for one in of_depth)
    where = " at the best rate" if rates else ""
    floors = distinct_levels(one.floor for one in known.results.values())
    level = f", {floors[0]:.3f}" if len(floors) == 1 else ""
    gain = f"(mean gain in nats over {guess_of(known[0])}{level})"
    lead = lead_sentence(bests)
    last = [lead] if lead else task_sentence(one.task for one in known.results.values())
    counts = {n: ", ".join(map(count_text, by_success(depths[n]))) for n in sorted(depths)}
    return [
        f"runs that learned from context{where} {gain}:",
        *(f"{n} layers: {text}" for n, text in counts.items()),
        *last,
    ]


def guess_of(run: Run) -> str:
    """Return the name of the loss that `deepstack.runs.outcomes` compares with."""
    is_unigram = "unigram_entropy" in run.columns.get("references", {})
    return "the unigram" if is_unigram else "a guess without context"
