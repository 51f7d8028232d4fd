"""A run keeps the text of its plugins, which runs by itself only if the user gave it before."""

import hashlib
import json
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.command_line import PLUGIN, TINY, refusal, succeed
from helpers.extensions import needs
from helpers.registries import restored_names
from helpers.small_runs import only_run

from deepstack.records import Run, problems
from deepstack.records.given_plugins import given_before, list_file, remember


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of a plugin that was edited since, in a process that has not loaded it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plugin, out = tmp_path / "own.py", tmp_path / "results"
    plugin.write_text(PLUGIN)
    words = ["train", QUICK, *TINY, "model.scheme=own", "--plugin", plugin, "--out", out, "-q"]
    with restored_names():
        succeed(*words)
    plugin.write_text(f"{PLUGIN}\n# edited\n")
    return only_run(out / "quick")


@pytest.mark.slow(turn=48)
@needs("depth_use")
def test_a_run_keeps_its_plugin_and_is_read_without_naming_it(trained: Run) -> None:
    copy = trained.path / "plugins" / "own.py"
    assert copy.read_text() == PLUGIN and problems(trained.folder) == []
    with restored_names():
        assert succeed("rerun", trained.path, "--check").startswith("identical: ")
    with restored_names():
        succeed("analyze", trained.path, "--what", "linear", "--batches", "1")
    copy.write_text(PLUGIN.replace("x + G(x)", "x - G(x)"))
    assert "plugins/own.py: changed" in problems(trained.folder)[0]


def test_a_copy_that_this_user_never_gave_does_not_run(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    message = refusal(2, "rerun", trained.path, "--check")
    assert f"the run's own copy: --plugin {trained.path / 'plugins' / 'own.py'}" in message
    assert not given_before()
    with restored_names():
        succeed("rerun", trained.path, "--check", "--plugin", trained.path / "plugins" / "own.py")


@pytest.mark.parametrize("name", ["own.py", "../own.py", "/own.py"])
def test_a_changed_copy_of_a_plugin_does_not_run(name: str, trained: Run, tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\n{PLUGIN}"
    path = Path(f"{trained.path}/plugins/{name}") if name != "/own.py" else tmp_path / "own.py"
    path.write_text(text)
    recorded = str(path) if name == "/own.py" else name
    meta = json.loads((trained.path / "meta.json").read_text())
    meta["plugins"] = [{"file": recorded, "sha256": hashlib.sha256(text.encode()).hexdigest()}]
    (trained.path / "meta.json").write_text(json.dumps(meta))
    assert "was made with the plugin" in refusal(2, "rerun", trained.path, "--check")
    assert not (tmp_path / "ran").exists()


def test_a_list_that_others_can_write_to_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    remember(["ab" * 32])
    assert given_before() == {"ab" * 32}
    path = list_file()
    assert path is not None and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    assert not given_before()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert not given_before()
