"""`deepstack analyze`: analyses in a run's folder, their files, and refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import typed
from helpers.small_runs import small

import deepstack
from deepstack.depth_use import MEASURES, analyze_run
from deepstack.errors import ConfigError, NothingMatchedError
from deepstack.records import Inspection, Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small(train__eval_batches=3, train__lr=1e-2, model__scheme="pre_ln")
    return deepstack.train(config, study="runs", out=tmp_path_factory.mktemp("out"))


def test_a_run_folder_has_the_arrays_their_meaning_and_checksums(trained: Run) -> None:
    shutil.rmtree(trained.path / "analysis", ignore_errors=True)
    before = Inspection(trained.folder).files
    words = "--what", ",".join(MEASURES), "--probes", 2, "--batches", 3, "--json"
    printed = typed("analyze", trained.path, *words)
    assert printed.exit_code == 0, printed.output
    (run,) = json.loads(printed.stdout)
    for name in MEASURES:
        result, stored = run["analyses"][name], Run(trained.path).analysis(name)
        assert result["scalars"] == stored.scalars
        assert stored.about["weights_sha256"] and stored.about["depth"] == 4
        assert stored.columns.keys() == stored.arrays.keys() | stored.scalars.keys()
        assert all(stored.columns[key]["meaning"] for key in stored.columns)
    loss = Run(trained.path).analysis("lens").arrays["loss"][-1]  # after the last layer
    assert loss == pytest.approx(trained.evals["loss_masked"].iloc[-1], rel=1e-5)
    inspection = Inspection(trained.folder)
    files = [path for path in (trained.path / "analysis").glob("*/*") if path.stem != "checksums"]
    assert inspection.files == before + len(files) > before + 30
    assert inspection.verdict == "whole"


def test_a_repeated_call_replaces_the_analysis(trained: Run) -> None:
    wide = analyze_run(trained.path, ["effects"])["effects"]
    narrow = analyze_run(trained.path, ["effects"], every=2)["effects"]
    stored = Run(trained.path).analysis("effects")
    assert stored.arrays["removed"].tolist() == [1, 3]
    assert stored.notes == narrow.notes != wide.notes
    folder = trained.path / "analysis"
    shutil.copytree(folder / "effects", folder / ".draft-effects")  # as a kill leaves them
    shutil.copytree(folder / "effects", folder / ".gone-effects")
    assert Inspection(trained.folder).verdict == "whole"
    analyze_run(trained.path, ["effects"])
    assert not list(folder.glob(".*"))
    assert Run(trained.path).analysis("effects").arrays["removed"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("file", ["kl.npy", "columns.json", "checksums.json"])
def test_verify_notices_a_flipped_bit(trained: Run, file: str) -> None:
    analyze_run(trained.path, ["lens"])
    path = trained.path / "analysis" / "lens" / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    verified = typed("verify", trained.path)
    assert verified.exit_code == 6 and "analysis/lens/" in verified.stderr
    path.unlink()
    assert typed("verify", trained.path).exit_code == 6
    path.write_bytes(whole)
    (path.parent / "more.npy").write_bytes(b"")
    assert "more.npy: not listed" in typed("verify", trained.path).stderr
    (path.parent / "more.npy").unlink()
    assert typed("verify", trained.path).exit_code == 0
    elsewhere = path.rename(trained.path.parent / file)
    path.symlink_to(elsewhere)
    assert typed("verify", trained.path).exit_code == 6  # a link is no file of an analysis
    elsewhere.replace(path)


def test_two_runs_of_different_depth_are_compared(trained: Run, tmp_path: Path) -> None:
    other = deepstack.train(small(model__depth=2, train__steps=1), study="runs", out=tmp_path)
    words = ("analyze", trained.path, "--what", "similarity", "--with", other.path)
    printed = typed(*words)
    assert printed.exit_code == 0 and "similarity: no numbers; arrays are in" in printed.stderr
    result = Run(trained.path).analysis("similarity")
    assert result.arrays["cka_with"].shape == (5, 3)
    assert np.isfinite(result.arrays["cka_with"]).all()
    assert result.about["with"]["run"] == str(other.path)
    elsewhere = deepstack.train(
        small(task__name="markov", train__steps=1), study="runs", out=tmp_path
    )
    refused = typed(*words[:-1], elsewhere.path)
    assert refused.exit_code == 2 and "--with: " in refused.stderr and "task." in refused.stderr


def test_refusals_name_the_remedy(trained: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'effects'"):
        analyze_run(trained.path, ["effect"])
    with pytest.raises(ConfigError, match=r"side .*decoder"):
        analyze_run(trained.path, ["lens"], side="decoder")
    with pytest.raises(ConfigError, match="batches: found 0; allowed 1 or more"):
        analyze_run(trained.path, batches=0)
    config = small(model__scheme="hyper_connections", train__steps=1)
    several = deepstack.train(config, study="runs", out=tmp_path)
    with pytest.raises(ConfigError, match=r"more than one tensor.*allowed for it: lens"):
        analyze_run(several.path, ["lens", "swap"])
    assert not (several.path / "analysis").exists()
    diverged = deepstack.train(small(train__max_loss=1e-3), study="runs", out=tmp_path)
    with pytest.raises(NothingMatchedError, match="its run is diverged"):
        analyze_run(diverged.path)
    whole = deepstack.train(small(train__steps=1), study="runs", out=tmp_path)
    printed = typed("analyze", tmp_path / "runs", "--what", "swap", "--json")
    assert [run["run"] for run in json.loads(printed.stdout)] == [str(whole.path)]
    assert printed.stderr.count("left out: ") == 2
    refused = typed("analyze", tmp_path / "runs", "--what", "swaps")
    assert refused.exit_code == 2 and "did you mean 'swap'" in refused.stderr
