"""An instrument of a plugin: its log, its rows after a kill, its column in tables and charts."""

import json
import os
import signal
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import refusal, succeed, typed
from helpers.extensions import needs
from helpers.instrument_recipe import COLUMN, EVERY, NAME, load_recipe, measured_config, recipe
from helpers.small_runs import logs_of, small

import deepstack
from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.errors import ConfigError, PluginError
from deepstack.config.instruments import specs
from deepstack.diagnostics import INSTRUMENTS
from deepstack.records import Run
from deepstack.runs.tracked import scalars
from deepstack.training import Observer


class Killer(Observer):
    """Kills its own process at a step."""

    def stepped(self, step: int, row: object) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def plugin(folder: Path, body: str, name: str = "own") -> None:
    """Load a plugin with an instrument of one column `own_value`."""
    text = f'''
    from deepstack.diagnostics import Instrument
    class Own(Instrument, name="{name}"):
        """Own."""
        columns = {{"own_value": ("o", "", "Own.")}}
    '''
    path = folder / f"{name}_plugin.py"
    path.write_text(textwrap.dedent(text) + textwrap.indent(textwrap.dedent(body), "    "))
    plugins.load_plugins([path])


def test_the_recipe_fits_on_a_screen() -> None:
    assert len(recipe().splitlines()) <= 60


@pytest.mark.slow(turn=16)
def test_the_recipe_measures_killed_and_resumed_as_without_a_kill(tmp_path: Path) -> None:
    file = load_recipe(tmp_path)
    config = measured_config()
    whole = deepstack.train(config, study="whole", out=tmp_path)
    saving = conf.with_overrides(config, {"runtime.checkpoint_seconds": 0.0})
    if (pid := os.fork()) == 0:
        deepstack.train(saving, study="killed", out=tmp_path, observer=Killer())
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    (path,) = (tmp_path / "killed").iterdir()
    before = (path / f"{NAME}.csv").read_bytes()
    state = json.loads((path / "checkpoint/6/state.json").read_text())
    assert NAME in state["logs"] and before.count(b"\n") == 3
    resumed = deepstack.train(saving, study="killed", out=tmp_path)
    assert logs_of(resumed) == logs_of(whole) and f"{NAME}.csv" in logs_of(whole)

    table = whole.descent_angle
    assert list(table["step"]) == [EVERY, 2 * EVERY, 8]  # at step 0 nothing has moved
    assert table[COLUMN].between(-1, 1).all() and (table["descent_length"] > 0).all()
    assert whole.columns["columns"][COLUMN]["symbol"] == "cos(−∇L, Δθ)"
    rows = json.loads(succeed("list", "diagnostics", "--json", "--plugin", file))
    (row,) = (row for row in rows if row["name"] == COLUMN)
    assert row["interval"] == f"instruments.{NAME}" and row["description"]
    words = "--x", "step", "--y", COLUMN, "--to", tmp_path / "figures"
    succeed("plot", "metric", whole.path, *words)
    (drawn,) = (tmp_path / "figures").glob("*.csv")
    assert f"{table[COLUMN].iloc[-1]:.3g}"[:5] in drawn.read_text()
    exported = dict(scalars(whole))
    assert exported[8][f"{NAME}/{COLUMN}"] == table[COLUMN].iloc[-1]


def test_the_recipe_measures_the_angle_of_the_literal_vectors(tmp_path: Path) -> None:
    """Plain gradient descent without momentum goes straight against the gradient in one step."""
    load_recipe(tmp_path)
    descent = {"train.optimizer": "sgd", "train.clip": None, "train.schedule": "constant"}
    config = conf.with_overrides(measured_config(1), descent | {"train.warmup_steps": 0})
    run = deepstack.train(config, out=tmp_path)
    (length,) = run.log(NAME)["descent_length"]
    assert length == pytest.approx(config.train.lr * run.steps["grad_norm"].iloc[0], rel=1e-4)


def test_an_instrument_that_no_interval_names_writes_no_log(tmp_path: Path) -> None:
    load_recipe(tmp_path)
    run = deepstack.train(small(train__steps=1), out=tmp_path)
    assert not (run.path / f"{NAME}.csv").exists() and len(run.log(NAME)) == 0
    assert "instruments" not in (run.path / "config.yaml").read_text()


def test_only_intervals_count_in_the_hash_of_a_run() -> None:
    assert conf.config_hash(conf.Config()) == "44136f"  # of no settings at all
    measured = conf.parse_config("log: {instruments: {own: 5}}")
    assert conf.config_hash(measured) != "44136f"
    assert conf.parse_config(conf.to_yaml(measured)) == measured


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("descent_angel", "unknown instrument 'descent_angel'; did you mean 'descent_angle'"),
        ("jacobian", "log.instruments: found jacobian, which has a setting of its own; .*log.jac"),
    ],
)
def test_an_entry_that_is_not_a_free_instrument_is_refused(
    entry: str, said: str, tmp_path: Path
) -> None:
    load_recipe(tmp_path)
    config = conf.with_overrides(small(), {f"log.instruments.{entry}": 2})
    with pytest.raises(ConfigError, match=said):
        deepstack.train(config, out=tmp_path)
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    "typo",
    [
        pytest.param("sharpnes", marks=needs("sharpness")),
        pytest.param("atribution", marks=needs("attribution")),
        pytest.param("noise_scal", marks=needs("noise_scale")),
        "jacobain",
        "stream_updat",
        "skiped_layers",
    ],
)
def test_the_setting_that_a_refusal_names_is_accepted(typo: str) -> None:
    message = refusal(2, "check", "quick", f"log.instruments.{typo}=2")
    setting = message.split("did you mean ")[1].split("?")[0]
    (value,) = (
        value
        for value in ("2", "true")
        if typed("check", "quick", "log.probe_sequences=2", f"{setting}={value}").exit_code == 0
    )
    assert setting.startswith("log.") and value


def test_check_refuses_an_unknown_instrument() -> None:
    assert "unknown instrument 'own'" in refusal(2, "check", "quick", "log.instruments.own=2")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def measure(self, state):\n    return {}",
            "found no columns; allowed its columns",
        ),
        ("def measure(self, state):\n    return 1.0", "found float; allowed its columns"),
        (
            "def measure(self, state):\n    return {'own_value': state.inputs}",
            r"found \(2, 16\) for own_value; allowed one number",
        ),
    ],
)
def test_a_row_that_is_not_one_of_the_columns_names_the_line(
    body: str, said: str, tmp_path: Path
) -> None:
    plugin(tmp_path, body)
    with pytest.raises(PluginError, match=rf"instrument 'own': .*own_plugin.py:6: {said}"):
        deepstack.train(small(log__instruments={"own": 1}), out=tmp_path)


@pytest.mark.parametrize("name", ["steps", "config", "layers"])
def test_a_name_that_a_run_has_already_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=f"'{name}' is that of an attribute of runs"):
        plugin(tmp_path, "def measure(self, state): ...", name)


def test_a_column_of_another_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="its column 'loss' is also one of another log"):
        plugin(tmp_path, "columns = {'loss': ('', '', '')}\ndef measure(self, state): ...")


def test_a_value_added_to_snapshots_is_read_by_a_diagnostic(tmp_path: Path) -> None:
    body = """
    adds = "own_layers"
    def measure(self, state):
        return {"own_value": self.layers(state).sum()}
    def layers(self, state):
        import torch
        return torch.arange(4.0) + state.step
    def of_layers(self, state):
        return {"encoder": self.layers(state)}

from deepstack.diagnostics import diagnostic
@diagnostic("own_layer", "o_l", parts=())
def own_layer(snapshot):
    \"\"\"Own.\"\"\"
    return snapshot.own_layers
"""
    path = tmp_path / "adding.py"
    head = "from deepstack.diagnostics import Instrument\nclass Own(Instrument, name='own'):\n"
    path.write_text(head + "    columns = {'own_value': ('o', '', 'Own.')}\n" + body)
    plugins.load_plugins([path])
    settings = {"log.layers_every": 2, "log.instruments.own": 1, "train.steps": 2}
    run = deepstack.train(conf.with_overrides(small(), settings), out=tmp_path)
    assert list(run.log("own")["own_value"]) == [6.0, 10.0, 14.0]
    steps, values = run.layers("own_layer")
    assert list(steps) == [0, 2] and np.array_equal(values, [[0, 1, 2, 3], [2, 3, 4, 5]])


def test_every_instrument_with_a_log_is_known_without_torch() -> None:
    logged = {name for name, one in INSTRUMENTS.items() if one.has_log()}
    assert logged == set(specs())
    for name in logged:
        assert INSTRUMENTS[name].spec is specs()[name]


def test_a_run_has_an_empty_table_of_each_known_instrument_and_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in specs():
        assert list(getattr(run, name).columns) == ["step"] and len(getattr(run, name)) == 0
    with pytest.raises(AttributeError, match="no attribute 'sharpnes'"):
        _ = run.sharpnes
    (tmp_path / "other.csv").write_text("step,value\n0,1.5\n")
    (tmp_path / "notes.csv").write_text("day,text\n0,x\n")
    again = Run(tmp_path)
    assert again.log_names() == ["steps", "evals", "timing", "other"]
    assert again.other["value"].tolist() == [1.5]
