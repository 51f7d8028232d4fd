"""Models that deepstack did not build: run folders, models of other packages, rates by depth."""

import json
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.command_line import typed
from helpers.extensions import needs
from helpers.probe_models import D, WithHead, adamw, batch_of, encoder, probe_of, probed
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ChangedLogError, ConfigError, LockedError
from deepstack.records import Run, RunFolder, problems

# -- the run folder --------------------------------------------------------------------------------


def test_the_external_probe_seals_no_changed_log(tmp_path: Path) -> None:
    def after(probe: Any, loss: Tensor) -> None:
        probe.step(loss)
        (tmp_path / "attribution.csv").unlink(missing_ok=True)

    with pytest.raises(ChangedLogError, match=r"attribution\.csv: was changed"):
        probed(tmp_path, 3, after=after)
    assert RunFolder(tmp_path).read_status()["state"] == "failed"


@pytest.mark.parametrize(
    "error, state",
    [(None, "done"), (RuntimeError("no"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_the_folder_says_how_the_loop_ended(
    error: BaseException | None, state: str, tmp_path: Path
) -> None:
    def after(probe: Any, loss: Tensor) -> None:
        probe.step(loss)
        if error is not None and probe.at == 2:
            raise error

    with pytest.raises(type(error)) if error else nullcontext():
        probed(tmp_path / "run", 2, after=after)
    run = Run(tmp_path / "run")
    assert (run.state, run.status["step"], len(run.steps)) == (state, 2, 2)


def test_compare_names_models_that_another_one_hides(tmp_path: Path) -> None:
    for name in ("pre", "post"):
        probed(tmp_path / "study" / name, 1)
    note = "study: 1 run hidden: same setting and seed as another run; of your own loop: "
    note += "probe(…, seed=…) or probe(…, name=…)"
    assert note in " ".join(typed("compare", tmp_path / "study").stderr.split())
    probed(tmp_path / "other" / "pre", 1)
    assert "hidden" not in typed("compare", tmp_path / "other").stderr


@pytest.mark.parametrize(("start", "step"), [(float("nan"), 1), (1.0, 3)])
def test_divergence_is_a_result(start: float, step: int, tmp_path: Path) -> None:
    """From a parameter that is not finite, or a loss of the third step."""
    model = encoder()
    next(model.parameters()).data.mul_(start)

    def after(probe: Any, loss: Tensor) -> None:
        probe.step(float("nan") if probe.at == 2 else loss)

    run = probed(tmp_path / "run", 5, model, after)
    assert (run.state, run.status["step"], run.status["quantity"]) == ("diverged", step, "loss")
    assert run.steps["step"].tolist() == list(range(1, step + 1))


@pytest.mark.slow(turn=45)
def test_a_rare_row_measures_its_last_step_alone(tmp_path: Path) -> None:
    """Of the steps since the row before, F_{t-1} and the time of a step are the last one's."""
    pause, F = 0.5, list[Tensor]()

    def after(probe: Any, loss: Tensor) -> None:
        F.extend([probe.subject.initial] if not F else [])
        probe.step(loss)
        F.append(probe.subject.hidden())
        time.sleep(pause if probe.at in (1, 3, 4) else 0)  # before steps 2, 4 and 5

    run = probed(tmp_path / "run", 7, after=after, every=3, layers_every=0, attribution_every=0)
    assert run.steps["step"].tolist() == [1, 3, 6]
    assert not (run.path / "attribution.csv").exists() and run.layer_names() == []
    assert run.state == "done" and run.folder.read_status()["step"] == 7
    assert problems(run.folder) == []
    expected = [float((F[t] - F[t - 1]).norm(dim=-1).mean()) for t in (1, 3, 6)]
    assert run.steps["model_update_step"].tolist() == pytest.approx(expected)
    assert (run.timing["step_ms"] < 1000 * pause).all()


@pytest.mark.parametrize(
    "words",
    [["rerun", "--check"], pytest.param(["export", "--to", "x"], marks=needs("export"))],
)
def test_a_probed_run_is_not_trained_again(words: list[str], tmp_path: Path) -> None:
    probed(tmp_path / "run", 1)
    result = typed(words[0], tmp_path / "run", *words[1:])
    assert result.exit_code == 2
    assert "measured by deepstack.probe, not trained by deepstack" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_config_is_read_back_as_it_was_given(tmp_path: Path) -> None:
    given = {
        "task.words": ["on", "1e-3", "null", "a: b", "ä\n"],
        "task.grid": ((1, 2.5), (True, None)),
        "task.long": list(range(20_000)),
        "task.parts": [{"a": [1, "x y"]}, {}],
        "train.beta": np.float64(0.1),
        "train.clip": float("inf"),
    }
    run = probed(tmp_path / "run", 0, nn.Linear(D, D), layers=(), config=given)
    found = {key: run.get(key) for key in given}
    assert found == given | {"task.grid": [[1, 2.5], [True, None]], "train.clip": "inf"}
    assert run.layer_names() == [] and run.get("model.depth") == 0


CHARTS = ["update_vs_depth", "update_vs_step", "grad_norm_by_layer", "layer_step_heat_map"]


@pytest.mark.slow
@pytest.mark.parametrize("named", [CHARTS, []], ids=len)
def test_plot_and_ls_read_what_a_probe_writes(named: list[str], tmp_path: Path) -> None:
    cells = [(depth, seed) for depth in (2, 4) for seed in (0, 1)]
    for depth, seed in cells:
        given = {"seed": seed, "name": "Pre-LN (torch)", "config": {"task.name": "reversal"}}
        model = encoder(depth, first=True)
        run = probed(tmp_path / "mine" / f"d{depth}-s{seed}", 4, model, **given)
    result = typed("plot", *(named or ["--all"]), tmp_path)
    assert result.exit_code == 0, result.output
    assert {Path(line).stem for line in result.stdout.splitlines()} >= set(CHARTS)
    rows = json.loads(typed("ls", tmp_path / "mine", "--json").stdout)
    assert [(row["model.depth"], row["seed"]) for row in rows] == cells
    assert run.get("model.scheme") == "Pre_LN_torch_" and run.meta["layers"] == "layers"
    assert run.columns["scheme"]["label"] == "Pre-LN (torch)"
    assert set(run.columns["layers"]) == set(run.layer_names())
    assert set(run.columns["columns"]) >= set(run.steps) | set(run.timing)


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    probe = probe_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="outside of its context"):
        probe.step(1.0)
    with pytest.raises(ConfigError, match=r"no gradient: .*before optimizer.zero_grad"), probe:
        with pytest.raises(LockedError), probe_of(tmp_path / "run"):
            pass
        probe.step(1.0)
    with pytest.raises(ConfigError, match="holds a run already"), probe_of(tmp_path / "run"):
        pass


# -- other people's packages: python -m pytest -m others -------------------------------------------


def trained(model: nn.Module, batch: Any, out: Path, **options: Any) -> Run:
    """Three steps on the output's square."""
    optimizer = adamw(model, 1e-3)
    with deepstack.probe(model, batch, optimizer, out=out, **options) as probe:
        for _ in range(3):
            optimizer.zero_grad()
            output = model(**batch) if isinstance(batch, dict) else model(batch)
            output = output if isinstance(output, Tensor) else output[0]
            loss = (output - 1).square().mean()
            loss.backward()
            optimizer.step()
            probe.step(loss)
    run = probe.run
    assert run.state == "done" and (run.steps["model_update"] > 0).tolist() == [True] * 3
    for name in run.layer_names():
        assert np.isfinite(run.layers(name)[1][1:]).all(), name
    return run


@pytest.mark.others
def test_a_bert_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=D, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=16,
    )  # fmt: skip
    padded = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch = {"input_ids": torch.arange(10).view(2, 5), "attention_mask": padded}
    run = trained(transformers.BertModel(config), batch, tmp_path / "bert")
    assert run.meta["layers"] == "encoder.layer" and run.get("model.depth") == 3
    assert run.columns["scheme"]["normalised"]  # Post-LN: F leaves the last layer's norm
    assert {"embeddings", "attention", "intermediate", "output"} <= set(run.meta["groups"])

    masked = transformers.BertForMaskedLM(config)
    with pytest.raises(ConfigError, match=r"hidden='.*cls|hidden='bert"):
        deepstack.probe(masked, batch, adamw(masked), out=tmp_path / "masked")
    run = trained(masked, batch, tmp_path / "masked", hidden="bert.encoder")
    assert run.columns["scheme"]["normalised"]


@pytest.mark.others
def test_a_stack_of_x_transformers(tmp_path: Path) -> None:
    x_transformers = pytest.importorskip("x_transformers")
    torch.manual_seed(0)
    layers = x_transformers.Encoder(dim=D, depth=3, heads=2, attn_dim_head=8)
    model = x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=8, attn_layers=layers)
    batch = torch.arange(10).view(2, 5)
    with pytest.raises(ConfigError, match="no hidden state of width 16; name the module"):
        deepstack.probe(model, batch, adamw(model), out=tmp_path / "x")
    run = trained(model, batch, tmp_path / "x", hidden="attn_layers")
    # its ModuleList holds sublayers, attention and feed-forward in turn
    assert run.get("model.depth") == 6 and run.meta["layers"] == "attn_layers.layers"
    assert run.columns["scheme"]["normalised"]
    result = typed("plot", tmp_path)
    assert result.exit_code == 0, result.output


# --- rates by depth for parameter groups: `deepstack.calibrate_model` -----------------------------


GUIDE = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of the guide's example after it has run."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(code.splitlines()) <= 30
    out = tmp_path_factory.mktemp("guide")
    names: dict[str, Any] = {}
    exec(code.replace("results/", f"{out}/"), names)
    return names


@pytest.mark.slow
def test_the_factors_make_the_update_independent_of_depth(example: dict[str, Any]) -> None:
    result = example["result"]
    before = {row.role: row for row in result.rows if row.step == 1}
    after = {row.role: row for row in result.rows_after if row.step == 1}
    assert set(before) == {"matrices", "biases", "rest", "together"}
    assert all(row.exponent > 0.8 for row in before.values())
    assert all(abs(row.exponent) < 0.05 for row in after.values()), after
    # not only a slope of 0: the updates are within a few tens of percent at all depths
    whole, free = after["together"], before["together"]
    assert whole.largest / whole.smallest < 1.6 < 4 < free.largest / free.smallest
    assert free.linearity == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@needs("calibrate")
def test_every_step_is_measured_if_none_divides_the_others(
    example: dict[str, Any], tmp_path: Path
) -> None:
    shared = {"groups": example["groups"], "lr": 1e-5, "out": tmp_path / "x", "check": False}
    result = deepstack.calibrate_model(
        example["build"], depths=(1, 2), steps=(2, 3, 4), seeds=1, **shared
    )
    assert [row.step for row in result.rows if row.role == "matrices"] == [2, 3, 4]


@pytest.mark.slow(turn=1)
def test_the_guide_states_its_exponents(example: dict[str, Any]) -> None:
    stated = {name: float(x) for name, x in re.findall(r"'(\w+)': ([\d.]+)", GUIDE)}
    assert stated == pytest.approx(example["result"].exponents, abs=0.02)


@needs("calibrate")
def test_groups_of_an_optimizer_have_the_rates_of_the_depth(example: dict[str, Any]) -> None:
    result, model = example["result"], example["model"]
    groups = {group["name"]: group for group in example["optimizer"].param_groups}
    for name, power in result.exponents.items():
        assert groups[name]["lr"] == pytest.approx(1e-3 * (24 / 2) ** -power)
    assert sum(len(group["params"]) for group in groups.values()) == len([*model.parameters()])
    assert result.factors(2) == pytest.approx(dict.fromkeys(groups, 1.0))
    assert result.factors(2, interpolate=True) == pytest.approx(dict.fromkeys(groups, 1.0))
    between = result.factors(4, interpolate=True)["matrices"]
    updates = {run.get("model.depth"): run for run in result.before if run.get("seed") == 0}
    assert between == pytest.approx(
        updates[2].attribution["matrices"][0] / updates[4].attribution["matrices"][0], rel=0.5
    )


@needs("calibrate")
def test_mistakes_are_refused(tmp_path: Path) -> None:
    def build(depth: int, seed: int) -> Any:
        model = encoder(depth)
        return model, batch_of(0), lambda step: model(batch_of(step)).square().mean()

    given = {"depths": (2, 4), "groups": {"all": "*"}, "lr": 1e-5, "out": tmp_path / "s"}
    for wrong, message in (
        ({"depths": (4, 4)}, "depths: found"),
        ({"steps": (0,)}, "steps: found"),
        ({"groups": {"all": "layer.*"}}, "no parameter is named 'layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            deepstack.calibrate_model(build, **given | wrong)


@needs("calibrate")
def test_a_calibration_without_hidden_refuses_logits(tmp_path: Path) -> None:
    tokens = torch.arange(6).view(2, 3)

    def logits(depth: int, seed: int) -> Any:
        model = WithHead()
        return model, tokens, lambda step: model(tokens).square().mean()

    def unknown(depth: int, seed: int) -> Any:
        model = nn.Linear(D, D)
        return model, batch_of(0), lambda step: model(batch_of(step)).square().mean()

    given = {"depths": (2, 4), "groups": {"all": "*"}, "lr": 1e-5, "steps": (1,), "seeds": 1}
    for build, message in (
        (logits, r"hidden: found a tensor of shape \(2, 3, 11\), no hidden state of width 16"),
        (unknown, r"hidden: without layers .* name the module whose output is F"),
    ):
        with pytest.raises(ConfigError, match=message):
            deepstack.calibrate_model(build, **given, out=tmp_path / "s")
        assert not list(tmp_path.iterdir())
    for build, hidden in ((logits, "encoder"), (unknown, lambda model, batch: model(batch))):
        result = deepstack.calibrate_model(
            build, **given, out=tmp_path / build.__name__, hidden=hidden, check=False
        )
        assert len(result.before) == 4
