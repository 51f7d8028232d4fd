"""Faults in counts, limits and words of sentences, most of which no test noticed before."""

CLAUSES = "runs/test_clauses.py"
COUNTS = "tools/answer/test_counts_of_sentences.py"
FINDINGS = "tools/report/test_words_of_findings.py"
ROWS = (
    (
        "a_seed_as_low_as_the_rival_is_not_counted", "runs",
        "DIGITS) <= most)", "DIGITS) < most)",
        f"{CLAUSES}::test_a_single_seed_as_low_as_the_rival_is_the_rival",
    ),
    (
        "the_other_one_of_three_others", "runs",
        "margin.others == 2", "margin.others == 3",
        f"{CLAUSES}::test_the_leader_is_better_than_the_others_by_their_number",
    ),
    (
        "three_settings_and_none_more", "runs",
        "if len(names) > MOST_UNCOUNTED else", "if len(names) >= MOST_UNCOUNTED else",
        f"{CLAUSES}::test_settings_that_are_not_counted_are_named_up_to_three",
    ),
    (
        "zero_is_higher", "runs",
        'side = "lower" if gap.value >= 0', 'side = "lower" if gap.value > 0',
        f"{CLAUSES}::test_a_difference_of_zero_is_not_higher",
    ),
    (
        "the_first_update_is_never_relative", "runs",
        'if growth.column == "model_update" else',
        'if growth.step == 1 or growth.column == "model_update" else',
        f"{CLAUSES}::test_a_growth_names_its_column_and_step",
    ),
    (
        "a_single_rate_is_no_rate", "runs",
        "if one.is_chosen and not one.learnt:", "if not one.learnt:",
        f"{CLAUSES}::test_a_setting_with_one_rate_learns_in_so_many_seeds",
    ),
    (
        "a_line_has_another_degree_of_freedom", "runs",
        "float(rest @ rest) / (len(x) - 2)", "float(rest @ rest) / (len(x) - 1)",
        f"{CLAUSES}::test_means_on_a_line_within_the_seeds_spread_are_a_power",
    ),
    (
        "all_layers_move_at_every_spike", "runs",
        "median > max(MOVED, factor / 2)", "median > min(MOVED, factor / 2)",
        f"{CLAUSES}::test_one_layer_moves_first_or_all_do",
    ),
    (
        "four_depths_are_too_many", "runs",
        "if len(values) > MOST_DEPTHS:", "if len(values) >= MOST_DEPTHS:",
        f"{CLAUSES}::test_four_rates_by_depth_are_listed_and_five_are_not",
    ),
    (
        "two_versions_are_one", "runs",
        "if len(digests) > 1\n", "if len(digests) > 2\n",
        f"{CLAUSES}::test_two_versions_of_a_script_are_named_and_one_is_not",
    ),
    (
        "the_spread_of_a_mean_is_that_of_a_seed", "tools/answer",
        "half / student(seeds) * math.sqrt(seeds)", "half / student(seeds)",
        f"{COUNTS}::test_the_spread_of_an_exponent_is_the_deviation_of_its_seeds",
    ),
    (
        "the_share_of_the_fewest_seeds", "tools/answer",
        "share_text(max(all_learned), max(all_learned))",
        "share_text(min(all_learned), min(all_learned))",
        f"{COUNTS}::test_the_share_of_seeds_is_that_of_the_cell_with_most",
    ),
    (
        "the_best_of_one_fewer", "tools/answer",
        "The best of {gap.others + 1} settings", "The best of {gap.others} settings",
        f"{COUNTS}::test_the_best_of_three_is_compared_with_two",
    ),
    (
        "a_growing_study_takes_as_many_seeds_as_any", "tools/answer",
        "SEEDS[-1] if gap.looks.repeated else MOST_SEEDS", "MOST_SEEDS",
        f"{COUNTS}::test_what_is_ruled_out_names_the_most_seeds_of_its_study",
    ),
    (
        "budgets_grow_from_run_to_run", "tools/laws",
        "SAME_BUDGET * flops[groups[-1][0]]", "SAME_BUDGET * flops[groups[-1][-1]]",
        "tools/laws/test_laws.py::test_a_budget_reaches_a_tenth_above_its_least_flops",
    ),
    (
        "all_laws_lack_an_interval_or_none", "tools/laws",
        "if any(law.seeds < LEAST_SEEDS", "if all(law.seeds < LEAST_SEEDS",
        "tools/laws/test_laws.py::test_any_setting_below_three_seeds_has_a_note",
    ),
    (
        "a_cost_of_a_rate_at_the_edge", "tools/transfer",
        "best[0].inside and one.inside", "one.inside",
        "tools/transfer/test_transfer.py"
        "::test_a_cost_needs_a_best_rate_inside_at_the_smallest_depth_too",
    ),
    (
        "all_rates_lack_an_interval_or_none", "tools/transfer",
        "few = any(best.seeds", "few = all(best.seeds",
        "tools/transfer/test_transfer.py::test_any_setting_below_three_seeds_has_a_note",
    ),
    (
        "a_sign_after_a_comma_is_lost", "tools/own_trainer",
        'in " \\t:=(,")', 'in " \\t:=(")',
        "tools/own_trainer/test_metrics.py::test_a_sign_after_a_separator_belongs_to_the_number",
    ),
    (
        "an_interval_below_zero_includes_it", "tools/report",
        "if gap.high < 0:", "if gap.high < -1:",
        f"{FINDINGS}::test_a_margin_is_clear_only_above_zero",
    ),
    (
        "one_more_setting_is_none", "tools/report",
        'if more > 0 else "")', 'if more > 1 else "")',
        f"{FINDINGS}::test_four_settings_are_listed_and_the_others_counted",
    ),
    (
        "two_depths_are_a_power", "tools/conform",
        "if len(values) < 3 or min(values.values()) <= 0:",
        "if len(values) < 2 or min(values.values()) <= 0:",
        "tools/conform/test_conform_numbers.py::test_three_depths_show_a_power_and_two_do_not",
    ),
    (
        "a_desk_study_of_any_small_depth", "tools/answer",
        "SHALLOWEST <= ", "",
        "tools/answer/test_size.py::test_other_studies_do_not_cite_it",
    ),
    (
        "boxes_are_divided_from_four_seeds_on", "plots",
        "when=max(sizes) > 1", "when=max(sizes) > 3",
        "plots/test_chart_options.py"
        "::test_settings_are_one_line_under_the_figure_and_all_in_a_text_file",
    ),
    (
        "two_blocks_are_an_interval", "runs",
        "error is not None and blocks >= LEAST_SEEDS", "error is not None",
        "runs/test_outcomes.py::test_two_blocks_of_a_validation_set_give_no_interval",
    ),
    (
        "validation_sets_of_other_tasks_are_compared", "runs",
        "if len({task for task, _ in sizes}) != 1 or len(known) < 2:", "if len(known) < 2:",
        "tools/test_several_tasks.py::test_sizes_of_validation_sets_are_compared_within_a_task",
    ),
)  # fmt: skip
