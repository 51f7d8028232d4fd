"""results/published: commands read its runs and write elsewhere."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import QUICK, ROOT
from helpers.command_line import TINY, typed
from helpers.extensions import needs, needs_settings_of
from helpers.record_runs import contents

from deepstack.plots import CHARTS
from deepstack.records import Run, find_runs

PUBLISHED = ROOT / "results" / "published"
RUN = "schemes_and_depth/deepnorm-d6-s0-4616ed"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with results/published, in which commands run; checks that it stays as it is."""
    monkeypatch.chdir(tmp_path)
    for source in PUBLISHED.glob("schemes_and_depth/deepnorm-d6-s[01]-*"):
        shutil.copytree(source, tmp_path / "results/published" / source.relative_to(PUBLISHED))
    before = contents(tmp_path / "results/published")
    yield tmp_path
    assert contents(tmp_path / "results/published") == before


def test_published_studies_are_small_and_whole() -> None:
    sizes = [path.stat().st_size for path in PUBLISHED.rglob("*") if path.is_file()]
    assert sum(sizes) < 5e6 and max(sizes) < 3e5
    result = typed("verify", PUBLISHED)
    assert result.exit_code == 0 and result.stdout.count("no weights") == len(find_runs(PUBLISHED))


def test_charts_of_published_runs_lie_outside(clone: Path) -> None:
    Path("link").symlink_to("results/published/schemes_and_depth")
    for source in ("results/", "link"):
        result = typed("plot", "loss_vs_step", source, "--format", "csv")
        assert result.stdout == "results/figures/schemes_and_depth/loss_vs_step.csv\n"
    assert typed("plot", "loss_vs_step", f"results/published/{RUN}").exit_code == 0


@pytest.mark.slow
@needs("report")
def test_a_report_of_published_runs_lies_outside(clone: Path) -> None:
    written = typed("report", "results/published", "-q").stdout.strip()
    assert written == "results/figures/report.html" and Path(written).is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["train", QUICK, *TINY, "--out", "results/published"],
        ["rm", "results/published"],
        ["plot", "loss_vs_step", "results", "--to", "results/published/x"],
    ],
    ids=lambda words: words[0],
)
def test_commands_do_not_write_there(words: list[str], clone: Path) -> None:
    result = typed(*words)
    assert result.exit_code == 2
    assert "no command writes to results/published" in result.stderr


def test_commands_of_the_gallery_draw_published_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PUBLISHED, tmp_path / "results/published")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "gallery.md").read_text("utf-8")
    commands = re.findall("^    deepstack (plot .*results/published.*)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in [line for line in commands if line.split()[1] in CHARTS]:
        result = typed(*command.split(), "--format", "csv")
        assert result.exit_code == 0 and Path(result.stdout.strip()).is_file(), result.stderr


@needs_settings_of(PUBLISHED / RUN / "config.yaml")
def test_a_published_run_is_trained_again(clone: Path) -> None:
    config = Path("results/published", RUN, "config.yaml")
    result = typed("train", config, "--study", "mine", "-q")
    assert result.exit_code == 0, result.stderr
    again = Path(result.stdout.strip())
    assert again == Path("results/mine", Path(RUN).name)
    assert len(find_runs("results")) == 3
    if Run(again).meta["environment"] == Run(config.parent).meta["environment"]:
        assert (again / "steps.csv").read_bytes() == (config.parent / "steps.csv").read_bytes()


@needs("depth_use")
@needs_settings_of(PUBLISHED / RUN / "config.yaml")
def test_weights_may_be_missing_only_there(clone: Path) -> None:
    needed = typed("analyze", f"results/published/{RUN}")
    assert needed.exit_code == 7
    assert f"deepstack train results/published/{RUN}/config.yaml" in needed.stderr
    shutil.copytree(f"results/published/{RUN}", "results/study/run")
    result = typed("verify", "results/study/run")
    assert result.exit_code == 6 and "weights.safetensors: missing" in result.stderr
