"""Measures entries of the ledger, and keeps the results as files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base import ResourceError
from deepstack.records import ENDED, LARGEST_TEXT, Run, followed, make_folder, parse_object, read
from deepstack.records import replace as write
from deepstack.runs import Runs
from deepstack.sweeps import Cell, CellProgress, plan, sweep
from deepstack_lab.ledger.claim import (
    TIERS,
    Claim,
    Curves,
    Finding,
    Line,
    Null,
    Part,
    Tier,
    UnmeasuredError,
)  # fmt: skip
from deepstack_lab.ledger.reach import Extent, Verdict, extent_of, outside, reached

STUDIES = Path(__file__).parent / "studies"
SEED = "seed"
OTHER_SEEDS = 1000  # between the sets of seeds of a study's runs
Show = Callable[[Sequence[CellProgress]], None]


@dataclass(frozen=True)
class Measured:
    """An entry and its result.

    finding: the result; None if the entry was not measured.
    reason: why it was not measured.
    seconds: CPU seconds of the experiment, and the time of the steps of its runs.
    """

    entry: Claim
    finding: Finding | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The verdict of the rules as far as it reaches (see `reached`), or 'not measured'."""
        decided = self.finding.verdict if self.finding else "not measured"
        entry = self.entry
        return reached(decided, entry.source_range, self.measured_range, entry.identity)

    @cached_property
    def measured_range(self) -> Extent | None:
        """The range of the stacks on which the entry is measured; None if it trains none."""
        entry = self.entry
        if entry.study:
            study = conf.load_study(STUDIES / entry.study)
            cells = [one.settings | {SEED: 0} for one in study.combinations()]
            distinct = {str(cell): cell for cell in cells}.values()
            return extent_of(conf.with_overrides(study.base, cell) for cell in distinct)
        if entry.trials:
            from deepstack_lab.ledger.claim_stack import trial_config

            return extent_of(trial_config(0, **settings) for settings in entry.trials)
        return entry.measured_range

    @property
    def outside(self) -> tuple[str, ...]:
        """The properties in which the measurement is not shown to lie in the source's range."""
        source = self.entry.source_range
        return outside(self.measured_range or Extent(), source) if source else ()

    @property
    def seeds(self) -> int:
        """The largest number of draws of a part."""
        return max((part.draws for part in self.finding.parts), default=0) if self.finding else 0


def measure(
    entry: Claim,
    tier: Tier,
    out: Path,
    *,
    seed: int = 0,
    thorough: bool = False,
    workers: int | None = None,
    show: Show | None = None,
) -> Measured:
    """Measure an entry, after the runs that its study lacks.

    tier: entries and runs above it are left out; finished runs below `out` are read.
    seed: number of the set of seeds, of draws and of runs.
    workers, show: of the sweep.
    """
    if entry.needs:
        return Measured(entry, reason=f"needs {entry.needs}")
    began, seconds = time.process_time(), 0.0
    allowed = TIERS.index(entry.tier) <= TIERS.index(tier) and not lacks_gpu(entry)
    if not entry.study and not allowed:
        return Measured(entry, reason=f"tier {entry.tier}")
    if entry.study:
        study = with_seeds(conf.load_study(STUDIES / entry.study), seed)
        name = conf.study_name(study.base, STUDIES / entry.study, None)
        cells = plan(study, study=name, out=out)
        if allowed and missing(cells):
            sweep(study, study=name, out=out, workers=workers, show=show)
            cells = plan(study, study=name, out=out)
        if lacking := missing(cells):
            return Measured(entry, reason=f"tier {entry.tier}: {lacking} of {len(cells)} runs lack")
        runs = Runs(Run(cell.folder.path) for cell in cells)
        seconds = sum(float(run.timing["step_ms"].sum()) for run in runs) / 1000
        try:
            finding = entry.judge(entry.experiment(runs))
        except UnmeasuredError as error:
            return Measured(entry, reason=str(error), seconds=seconds)
    else:
        finding = entry.measure(seed, thorough)
    return Measured(entry, finding, seconds=seconds + time.process_time() - began)


def with_seeds(study: conf.Study, seed: int) -> conf.Study:
    """Return a study whose seeds are 1000 `seed` higher."""
    seeds = [OTHER_SEEDS * seed + one for one in study.grid[SEED]]
    return replace(study, grid={**study.grid, SEED: seeds})


def folder_of(seed: int) -> str:
    """Return the folder of the results that holds <id>.json for a set of seeds."""
    return f"ledger_seed_{seed}" if seed else "ledger"


def lacks_gpu(entry: Claim) -> bool:
    """Return whether an entry of tier gpu meets a machine without one."""
    import torch

    return entry.tier == "gpu" and not torch.cuda.is_available()


def missing(cells: Sequence[Cell]) -> int:
    """Return the number of runs that have not ended."""
    return sum(cell.state not in ENDED for cell in cells)


def save(one: Measured, out: Path, content: dict[str, Any], seed: int = 0) -> None:
    """Write the result of an entry as <out>/ledger/<id>.json, or of another seed beside it."""
    folder = followed(out) / folder_of(seed)
    make_folder(folder)
    write(
        folder / f"{one.entry.id}.json", (json.dumps(content, ensure_ascii=False) + "\n").encode()
    )


def recorded(entry: Claim, out: Path, seed: int = 0) -> Measured:
    """Return the result that `save` wrote for an entry; not measured if its rules have changed.

    Raises ResourceError for a file that it did not write.
    """
    path = out / folder_of(seed) / f"{entry.id}.json"
    text = read(path, LARGEST_TEXT) if path.exists() else None
    if entry.needs or text is None:
        reason = f"needs {entry.needs}" if entry.needs else f"tier {entry.tier}"
        return Measured(entry, reason=reason)
    try:
        content = parse_object(text, constants=True)
        seconds = float(content["seconds"])
        if entry.rules:
            if content["draws"] and set(content["draws"]) == {rule.what for rule in entry.rules}:
                return Measured(entry, entry.judge(content["draws"]), seconds=seconds)
            return Measured(entry, reason="its rules have changed; measure it again")
        finding = finding_of(content) if content["parts"] else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResourceError(
            f"{path}: found no result of deepstack reproduce ({error}); delete the file and "
            f"measure {entry.id} again"
        ) from error
    return Measured(entry, finding, content["reason"], seconds)


def finding_of(content: dict[str, Any]) -> Finding:
    """Return the finding in a result as JSON."""
    names = ("what", "predicted", "measured", "uncertainty", "relation", "tolerance", "stated")
    parts = [
        Part(**{name: one[name] for name in (*names, "draws")}, null=Null(**one["null"]))
        for one in content["parts"]
    ]
    curves = content["curves"]
    if curves is not None:
        lines = [Line(**line) for line in curves["lines"]]
        curves = replace(Curves(**{**curves, "lines": ()}), lines=lines)
    return Finding(parts, content["note"], curves)
