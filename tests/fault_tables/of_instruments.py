"""Faults of commands and loops of the user, of coordinates, probes and `compare --diff`."""

ROWS = (
    (
        "a_row_against_an_older_f", "tools/probe",
        "if self.every > 1 and is_due(self.every, self.at + 1):",
        "if self.every > 1 and is_due(self.every, self.at):",
        "tools/probe/test_external_probe_folder.py"
        "::test_a_rare_row_measures_its_last_step_alone",
    ),
    (
        "norm_of_a_stream_over_all_tokens", "tools/probe",
        "as_float(x).norm(dim=-1).mean(), x.shape[-1]",
        "as_float(x).norm(dim=-1).sum(), x.shape[-1]",
        "tools/probe/test_external_probe.py"
        "::test_steps_and_layers_are_what_they_are_called",
    ),
    (
        "mean_over_processes_is_a_sum", "tools/probe",
        "return (total / dist.get_world_size()).to(number.dtype)",
        "return total.to(number.dtype)",
        "tools/probe/test_external_probe_wrappers.py"
        "::test_the_loss_of_a_sharded_model_is_the_mean_over_its_processes",
    ),
    (
        "a_probe_forgets_a_divergence", "tools/probe",
        "self.recorder.divergence = divergence_of(self.folder)", "pass",
        "tools/probe/test_probe_in_loops.py::test_a_run_that_diverged_stays_as_it_is",
    ),
    (
        "a_probe_forgets_the_losses_before_a_resume", "tools/probe",
        '            self._spikes.load(state["spikes"])', "            pass",
        "tools/probe/test_probe_at_spikes.py::test_a_resumed_loop_has_the_same_spike[25]",
    ),
    (
        "a_study_without_a_value_goes_on", "tools/own_trainer",
        "return self.has_value or self.without is None", "return True",
        "tools/own_trainer/test_no_value.py"
        "::test_a_metric_that_matches_nothing_ends_the_study_after_its_first_run",
    ),
    (
        "a_step_made_again_is_kept_twice", "tools/own_trainer",
        "while values and values[-1].step >= step:", "while values and values[-1].step > step:",
        "tools/own_trainer/test_metrics.py"
        "::test_a_trainer_that_begins_again_at_a_step_replaces_its_later_values",
    ),
    (
        "values_of_an_earlier_start", "tools/own_trainer",
        "if not path.is_file() or path.stat().st_mtime_ns < since:", "if not path.is_file():",
        "tools/own_trainer/test_metrics.py"
        "::test_a_file_of_an_earlier_start_does_not_count",
    ),
    (
        "a_nan_at_any_step_has_diverged", "tools/own_trainer",
        "diverged = any(rows and not math.isfinite(rows[-1].value)",
        "diverged = any(rows and not math.isfinite(rows[0].value)",
        "tools/own_trainer/test_runs_of_commands.py"
        "::test_a_nan_is_a_result_and_an_exit_code_a_failure",
    ),
    (
        "all_commands_on_the_first_gpu", "tools/own_trainer",
        "min(self.gpus, key=used.count)", "self.gpus[0]",
        "tools/own_trainer/test_runs_of_commands.py::test_runs_at_a_time_share_the_gpus",
    ),
    (
        "a_changed_script_is_not_named", "tools/own_trainer",
        "if before.get(name, digest) != digest:", "if name not in before:",
        "tools/own_trainer/test_runs_of_commands.py"
        "::test_a_command_without_a_value_has_failed_and_a_changed_script_is_named",
    ),
    (
        "a_command_without_a_value_is_done", "tools/own_trainer",
        "    if why and not diverged:\n", "    if exit_code and why and not diverged:\n",
        "tools/own_trainer/test_runs_of_commands.py"
        "::test_a_command_without_a_value_has_failed_and_a_changed_script_is_named",
    ),
    (
        "a_sign_is_lost", "tools/own_trainer",
        "        start -= 1\n", "        pass\n",
        "tools/own_trainer/test_metrics.py"
        "::test_a_sign_before_the_group_belongs_to_the_number",
    ),
    (
        "widths_at_the_greatest_depth", "tools/coordinates",
        "table[table[other] == table[other].min()]", "table[table[other] == table[other].max()]",
        "tools/coordinates/test_exponents.py"
        "::test_a_step_without_change_and_a_module_of_some_depths_have_no_exponent",
    ),
    (
        "a_verdict_by_the_upper_end", "tools/coordinates",
        "    if low > most:\n", "    if high > most:\n",
        "tools/coordinates/test_exponents.py"
        "::test_a_module_breaks_a_rule_if_its_whole_interval_lies_outside[0.2-0.3-undecided]",
    ),
    (
        "a_relative_change_of_the_multiplier", "tools/coordinates",
        "return (a - 1, a - 1) if module.inside else FLAT",
        "return (-a, -a) if module.inside else FLAT",
        "tools/coordinates/test_exponents.py"
        "::test_width_is_flat_in_all_rules_and_depth_follows_the_branch",
    ),
    (
        "a_single_late_step_breaks_a_rule", "tools/coordinates",
        "STEPS = 2  #", "STEPS = 1  #",
        "tools/coordinates/test_exponents.py"
        "::test_one_late_step_alone_does_not_break_a_rule",
    ),
    (
        "steps_that_are_not_finite_are_compared", "tools/coordinates",
        'table[table["step"] < first["step"]], note',
        'table[table["step"] <= first["step"]], note',
        "tools/coordinates/test_exponents.py"
        "::test_steps_from_the_first_value_on_that_is_not_finite_are_left_out",
    ),
    (
        "attention_at_the_start_may_not_fall", "tools/coordinates",
        "return MAY_FALL if module.grows else HALF", "return FLAT if module.grows else HALF",
        "tools/coordinates/test_exponents.py"
        "::test_attention_logits_fall_at_the_start_if_heads_get_wider",
    ),
    (
        "empty_cells_differ", "tools/diff",
        "if a != b and not (a is not None and b is not None and a != a and b != b):",
        "if a != b:",
        "tools/diff/test_diff.py::test_an_empty_cell_equals_an_empty_cell",
    ),
    (
        "the_end_of_a_log_is_not_compared", "tools/diff",
        "    if len(one) != len(other):\n", "    if False:\n",
        "tools/diff/test_diff.py::test_a_shorter_log_differs_by_its_last_step",
    ),
    (
        "times_of_steps_are_compared", "tools/diff",
        "if name in there and name != TIMED:", "if name in there:",
        "tools/diff/test_diff.py::test_equal_parts_are_named_with_their_rows",
    ),
    (
        "commits_are_not_compared", "tools/diff",
        'return environment | {"commit": git.get("commit")}', "return environment",
        "tools/diff/test_diff.py::test_other_versions_and_commits_are_named",
    ),
    (
        "variables_of_a_study_make_no_other_run", "tools/own_trainer",
        'known |= {"environment": dict(self.environment)} if self.environment else {}',
        "known |= {}",
        "tools/own_trainer/test_records_of_commands.py"
        "::test_runs_of_other_variables_are_others",
    ),
    (
        "a_command_without_the_seed_is_compared", "tools/own_trainer",
        "if not set(seeds) & set(one.names))", "if not seeds)",
        "tools/own_trainer/test_verdicts.py"
        "::test_a_comparison_needs_the_seed_in_both_commands",
    ),
    (
        "a_probe_that_goes_on_is_taken", "tools/own_trainer",
        "if probe.state not in ENDED:", "if not probe.state:",
        "tools/own_trainer/test_records_of_commands.py"
        "::test_a_probe_must_have_ended_before_its_command[running-failed]",
    ),
    (
        "settings_of_a_probe_before_those_of_its_study", "tools/own_trainer",
        "nested(known | settings)", "nested(settings | known)",
        "tools/own_trainer/test_records_of_commands.py"
        "::test_a_probe_gives_the_settings_that_the_study_does_not",
    ),
    (
        "a_probe_hides_a_divergence", "tools/own_trainer",
        'diverged |= not math.isfinite(float(folder.last_row().get("loss") or 0))', "pass",
        "tools/own_trainer/test_records_of_commands.py"
        "::test_a_loss_of_the_probe_that_is_not_finite_has_diverged",
    ),
    (
        "a_resumed_command_loses_its_files", "tools/own_trainer",
        "if not keep and files.exists():", "if files.exists():",
        "tools/own_trainer/test_records_of_commands.py"
        "::test_a_command_that_goes_on_keeps_its_files_of_the_earlier_start[True]",
    ),
    (
        "truth_as_python_writes_it", "tools/own_trainer",
        "str(value).lower() if isinstance(value, bool) else str(value)", "str(value)",
        "tools/own_trainer/test_study_files.py"
        "::test_numbers_and_truth_are_written_as_a_trainer_reads_them",
    ),
    (
        "only_children_of_a_command_are_killed", "tools/own_trainer",
        "        todo += new\n", "",
        "tools/own_trainer/test_records_of_commands.py"
        "::test_processes_below_those_of_a_command_are_found",
    ),
    (
        "a_probe_without_updates_at_a_spike", "tools/probe",
        "may_be_due = self._spikes is not None or is_due(self.layers_every, self.at + 1)",
        "may_be_due = is_due(self.layers_every, self.at + 1)",
        "tools/probe/test_probe_at_spikes.py"
        "::test_a_bad_batch_gives_a_snapshot_at_its_step[1]",
    ),
    (
        "a_rate_of_falling_modules_alone", "tools/coordinates",
        'is_twice = row.over == "width" and grows_twice(of_output, before)',
        'is_twice = row.over == "width"',
        "tools/coordinates/test_exponents.py"
        "::test_steps_that_grow_together_have_one_cause",
    ),
    (
        "a_remedy_of_the_other_rule", "tools/coordinates",
        'power = {1.0: "1/depth", 0.5: "1/√depth"}[a]',
        'power = {0.5: "1/depth", 1.0: "1/√depth"}[a]',
        "tools/coordinates/test_exponents.py"
        "::test_the_remedy_of_a_branch_is_the_multiplier_of_its_rule[completep-1/depth]",
    ),
    (
        "changed_parameters_are_allowed", "diagnostics",
        "if sums_of_bits(built) != before[0]:", "if False:",
        "plugins/test_rules_and_instruments.py::test_an_instrument_that_changes_the_run_is_refused",
    ),
)  # fmt: skip
