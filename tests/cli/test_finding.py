"""train and sweep end with a finding in words and the next command."""

from pathlib import Path

from helpers import QUICK, ROOT
from helpers.command_line import TINY, typed

from deepstack.cli.finding import next_command, run_finding, sweep_finding
from deepstack.records import Run, find_runs

PUBLISHED = ROOT / "results/published/schemes_and_depth"


def test_a_run_is_described_and_a_sweep_by_depth() -> None:
    for name, sentence in (
        ("deepnorm", "DeepNorm with 48 layers has learned from context: 0.41 nats below"),
        ("post_ln", "Post-LN with 48 layers has learned nothing from context: it ends"),
    ):
        (path,) = PUBLISHED.glob(f"{name}-d48-s0-*")
        text = run_finding(Run(path)) or ""
        assert text.startswith(sentence) and "the unigram" in text
    assert sweep_finding(find_runs(PUBLISHED))[1:] == [
        "6 layers: Pre-LN 3 of 3 (0.46), DeepNorm 3 of 3 (0.42), Post-LN 3 of 3 (0.32)",
        "48 layers: Pre-LN 3 of 3 (0.40), DeepNorm 3 of 3 (0.36), Post-LN 0 of 3",
        "200 layers: Pre-LN 3 of 3 (0.39), DeepNorm 3 of 3 (0.34), Post-LN 0 of 3",
    ]


def test_train_names_another_scheme_and_then_the_charts(run: Path, tmp_path: Path) -> None:
    words, one = ["train", "quick", "model.scheme=deepnorm"], Run(run)
    assert next_command(one, words) == "deepstack train quick model.scheme=post_ln"
    other = ["train", QUICK, *TINY, "model.scheme=post_ln", "--out", tmp_path]
    shown = typed(*other)
    assert "validation loss" in shown.stderr and "unigram" in shown.stderr
    assert f"next: deepstack plot {tmp_path / 'quick'}" in shown.stderr
    assert typed(*other, "-q").stderr == ""
    assert next_command(one, words) == f"deepstack plot {tmp_path / 'quick'}"


def test_a_diverged_run_and_a_damaged_one_are_no_obstacle(tmp_path: Path) -> None:
    words = ["train", QUICK, *TINY, "train.max_loss=0.1", "--out", tmp_path]
    shown = typed(*words)
    assert shown.exit_code == 0 and "DeepNorm with 2 layers diverged at step 1." in shown.stderr
    assert typed(*words, "--fail-on-divergence").exit_code == 4
    (run,) = find_runs(tmp_path)
    (run.path / "evals.csv").write_text("step\n")
    assert sweep_finding(find_runs(tmp_path)) == []
