"""Plants small faults in a copy of the source, and runs the tests that should notice them.

    python tests/planted_faults.py                                  all faults
    python tests/planted_faults.py --only dropout_masks_repeat …    these

Exits 1 if a fault passes its tests, or if they fail without a fault (`--trust`: not tried).
Every run of tests is a fork of this process, which imports PyTorch and pytest once, and never
deepstack.
"""

import argparse
import compileall
import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Imported once for all runs of tests: modules that take long and read nothing of the copy.
SHARED = ("torch", "pytest", "numpy", "pandas", "pydantic", "scipy.optimize", "typer")


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
        "loss / math.log(2)}", "loss}",
        "training/test_training.py::test_a_run_folder_explains_itself",
    ),
    Fault(
        "heat_map_upside_down", "plots",
        "~is_drawable(values.T, scale))", "~is_drawable(values.T, scale))[::-1]",
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
        "worst_loss_marked_best", "runs",
        'row["val_loss"] == min(losses)', 'row["val_loss"] == max(losses)',
        "instruments/report/test_reports.py::test_the_lowest_loss_of_each_depth_is_bold",
    ),
    Fault(
        "deviation_as_standard_error", "runs",
        '["mean", "std", "sem"]', '["mean", "std", "std"]',
        "instruments/report/test_reports.py::test_a_difference_is_taken_seed_by_seed",
    ),
    Fault(
        "first_override_wins", "config",
        "settings |= override.settings", "settings = override.settings | settings",
        "config/test_sweep_files.py::"
        "test_zip_exclude_and_overrides_give_the_cells",
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
        "padded(count_tokens(halves.train), BYTES)", "padded(count_tokens(halves.held), BYTES)",
        "tasks/test_tasks_text.py::test_the_unigram_loss_is_that_of_the_validation_positions",
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
        "::test_every_diagnostic_equals_a_literal_forward_pass[pre_ln-encoder]",
    ),
    Fault(
        "band_without_its_lower_half", "instruments/ledger",
        "np.subtract(line.y, line.error)", "np.asarray(line.y)",
        "instruments/ledger/test_claims.py::test_a_claims_chart_draws_means_and_standard_errors",
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
    Fault(
        "cross_attention_of_new_layers_acts", "training",
        'OUTPUTS = {"o", "w2", "cross_o"}', 'OUTPUTS = {"o", "w2"}',
        "training/test_start.py::test_identity_keeps_the_last_hidden_state_bit_for_bit",
    ),
    Fault(
        "threshold_from_the_second_beta", "instruments/sharpness",
        'if train.optimizer == "sgd" else train.betas[0]',
        'if train.optimizer == "sgd" else train.betas[1]',
        "instruments/sharpness/test_sharpness.py::test_a_quadratic_diverges_above_the_threshold_alone",
    ),
    Fault(
        "absolute_tolerance_of_a_resume", "records",
        "rel_tol=tolerance)", "rel_tol=tolerance, abs_tol=tolerance)",
        "records/test_records.py::test_the_tolerance_is_relative_for_small_numbers_too",
    ),
    Fault(
        "ends_of_the_central_90_percent", "runs",
        "ENDS = (0.025, 0.975)", "ENDS = (0.05, 0.95)",
        "instruments/test_coverage.py::test_the_interval_of_a_mean_is_about_students",
    ),
    Fault(
        "residual_of_a_sum_of_squares", "instruments/laws",
        "residual = math.sqrt(np.mean(", "residual = math.sqrt(np.sum(",
        "instruments/laws/test_laws.py::test_the_residual_of_a_law_is_the_root_of_a_mean",
    ),
    Fault(
        "inside_without_the_upper_neighbour", "instruments/refine",
        "{self.best - 1, self.best + 1} <=", "{self.best - 1} <=",
        "instruments/refine/test_refine.py::test_a_best_value_lies_inside_with_both_neighbours_only",
    ),
    Fault(
        "only_failed_seeds_make_a_loss_infinite", "instruments/refine",
        "if len(ends) == len(runs) else math.inf", "if ends else math.inf",
        "instruments/refine/test_refine.py::test_a_run_that_failed_after_an_evaluation_has_no_loss",
    ),
    Fault(
        "noise_is_never_the_first_token", "tasks",
        "random.integers(0, vocabulary, tokens.shape)",
        "random.integers(1, vocabulary, tokens.shape)",
        "tasks/test_tasks_text.py::test_masks_are_exact_and_split_as_asked",
    ),
    Fault(
        "share_of_signal_is_biased", "instruments/ledger/claims",
        "(square - mean.square()) * batches / (batches - 1)", "square - mean.square()",
        "instruments/ledger/test_claims.py::test_the_share_of_signal_is_unbiased_for_few_batches",
    ),
    Fault(
        "a_removed_run_is_deleted_in_place", "records",
        "os.rename(path, hidden)", "hidden = path",
        "cli/test_rm.py::test_a_kill_leaves_whole_runs_and_later_use_deletes_the_rest",
    ),
    Fault(
        "rules_match_excluded_cells", "config",
        "            cells = others\n", "            pass\n",
        "config/test_config.py::test_a_mistake_and_its_message",
    ),
    Fault(
        "sgd_rate_of_the_head_grows_with_width", "schemes",
        '1.0 if role in (*MATRICES, "head") else m', "1.0 if role in MATRICES else m",
        "schemes/test_width.py::test_factors_of_training_follow_the_papers_tables",
    ),
    Fault(
        "levels_of_group_from_0", "tasks",
        "levels = np.arange(1, seq_len + 1)", "levels = np.arange(seq_len)",
        "tasks/test_composition.py::test_accuracy_of_each_k_and_the_largest_solved",
    ),
    Fault(
        "hadamard_over_the_root_of_its_rows", "model",
        "/ math.sqrt(len(hadamard))", "/ math.sqrt(n_out)",
        "model/test_model.py::test_zero_identity_is_identity_or_hadamard",
    ),
    Fault(
        "a_bias_is_scaled_with_its_product", "fast",
        ".mul_(alpha).add_(bias)", ".add_(bias).mul_(alpha)",
        "fast/test_products.py::test_products_for_threads_scale_the_product_alone",
    ),
    Fault(
        "a_decoder_layer_counts_from_its_own_stack", "diagnostics",
        "        before += len(stack.layers)\n", "        before = 0\n",
        "diagnostics/test_divergence.py::test_a_decoders_gradients_follow_its_encoders",
    ),
    Fault(
        "muon_by_the_inverse_ratio", "training",
        "max(1.0, n_out / n_in)", "max(1.0, n_in / n_out)",
        "training/test_equations.py::test_updates_follow_the_equation"
        " training/test_equations.py::test_torchs_muon_takes_the_same_steps",
    ),
    Fault(
        "middle_layer_one_too_high", "instruments/coordinates",
        "(len(by_layer) - 1) // 2", "len(by_layer) // 2",
        "instruments/coordinates/test_coordinates.py"
        "::test_values_per_coordinate_are_of_the_first_the_middle_and_the_last_layer",
    ),
    Fault(
        "diverged_seeds_in_losses_by_compute", "instruments/laws",
        "== depth and not has_diverged(run)]\n            at =", "== depth]\n            at =",
        "plots/test_charts_of_sweeps_and_layers.py"
        "::test_a_budget_has_the_loss_of_the_seeds_that_did_not_diverge",
    ),
    Fault(
        "minutes_rounded_down", "integrations/slurm",
        "math.ceil(60 * hours)", "int(60 * hours)",
        "integrations/slurm/test_slurm.py::test_the_array_has_what_its_largest_run_needs",
    ),
    Fault(
        "time_left_of_all_steps", "cli",
        "(steps - step) * step_ms", "steps * step_ms",
        "cli/test_progress.py::test_a_running_run_has_speed_and_time_left",
    ),
    Fault(
        "deviation_of_probes_as_error", "instruments/depth_use/analyses",
        "values.std().item() / math.sqrt(probes)", "values.std().item()",
        "instruments/depth_use/test_measures.py"
        "::test_the_error_of_a_jacobians_distance_is_its_spread_over_probes",
    ),
    Fault(
        "agreement_over_the_other_norm", "instruments/ledger",
        "((a - b).norm() / b.norm())", "((a - b).norm() / a.norm())",
        "instruments/ledger/test_claims.py::test_agreement_is_relative_to_the_second_argument",
    ),
    Fault(
        "diverged_seeds_of_the_runs_of_all_depths", "instruments/report",
        "{len(ends)} of {len(there)}, at", "{len(ends)} of {len(s.runs)}, at",
        "instruments/report/test_report_finding.py::test_the_page_begins_with_the_finding",
    ),
    Fault(
        "norm_counts_repeated_layers", "model",
        "loop.once(b.gradient_rows()) if loop and b.in_layers", "b.gradient_rows() if loop",
        "model/test_unique_layers.py::test_a_looped_stack_takes_the_steps_of_shared_parameters",
    ),
    Fault(
        "a_rank_of_all_hosts_as_that_of_this_one", "",
        "launch is None else launch.local_rank", "launch is None else launch.rank",
        "training/test_parallel.py::test_the_gpu_of_a_rank_has_its_number_on_this_host",
    ),
    Fault(
        "summaries_of_the_last_step_again", "plots",
        "if step > after and len(finite)", "if step >= after and len(finite)",
        "plots/test_tracked.py::test_summaries_are_of_later_steps_and_of_finite_values",
    ),
    Fault(
        "penalty_of_ntk_without_its_factor", "training",
        "return square / n_in if self.scaled else square", "return square",
        "training/test_equations.py::test_the_penaltys_gradient_equals_the_sum_of_squared_norms",
    ),
    Fault(
        "stable_rank_of_ntk_is_too_large", "diagnostics",
        "squares = {role: s / snapshot.matrices[role].shape[2] for role, s in squares.items()}",
        "squares = dict(squares)",
        "diagnostics/test_diagnostics_forward.py"
        "::test_every_diagnostic_equals_a_literal_forward_pass[deepnorm-ntk]",
    ),
    Fault(
        "attribution_every_first_step", "instruments/calibrate",
        "0 if roles else math.gcd(*at)", "0 if roles else min(at)",
        "instruments/calibrate/test_calibrate.py::test_roles_can_be_trained_alone_for_several_steps",
    ),
    Fault(
        "attribution_every_first_step_of_a_model", "instruments/calibrate",
        "attribution_every=math.gcd(*at)", "attribution_every=min(at)",
        "instruments/probe/test_external_probe_folder.py"
        "::test_every_step_is_measured_if_none_divides_the_others",
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


class Copy:
    """A copy of the repository in a folder, in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".*", "results"))
        compileall.compile_dir(self.root / "deepstack", quiet=1)
        self.output = folder / "output"

    def first_failure(self, tests: str, fault: Fault | None = None) -> str | None:
        """Return the first error of the tests, run with a fault, or None if they pass."""
        if fault is None:
            return self._run(tests)
        path = file_of(fault, self.root)
        kept = path.read_text(encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()  # it may have the time and the size of the changed file
        path.write_text(kept.replace(fault.old, fault.new), encoding="utf-8")
        try:
            return self._run(tests)
        finally:
            path.write_text(kept, encoding="utf-8")

    def _run(self, tests: str) -> str | None:
        pid = os.fork()
        if pid == 0:
            self._be_pytest(tests)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output = self.output.read_text(encoding="utf-8", errors="replace")
        if code not in (0, 1):  # pytest did not run the tests
            raise RuntimeError(f"pytest {tests}: exit code {code}\n{output}")
        errors = re.findall(r"^E +(.*)", output, re.M)
        return None if code == 0 else (errors or ["failed"])[0]

    def _be_pytest(self, tests: str) -> None:
        """Run pytest in this forked process, on the copy's source, and end the process."""
        code = 3
        try:
            file = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(self.root / "tests")
            os.environ["PYTHONPATH"] = str(self.root)
            sys.path[:] = [str(self.root), *(p for p in sys.path if Path(p) != ROOT / "tests")]
            sys.dont_write_bytecode = True
            assert "deepstack" not in sys.modules
            pytest = importlib.import_module("pytest")
            # Under CI=true, pytest explains how two long lists differ for minutes.
            words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "", "--assert=plain"]
            code = int(pytest.main([*words, *tests.split()]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def main() -> int:
    """Plant the faults one after the other and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="FAULT", help="these faults")
    parser.add_argument("--trust", action="store_true", help="the tests pass without a fault")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.name in (given.only or names)]
    for module in SHARED:
        importlib.import_module(module)
    missed = 0
    with TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        every = " ".join(dict.fromkeys(" ".join(fault.tests for fault in faults).split()))
        if not given.trust and (error := copy.first_failure(every)):
            print(f"the tests fail without a fault: {error}")
            return 1
        for fault in faults:
            error = copy.first_failure(fault.tests, fault)
            missed += error is None
            print(f"{'noticed' if error else 'NOT NOTICED':12} {fault.name:34} {error or ''}"[:150])
            sys.stdout.flush()
    print(f"{len(faults) - missed} of {len(faults)} faults were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
