"""The rule for width of depth-µP and CompleteP, with the option `base_width`.

`python -m pytest -m others` compares whole trainings with Microsoft's package mup, if installed.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.configs import config_with
from helpers.others_stacks import maps_of, package
from torch import Tensor, nn

from deepstack.config import Config
from deepstack.model import build_model
from deepstack.model.build import Built
from deepstack.training.optimizer import make_optimizer

BASE, M, VOCAB, SEQ = 8, 4, 11, 6
TOKENS = torch.arange(4 * SEQ).view(4, SEQ) * 5 % VOCAB


def config_of(m: int = M, **changes: Any) -> Config:
    keys = {
        "model.scheme": "complete_p", "model.depth": 2, "model.d_model": m * BASE,
        "model.scheme_options": {"base_width": BASE}, "task.seq_len": SEQ,
    }  # fmt: skip
    return config_with(keys, **changes)


def built_of(m: int = M, **changes: Any) -> Built:
    return build_model(config_of(m, **changes), vocab_size=VOCAB)


# role -> factors of learning rate, decay and epsilon at four times the base width, by hand from
# arXiv:2203.03466, Table 8, and arXiv:2505.01618, Table 1; tables here are those over sqrt(d_model)
ADAM = {
    "embedding": (0.5, 2, 0.5), "position": (0.5, 2, 0.5), "head": (1, 1, 0.25),
    "q": (0.25, 4, 0.25), "w2": (0.25, 4, 0.25), "bias": (1, 1, 0.25), "final_norm": (1, 1, 0.25),
}  # fmt: skip
SGD = {
    "embedding": (1, 1, 1), "head": (1, 1, 1), "q": (1, 1, 1), "w2": (1, 1, 1),
    "bias": (4, 0.25, 1), "norm_gain": (4, 0.25, 1), "final_norm": (4, 0.25, 1),
}  # fmt: skip
MUON = ADAM | {"q": (0.5, 2, 1), "w2": (0.5, 2, 1)}


@pytest.mark.parametrize(
    ("optimizer", "table"), [("adamw", ADAM), ("adam", ADAM), ("sgd", SGD), ("muon", MUON)]
)
def test_factors_of_training_follow_the_papers_tables(optimizer: str, table: Any) -> None:
    built = built_of(train__optimizer=optimizer)
    assert {role: built.optim(role) for role in table} == table
    deeper = built_of(train__optimizer=optimizer, model__depth=6)
    by_depth = 3.0 if optimizer == "sgd" else 1.0  # CompleteP's factor multiplies
    assert deeper.optim("w2").lr == pytest.approx(by_depth * table["w2"][0])


@pytest.mark.parametrize(
    ("m", "head", "optimizer", "factor", "deviation"),
    [
        (M, "tied", "adamw", 0.5, 1),
        (M, "separate", "adamw", 0.25, 2),
        (M, "separate", "sgd", 0.5, 1),
        (1, "separate", "adamw", 1, 1),  # nothing changes at the base width
    ],
)
def test_initial_values_and_multipliers(
    m: int, head: str, optimizer: str, factor: float, deviation: float
) -> None:
    changes = {"model__head": head, "train__optimizer": optimizer}
    built, plain = built_of(m, **changes), built_of(m, **changes, model__scheme_options={})
    ours, theirs = (dict(b.model.named_parameters()) for b in (built, plain))
    if head == "separate":
        theirs["head.weight"] = deviation * theirs["head.weight"]
    torch.testing.assert_close(ours, theirs)
    x = torch.randn(2, m * BASE)
    expected = plain.model.head(x, plain.model.embedding) * factor * deviation
    assert torch.allclose(built.model.head(x, built.model.embedding), expected, atol=1e-6)
    attentions: Any = [one.model.layers[0].attention for one in (built, plain)]
    (q, k, _), (q0, k0, _) = (one.project(torch.ones(1, 3, m * BASE)) for one in attentions)
    assert torch.allclose(q, q0 / math.sqrt(m)) and torch.equal(k, k0)
    if m == 1:
        assert all(built.optim(role) == (1, 1, 1) for role in ADAM)


def test_matrices_of_a_fixed_deviation_shrink_and_heads_of_a_fixed_width_keep_their_scale() -> None:
    options = {"base_width": BASE, "base_d_head": 4}
    init = {"model__init__distribution": "normal", "model__n_heads": 8}
    built = built_of(**init, model__scheme_options=options)
    gain = built.schemes["encoder"].gain
    assert (gain("w1", 1), gain("embedding", 0)) == (0.5, 1)
    assert not built.model.schemes[0].slots


class MupModel(nn.Module):
    """CompleteP's encoder in the units of the package mup, with its layers."""

    def __init__(self, mup: Any, width: int, head: str) -> None:
        super().__init__()
        layers, heads = 4, 2
        self.heads, self.factor = heads, 2 / layers
        # mup leaves the scale of 1/d_head to the model: here 1/sqrt(d_head) at the base
        self.scale = math.sqrt(BASE / heads) / (width / heads)
        self.token = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(SEQ, width)
        self.maps = nn.ModuleList(
            nn.Linear(n, out)
            for _ in range(layers)
            for n, out in [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        tied = {"output_mult": (BASE / 2) ** -0.5}
        self.head = (
            mup.MuSharedReadout(self.token.weight, **tied)
            if head == "tied"
            else mup.MuReadout(width, VOCAB)
        )
        self.head.bias = nn.Parameter(torch.zeros(VOCAB))  # MuSharedReadout's has d_model entries

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for i in range(0, len(self.maps), 6):
            q, k, v, o, w1, w2 = self.maps[i : i + 6]
            attention, feed_forward = self.norms[i // 3 : i // 3 + 2]
            h = attention(x)
            parts = [w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (q, k, v)]
            y = F.scaled_dot_product_attention(*parts, scale=self.scale)
            x = x + self.factor * o(y.transpose(1, 2).flatten(2))
            x = x + self.factor * w2(torch.relu(w1(feed_forward(x))))
        out: Tensor = self.head(self.norms[-1](x))
        return out

    def load(self, built: Built, sgd: bool) -> None:
        """Copy our initial values, in mup's units."""
        model, d = built.model, self.token.embedding_dim
        assert model.position is not None
        self.token.weight.copy_(model.embedding * math.sqrt(d / 2))
        self.position.weight.copy_(model.position * math.sqrt(d / 2))
        for i, layer in enumerate(model.layers):
            matrices = [matrix for matrix, _ in maps_of(layer).values()]
            for linear, matrix in zip(self.maps[6 * i : 6 * i + 6], matrices, strict=True):
                linear.weight.copy_(matrix)
        for linear in self.maps:
            linear.bias.zero_()
        if "head.weight" in dict(model.named_parameters()):
            own = model.head.get_parameter("weight")
            self.head.weight.copy_(own * (d / BASE) ** 0.5 if sgd else own)


@pytest.mark.others
@pytest.mark.parametrize("head", ["tied", "separate"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_equals_the_package_mup(head: str, optimizer: str) -> None:
    mup, sgd = package("mup"), optimizer == "sgd"
    rate, decay = 0.01, 0.1
    config = config_of(
        model__depth=4, model__head=head, train__optimizer=optimizer, train__eps=1e-15,
        train__weight_decay=0.0 if sgd else decay, train__lr=rate,
    )  # fmt: skip
    built = build_model(config, vocab_size=VOCAB)
    ours = make_optimizer(config.train, built)
    for group in ours.param_groups:
        group["lr"] = rate * group["factor"]
    models = [MupModel(mup, m * BASE, head) for m in (1, 2, M)]
    base, delta, model = models
    mup.set_base_shapes(model, base, delta=delta, rescale_params=False)
    with torch.no_grad():
        model.load(built, sgd)
    unit = BASE / 2 if sgd else math.sqrt(BASE / 2)  # of tables: x_0 = sqrt(d/2) (E + P) here
    by_depth = 2.0 if sgd else 1.0  # CompleteP's factor inside the layers: N/base under SGD
    inside = {p for part in (model.maps, model.norms[:-1]) for p in part.parameters()}
    tables = {model.token.weight, model.position.weight}
    groups = []
    for p in model.parameters():
        times = by_depth if p in inside else unit if p in tables else 1.0
        wd = 0.0 if p.ndim < 2 or sgd else decay / times
        groups.append({"params": [p], "lr": rate * times, "weight_decay": wd})
    kind = mup.MuSGD if sgd else mup.MuAdamW
    more = {} if sgd else {"betas": config.train.betas, "eps": 1e-15}
    theirs = kind(groups, lr=rate, **more)
    start = built.model(TOKENS).detach()
    assert torch.allclose(model(TOKENS), start, atol=1e-5)
    for _ in range(4):
        for own, step in ((built.model, ours), (model, theirs)):
            step.zero_grad(set_to_none=False)
            F.cross_entropy(own(TOKENS).flatten(0, 1), TOKENS.roll(1, 1).flatten()).backward()
            step.step()
    with torch.no_grad():
        moved = built.model(TOKENS) - start
        assert moved.abs().max() > 0.05
        error = (model(TOKENS) - built.model(TOKENS)).abs().max() / moved.abs().max()
    assert error < 1e-3
