"""Faults of kernels, replays, runs, sweeps, estimates, spikes and held-out blocks."""

ROWS = (
    (
        "gradient_of_a_slice_from_the_start", "fast/native",
        "start = max(start + size[dim] if start < 0 else start, 0)", "start = max(start, 0)",
        "fast/test_native_operands.py"
        "::test_the_gradient_of_a_slice_counts_from_the_end[1-ends0-1]",
    ),
    (
        "operands_may_reach_beyond_their_memory", "fast/native",
        "need(first + layouts.extent(tensor.size, tensor.stride) * width <= size)",
        "need(first <= size)",
        "fast/test_native_operands.py"
        "::test_a_tensor_that_reaches_beyond_its_memory_is_left_to_torch[359-False]",
    ),
    (
        "wide_products_by_the_kernels", "fast/native",
        "LARGEST_BESIDE_ONEDNN if call.by_onednn else LARGEST_PRODUCT", "LARGEST_PRODUCT",
        "fast/test_native_operands.py"
        "::test_wide_products_are_left_to_the_library_that_the_step_uses[0-sizes1-True-False]",
    ),
    (
        "clamp_loses_what_is_not_a_number", "fast/native",
        "FUNCTION1(Clamp, smaller(x < c ? c : x, d))",
        "FUNCTION1(Clamp, smaller(x > c ? x : c, d))",
        "fast/test_native_numbers.py"
        "::test_clamp_takes_the_upper_bound_where_bounds_cross[bounds1]",
    ),
    (
        "a_norm_of_overflowing_squares_is_0", "fast/native",
        "        store(mean, fused(load(mean), variance, vec{}));\n", "",
        "fast/test_native_numbers.py"
        "::test_a_norm_whose_squares_overflow_is_not_a_number[3-1e+20]",
    ),
    (
        "elu_without_its_scale", "fast/native",
        't.elementwise("elu", o.out, o.args[0], constants=[scale, alpha * scale])',
        't.elementwise("elu", o.out, o.args[0], constants=[scale, alpha])',
        "fast/test_native_operands.py::test_options_of_an_operation_count",
    ),
    (
        "entries_of_a_gradient_from_the_start", "fast/native",
        "index % size[dim]), dy)", "max(index, 0)), dy)",
        "fast/test_native_operands.py::test_the_gradient_of_an_entry_counts_from_the_end[0--1]",
    ),
    (
        "a_library_of_another_user_is_loaded", "fast/native",
        "is_own = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()",
        "is_own = stat.S_ISREG(state.st_mode)",
        "fast/test_native_cache.py"
        "::test_a_library_that_the_system_gives_another_owner_is_replaced",
    ),
    (
        "a_failure_outlives_its_compiler", "fast/native",
        'f"{key} {compiler.identity()}"', 'f"{key} {compiler.name}"',
        "fast/test_native_compiler.py"
        "::test_a_failure_is_forgotten_with_the_compiler_or_the_flags",
    ),
    (
        "a_divergence_is_forgotten", "fast",
        "diverged.masked_fill_(~is_usable, 1.0)", "diverged.copy_(~is_usable)",
        "training/test_training.py"
        "::test_no_parameter_moves_from_the_step_on_that_diverged[adamw-1000000.0]",
    ),
    (
        "a_divergence_of_f_is_forgotten", "fast",
        'diverged.masked_fill_(~(values["model_update"] < torch.inf), 1.0)', "pass",
        "training/test_training.py::test_no_parameter_moves_after_an_f_that_is_not_finite",
    ),
    (
        "results_share_memory_while_read", "fast",
        "            if last[number] == index:", "            if last[number] <= index + 1:",
        "fast/test_replay.py::test_no_two_results_share_memory_while_both_are_read[0]",
    ),
    (
        "a_replay_of_old_targets", "fast",
        "        self.targets.copy_(targets)\n        with gc_paused():",
        "        with gc_paused():",
        "fast/test_replay.py::test_every_kind_of_step_replayed_gives_the_same_bytes[b2t]",
    ),
    (
        "kept_weights_count_once", "config",
        "kept = weights * count_kept(config.train)",
        "kept = weights * bool(count_kept(config.train))",
        "training/test_kept_weights.py"
        "::test_the_disk_estimate_counts_the_weights_of_each_kept_step[12-chosen0-at0]",
    ),
    (
        "the_last_step_is_kept_twice", "config",
        "{step for step in chosen if step < steps}", "{step for step in chosen if step <= steps}",
        "training/test_kept_weights.py"
        "::test_the_disk_estimate_counts_the_weights_of_each_kept_step[12-chosen0-at0]",
    ),
    (
        "records_of_layers_take_no_space", "config",
        "layer_counts(config).all * (snapshots + 2))", "layer_counts(config).all)",
        "training/test_kept_weights.py::test_the_disk_estimate_counts_the_records_of_layers[10]",
    ),
    (
        "twenty_one_quiet_steps_after_a_spike", "diagnostics",
        "step - self._last <= WINDOW", "step - self._last <= WINDOW + 1",
        "diagnostics/test_spikes.py"
        "::test_the_twenty_first_step_after_a_spike_may_be_one[51-steps1]",
    ),
    (
        "the_last_layer_that_moved", "diagnostics",
        "for back in reversed(range(LOOK_BACK + 1)):", "for back in range(LOOK_BACK + 1):",
        "diagnostics/test_spikes.py"
        "::test_the_first_step_with_a_moved_layer_counts_and_there_the_largest_factor",
    ),
    (
        "a_resumed_run_forgets_its_spike", "diagnostics",
        '"last": torch.tensor([self._last])', '"last": torch.tensor([-WINDOW])',
        "diagnostics/test_spikes.py::test_a_finder_that_goes_on_knows_of_the_spike_before",
    ),
    (
        "a_spike_in_its_own_window", "diagnostics",
        "losses, norms = ([row[i] for row in before[-WINDOW:]] for i in range(2))",
        "losses, norms = ([row[i] for row in self._rows[-WINDOW:]] for i in range(2))",
        "diagnostics/test_spikes.py"
        "::test_a_raised_loss_is_one_spike_with_its_size_in_robust_deviations",
    ),
    (
        "calm_losses_have_spikes", "diagnostics",
        "return max(spread, LEAST_DEVIATION * abs(middle), 1e-30)", "return max(spread, 1e-30)",
        "diagnostics/test_spikes.py::test_calm_losses_have_a_spike_above_eight_percent[0.15-0]",
    ),
    (
        "every_validation_batch_is_the_first", "tasks",
        "self.held.read_evenly(first, count)", "self.held.read_evenly(0, count)",
        "tasks/test_held_out.py::test_the_validation_set_is_spread_over_the_blocks[300]",
    ),
    (
        "parts_count_as_blocks", "tasks",
        "return tokens, self.blocks[indices]", "return tokens, indices",
        "tasks/test_held_out.py::test_windows_never_have_tokens_of_both_sides[80]",
    ),
    (
        "the_least_representative_blocks", "tasks",
        "return min(choices, key=distance)", "return max(choices, key=distance)",
        "tasks/test_held_out.py::test_the_split_is_the_most_representative_one",
    ),
    (
        "training_windows_for_validation", "tasks",
        "(self.held if held_out else self.train).draw",
        "(self.train if held_out else self.held).draw",
        "tasks/test_held_out.py::test_windows_never_have_tokens_of_both_sides[1]",
    ),
    (
        "blocks_of_one_window", "tasks",
        "return max(BLOCK_WINDOWS * window, usual, held_out / MOST_BLOCKS)",
        "return max(window, usual, held_out / MOST_BLOCKS)",
        "tasks/test_held_out.py::test_every_token_is_for_training_or_held_out[1000-0.3]",
    ),
    (
        "a_worker_that_failed_goes_on", "sweeps",
        'if code or not request["keep"]:', 'if not request["keep"]:',
        "sweeps/test_workers.py::test_an_interrupted_run_saves_and_ends_its_worker[2]",
    ),
    (
        "a_worker_of_another_environment", "sweeps",
        'if worker.environment == request["environment"] and worker.is_alive:',
        "if worker.is_alive:",
        "sweeps/test_workers.py::test_a_run_takes_a_worker_of_its_own_variables_alone",
    ),
    (
        "memory_beside_what_is_resident", "sweeps",
        "soft = data + max(memory - resident, LEAST_BYTES)",
        "soft = data + max(memory, LEAST_BYTES)",
        "sweeps/test_sweeps_resources.py"
        "::test_memory_beyond_the_limit_raises_and_below_it_does_not",
    ),
    (
        "a_pause_counts_as_time_of_a_run", "sweeps",
        "            entry.began += paused\n", "",
        "sweeps/test_sweeps_pool.py::test_the_time_of_a_pause_counts_for_no_limit_of_a_run",
    ),
    (
        "a_late_run_was_interrupted", "sweeps",
        "            entry.is_late = True\n", "",
        "sweeps/test_sweeps_pool.py"
        "::test_a_run_beyond_its_timeout_is_killed_and_has_failed[script0-signals0]",
    ),
    (
        "the_newest_idle_workers_end", "sweeps",
        'end(idle[: request["end"]])\n                    del idle[: request["end"]]',
        'end(idle[-request["end"] :])\n                    del idle[-request["end"] :]',
        "sweeps/test_workers.py::test_the_longest_idle_worker_ends_first",
    ),
    (
        "a_pass_of_the_first_inputs", "fast",
        "        own.copy_(inputs)\n", "",
        "fast/test_captured_passes.py"
        "::test_an_evaluation_is_captured_for_each_shape_of_its_batches",
    ),
    (
        "a_failed_pass_is_captured_forever", "fast",
        "if inputs.shape not in self.captured and self.failures < ATTEMPTS:",
        "if inputs.shape not in self.captured:",
        "fast/test_captured_passes.py"
        "::test_a_pass_that_cannot_be_captured_runs_kernel_by_kernel[2]",
    ),
    (
        "update_of_a_layer_unknown_at_a_spike", "training",
        "due = self.spikes is not None or self._layers_are_due(step)",
        "due = self._layers_are_due(step)",
        "diagnostics/test_spikes.py"
        "::test_a_planted_change_gives_a_record_at_its_spike_and_names_its_layer",
    ),
    (
        "a_spike_without_a_record", "training",
        "return is_usual or self._spike_at(step) is not None", "return is_usual",
        "diagnostics/test_spikes.py"
        "::test_a_planted_change_gives_a_record_at_its_spike_and_names_its_layer",
    ),
    (
        "an_extended_run_loses_records_of_spikes", "training",
        'due = log == SPIKES_LOG or (log == "layers" and at in spikes)', "due = log == SPIKES_LOG",
        "diagnostics/test_spikes.py"
        "::test_an_extended_run_keeps_the_record_of_a_spike_at_the_last_step_before",
    ),
    (
        "a_gpu_shared_without_end", "sweeps",
        "return gpu.free - sum(other.gpu_memory for other in taken if other.gpu == gpu.name)",
        "return gpu.free",
        "sweeps/test_sweeps_resources.py"
        "::test_small_runs_share_a_gpu_and_large_ones_have_one_each",
    ),
    (
        "a_run_has_no_share_of_the_memory", "sweeps",
        "memory = max(memory, self.budget // self.workers)", "pass",
        "sweeps/test_sweeps_resources.py"
        "::test_runs_share_the_memory_and_never_hold_more_than_there_is",
    ),
    (
        "idle_workers_keep_their_memory", "sweeps",
        "                self._server.end_idle_workers(self._idle.total())\n", "",
        "sweeps/test_workers.py::test_idle_workers_leave_their_memory_to_a_run_that_waits",
    ),
    (
        "error_over_sequences_and_not_blocks", "training",
        "return standard_error(sums, positions.sum(axis=1), self.blocks)",
        "return standard_error(sums, positions.sum(axis=1), np.arange(len(sums)))",
        "training/test_evaluation.py"
        "::test_the_logged_errors_are_those_of_a_jackknife_over_blocks",
    ),
    (
        "error_of_a_loss_without_its_chance", "training",
        'row["margin_se"] = self.mean(masked - self.chance, self.masked)[1]',
        'row["margin_se"] = row["loss_masked_se"]',
        "training/test_evaluation.py"
        "::test_the_logged_errors_are_those_of_a_jackknife_over_blocks",
    ),
    (
        "muon_remembers_two_moments", "config",
        "sum(n if role in of_muon else 2 * n for role, n", "sum(2 * n for role, n",
        "training/test_kept_weights.py::test_the_disk_estimate_is_near_the_bytes_of_a_run[muon]",
    ),
    (
        "a_run_keeps_its_optimizer_for_nothing", "config",
        "checkpoint = (optimizer + logs) * config.runtime.keep_optimizer",
        "checkpoint = logs * config.runtime.keep_optimizer",
        "training/test_kept_weights.py"
        "::test_the_disk_estimate_is_near_the_bytes_of_a_run[adamw]",
    ),
    (
        "a_state_named_step_is_one_number", "training",
        'return name == "step" and not isinstance(optimizer, RuleOptimizer)',
        'return name == "step"',
        "plugins/test_rules_and_instruments.py::test_a_state_may_have_any_name",
    ),
    (
        "a_lost_log_is_not_damage", "records",
        "if self.evals_path.name in sums and not self.evals_path.exists():", "if False:",
        "records/test_runs.py::test_a_run_that_has_lost_a_file_is_named_and_left_out",
    ),
    (
        "a_changed_config_labels_numbers", "records",
        "if listed and self.config_path.is_file() and", "if False and",
        "records/test_verify.py"
        "::test_a_config_that_was_changed_after_the_end_labels_no_numbers",
    ),
)  # fmt: skip
