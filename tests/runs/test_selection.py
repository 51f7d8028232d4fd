"""Selection of runs by conditions, order, number and best key, the same in every command."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import refusal, typed
from helpers.extensions import needs
from helpers.plot_runs import make_runs, without_layout
from helpers.record_runs import end, make_run, python
from helpers.report_pages import draw_only

import deepstack
from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.records import RunFolder, find_runs, problems, read_labels
from deepstack.training.meta import utc_now

RUNS: dict[str, tuple[str, int, float, str]] = {
    "p6": ("post_ln", 6, 0.001, "done"),
    "p48": ("post_ln", 48, 0.01, "diverged"),
    "d6": ("deepnorm", 6, 0.001, "done"),
    "d48": ("deepnorm", 48, 0.002, "done"),
    "d200": ("deepnorm", 200, 0.002, "failed"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs whose losses fall and whose times of creation rise in the order of RUNS."""
    out = tmp_path_factory.mktemp("results")
    for number, (name, (scheme, depth, lr, state)) in enumerate(RUNS.items()):
        config = (
            f"model: {{scheme: {scheme}, depth: {depth}}}\n"
            f"train: {{lr: {lr}, betas: [0.9, 0.98], clip: null}}\n"
        )
        folder = make_run(out / "study" / name, config, state, rows=3)
        folder.write_meta({"created": f"2026-01-0{number + 1}T00:00:00Z"})
        folder.write_columns({"references": {"uniform_entropy": 3.0}})
        with folder.log("evals", ("step", "loss")) as log:
            log.write({"step": 3, "loss": 2.0 + 0.5 * number})
        if state == "done":
            end(folder)
    return out


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("model.depth=6,48", "p6 p48 d6 d48"),
        ("depth>6", "p48 d48 d200"),
        ("depth <= 48", "p6 p48 d6 d48"),
        ("depth!=48,200", "p6 d6"),
        ("scheme == post_ln", "p6 p48"),
        ("scheme=post*", "p6 p48"),
        ("lr=1e-3", "p6 d6"),
        ("clip=null", "p6 p48 d6 d48 d200"),
        ("betas=[0.9, 0.98]", "p6 p48 d6 d48 d200"),
        ("state!=done", "p48 d200"),
        ("outcome=trained", "p6"),
        ("outcome=at chance,diverged", "p48 d6"),
        ("outcome=lear*", "p6"),
        ("outcome!=lear*,at*", "p48 d48 d200"),
        ("val_loss<2.6", "p6 p48"),
        ("run=d*", "d6 d48 d200"),
        (["scheme=deepnorm", "depth=6,48"], "d6 d48"),
        ({"scheme": "deepnorm", "model.depth": [6, 48]}, "d6 d48"),
        ({"clip": None, "depth": 200}, "d200"),
    ],
)
def test_conditions(where: Any, names: str, results: Path) -> None:
    assert set(deepstack.load_runs(results, where=where)["run"]) == set(names.split())


def test_names_and_tags_may_look_like_other_values(tmp_path: Path) -> None:
    for name, tag, betas in (
        ("007", "true", [0.9, 0.98]), ("a[1]", "0123", [0.9, 0.95]), ("x", "good", [0.8, 0.9])
    ):  # fmt: skip
        folder = end(make_run(tmp_path / "study" / name, f"train: {{betas: {betas}}}\n"))
        assert typed("note", folder.path, "--tag", tag).exit_code == 0
    for names, where in (
        ("007", "run=007"), ("a[1]", "run=a[1]"), ("007 x", "tag=true,good"),
        ("a[1] x", "tag!=true"), ("007 a[1]", "betas=[0.9,0.98],[0.9, 0.95]"),
        ("007 x", {"betas": [[0.9, 0.98], [0.8, 0.9]]}),
    ):  # fmt: skip
        assert set(deepstack.load_runs(tmp_path, where=where)["run"]) == set(names.split())


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ({"depth": range(6, 49)}, "p6 p48 d6 d48"),
        ({"depth": np.array([6, 200])}, "p6 d6 d200"),
        ({"depth": np.int64(48), "lr": np.float64(0.002)}, "d48"),
        ({"lr": pd.Series([0.01, 0.002])}, "p48 d48 d200"),
        ({"depth": {6: "a key", 7: "another"}.keys()}, "p6 d6"),
        ({"clip": [None, 1.0]}, "p6 p48 d6 d48 d200"),
        ({"betas": (0.9, 0.98)}, "p6 p48 d6 d48 d200"),
        ({"betas": np.array([0.9, 0.98]), "scheme": "post_ln"}, "p6 p48"),
        ({"state": ["done", "failed"]}, "p6 d6 d48 d200"),
        ({"outcome": "at chance"}, "d6"),
    ],
    ids=str,
)
def test_a_mapping_selects_by_values_of_every_kind(where: Any, names: str, results: Path) -> None:
    assert set(deepstack.load_runs(results, where=where)["run"]) == set(names.split())


def test_texts_of_a_mapping_are_values_and_no_patterns(tmp_path: Path) -> None:
    for name, file in (("a,b", "x,y.txt"), ("a", "x"), ("ab", "x?"), ("1", "[x]")):
        end(make_run(tmp_path / "study" / name, f"task: {{path: '{file}'}}\n"))

    def selected(**where: Any) -> list[str]:
        return sorted(deepstack.load_runs(tmp_path, where=where)["run"])

    assert selected(run="a,b") == ["a,b"] and selected(run=["a,b", "ab"]) == ["a,b", "ab"]
    assert selected(path="x,y.txt") == ["a,b"] and selected(path="x?") == ["ab"]
    assert selected(path=Path("[x]")) == ["1"] and selected(run="1") == ["1"]
    for where in ({"run": "a*"}, {"run": 1}, {"path": "[?]"}, {"run": []}):
        with pytest.raises(NothingMatchedError, match="where: no run has "):
            selected(**where)
    with pytest.raises(ConfigError, match="where: run: found a generator; allowed a value or a"):
        selected(run=(name for name in "ab"))
    with pytest.raises(ConfigError, match="unknown state 'dnoe'; did you mean 'done'"):
        selected(state="dnoe")


def test_the_last_runs_were_created_last_also_within_a_second(tmp_path: Path) -> None:
    """Runs of this version have microseconds; earlier ones differ in the time of config.yaml."""
    names = [f"r{number}" for number in (3, 11, 2, 8, 1, 5)]
    for at, name in enumerate(names):
        folder = make_run(tmp_path / "new" / name, "model: {depth: 6}\n")
        folder.write_meta({"created": f"2026-01-01T00:00:00.{at:06d}Z"})
        folder = make_run(tmp_path / "old" / name, "model: {depth: 6}\n")
        folder.write_meta({"created": "2026-01-01T00:00:00Z"})
        os.utime(folder.config_path, ns=(10**18 + at, 10**18 + at))
    for study in ("new", "old"):
        for count in range(1, 6):
            table = deepstack.load_runs(tmp_path / study, last=count)
            assert set(table["run"]) == set(names[-count:])
    assert len({utc_now() for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("depth", ConfigError, "found 'depth'; allowed KEY=A,B"),
        ("dpeth=6", ConfigError, r"unknown key 'dpeth'; did you mean 'model.depth'\?$"),
        ("lr<fast", ConfigError, "found 'fast' after lr<; allowed one number"),
        ("state=dnoe", ConfigError, "unknown state 'dnoe'; did you mean 'done'?"),
        ("outcome=good", ConfigError, "unknown outcome 'good'; allowed: trained, stalled"),
        ("s=1", ConfigError, "'s' can mean .*; give one of them in full"),
        ("depth=7", NothingMatchedError, "no run has depth=7; model.depth there: 6, 48, 200"),
        ("tag=x", NothingMatchedError, "no run has tag=x; tags there: none"),
    ],
)
def test_wrong_conditions(where: str, error: Any, message: str, results: Path) -> None:
    with pytest.raises(error, match=message.replace("?", r"\?") if message[-1] == "?" else message):
        deepstack.load_runs(results, where=where)


def test_order_and_number(results: Path) -> None:
    def names(**options: Any) -> list[str]:
        return list(deepstack.load_runs(results, **options)["run"])

    assert names(last=2) == ["d48", "d200"]
    assert names(last=9, sort="-val_loss") == [*reversed(RUNS)]
    assert names(sort="depth", where="scheme=deepnorm") == ["d6", "d48", "d200"]
    assert names(sort="-lr", last=3) == ["d48", "d200", "d6"]
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match=f"last: found {wrong}; allowed 1 or more"):
            names(last=wrong)
    with pytest.raises(ConfigError, match="unknown state"):
        names(where={"state": [["done"]]})
    with pytest.raises(ConfigError, match="sort: unknown key 'lsos'; did you mean 'loss'"):
        names(sort="lsos")


def test_all_settings_are_the_same_columns_in_every_study(results: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other" / "run", "model: {scheme: rezero, scheme_options: {start: 0.5}}\n")
    one = deepstack.load_runs(results, settings="all")
    other = deepstack.load_runs(tmp_path, settings="all")
    assert list(one.columns) == list(other.columns)
    assert one["train.betas"][0] == "[0.9, 0.98]"
    assert other["model.scheme_options"][0] == '{"start": 0.5}'
    with pytest.raises(ConfigError, match="settings: found 'every'; allowed 'varying' or 'all'"):
        deepstack.load_runs(results, settings="every")


@needs("report")
def test_all_commands_select(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_only(monkeypatch, "loss_vs_step")
    words = ["--where", "scheme=deepnorm", "--where", "state=done", "--sort", "-depth"]
    listed = json.loads(typed("ls", results, *words, "--json").stdout)
    assert [row["run"] for row in listed] == ["d48", "d6"]
    compared = json.loads(typed("compare", results, *words, "--json").stdout)
    assert [row["depth"] for row in compared] == [48, 6]
    page = tmp_path / "page.html"
    assert typed("report", results, *words, "--to", page, "-q").exit_code == 0
    text = page.read_text()
    assert "d48" in text and "/p6" not in text
    assert "--where=scheme=deepnorm" in text and "--sort=-depth" in text
    to = ["--to", tmp_path, "--format", "csv"]
    assert typed("plot", "loss_vs_step", results, *words[:4], *to).exit_code == 0
    assert "0.01" not in (tmp_path / "loss_vs_step.csv").read_text()
    for command in ("ls", "plot", "compare", "report"):
        assert "depth there: 6, 48, 200" in refusal(7, command, results, "--where", "depth=7")


def test_the_best_key_and_the_baseline_may_be_short(results: Path) -> None:
    words = "compare", results, "--where", "scheme=deepnorm"
    chosen = typed(*words, "--best", "lr", "--json")
    assert chosen.exit_code == 0 and '"train.lr": 0.001' in chosen.stdout
    assert typed("compare", results, "--against", "scheme=post_ln").exit_code == 0
    for against, message in {
        "lr": "allowed: deepnorm, post_ln; another setting: --against KEY=VALUE",
        "post_lnn": "unknown model.scheme 'post_lnn'; did you mean 'post_ln'?",
        "model.shceme=post_ln": "did you mean 'model.scheme'?",
    }.items():
        assert message in typed("compare", results, "--against", against).stderr
    for option, message in {
        "--against=scheme=deepnorm": "against: model.scheme does not vary: it is deepnorm in all",
        "--best=betas": "best: train.betas does not vary: it is (0.9, 0.98) in all of these runs",
        "--best=depth": "best: model.depth is never compared here; these vary: train.lr",
        "--best=rl": "best: unknown key 'rl'",
    }.items():
        assert message in refusal(2, *words, option)


def test_a_baseline_with_several_values_of_its_own_option_is_refused(tmp_path: Path) -> None:
    for name, power in {"a": 0.25, "b": 0.5, "c": None}.items():
        options = "{}" if power is None else f"{{power: {power}}}"
        scheme = "post_ln" if power is None else "deepnorm_power"
        config = f"model: {{scheme: {scheme}, depth: 6, scheme_options: {options}}}\n"
        folder = make_run(tmp_path / "study" / name, config)
        with folder.log("evals", ("step", "loss")) as log:
            log.write({"step": 3, "loss": 2.0 + (power or 0.0)})
        end(folder)
    words = "compare", tmp_path, "--against", "deepnorm_power"
    assert refusal(2, *words).strip().endswith("--best power")
    rows = json.loads(typed(*words, "--best", "power", "--json").stdout)
    assert [row["difference"] for row in rows if row["setting"] == "post_ln"] == [-0.25]


# --- tags and notes -------------------------------------------------------------------------


@needs("report")
def test_tags_and_notes_are_shown_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_only(monkeypatch)
    folder = end(make_run(tmp_path / "study" / "run"))
    other = end(make_run(tmp_path / "study" / "other"))
    both = "tags: good, keep\nnote: loss falls <late>\n"
    words = ["note", folder.path, "--tag", "good"]
    assert typed(*words, "loss falls <late>", "--tag", "keep").stdout == both
    assert typed(*words).stdout == both
    assert problems(folder) == [] and typed("verify", tmp_path).exit_code == 0
    listed = typed("ls", tmp_path).stdout
    assert "good, keep" in listed and "loss falls <late>" in listed
    for condition, name in (("tag=good", "run"), ("tag!=good", "other")):
        assert list(deepstack.load_runs(tmp_path, where=condition)["run"]) == [name]
    page = tmp_path / "page.html"
    assert typed("report", tmp_path, "--to", page, "-q").exit_code == 0
    assert "loss falls &lt;late&gt;" in page.read_text()
    assert typed("note", folder.path, "", "--untag", "good").stdout == "tags: keep\n"
    assert typed("note", folder.path).stdout == "tags: keep\n"
    assert typed("note", other.path).stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tag", "two words"], "tag: found 'two words'; allowed letters, digits"),
        (["text", "--untag", "none"], "has no tag 'none'; its tags: none"),
        (["x" * 2001, "--tag", "good"], "found 2001 characters; allowed 2000 at most"),
    ],
)
def test_wrong_tags_and_notes_change_nothing(
    words: list[str], message: str, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run")
    assert message in refusal(2, "note", folder.path, *words)
    assert not (folder.path / "labels.json").exists()


TAGGER = """
import sys
from deepstack.records import RunFolder, change_labels
for number in range(40):
    change_labels(RunFolder(sys.argv[1]), [f"{sys.argv[2]}-{number}"])
change_labels(RunFolder(sys.argv[1]), note=sys.argv[2])
"""


def test_no_tag_of_several_writers_is_lost(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with ExitStack() as stack:
        writers = [stack.enter_context(python(TAGGER, folder.path, name)) for name in "abcd"]
    assert [writer.returncode for writer in writers] == [0] * 4
    labels = read_labels(folder)
    assert set(labels.tags) == {f"{name}-{number}" for name in "abcd" for number in range(40)}
    assert labels.note in "abcd"


def test_labels_of_absurd_size_are_not_read(tmp_path: Path) -> None:
    folder = end(make_run(tmp_path / "run"))
    with (folder.path / "labels.json").open("wb") as file:
        file.truncate(2**40)
    assert typed("ls", tmp_path).exit_code == 0
    assert "found 1,099,511,627,776 bytes" in refusal(5, "note", folder.path, "x")


@pytest.mark.parametrize("text", ["{", '{"tags": 3, "note": []}'])
def test_unreadable_labels_are_not_damage(text: str, tmp_path: Path) -> None:
    folder = end(make_run(tmp_path / "run"))
    (folder.path / "labels.json").write_text(text)
    assert typed("ls", tmp_path).exit_code == 0 and problems(RunFolder(folder.path)) == []
    assert typed("note", folder.path, "x").stdout == "note: x\n"


# --- best and sort ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schemes with two learning rates and two seeds; each scheme has another best rate."""
    out = tmp_path_factory.mktemp("results") / "study"
    losses = {"deepnorm": {1e-3: 2.5, 2e-3: 2.1}, "post_ln": {1e-3: 2.2, 2e-3: 2.4}}
    make_runs(
        out, scheme=("deepnorm", "post_ln"), lr=(1e-3, 2e-3), seed=(0, 1),
        masked=lambda scheme, lr, seed: losses[scheme][lr],
    )  # fmt: skip
    return out


def test_best_keeps_the_runs_that_compare_shows(study: Path, tmp_path: Path) -> None:
    compared = deepstack.compare(study, best="lr")
    expected = set(zip(compared["train.lr"], compared["val_loss"], strict=True))
    assert expected == {(2e-3, 2.1), (1e-3, 2.2)}
    table = deepstack.load_runs(study, best="lr", sort="-run")
    assert list(table["run"]) == sorted(table["run"], reverse=True) and len(table) == 4
    assert set(zip(table["train.lr"], table["val_loss_masked"], strict=True)) == expected
    listed = json.loads(typed("ls", study, "--best", "lr", "--sort", "-run", "--json").stdout)
    assert [row["run"] for row in listed] == list(table["run"])
    words = "--x", "depth", "--y", "val_loss_masked", "--to", tmp_path, "--format", "csv"
    assert typed("plot", "metric", study, "--best", "train.lr", *words).exit_code == 0
    drawn = pd.read_csv(tmp_path / "metric_val_loss_masked_vs_depth.csv")
    assert set(drawn["y"]) == {2.1, 2.2}


def test_lines_and_legend_have_the_order_of_sort(study: Path, tmp_path: Path) -> None:
    by_loss = ["DeepNorm, lr\u00a00.002", "Post-LN, lr\u00a00.001"]
    by_loss += ["Post-LN, lr\u00a00.002", "DeepNorm, lr\u00a00.001"]
    for sort, expected in (("val_loss_masked", by_loss), ("-val_loss_masked", by_loss[::-1])):
        with without_layout():
            drawn = deepstack.plot(find_runs(study), "loss_vs_step", sort=sort, best="none")
        (legend,) = drawn.legends
        assert [text.get_text() for text in legend.get_texts()][:4] == expected
    words = ["--sort", "-scheme", "--x", "step", "--y", "loss", "--by", "scheme", "--format", "csv"]
    assert typed("plot", "metric", study, *words, "--to", tmp_path).exit_code == 0
    drawn = pd.read_csv(tmp_path / "metric_loss_vs_step_by_scheme.csv")
    assert list(drawn["series"].unique())[:2] == ["Post-LN", "DeepNorm"]
