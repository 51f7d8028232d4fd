"""Plants small faults in a copy of the source, and runs the tests that should notice them.

    python tests/planted_faults.py            all faults
    python tests/planted_faults.py --only dropout_masks_repeat

Exits 1 if a fault passes its tests, or if they fail without a fault.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """`old`, which occurs once in the files of deepstack/`folder`, becomes `new`."""

    name: str
    folder: str
    old: str
    new: str
    tests: str  # what pytest is given, relative to tests/, with spaces between


DRAWN = "plots/test_drawn_arrays.py::test_a_chart_draws_the_numbers_of_its_csv"
FAULTS = (
    Fault(
        "gains_decay", "training",
        'if bank.start in ("matrix", "table") else',
        'if bank.start in ("matrix", "table", "one") else',
        "training/test_decay_ramp_dropout.py::test_matrices_and_tables_decay_and_nothing_else",
    ),
    Fault(
        "ramp_one_step_late", "training",
        "self.built.at_step(step)", "self.built.at_step(step - 1)",
        "training/test_decay_ramp_dropout.py::test_a_ramp_has_its_value_at_every_step_of_a_run",
    ),
    Fault(
        "dropout_masks_repeat", "training",
        "dropout_seed(self.config.seed, step,", "dropout_seed(self.config.seed, 1,",
        "training/test_decay_ramp_dropout.py::test_dropout_differs_between_steps",
    ),
    Fault(
        "bits_are_nats", "training",
        "total / count / math.log(2)", "total / count",
        "training/test_training.py::test_a_run_folder_explains_itself",
    ),
    Fault(
        "heat_map_upside_down", "plots",
        "np.ma.masked_array(values, ~drawable)", "np.ma.masked_array(values, ~drawable)[::-1]",
        f"{DRAWN}[layer_step_heat_map]",
    ),
    Fault(
        "legend_colours_reversed", "plots",
        'drawing.entry(f"step {step}", color=colours[step])',
        'drawing.entry(f"step {step}", color=colours[steps[-1 - steps.index(step)]])',
        f"{DRAWN}[grad_norm_by_layer]",
    ),
    Fault(
        "ring_around_the_largest_rate", "plots",
        'panel.ring(best["x"], best["y"]', 'panel.ring(rows["x"][-1:], rows["y"][-1:]',
        f"{DRAWN}[loss_vs_lr]",
    ),
    Fault(
        "worst_loss_marked_best", "reports",
        'row["val_loss"] == min(known)', 'row["val_loss"] == max(known)',
        "reports/test_reports.py",
    ),
    Fault(
        "deviation_as_standard_error", "analysis",
        '["mean", "std", "sem"]', '["mean", "std", "std"]',
        "reports/test_reports.py::test_a_difference_is_taken_seed_by_seed",
    ),
    Fault(
        "first_override_wins", "config",
        "settings |= override.settings", "settings = override.settings | settings",
        "config/test_sweep_files.py::"
        "test_zipped_keys_go_together_excluded_cells_are_left_out_and_overrides_hold",
    ),
    Fault(
        "mean_time_of_a_step", "records",
        "return statistics.median(times)", "return statistics.mean(times)",
        "records/test_runs.py::test_the_time_of_a_step_is_the_median_of_the_latest",
    ),
    Fault(
        "ramp_without_end", "schemes",
        "min(1.0, step / self.ramp_steps)", "step / self.ramp_steps",
        "training/test_decay_ramp_dropout.py::test_a_ramp_has_its_value_at_every_step_of_a_run[branch_norm]",
    ),
    Fault(
        "unigram_of_held_out_text", "tasks",
        "padded(count_tokens(train), BYTES)", "padded(count_tokens(held), BYTES)",
        "tasks/test_tasks_text.py::test_the_unigram_entropy_is_the_held_out_cross_entropy",
    ),
    Fault(
        "bert_head_with_relu", "model",
        "self.norm(F.gelu(", "self.norm(F.relu(",
        "model/test_model.py::test_the_bert_head_is_dense_activation_norm_and_the_tied_table",
    ),
    Fault(
        "replay_without_lr_factors", "fast",
        'group["lr"].fill_(rate)', 'group["lr"].fill_(lr)',
        "fast/test_replay.py::test_every_kind_of_step_replayed_gives_the_same_bytes[depth_mup]",
    ),
    Fault(
        "stream_that_enters_a_layer", "diagnostics",
        "snapshot.stream[1:].mean(dim=-1)", "snapshot.stream[:-1].mean(dim=-1)",
        "diagnostics/test_diagnostics_forward.py"
        "::test_every_diagnostic_is_that_of_the_forward_pass[pre_ln-encoder]",
    ),
    Fault(
        "band_without_its_lower_half", "theory",
        "np.subtract(line.y, line.error)", "np.asarray(line.y)",
        "theory/test_claims.py::test_a_claims_chart_draws_means_and_standard_errors",
    ),
    Fault(
        "largest_run_first", "sweeps",
        "key=lambda cell: (cell.flops,", "key=lambda cell: (-cell.flops,",
        "sweeps/test_sweeps.py::test_a_plan_is_cheap_first_and_knows_what_is_done",
    ),
    Fault(
        "memory_of_the_smallest_runs", "cli",
        "for cell in todo)[-workers:]", "for cell in todo)[:workers]",
        "sweeps/test_sweeps.py::test_a_plan_ends_with_the_memory_and_time_of_all_runs",
    ),
)  # fmt: skip


def file_of(fault: Fault, root: Path = ROOT) -> Path:
    """Return the file that contains `old` exactly once; LookupError otherwise."""
    folder = root / "deepstack" / fault.folder
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".html")]
    counts = {path: path.read_text(encoding="utf-8").count(fault.old) for path in files}
    if sum(counts.values()) != 1:
        raise LookupError(
            f"{fault.name}: {fault.old!r} occurs {sum(counts.values())} times in {folder}; "
            "allowed once: update FAULTS in tests/planted_faults.py"
        )
    return next(path for path, count in counts.items() if count)


def passes(tests: str, fault: Fault | None = None) -> bool:
    """Return whether the tests pass in a copy of the repository, with the fault planted in it."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
        if fault is not None:
            path = file_of(fault, copy)
            text = path.read_text(encoding="utf-8").replace(fault.old, fault.new)
            path.write_text(text, encoding="utf-8")
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *tests.split()]
        done = subprocess.run(
            words, cwd=copy / "tests", env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode > 1:  # pytest did not run the tests
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}")
    return done.returncode == 0


def main() -> int:
    """Plant the faults one after the other and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[fault.name for fault in FAULTS], help="one fault")
    only = parser.parse_args().only
    faults = [fault for fault in FAULTS if only in (None, fault.name)]
    if not passes(" ".join(fault.tests for fault in faults)):
        print("the tests fail without a fault")
        return 1
    missed = 0
    for fault in faults:
        passed = passes(fault.tests, fault)
        missed += passed
        print(f"{'NOT NOTICED' if passed else 'noticed':12} {fault.name}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
