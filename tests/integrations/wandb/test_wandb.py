"""W&B shows the values of a run (slow)."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import succeed
from helpers.extensions import needs
from helpers.live_runs import STEPS, Steps, assert_every_row, killed_and_resumed
from helpers.sampling import turn
from helpers.tracked_runs import assert_logged, pictured

from deepstack.records import Run


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after seven bytes of identification."""
    parts = b""
    for start in range(0, len(content), 32_768):
        block, at = content[start : start + 32_768], 0 if start else 7
        while at + 7 <= len(block):
            length, kind = struct.unpack_from("<HB", block, at + 4)
            parts += block[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a full record, or the last part of one
                yield parts
                parts = b""


@needs("export")
@turn(2, 3)
def test_wandb_reads_the_export(runs: dict[str, Run], tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    succeed("export", runs["done"].path.parent, "--logs", "wandb", "--to", tmp_path / "w")
    from wandb.proto import wandb_internal_pb2

    read = {}
    for file in (tmp_path / "w").glob("wandb/offline-run-*/*.wandb"):
        rows: dict[int, dict[str, Any]] = {}
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                run_record = record.run
            if record.HasField("history"):
                row = {
                    (each.key or "/".join(each.nested_key)): json.loads(each.value_json)
                    for each in record.history.item
                }
                rows[row["_step"]] = row
        config = {each.key: each.value_json for each in run_record.config.update}
        read[run_record.display_name] = rows, config
    assert set(read) == {run.name for run in runs.values()}
    for run in runs.values():
        rows, config = read[run.name]
        assert config["model.depth"] == "3" and config["state"] == f'"{run.state}"'
        assert_logged(rows, run)
        last = rows[max(rows)]
        for key in pictured(run):
            assert last[f"{key}/_type"] == "image-file" and last[f"{key}/width"] > 300
            assert list((tmp_path / "w").glob(f"wandb/*/files/{last[f'{key}/path']}"))


@pytest.mark.slow
def test_wandb_follows_a_run_through_a_kill(tmp_path: Path) -> None:
    """Both starts write a file of their own for one run of W&B, and no row is missing."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    def read(path: Path) -> Steps:
        steps: Steps = {}
        for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
            for data in wandb_records(file.read_bytes()):
                record = wandb_internal_pb2.Record.FromString(data)
                row = {each.key or "/".join(each.nested_key): each for each in record.history.item}
                for key in row:
                    steps.setdefault(key, []).append(int(json.loads(row["step"].value_json)))
        return {key: sorted(found) for key, found in steps.items()}

    run, before, shown = killed_and_resumed("wandb", tmp_path, read)
    assert 0 < len(before["steps/loss"]) < STEPS
    assert_every_row(shown, is_once=False)
    number = json.loads((run.path / "wandb" / "run.json").read_text())["id"]
    files = [path.name for path in run.path.glob("wandb/offline-run-*/*.wandb")]
    assert files == [f"run-{number}.wandb"] * 2
    assert {f"{key}/_type" for key in pictured(run)} <= set(shown)
