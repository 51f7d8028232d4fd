"""What the remedies say of SGD's rates: a net of these rates passes, one without a factor fails."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.sampling import some
from torch import Tensor, nn

import deepstack
from deepstack.tools.coordinates.causes import REMEDIES

BASE = 32
Data = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    """Layers h + relu(W h + b)/depth above an embedding and a first matrix, logits * BASE/width."""

    def __init__(self, width: int, depth: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.first = nn.Embedding(11, width), nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)
        self.multiplier = BASE / width
        nn.init.normal_(self.first.weight, std=8**-0.5)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=width**-0.5)
        nn.init.normal_(self.head.weight, std=BASE**-0.5)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        h = self.embed(tokens) + self.first(x)
        for layer in self.layers:
            h = h + F.relu(layer(h)) / len(self.layers)
        logits: Tensor = self.head(self.norm(h)) * self.multiplier
        return logits


def batch(seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (64,), generator=generator)
    x = torch.randn(64, 8, generator=generator)
    return tokens, x, (3 * tokens + (x.sum(1) > 0)) % 11


def loss(model: nn.Module, data: Data) -> Tensor:
    tokens, x, targets = data
    return F.cross_entropy(model(tokens, x), targets)


def sgd(changed: str) -> Callable[[nn.Module, int, int], torch.optim.Optimizer]:
    """Return SGD whose rates are those of the remedies, but for parameters named `changed`…"""

    def make(model: nn.Module, width: int, depth: int) -> torch.optim.Optimizer:
        groups = []
        for name, parameter in model.named_parameters():
            is_hidden = name.startswith("layers") and parameter.dim() == 2
            grows = is_hidden == (bool(changed) and name.startswith(changed))
            groups.append({"params": [parameter], "lr": 0.1 * (width / BASE if grows else 1.0)})
        return torch.optim.SGD(groups, lr=0.1)

    return make


WRONG = [
    ("head.weight", "head", "learning rate of the output matrix"),
    ("embed.weight", "embed", "learning rate of the embedding"),
    ("first.weight", "first", "learning rate of the input layer"),
    ("norm", "norm", "learning rate of norm gains"),
    ("layers.1.weight", "layers.1", "learning rate of a hidden matrix"),
]


@pytest.mark.parametrize(("changed", "module", "cause"), [("", None, None), *some(WRONG, 5)])
def test_sgd_passes_with_the_rates_of_the_remedies_alone(
    changed: str, module: str | None, cause: str | None
) -> None:
    check = deepstack.coordinates(
        Net, batch, widths=[32, 64, 128, 256], depths=4, rule="mup", seeds=4, steps=[1, 3],
        loss=loss, optimizer=sgd(changed),
    )  # fmt: skip
    first = check.first
    assert (first and (first.module, first.cause)) == (module and (module, cause))
    if cause is not None:
        words = "SGD's is constant" if module == "layers.1" else "SGD's grows as width"
        assert REMEDIES[cause].endswith(words)
