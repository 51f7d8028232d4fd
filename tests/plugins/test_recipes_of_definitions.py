"""The complete files of docs/extending for schedules, optimizers, activations, …, as plugins."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import QUICK, ROOT
from helpers.command_line import TINY, refusal, succeed
from helpers.sampling import some
from helpers.small_runs import data_of, interrupted, small, weights_of

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.base.kinds import KINDS, Kind
from deepstack.cli.listing import definition_kinds, names_of_setting, short_table
from deepstack.config import Config, with_overrides
from deepstack.model import build_model, flops_of
from deepstack.records import Run, find_runs
from deepstack.tasks import task_of
from deepstack.training import mean_loss
from deepstack.training.schedule import learning_rate

# setting -> (page, the name that its file defines, an option with another value than the default)
RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "model.attention": ("attention", "linear", {"c": 1.5}),
    "model.feed_forward": ("feed_forward", "bilinear", {"c": 2.0}),
    "model.activation": ("activation", "softplus", {"a": 2.0}),
    "model.norm.kind": ("norm", "power_norm", {"p": 3.0}),
    "train.optimizer": ("optimizer", "lion", {"beta1": 0.95}),
    "train.schedule": ("schedule", "polynomial", {"power": 3.0}),
}


def train_recipe(setting: str, folder: Path, **more: Any) -> tuple[Config, Run]:
    """Load the file of a page and train a short run with it; return its configuration too."""
    page, name, options = RECIPES[setting]
    text = (ROOT / "docs" / "extending" / f"{page}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    deepstack.load_plugins([path])
    key = setting.replace(".", "__")
    chosen = {key: name, f"{key}_options": options}
    config = small(**({"train__steps": 4} | chosen | more))
    return config, deepstack.train(config, out=folder)


def test_every_kind_has_a_recipe_and_is_listed_without_torch() -> None:
    assert set(KINDS) == set(RECIPES) == set(definition_kinds())
    for setting, kind in KINDS.items():
        assert isinstance(kind, Kind) and names_of_setting(setting) == kind.names()
        assert all(definition.equation() for definition in kind.values())
        listed = {row["name"]: row for row in short_table(f"{kind.kind}s")}
        for name, definition in kind.items():
            options = [option["name"] for option in listed[name]["options"]]
            assert options == list(definition.options), name


def sweep_recipe(setting: str, folder: Path) -> None:
    """Sweep over two seeds with the file of a page: the runs are trained by other processes."""
    page, name, _ = RECIPES[setting]
    text = (ROOT / "docs" / "extending" / f"{page}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    words = [f"{setting}={name}", "seed=0,1", "--plugin", path, "--out", folder, "--study", "s"]
    succeed("sweep", QUICK, *TINY, *words, "-q")
    assert [run.state for run in find_runs(folder / "s")] == ["done"] * 2


@pytest.mark.slow(turn=14)
def test_the_runs_of_a_sweep_have_the_norm_of_a_plugin(tmp_path: Path) -> None:
    sweep_recipe("model.norm.kind", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [one for one in RECIPES if one != "model.norm.kind"])
def test_the_runs_of_a_sweep_have_the_definition_of_a_plugin(setting: str, tmp_path: Path) -> None:
    sweep_recipe(setting, tmp_path)


def test_the_schedule_of_the_recipe_is_the_rate_of_every_step(tmp_path: Path) -> None:
    config, run = train_recipe("train.schedule", tmp_path, train__warmup_steps=2)
    lr = config.train.lr
    rates = [1 / 2, 1, (2 / 3) ** 3, (1 / 3) ** 3]
    assert run.steps.lr.tolist() == pytest.approx([lr * rate for rate in rates])
    assert [learning_rate(config.train, step) for step in (1, 4)] == pytest.approx(
        [lr / 2, lr / 27]
    )
    assert run.config["train"]["schedule_options"] == {"power": 3.0}


def test_the_activation_of_the_recipe_is_its_equation(tmp_path: Path) -> None:
    config, run = train_recipe("model.activation", tmp_path, model__gated=True)
    assert run.state == "done"
    activation: Any = build_model(config, vocab_size=5).model.layers[1].feed_forward.activation
    z = torch.randn(50)
    torch.testing.assert_close(activation(z), torch.log(1 + torch.exp(2 * z)) / 2)


def test_the_norm_of_the_recipe_is_its_equation(tmp_path: Path) -> None:
    config, run = train_recipe("model.norm.kind", tmp_path, model__norm__bias=False)
    assert run.state == "done" and run.config["model"]["norm"]["kind_options"] == {"p": 3.0}
    model = build_model(config, vocab_size=5).model
    norms: list[Any] = [one for one in model.modules() if type(one).__name__ == "PowerNorm"]
    assert len(norms) > 2 * config.model.depth - 1
    for norm in norms:
        z = torch.randn(2, 7, 16)
        expected = z / ((z.abs() ** 3).mean(-1, keepdim=True) + 1e-5) ** (1 / 3)
        torch.testing.assert_close(norm(z), expected)  # gains start at 1


@pytest.mark.parametrize(
    "more",
    [{}, {"model__qk_norm": True, "model__scheme": "pre_ln"}, {"runtime__replay": True}],
    ids=["default", "queries and keys", "replayed"],
)
def test_a_norm_of_a_plugin_trains_like_the_equal_built_in_one(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """With p = 2 it is RMSNorm.  SGD: Adam would move by the signs of gradients that are 0."""
    steps = {"train__steps": 2, "train__optimizer": "sgd", "train__lr": 0.1} | more
    options = {"model__norm__kind_options": {"p": 2.0}}
    config, run = train_recipe("model.norm.kind", tmp_path, **steps | options)
    settings = {"model.norm.kind": "rms", "model.norm.kind_options": {}}
    built_in = deepstack.train(with_overrides(config, settings), out=tmp_path / "rms")
    assert len(run.steps) == 2 and run.steps.model_update.iloc[-1] > 0
    for column in ("loss", "grad_norm", "model_update"):
        assert run.steps[column].tolist() == pytest.approx(
            built_in.steps[column].tolist(), rel=1e-4
        )
    weights, others = weights_of(run), weights_of(built_in)
    assert weights.keys() == others.keys()
    for key, value in weights.items():
        torch.testing.assert_close(value, others[key], rtol=1e-4, atol=1e-6)
    (plugin,) = run.meta["plugins"]
    assert plugin["file"] == "power_norm.py" and len(plugin["sha256"]) == 64


def test_the_feed_forward_of_the_recipe_is_its_equation(tmp_path: Path) -> None:
    config, run = train_recipe("model.feed_forward", tmp_path, train__lr_factors={"w3": 0.5})
    assert run.state == "done" and np.isnan(run.folder.read_layers("grad_norm_predicted")[1]).all()
    built = build_model(config, vocab_size=5)
    module: Any = built.model.layers[1].feed_forward
    x = torch.randn(2, 3, 16)
    expected = 2 * (x @ module.w1.T) * (x @ module.w3.T) @ module.w2.T
    torch.testing.assert_close(module(x), expected)  # biases start at 0
    assert built.banks.count()["w3"] == 4 * 16 * 64
    gated, plain = (
        flops_of(with_overrides(config, {"model.feed_forward": name, **more}), task_of(config))
        for name, more in (("bilinear", {}), ("mlp", {"model.feed_forward_options": {}}))
    )
    assert gated.forward - plain.forward == 2 * 4 * (4 * 16) * 16 * 64


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_the_attention_of_the_recipe_is_its_equation(family: str, tmp_path: Path) -> None:
    more = {"model__family": family, "model__n_kv_heads": 1, "train__steps": 2}
    task = {"task__name": "markov"}
    config, run = train_recipe("model.attention", tmp_path, **more, **task)
    assert run.state == "done" and not list(run.path.glob("layers/*entropy*"))
    attention: Any = build_model(config, vocab_size=5).model.layers[1].attention
    q, k, v = attention.project(torch.randn(2, 6, 16))
    weights = (F.elu(q) + 1.5) @ (F.elu(k) + 1.5).transpose(2, 3)
    if family == "decoder":
        weights = weights.tril()
    expected = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(attention.mix(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_a_scheme_whose_slot_a_sublayer_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention: found linear, which has no slot"):
        train_recipe("model.attention", tmp_path, model__scheme="real_former")


@pytest.mark.parametrize("replay", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_optimizer_of_the_recipe_is_its_equation(replay: bool, tmp_path: Path) -> None:
    """One step of each parameter in plain PyTorch, and a resumed run like an uninterrupted one."""
    more = {"train__lr": 1e-2, "train__weight_decay": 0.1, "runtime__replay": replay}
    more["model__bias"] = (
        False  # the gradient of a key's bias is 0 but for rounding, which has a sign
    )
    config, run = train_recipe("train.optimizer", tmp_path, train__steps=1, **more)
    built = build_model(config, vocab_size=257)
    inputs, targets, _ = map(torch.from_numpy, task_of(config).train_batch(1, 4))
    named = dict(built.model.named_parameters())
    gradients = torch.autograd.grad(mean_loss(built.model(inputs), targets), [*named.values()])
    scale = max(1.0, float(torch.stack([g.norm() for g in gradients]).norm()))
    rate = learning_rate(config.train, 1)
    for p, g in zip(named.values(), gradients, strict=True):
        decay = 0.1 if p.ndim == 2 else 0.0
        p.data -= rate * (torch.sign(g / scale) + decay * p.data)
    for key, value in weights_of(run).items():
        torch.testing.assert_close(value, built.state()[key], rtol=1e-5, atol=1e-6)
    longer = with_overrides(config, {"train.steps": 6})
    whole = deepstack.train(longer, out=tmp_path / "whole")
    interrupted(longer, tmp_path / "cut", at=3)
    assert data_of(deepstack.train(longer, out=tmp_path / "cut")) == data_of(whole)


def norm_of(text: str, tmp_path: Path) -> Path:
    """Write a norm of a plugin with this body."""
    path = tmp_path / "mine_of_norms.py"
    body = "\n    ".join(text.splitlines())
    path.write_text(
        "from deepstack.schemes import StackNorm\n\n\n"
        f'class Mine(StackNorm, name="mine"):\n    """N(z) = z."""\n\n    {body}\n'
    )
    return path


FORWARD = "def forward(self, z):\n    return self.scaled(z)"


@pytest.mark.parametrize(
    ("body", "words", "said"),
    [
        ("eps: float = 0.5\n" + FORWARD, [], "norm mine: every one has eps; give the option"),
        ("gain: float = 1.0\n" + FORWARD, [], "norm mine: every one has gain; give the option"),
        ("p: float = 2.0", [], "the norm mine: it has no forward(self, z)"),
        (FORWARD, ["model.norm.kind_options.q=1"], "model.norm.kind_options.q"),
        (
            "by_token = False\n" + FORWARD, ["train.micro_batches=2"],
            "model.norm.kind: found mine, which needs one process and train.shards=1",
        ),
        ("by_token = False\n" + FORWARD, ["model.family=decoder"], "model.norm.kind"),
        (
            "def forward(self, z):\n    return z.mean(-1)", [],
            "forward gave (2, 5) of torch.float32 for z = (2, 5, 8) of torch.float32",
        ),
        ("def forward(self, z):\n    self.scaled(z)", [], "forward gave None, as without `return`"),
        (
            "def __init__(self, d, **more):\n"
            "    super().__init__(d, **more)\n"
            "    self.a = __import__('torch').nn.Parameter(__import__('torch').ones(d))\n\n"
            + FORWARD, [],
            "the norm mine: its parameter a is torch's, without role and start; make it as "
            "deepstack.schemes.parameter(8, role=self.roles[0], start=…)",
        ),
    ],
)  # fmt: skip
def test_a_norm_without_effect_or_place_is_refused(
    body: str, words: list[str], said: str, tmp_path: Path
) -> None:
    path = norm_of(body, tmp_path)
    more = ["model.norm.kind=mine", *words, "--plugin", path, "--out", tmp_path]
    assert said in refusal(2, "train", QUICK, *TINY, *more)


def test_a_norm_of_deepstack_takes_no_options_that_it_lacks() -> None:
    message = refusal(2, "check", QUICK, "model.norm.kind_options.p=2")
    assert "model.norm.kind_options" in message and "p" in message


def test_the_kind_in_place_of_a_name_is_named(tmp_path: Path) -> None:
    path = norm_of(FORWARD, tmp_path)
    path.write_text(path.read_text().replace('name="mine"', 'kind="mine"'))
    message = refusal(2, "check", QUICK, "model.norm.kind=mine", "--plugin", path)
    assert "Mine: found kind='mine'; allowed name='mine'" in message


COUNTS = """
import sys
from deepstack.config import parse_config
from deepstack.config.estimate import memory_estimate
from deepstack.config.sizes import parameter_count

config = parse_config(f"model: {{norm: {{kind: {sys.argv[1]}}}}}")
before = parameter_count(config, 17), memory_estimate(config)
assert "torch" not in sys.modules
import deepstack.schemes
assert before == (parameter_count(config, 17), memory_estimate(config)), before
"""


@pytest.mark.parametrize("kind", some(["dynamic_erf", "rms"], 2))
def test_estimates_are_equal_before_and_after_the_norms_are_imported(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", COUNTS, kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
