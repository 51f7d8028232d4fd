"""Faults of comparisons: the judge, answers, `conform` and the ledger."""

ROWS = (
    (
        "rates_do_not_share_the_error", "tools/answer",
        "return looks.part(1 / len(leader.tried)).widened(gap, gap.n)",
        "return looks.widened(gap, gap.n)",
        "tools/answer/test_shared_error.py"
        "::test_the_rates_of_the_leader_share_the_error_of_the_comparison",
    ),
    (
        "exponents_do_not_share_the_error", "tools/answer",
        "level = Looks(looks.number, looks.error / together)",
        "level = Looks(looks.number, looks.error)",
        "tools/answer/test_shared_error.py"
        "::test_intervals_of_several_exponents_hold_together",
    ),
    (
        "added_depths_count_once_for_all_rates", "tools/answer",
        "sum(halvings(a, b) * len(a.tried) for a, b", "sum(halvings(a, b) for a, b",
        "tools/answer/test_shared_error.py"
        "::test_depths_and_rates_share_the_error_of_who_learns[True-depths1-4]",
    ),
    (
        "equal_differences_have_an_interval", "runs",
        "if seeds_change_nothing(zip(*known, strict=True)):", "if len(set(known)) == 0:",
        "tools/answer/test_answer_page.py::test_seeds_that_change_nothing_show_no_difference",
    ),
    (
        "pairs_of_unequal_seeds", "runs",
        "[(losses[seed], of_leader[seed]) for seed in shared]",
        "[*zip(losses.values(), of_leader.values())]",
        "tools/answer/test_compared_settings.py"
        "::test_a_difference_is_taken_over_the_seeds_that_both_settings_have",
    ),
    (
        "power_of_a_single_look", "tools/answer",
        "nctdtr(seeds - 1, shift, looks.critical(seeds))",
        "nctdtr(seeds - 1, shift, FIXED.critical(seeds))",
        "tools/answer/test_shared_error.py"
        "::test_the_further_seeds_show_the_difference_at_one_look_of_a_growing_study[0.95]",
    ),
    (
        "the_better_setting_ends_above", "runs",
        "{leader.unit} below {rival.label}", "{leader.unit} above {rival.label}",
        "tools/answer/test_compared_settings.py"
        "::test_a_clearly_worse_setting_is_named_at_its_best_rate",
    ),
    (
        "a_rising_loss_falls", "runs",
        '"falls" if leader.depth == most', '"falls" if leader.depth == least',
        "tools/answer/test_compared_settings.py"
        "::test_a_loss_falls_or_rises_with_depth[-0.2-falls]",
    ),
    (
        "largest_error_of_several_studies", "tools/answer",
        "return min(every, key=lambda looks: looks.error",
        "return max(every, key=lambda looks: looks.error",
        "tools/answer/test_compared_settings.py"
        "::test_of_several_growing_studies_the_least_error_counts",
    ),
    (
        "an_added_depth_halfway_in_layers", "tools/answer",
        "math.log(depth / below) / math.log(above / below)", "(depth - below) / (above - below)",
        "tools/answer/test_added_depths.py"
        "::test_numbers_are_interpolated_in_logarithms_and_equal_values_stay",
    ),
    (
        "of_equal_rates_the_largest", "runs",
        "rising = sorted(cell.tried, key=order_of_value)",
        "rising = sorted(cell.tried, key=order_of_value, reverse=True)",
        "runs/test_best_values.py::test_the_best_value_follows_the_rule",
    ),
    (
        "a_diverged_run_ends_lowest", "runs",
        'if self.state == "diverged":\n            return math.inf',
        'if self.state == "diverged":\n            return -math.inf',
        "runs/test_best_values.py::test_the_best_value_follows_the_rule",
    ),
    (
        "as_many_diverged_seeds_are_more", "tools/own_trainer",
        "if failed > others:", "if failed >= others > 0:",
        "tools/own_trainer/test_verdicts.py::test_a_candidate_that_diverges_is_not_better",
    ),
    (
        "differences_of_unequal_seeds", "runs",
        "shared = [DEPTH, SEED, *undetermined", "shared = [DEPTH, *undetermined",
        "tools/report/test_reports.py::test_a_difference_is_taken_seed_by_seed",
    ),
    (
        "a_rate_beyond_the_grid_has_a_cost", "tools/transfer",
        "if not x[0] - 1e-9 <= at <= x[-1] + 1e-9 or not np.isfinite(y.min()):",
        "if not np.isfinite(y.min()):",
        "tools/transfer/test_transfer.py::test_a_rate_outside_of_those_tried_has_no_cost",
    ),
    (
        "best_in_bold_over_all_studies", "runs",
        'for k in ("study", "depth")', 'for k in ("depth",)',
        "runs/test_paper_table.py::test_each_study_has_a_best_row_at_each_depth",
    ),
    (
        "a_tilde_of_a_name_is_a_space", "base",
        '"~": r"\\textasciitilde{}"', '"~": "~"',
        "tools/test_hostile_texts.py::test_signs_that_latex_joins_or_replaces_stay",
    ),
    (
        "an_interval_across_0_is_clear", "runs",
        "math.isfinite(self.gap.low) and self.gap.low > 0",
        "math.isfinite(self.gap.low) and self.gap.high > 0",
        "tools/answer/test_compared_settings.py"
        "::test_the_rival_is_the_setting_whose_interval_reaches_furthest_down",
    ),
    (
        "variables_make_no_setting", "tools/own_trainer",
        "    if environment:\n        variables", "    if not environment:\n        variables",
        "tools/own_trainer/test_records_of_commands.py::test_runs_of_other_variables_are_others",
    ),
    (
        "a_nan_of_the_last_evaluation_is_done", "tools/probe",
        "return None if math.isfinite(value) else", "return None if loss else",
        "tools/probe/test_probe_in_loops.py"
        "::test_a_run_whose_last_evaluation_is_nan_has_diverged",
    ),
    (
        "nothing_to_compare_with_is_judged", "runs",
        "and any(one.floor is not None for one in ends)", "and bool(ends)",
        "tools/answer/test_answer_page.py"
        "::test_a_trainer_without_a_loss_to_compare_with_has_learned_nothing_and_failed_nothing",
    ),
    (
        "failed_runs_have_exponents", "tools/answer",
        "growths_of(ended)[:MOST_NAMES]", "growths_of(readable)[:MOST_NAMES]",
        "tools/answer/test_answer_page.py"
        "::test_runs_without_a_result_are_named_and_give_no_exponent",
    ),
    (
        "the_best_rate_costs_its_interpolation", "tools/transfer",
        "least = float(y.min()) if lowest is None else lowest[1]", "least = float(y.min())",
        "tools/transfer/test_transfer.py"
        "::test_a_rate_between_two_tried_costs_what_its_curve_says",
    ),
    (
        "a_failing_rate_wins_by_its_mean", "tools/transfer",
        "wrongly = share > winning[0] and mean < winning[1]", "wrongly = False",
        "tools/transfer/test_transfer.py"
        "::test_a_rate_at_which_a_seed_does_not_learn_does_not_win_by_its_mean",
    ),
    (
        "losses_of_a_search_are_margins", "tools/refine",
        "losses = [one.final_loss for one in ends_of(runs)]",
        "losses = [one.final_loss - (one.floor or 0) for one in ends_of(runs)]",
        "tools/refine/test_refine.py"
        "::test_the_losses_are_those_of_the_runs_and_no_rule_sets_the_value",
    ),
    (
        "one_shared_seed_is_mixed_with_others", "tools/laws",
        "    if seeds:\n        by_seed", "    if len(seeds) > 1:\n        by_seed",
        "tools/laws/test_laws.py::test_the_seed_that_all_depths_share_makes_the_law",
    ),
    (
        "a_decoder_may_read_later_positions", "model",
        'if side == "decoder":', 'if side == "none":',
        "plugins/test_later_positions.py"
        "::test_a_decoder_refuses_a_scheme_that_reads_later_positions",
    ),
    (
        "the_rival_has_the_second_best_mean", "runs",
        "rival = min(known, key=lambda i: round(gaps[i].low, DIGITS))", "rival = known[0]",
        "tools/answer/test_compared_settings.py"
        "::test_the_rival_is_the_setting_whose_interval_reaches_furthest_down",
    ),
    (
        "futility_from_the_first_look", "tools/answer",
        "known = seeds >= FEWEST and math.isfinite(effect)", "known = math.isfinite(effect)",
        "tools/answer/test_shared_error.py"
        "::test_a_growing_study_ends_where_its_last_look_would_hardly_show_more[6-0.1]",
    ),
    (
        "a_lead_of_half_the_odds", "tools/answer",
        "odds = math.log((1 - FEW_LEARN) / FEW_LEARN)",
        "odds = 2 * math.log((1 - FEW_LEARN) / FEW_LEARN)",
        "tools/answer/test_shared_error.py"
        "::test_depths_and_rates_share_the_error_of_who_learns[False-depths0-1]",
    ),
    (
        "the_comparison_has_all_of_the_error", "tools/answer",
        "looks.part(1 - OF_COUNTS)", "looks.part(1)",
        "tools/answer/test_shared_error.py"
        "::test_the_rates_of_the_leader_share_the_error_of_the_comparison",
    ),
    (
        "tolerance_without_the_first_update", "tools/conform",
        "allowed = max(self.numbers.update_tolerance, self.tolerance)",
        "allowed = self.numbers.update_tolerance",
        "tools/conform/test_conform_attention.py"
        "::test_the_tolerance_reaches_every_comparison",
    ),
    (
        "each_test_of_a_start_has_the_whole_level", "tools/conform",
        "each = level / (2 * max(1, len(tests)))", "each = level / 2",
        "tools/conform/test_conform_numbers.py"
        "::test_a_right_start_fails_any_test_as_rarely_as_the_level_says",
    ),
    (
        "a_fitted_constant_at_half_its_slope", "tools/conform",
        "(run(c + step) - run(c - step)) / (2 * step)", "(run(c + step) - run(c - step)) / step",
        "tools/conform/test_conform_numbers.py"
        "::test_a_constant_is_fitted_at_each_depth_and_named_as_a_power_of_it",
    ),
    (
        "effect_of_a_copied_start", "tools/conform",
        'copied=check != "start")', "copied=True)",
        "tools/conform/test_conform_numbers.py"
        "::test_the_effect_of_another_start_is_measured_from_that_start",
    ),
    (
        "a_badge_is_always_green", "tools/conform",
        '"brightgreen" if difference is None else "red"', '"brightgreen"',
        "tools/conform/test_conform_sets.py"
        "::test_a_badge_is_green_only_where_all_checks_agree",
    ),
    (
        "a_badge_counts_rows_that_differ", "tools/conform",
        'return sum(row["agrees"] for row in self.rows)', "return len(self.rows)",
        "tools/conform/test_conform_sets.py"
        "::test_a_fault_beside_the_numbers_is_a_check_that_fails",
    ),
    (
        "epsilon_of_adam_without_its_factor", "tools/conform",
        "g / (g.abs() + EPS * factors.eps)", "g / (g.abs() + EPS)",
        "tools/conform/test_conform_numbers.py::test_the_factor_of_adams_epsilon_counts",
    ),
    (
        "the_best_rate_lies_at_the_upper_end", "../deepstack_lab/ledger",
        "if not 0 < at < len(rates) - 1:", "if not 0 < at <= len(rates) - 1:",
        "lab/ledger/test_reproduce.py::test_no_rate_is_the_best_at_an_end_of_the_grid",
    ),
    (
        "a_larger_measurement_lies_inside", "../deepstack_lab/ledger",
        "whole[0] <= part[0] and part[1] <= whole[1]", "whole[0] <= part[0] <= whole[1]",
        "lab/ledger/test_reach.py"
        "::test_a_measurement_is_inside_if_each_of_its_points_is_one_of_the_source[0]",
    ),
    (
        "a_refuted_identity_holds", "../deepstack_lab/ledger",
        'if identity and decided == "agrees":', 'if identity and decided != "undecided":',
        "lab/ledger/test_reach.py"
        "::test_a_measurement_is_inside_if_each_of_its_points_is_one_of_the_source[0]",
    ),
    (
        "tokens_of_a_single_step", "../deepstack_lab/ledger",
        "tokens.add(config.train.steps * tokens_per_step(config, task) / parameters)",
        "tokens.add(tokens_per_step(config, task) / parameters)",
        "lab/ledger/test_reach.py::test_the_range_of_a_study_is_that_of_its_file",
    ),
    (
        "depths_of_the_encoder_alone", "../deepstack_lab/ledger",
        "depths |= {model.depth, model.decoder_depth or model.depth}", "depths |= {model.depth}",
        "lab/ledger/test_reach.py"
        "::test_a_range_of_depths_has_both_sides_of_an_encoder_decoder",
    ),
    (
        "a_diverged_run_keeps_what_it_learnt", "../deepstack_lab/ledger",
        "    if has_diverged(run):\n        return 0.0\n", "",
        "lab/ledger/test_reproduce.py"
        "::test_what_a_run_learnt_is_a_share_of_what_context_gives[diverged-0.0]",
    ),
    (
        "seeds_of_runs_in_the_order_of_folders", "../deepstack_lab/ledger",
        "seeds = sorted(table[points[0]])", "seeds = list(table[points[0]])",
        "lab/ledger/test_reproduce.py"
        "::test_values_of_runs_are_in_the_order_of_seeds_whatever_the_order_of_runs",
    ),
    (
        "an_infinite_loss_is_the_least", "../deepstack_lab/ledger",
        "torch.nan_to_num(losses, nan=math.inf, posinf=math.inf)",
        "torch.nan_to_num(losses, nan=math.inf, posinf=-math.inf)",
        "lab/ledger/test_reproduce.py::test_a_lost_rate_is_worse_than_all_others",
    ),
    (
        "outcome_by_less_than_an_interval", "runs",
        "student(blocks) * error if has_interval", "error if has_interval",
        "runs/test_outcomes.py"
        "::test_a_run_has_learnt_if_its_interval_over_blocks_lies_below_chance",
    ),
    (
        "learnt_by_another_distance", "runs", "CLEAR, FAR = 0.02, 0.1", "CLEAR, FAR = 0.05, 0.1",
        "runs/test_outcomes.py::test_the_distances_are_those_that_the_pages_state",
    ),
    (
        "a_far_setting_without_an_interval_is_the_rival", "runs",
        "if not known or (unknown and all_count):", "if unknown:",
        "runs/test_missing_seeds.py"
        "::test_a_setting_without_an_interval_far_behind_the_rival_is_named_and_not_counted",
    ),
    (
        "a_near_setting_without_an_interval_does_not_count", "runs",
        "if not known or (unknown and all_count):", "if not known:",
        "runs/test_missing_seeds.py"
        "::test_a_setting_without_an_interval_far_behind_the_rival_is_named_and_not_counted",
    ),
    (
        "interpolation_of_arithmetic_means", "tools/calibrate",
        'logs = np.log(table["value"]).groupby(table["depth"]).mean()',
        'logs = np.log(table["value"].groupby(table["depth"]).mean())',
        "tools/calibrate/test_calibrate.py"
        "::test_a_bend_shows_as_curvature_and_is_followed_by_interpolation",
    ),
    (
        "sides_of_a_comparison_stay_both", "tools/own_trainer",
        "            chosen = text.split(\",\")\n", "",
        "tools/own_trainer/test_study_files.py"
        "::test_the_command_line_chooses_one_side_of_a_comparison",
    ),
    (
        "losses_of_other_tasks_compared", "runs",
        "if k == FAMILY or k.startswith(\"task.\")", "if k == \"task.name\"",
        "tools/test_several_tasks.py::test_losses_of_other_tasks_are_not_compared",
    ),
    (
        "moved_texts_are_other_texts", "runs",
        "k not in PLACES}", "k}",
        "tools/test_several_tasks.py::test_a_text_is_known_by_its_contents",
    ),
    (
        "an_interrupted_run_hides_the_ended_one", "runs",
        "max(group, key=progress_of)", "group[0]",
        "runs/test_sets_of_runs.py::test_of_equal_runs_in_several_folders_the_ended_one_counts",
    ),
    (
        "masks_end_a_coordinate_check", "tools/coordinates",
        "tensors = [x[x != -math.inf] for x in tensors]", "tensors = list(tensors)",
        "tools/coordinates/test_coordinates_command.py"
        "::test_masked_outputs_count_as_little_as_masked_logits",
    ),
    (
        "a_model_without_depth_keeps_the_rule", "tools/coordinates",
        "if shapes[1:] and shapes[1:] == shapes[:-1] and", "if False and",
        "tools/coordinates/test_coordinates_command.py"
        "::test_a_model_that_ignores_an_axis_is_refused",
    ),
    (
        "a_wide_interval_is_nothing_learned", "cli",
        "if end.half_width is not None and loss - floor - end.half_width < -FAR:", "if False:",
        "runs/test_outcomes.py::test_a_run_is_described_by_its_outcome",
    ),
)  # fmt: skip
