"""The wheel, installed in a fresh environment, works in an empty folder."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers import ROOT

import deepstack

OF_THE_TESTS = "with the packages of the tests"
ENVIRONMENTS = [
    pytest.param("with its own dependencies", marks=pytest.mark.full),
    pytest.param(OF_THE_TESTS, marks=pytest.mark.slow),
]


@pytest.fixture(params=ENVIRONMENTS)
def installed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The commands' folder of an environment that has the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("deepstack_studies-*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    install = [*pip, "--python", python, "install", "-c", ROOT / "constraints.txt", wheel]
    if request.param == OF_THE_TESTS:
        install.append("--no-deps")
        (packages,) = folder.glob("env/lib/python3.*/site-packages")
        beside = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "packages_of_the_tests.pth").write_text(beside, encoding="utf-8")
    subprocess.run(install, check=True)
    where = [python, "-c", "import deepstack; print(deepstack.__file__)"]
    assert subprocess.check_output(where, text=True, cwd=folder).startswith(f"{folder}/env/")
    return folder / "env/bin"


def run(installed: Path, folder: Path, line: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program, *words = line.split()
    result = subprocess.run(
        [installed / program, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_examples_work_after_pip_install(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "deepstack --version") == f"deepstack {deepstack.__version__}\n"
    assert "quick" in run(installed, tmp_path, "deepstack list configs")
    assert run(installed, tmp_path, "deepstack init --from quick") == "quick.yaml\n"
    few = "train.steps=3 train.eval_batches=1"
    folder = run(installed, tmp_path, f"deepstack train quick {few}").strip()
    assert folder.startswith("results/quick/deepnorm-d48-s0-")
    assert run(installed, tmp_path, f"deepstack train quick.yaml {few}").strip() == folder
    sweep = f"deepstack sweep --depths 2,3 --schemes deepnorm {few} train.warmup_steps=1"
    assert "DeepNorm" in run(installed, tmp_path, sweep)
    charts = run(installed, tmp_path, "deepstack plot update_vs_depth results/")
    assert "results/depth_sweep/figures/update_vs_depth.png" in charts
    assert run(installed, tmp_path, "deepstack report") == "results/report.html\n"
