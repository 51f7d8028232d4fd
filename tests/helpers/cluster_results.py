"""What runs on a cluster and runs on this machine must agree on: for the tests of Ray and Slurm."""

from __future__ import annotations

from pathlib import Path

from deepstack.records import Run, find_runs


def runs_of(out: Path) -> list[Run]:
    """The runs in a folder, none where there is nothing yet."""
    return find_runs(out) if any(out.glob("*/*/config.yaml")) else []


def results(out: Path, count: int) -> dict[str, dict[str, bytes]]:
    """Of every run, which must be done: logs, layers and weights, byte for byte."""
    found = {}
    for run in find_runs(out):
        assert run.state == "done", run.name
        paths = [run.folder.steps_path, run.folder.evals_path]
        paths += [*run.folder.layers_dir.iterdir(), *run.path.rglob("*.safetensors")]
        found[run.name] = {str(path.relative_to(run.path)): path.read_bytes() for path in paths}
    assert len(found) == count
    return found
