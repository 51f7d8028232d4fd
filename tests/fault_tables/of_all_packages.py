"""One fault or two of almost every package."""

DRAWN = "plots/test_drawn_arrays.py::test_a_chart_draws_the_numbers_of_its_csv"
ROWS = (
    (
        "gains_decay", "training",
        'if bank.start in ("matrix", "table") else',
        'if bank.start in ("matrix", "table", "one") else',
        "training/test_decay_ramp_dropout.py::test_matrices_and_tables_decay_and_nothing_else",
    ),
    (
        "ramp_one_step_late", "training",
        "self.built.at_step(step)", "self.built.at_step(step - 1)",
        "training/test_decay_ramp_dropout.py::test_a_ramp_has_its_value_at_every_step_of_a_run",
    ),
    (
        "dropout_masks_repeat", "training",
        "dropout_seed(config.seed, step,", "dropout_seed(config.seed, 1,",
        "training/test_decay_ramp_dropout.py::test_dropout_differs_between_steps",
    ),
    (
        "bits_are_nats", "training",
        "loss / math.log(2)}", "loss}",
        "training/test_training.py::test_a_run_folder_explains_itself",
    ),
    (
        "heat_map_upside_down", "plots",
        "~is_drawable(values.T, scale))", "~is_drawable(values.T, scale))[::-1]",
        f"{DRAWN}[layer_step_heat_map]",
    ),
    (
        "legend_colours_reversed", "plots",
        'drawing.entry(f"step {step}", color=colours[step])',
        'drawing.entry(f"step {step}", color=colours[steps[-1 - steps.index(step)]])',
        f"{DRAWN}[grad_norm_by_layer]",
    ),
    (
        "ring_around_the_largest_rate", "plots",
        'panel.ring(best["x"], best["y"]', 'panel.ring(rows["x"][-1:], rows["y"][-1:]',
        f"{DRAWN}[loss_vs_lr]",
    ),
    (
        "worst_loss_marked_best", "runs",
        'row["val_loss"] == min(losses)', 'row["val_loss"] == max(losses)',
        "tools/report/test_reports.py::test_the_lowest_loss_of_each_depth_is_bold",
    ),
    (
        "deviation_as_standard_error", "runs",
        '["mean", "std", "sem"]', '["mean", "std", "std"]',
        "tools/report/test_reports.py::test_a_difference_is_taken_seed_by_seed",
    ),
    (
        "first_override_wins", "config",
        "settings |= override.settings", "settings = override.settings | settings",
        "config/test_sweep_files.py::"
        "test_zip_exclude_and_overrides_give_the_cells",
    ),
    (
        "mean_time_of_a_step", "records",
        "return statistics.median(times)", "return statistics.mean(times)",
        "records/test_runs.py::test_the_time_of_a_step_is_the_median_of_the_latest",
    ),
    (
        "ramp_without_end", "schemes",
        "min(1.0, step / self.ramp_steps)", "step / self.ramp_steps",
        "training/test_decay_ramp_dropout.py::test_a_ramp_has_its_value_at_every_step_of_a_run[branch_norm]",
    ),
    (
        "unigram_of_held_out_text", "tasks",
        "padded(count_tokens(halves.train), BYTES)", "padded(count_tokens(halves.held), BYTES)",
        "tasks/test_tasks_text.py::test_the_unigram_loss_is_that_of_the_validation_positions",
    ),
    (
        "bert_head_with_relu", "model",
        "self.norm(F.gelu(", "self.norm(F.relu(",
        "model/test_model.py::test_the_bert_head_is_dense_activation_norm_and_the_tied_table",
    ),
    (
        "replay_without_lr_factors", "fast",
        'group["lr"].fill_(rate)', 'group["lr"].fill_(lr)',
        "fast/test_replay.py::test_every_kind_of_step_replayed_gives_the_same_bytes[depth_mup]",
    ),
    (
        "stream_that_enters_a_layer", "diagnostics",
        "snapshot.stream[1:].mean(dim=-1)", "snapshot.stream[:-1].mean(dim=-1)",
        "diagnostics/test_diagnostics_forward.py"
        "::test_every_diagnostic_equals_a_literal_forward_pass[pre_ln-encoder]",
    ),
    (
        "band_without_its_lower_half", "../deepstack_lab/ledger",
        "np.subtract(line.y, line.error)", "np.asarray(line.y)",
        "lab/ledger/test_claims.py::test_a_claims_chart_draws_means_and_standard_errors",
    ),
    (
        "repeated_layers_count_in_the_width", "config",
        "owners = model.prelude_layers + model.unique_layers + model.coda_layers",
        "owners = model.depth",
        "config/test_equal_parameters.py::test_no_other_width_of_a_built_model_is_nearer[looped]",
    ),
    (
        "largest_run_first", "sweeps",
        "key=lambda cell: (cell.flops,", "key=lambda cell: (-cell.flops,",
        "sweeps/test_sweeps.py::test_a_plan_is_cheap_first_and_knows_what_is_done",
    ),
    (
        "memory_of_the_smallest_runs", "cli",
        "for cell in todo)[-workers:]", "for cell in todo)[:workers]",
        "sweeps/test_sweeps.py::test_a_plan_ends_with_the_memory_and_time_of_all_runs",
    ),
    (
        "cross_attention_of_new_layers_acts", "training",
        'OUTPUTS = {"o", "w2", "cross_o"}', 'OUTPUTS = {"o", "w2"}',
        "training/test_start.py::test_identity_keeps_the_last_hidden_state_bit_for_bit",
    ),
    (
        "threshold_from_the_second_beta", "instruments/sharpness",
        'if train.optimizer == "sgd" else train.betas[0]',
        'if train.optimizer == "sgd" else train.betas[1]',
        "instruments/sharpness/test_sharpness.py::test_a_quadratic_diverges_above_the_threshold_alone",
    ),
    (
        "absolute_tolerance_of_a_resume", "records",
        "rel_tol=tolerance)", "rel_tol=tolerance, abs_tol=tolerance)",
        "records/test_records.py::test_the_tolerance_is_relative_for_small_numbers_too",
    ),
    (
        "ends_of_the_central_90_percent", "runs",
        "END_QUANTILES = (0.025, 0.975)", "END_QUANTILES = (0.05, 0.95)",
        "tools/test_coverage.py::test_the_interval_of_a_mean_is_about_students",
    ),
    (
        "residual_of_a_sum_of_squares", "tools/laws",
        "residual = math.sqrt(np.mean(", "residual = math.sqrt(np.sum(",
        "tools/laws/test_laws.py::test_the_residual_of_a_law_is_the_root_of_a_mean",
    ),
    (
        "inside_without_the_upper_neighbour", "tools/refine",
        "{self.best - 1, self.best + 1} <=", "{self.best - 1} <=",
        "tools/refine/test_refine.py::test_a_best_value_lies_inside_with_both_neighbours_only",
    ),
    (
        "only_failed_seeds_make_a_loss_infinite", "tools/refine",
        "if len(ends) == len(runs) else math.inf", "if ends else math.inf",
        "tools/refine/test_refine.py::test_a_run_that_failed_after_an_evaluation_has_no_loss",
    ),
    (
        "noise_is_never_the_first_token", "tasks",
        "random.integers(0, vocabulary, tokens.shape)",
        "random.integers(1, vocabulary, tokens.shape)",
        "tasks/test_tasks_text.py::test_masks_are_exact_and_split_as_asked",
    ),
    (
        "share_of_signal_is_biased", "../deepstack_lab/ledger/claims",
        "(square - mean.square()) * batches / (batches - 1)", "square - mean.square()",
        "lab/ledger/test_claims.py::test_the_share_of_signal_is_unbiased_for_few_batches",
    ),
    (
        "a_removed_run_is_deleted_in_place", "records",
        "os.rename(path, hidden)", "hidden = path",
        "cli/test_rm.py::test_a_kill_leaves_whole_runs_and_later_use_deletes_the_rest",
    ),
    (
        "rules_match_excluded_cells", "config",
        "            cells = others\n", "            pass\n",
        "config/test_config.py::test_a_mistake_and_its_message",
    ),
    (
        "sgd_rate_of_the_head_grows_with_width", "schemes",
        '1.0 if role in (*MATRICES, "head") else m', "1.0 if role in MATRICES else m",
        "schemes/test_width.py::test_factors_of_training_follow_the_papers_tables",
    ),
    (
        "levels_of_group_from_0", "tasks",
        "levels = np.arange(1, seq_len + 1)", "levels = np.arange(seq_len)",
        "tasks/test_composition.py::test_accuracy_of_each_k_and_the_largest_solved",
    ),
    (
        "hadamard_over_the_root_of_its_rows", "model",
        "/ math.sqrt(len(hadamard))", "/ math.sqrt(n_out)",
        "model/test_model.py::test_zero_identity_is_identity_or_hadamard",
    ),
    (
        "a_bias_is_scaled_with_its_product", "fast",
        ".mul_(alpha).add_(bias)", ".add_(bias).mul_(alpha)",
        "fast/test_products.py::test_products_for_threads_scale_the_product_alone",
    ),
    (
        "a_decoder_layer_counts_from_its_own_stack", "diagnostics",
        "        before += len(stack.layers)\n", "        before = 0\n",
        "diagnostics/test_divergence.py::test_a_decoders_gradients_follow_its_encoders",
    ),
    (
        "muon_by_the_inverse_ratio", "training",
        "max(1.0, n_out / n_in)", "max(1.0, n_in / n_out)",
        "training/test_equations.py::test_updates_follow_the_equation"
        " training/test_equations.py::test_torchs_muon_takes_the_same_steps",
    ),
    (
        "middle_layer_one_too_high", "tools/coordinates",
        "(len(by_layer) - 1) // 2", "len(by_layer) // 2",
        "tools/coordinates/test_coordinates.py"
        "::test_values_per_coordinate_are_of_the_first_the_middle_and_the_last_layer",
    ),
    (
        "diverged_seeds_in_losses_by_compute", "tools/laws",
        "== depth and not has_diverged(run)]\n            at =", "== depth]\n            at =",
        "plots/test_charts_of_sweeps_and_layers.py"
        "::test_a_budget_has_the_loss_of_the_seeds_that_did_not_diverge",
    ),
    (
        "a_job_starts_another_run_after_it_was_asked_to_save", "integrations/slurm",
        "    143)  # it saved", "    99)  # it saved",
        "integrations/slurm/test_slurm.py"
        "::test_a_task_of_several_runs_starts_none_after_one_that_was_asked_to_save",
    ),
    (
        "rows_of_a_tracker_are_sent_again", "training",
        "or not known or step <= self._first[kind]:", "or not known:",
        "training/test_live_log.py"
        "::test_a_run_that_fails_anywhere_has_each_row_once_after_its_resume",
    ),
    (
        "an_evaluation_counts_as_sent_with_its_step", "training",
        "for kind, step, _ in self._pending:\n                self._last[kind]",
        "for kind, step in ((k, s) for _, s, _ in self._pending for k in KINDS):\n"
        "                self._last[kind]",
        "training/test_live_log.py"
        "::test_a_run_that_fails_anywhere_has_each_row_once_after_its_resume",
    ),
    (
        "minutes_rounded_down", "integrations/slurm",
        "math.ceil(60 * hours)", "int(60 * hours)",
        "integrations/slurm/test_slurm.py::test_the_array_has_what_its_largest_run_needs",
    ),
    (
        "time_left_of_all_steps", "cli",
        "(steps - step) * step_ms", "steps * step_ms",
        "cli/test_progress.py::test_a_running_run_has_speed_and_time_left",
    ),
    (
        "deviation_of_probes_as_error", "tools/depth_use/analyses",
        "values.std().item() / math.sqrt(probes)", "values.std().item()",
        "tools/depth_use/test_measures.py"
        "::test_the_error_of_a_jacobians_distance_is_its_spread_over_probes",
    ),
    (
        "agreement_over_the_other_norm", "../deepstack_lab/ledger",
        "((a - b).norm() / b.norm())", "((a - b).norm() / a.norm())",
        "lab/ledger/test_claims.py::test_agreement_is_relative_to_the_second_argument",
    ),
    (
        "diverged_seeds_of_the_runs_of_all_depths", "tools/report",
        "{len(ends)} of {len(there)}, at", "{len(ends)} of {len(s.runs)}, at",
        "tools/report/test_report_finding.py::test_the_page_begins_with_the_finding",
    ),
    (
        "norm_counts_repeated_layers", "model",
        "loop.once(b.gradient_rows()) if loop and b.in_layers", "b.gradient_rows() if loop",
        "model/test_unique_layers.py::test_a_looped_stack_takes_the_steps_of_shared_parameters",
    ),
    (
        "a_rank_of_all_hosts_as_that_of_this_one", "",
        "launch is None else launch.local_rank", "launch is None else launch.rank",
        "training/test_parallel.py::test_the_gpu_of_a_rank_has_its_number_on_this_host",
    ),
    (
        "summaries_of_the_last_step_again", "runs",
        "if step > after and len(finite)", "if step >= after and len(finite)",
        "plots/test_tracked.py::test_summaries_are_of_later_steps_and_of_finite_values",
    ),
    (
        "penalty_of_ntk_without_its_factor", "training",
        "return square / n_in if self.scaled else square", "return square",
        "training/test_equations.py::test_the_penaltys_gradient_equals_the_sum_of_squared_norms",
    ),
    (
        "stable_rank_of_ntk_is_too_large", "diagnostics",
        "squares = {role: s / snapshot.matrices[role].shape[2] for role, s in squares.items()}",
        "squares = dict(squares)",
        "diagnostics/test_diagnostics_forward.py"
        "::test_every_diagnostic_equals_a_literal_forward_pass[deepnorm-ntk]",
    ),
    (
        "attribution_every_first_step", "tools/calibrate",
        "0 if roles else math.gcd(*at)", "0 if roles else min(at)",
        "tools/calibrate/test_calibrate.py::test_roles_can_be_trained_alone_for_several_steps",
    ),
    (
        "attribution_every_first_step_of_a_model", "tools/calibrate",
        "attribution_every=math.gcd(*at)", "attribution_every=min(at)",
        "tools/probe/test_external_probe_folder.py"
        "::test_every_step_is_measured_if_none_divides_the_others",
    ),
    (
        "every_layer_adds_to_its_input", "tools/coordinates",
        "if share < ADDED]", "if share < -ADDED]",
        "tools/coordinates/test_kinds_of_models.py"
        "::test_depths_of_a_model_without_a_residual_path_are_refused",
    ),
    (
        "modules_are_called_again_without_autocast", "tools/coordinates",
        "enabled=cast,", "enabled=False,",
        "tools/coordinates/test_kinds_of_models.py"
        "::test_own_changes_under_autocast_are_those_without_it_to_the_rounding_of_bf16",
    ),
    (
        "a_law_is_drawn_with_seeds_that_it_leaves_out", "tools/laws",
        "if r.get(SEED, 0) in shared]", "if r.get(SEED, 0) in every]",
        "tools/laws/test_laws.py::test_a_seed_that_some_depth_lacks_is_named_and_not_drawn",
    ),
    (
        "a_search_begins_at_the_lowest_given_value", "tools/refine",
        "sorted(values)[len(values) // 2]", "sorted(values)[0]",
        "tools/refine/test_refine.py::test_a_search_begins_at_the_middle_of_the_given_values",
    ),
)  # fmt: skip
