"""Folding: what is folded computes the same, what is refused would not; and what export writes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import typed
from helpers.configs import config_with
from helpers.papers import PAPERS
from helpers.sampling import some
from safetensors.torch import save_file

from deepstack.config import Config, load_config, to_yaml
from deepstack.errors import ConfigError
from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.model.fold import compare, fold, output
from deepstack.model.plain import fill, from_plain, load_export, to_plain, values_of
from deepstack.records import RunFolder
from deepstack.schemes import SCHEMES, StackNorm
from deepstack.training import load_trained, train

VOCAB, SEQ = 13, 6


def config_of(scheme: str = "pre_ln", depth: int = 3, **changes: Any) -> Config:
    keys = {
        "model.scheme": scheme, "model.depth": depth, "model.d_model": 16, "model.n_heads": 4,
        "model.d_ff": 24, "model.activation": "gelu", "model.head": "separate",
        "task.seq_len": SEQ, "train.batch_size": 3,
    }  # fmt: skip
    return config_with(keys, **changes)


def moved(config: Config) -> Built:
    """Every parameter away from where it starts: gains from 1, biases and scalars from 0."""
    built = build_model(config, vocab_size=VOCAB)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in values_of(built.model).values():
            value.add_(0.3 * torch.rand_like(value) + 0.05)
    return built


def tokens(built: Built) -> torch.Tensor:
    length = SEQ * (2 if built.model.source_len else 1)
    return torch.arange(2 * length).view(2, length) * 5 % VOCAB


def folded(config: Config, built: Built, **options: Any) -> tuple[Config, Any, Any]:
    """The folded configuration and values, and how they compare with what they were made of."""
    after = fold(config, built, **options)
    return *after, compare((config, values_of(built.model)), after, tokens(built))


@pytest.mark.parametrize(
    "scheme, family",
    some(((name, family) for name in SCHEMES.names() for family in SCHEMES[name].families), 4),
)
def test_a_scheme_is_folded_exactly_if_linear_maps_alone_read_its_norms(
    scheme: str, family: str
) -> None:
    config = config_of(scheme, depth=4, model__family=family)
    built = moved(config)
    norms = [m for m in built.model.modules() if isinstance(m, StackNorm)]
    if not norms:
        with pytest.raises(ConfigError, match="nothing to fold: no norm"):
            fold(config, built)
        return
    small, values, found = folded(config, built)
    assert not (small.model.norm.gain or small.model.norm.bias)
    before, after = (sum(map(torch.numel, v.values())) for v in (values_of(built.model), values))
    assert before - after == 2 * sum(norm.shape[0] for norm in norms)
    assert found.equal is PAPERS[scheme].folds
    assert found.equal or found.difference > 1e-3 * found.largest


@pytest.mark.parametrize(
    "changes",
    [
        {"model__norm__kind": "rms", "model__norm__bias": False},
        {"model__norm__kind": "batch"},
        {"model__norm__kind": "dynamic_tanh"},
        {"model__norm__gain": False},
        {"model__bias": False},
        {"model__bias": False, "model__norm__bias": False},
        {"model__head": "bert"},
        {"model__init__distribution": "ntk"},
        {"train__lr_factors": {"q": 0.5}},
        {"train__trainable": ("q", "norm_gain")},
        {"train__trainable": ("norm_gain",)},
        {"model__family": "encoder_decoder", "train__lr_factors": {"cross_k": 0.5}},
        {"runtime__banks": False},
        {"model__scheme": "mix_ln", "model__scheme_options": {"share": 0.0}},
    ],
    ids=lambda changes: " ".join(f"{k.split('__')[-1]}={v}" for k, v in changes.items()),
)
def test_fold_keeps_the_function_under_other_settings(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    built = moved(config)
    small, values, found = folded(config, built)
    assert found.equal, found
    assert not small.model.norm.gain
    assert small.model.norm.bias == (config.model.norm.bias and not config.model.bias)
    fill(build_model(small, vocab_size=VOCAB).model, values)


def test_trained_norms_of_queries_and_keys_are_named_as_the_reason() -> None:
    config = config_of(model__qk_norm=True)
    with pytest.raises(ConfigError, match=r"model.qk_norm: true: .*_norm, whose gain is trained"):
        folded(config, moved(config))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__bias": False},
        {"model__norm__kind": "dynamic_tanh"},
        {"model__norm__kind": "rms", "model__norm__bias": False},
        {"model__family": "encoder_decoder"},
        {"model__norm__gain": False},
        {"model__scheme": "complete_p", "model__scheme_options": {"base_width": 4}},
    ],
)
def test_a_tied_head_keeps_the_last_gain_unless_untied(changes: dict[str, Any]) -> None:
    config = config_of(model__head="tied", **changes)
    built = moved(config)
    small, values, found = folded(config, built)
    assert found.equal and small.model.head == "tied"
    gains = [key for key in values if key.endswith("norm.gain")]
    last = [*built.model.stacks][-1]
    assert (f"{last}.final_norm.gain" in gains) == bool(small.model.norm.final_gain)
    assert len(gains) == len(built.model.stacks) * config.model.norm.gain
    fill(build_model(small, vocab_size=VOCAB).model, values)
    small, values, found = folded(config, built, untie=True)
    assert found.equal and small.model.head == "separate"
    assert values["head.weight"].shape == (VOCAB, 16)
    assert not [key for key in values if key.endswith("norm.gain")]


def test_a_bias_that_stays_in_its_norm_needs_a_gain_other_than_0() -> None:
    config = config_of(model__bias=False)
    built = moved(config)
    with torch.no_grad():
        values_of(built.model)["encoder.layers.0.scheme.attention_norms.0.gain"][0] = 0
    with pytest.raises(ConfigError, match="a bias cannot be divided by a gain of 0"):
        fold(config, built)


def test_one_wrong_number_would_be_seen() -> None:
    config = config_of()
    built = moved(config)
    before, (small, values) = (config, values_of(built.model)), fold(config, built)
    for name, change in (("layers.1.attention.qkv", 1e-5), ("layers.1.attention.o", math.nan)):
        values[f"encoder.{name}"][0, 0] += change
        assert not compare(before, (small, values), tokens(built)).equal


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("banks", [True, False])
def test_plain_tensors_go_there_and_back(scheme: str, banks: bool) -> None:
    config = config_of(
        scheme, runtime__banks=banks, model__head="bert", model__norm__kind="batch",
        model__gated=not banks,
    )  # fmt: skip
    model = moved(config).model
    values = values_of(model)
    plain = to_plain(model, values)
    torch.testing.assert_close(from_plain(model, plain), values, rtol=0, atol=0)
    a = plain["encoder.layers.1.attention.k.weight"]
    assert torch.equal(a, model.layers[1].attention.qkv[16:32])  # type: ignore[union-attr, index]
    assert torch.equal(plain["embedding.weight"], model.embedding)
    if not banks:
        assert plain["encoder.layers.2.feed_forward.w3.weight"].shape == (24, 16)
    del plain["embedding.weight"]
    with pytest.raises(ConfigError, match=r"have no embedding\.weight"):
        from_plain(model, plain)


# -- the command -----------------------------------------------------------------------------------

TINY = {
    "model__positions": "sinusoidal", "train__steps": 3, "train__lr": 0.1, "train__eval_every": 0,
    "log__layers_every": 0, "task__name": "markov", "train__eval_batches": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained runs by name of what is special about them."""
    out = tmp_path_factory.mktemp("results")
    cases = {
        "separate": {},
        "tied": {"model__head": "tied"},
        "post": {"model__scheme": "post_ln"},
        "batch": {"model__norm__kind": "batch"},
    }
    return {
        name: train(config_of(**TINY, **more), out=out, study=name).path
        for name, more in cases.items()
    }


@pytest.mark.parametrize("name", ["separate", "batch"])
@pytest.mark.parametrize(("target", "flags"), [("model", []), ("a.safetensors", ["--fold"])])
def test_export_writes_a_model_that_runs(
    name: str, target: str, flags: list[str], runs: dict[str, Path], tmp_path: Path
) -> None:
    to = tmp_path / "new" / target
    result = typed("export", runs[name], "--to", to, "--json", *flags)
    assert result.exit_code == 0, result.output
    (facts,) = json.loads(result.stdout)
    about, weights, settings = sorted(map(Path, facts["files"]))
    assert facts == json.loads(about.read_text())
    written = [*weights.parent.iterdir(), *runs[name].glob("checkpoint/*/*")]
    assert len({path.stat().st_mode for path in written}) == 1
    assert not RunFolder(to).exists()  # below results/ it is not listed as a run
    again = load_export(to)
    before = load_trained(RunFolder(runs[name]), print).built
    inputs = torch.arange(SEQ)[None] % 5
    expected, got = output(before.model, inputs), output(again.model, inputs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got, expected) is not bool(flags)
    config = load_config(settings, [])
    assert config.model.norm.gain is not bool(flags)
    if flags:
        d, norms = 16, 2 * 3 + 1
        assert facts["parameters"] - facts["parameters folded"] == 2 * d * norms
        assert train(config, out=tmp_path, study="again").state == "done"


def test_export_refuses(runs: dict[str, Path], tmp_path: Path) -> None:
    to = tmp_path / "model"
    for words, code, message in (
        ([runs["post"], "--fold"], 2, "the residual"),
        ([runs["separate"], "--untie"], 2, "add --fold"),
    ):
        result = typed("export", *words, "--to", to)
        assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert not to.exists()
    assert typed("export", runs["tied"], "--fold", "--untie", "--to", to).exit_code == 0
    again = typed("export", runs["tied"], "--to", to)
    assert again.exit_code == 2 and "exists already" in again.stderr


def test_files_that_do_not_belong_together_are_no_export(tmp_path: Path) -> None:
    model = build_model(config_of(), vocab_size=VOCAB).model
    save_file(to_plain(model, values_of(model)), tmp_path / "a.safetensors")
    cases = [
        ("[]", {}, "is no export of deepstack"),
        ('{"step": null}', {}, "is no export of deepstack"),
        ('{"step": 3}', {"model__d_ff": 48}, r"w1 is \(24, 16\), and in the .* \(48, 16\)"),
    ]
    for about, changes, message in cases:
        (tmp_path / "a.json").write_text(about)
        (tmp_path / "a.yaml").write_text(to_yaml(config_of(**changes)))
        with pytest.raises(ConfigError, match=message):
            load_export(tmp_path / "a.safetensors")


def test_a_run_without_weights_is_said_to_have_none(tmp_path: Path) -> None:
    config = config_of(**TINY | {"train__max_loss": 1e-3})
    run = train(config, out=tmp_path)
    assert run.state == "diverged" and len(run.steps) == 1  # the first step may diverge
    result = typed("export", run.path, "--to", tmp_path / "model")
    assert result.exit_code == 7 and "its run is diverged" in result.stderr
