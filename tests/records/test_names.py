"""Names of runs, studies and values: two that differ stay two, in tables, charts and folders."""

import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.plot_runs import make_chart, make_run, make_runs, rows

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.base.text import distinct_texts
from deepstack.config import Config
from deepstack.config.identity import study_name
from deepstack.plots.arguments import runs_of
from deepstack.records import Run, RunFolder, change_labels, find_runs
from deepstack.records.labels import LABELS


def test_files_that_differ_have_studies_that_differ() -> None:
    stems = ["研究一", "研究二", "étude", "a" * 64 + "1", "a" * 64 + "2", "Übung", "Äbung"]
    names = [study_name(Config(), f"{stem}.yaml") for stem in stems]
    assert len(set(names)) == len(stems) and all(len(name) <= 64 for name in names)
    assert names[0].startswith("study-") and names[5].startswith("bung-")
    usual = {"quick": "quick", "my study": "my_study", "a" * 64: "a" * 64, "...": "runs"}
    for stem, name in usual.items():  # as they were
        assert study_name(Config(), f"{stem}.yaml") == name


def test_a_row_of_a_table_is_the_run_at_its_path(tmp_path: Path) -> None:
    """Also where a published study and the one that was run again have equal names."""
    make_runs(tmp_path / "study", depth=(6, 18))
    shutil.copytree(tmp_path / "study", tmp_path / "published" / "study")
    table = deepstack.load_runs(tmp_path)
    assert len(table) == 4 and len(table[["study", "run"]].drop_duplicates()) == 2
    (run,) = runs_of(table[2:3])
    assert str(run.path) == table["path"].iloc[2]
    assert len(runs_of(table.reset_index(drop=True))) == 4
    with pytest.raises(ConfigError, match="mean several runs; keep its column path"):
        runs_of(table.drop(columns="path"))
    assert len(runs_of(deepstack.load_runs(tmp_path / "study").drop(columns="path"))) == 2


def test_a_linked_run_belongs_to_the_study_in_which_its_link_lies(tmp_path: Path) -> None:
    make_run(tmp_path / "study", depth=6)
    other = make_run(tmp_path / "disk" / "elsewhere", depth=18)
    (tmp_path / "study" / other.name).symlink_to(other)
    table = deepstack.load_runs(tmp_path / "study")
    assert table["study"].tolist() == ["study"] * 2 and table["model.depth"].tolist() == [6, 18]
    assert {run.study for run in find_runs(tmp_path / "study")} == {"study"}
    assert len(runs_of(table)) == 2 and len(runs_of(table[table["model.depth"] == 18])) == 1
    assert deepstack.compare(tmp_path / "study")["depth"].tolist() == [6, 18]


def test_tables_show_escapes_for_names_and_notes_that_are_not_utf_8(tmp_path: Path) -> None:
    study = tmp_path / os.fsdecode(b"caf\xe9")
    make_runs(study, depth=(6, 18), scheme=("deepnorm", "post_ln"))
    first, second, *_ = find_runs(study)
    change_labels(first.folder, note=os.fsdecode(b"\xe9t\xe9"))
    (second.path / LABELS).write_bytes(b'{"tags": ["good"], "note": "\xe9"}')
    table = deepstack.load_runs(study)
    assert set(table["study"]) == {r"caf\udce9"} and table["note"].iloc[0] == r"\udce9t\udce9"
    assert len(runs_of(table)) == 4 and len(runs_of(table[:1])) == 1
    make_runs(tmp_path / "other", depth=(6, 18))
    assert r"caf\udce9" in set(deepstack.compare(tmp_path)["study"])


def test_values_that_are_equal_in_some_digits_stay_two(tmp_path: Path) -> None:
    rates = (0.001, 0.00100004, 0.0010000004)
    assert distinct_texts(rates) == {r: str(r) for r in rates}
    assert distinct_texts([0.123456, 2, None]) == {0.123456: "0.1235", 2: "2", None: "-"}
    for i, lr in enumerate(rates):
        path = make_run(tmp_path / "study", lr=lr, masked=2.0 + i, seed=i)
        config: Any = Run(path).config | {"seed": 0}
        RunFolder(path).write_config(repr(config))
    table = deepstack.compare(tmp_path)
    assert table["setting"].tolist() == ["lr 0.001", "lr 0.0010000004", "lr 0.00100004"]
    drawn: pd.DataFrame = rows(make_chart("update_vs_step", tmp_path, rates="all"), x=1)
    assert drawn["series"].nunique() == 3
