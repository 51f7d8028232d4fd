"""Models whose forward pass changes or draws more than its result, also in evaluation mode."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, DEPTH, BATCH, SEQ = 8, 3, 4, 5


class Plain(nn.Module):
    """x + tanh(W x), without a state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class CachedWeights(Plain):
    """Keeps a tensor of its weights in evaluation mode until train()."""

    cached: Tensor | None = None

    def train(self, mode: bool = True) -> "CachedWeights":
        self.cached = None if mode else self.cached
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + torch.tanh(x @ torch.tanh(self.weight))
        if self.cached is None:
            self.cached = torch.tanh(self.weight).detach()
        return x + torch.tanh(x @ self.cached)


class Experts(nn.Module):
    """Counts the tokens of each expert; the counts move the router's bias after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.router = nn.Linear(D, 3)
        self.count = nn.Buffer(torch.zeros(3))
        self.bias = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.router(x) + self.bias).softmax(-1)
        self.count += torch.bincount(weights.argmax(-1).flatten(), minlength=3)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + torch.tanh((outputs * weights.unsqueeze(-2)).sum(-1))

    def after_step(self) -> None:
        self.bias += 0.1 * torch.sign(self.count.mean() - self.count)
        self.count.zero_()


class FakeQuantised(Plain):
    """Rounds activations to a scale that every pass widens, and that grows from no entries."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = nn.Buffer(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        largest = x.detach().abs().amax().view(1)
        if not self.largest.numel():
            self.largest.resize_(1).copy_(largest)
        torch.maximum(self.largest, largest, out=self.largest)
        step = self.largest / 127
        rounded = x + ((x / step).round() * step - x).detach()
        return x + torch.tanh(rounded @ self.weight)


class Dropping(Plain):
    """Attention with dropout whose rate does not ask for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        return x + F.scaled_dot_product_attention(h, h, h, dropout_p=0.3)


class Jitter(nn.Module):
    """Adds one number that Python or NumPy draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * self.draw()


class WithJitter(Plain):
    draw: Callable[[], float] = staticmethod(random.random)

    def __init__(self) -> None:
        super().__init__()
        self.jitter = Jitter(self.draw)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.jitter(x))


class WithNumPy(WithJitter):
    draw = staticmethod(np.random.rand)


class UnusedDraws(Plain):
    """Draws in every pass numbers of which only training reads any, as layer dropout does."""

    def forward(self, x: Tensor) -> Tensor:
        chance = torch.rand(()).item() + random.random() + float(np.random.rand())
        return super().forward(x * chance if self.training else x)


class AuxiliaryLosses(Plain):
    """Appends a loss to a list in every pass; the loop adds and clears the list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.sizes: dict[str, list[float]] = {"input": []}

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(0.01 * self.weight.square().sum() * x.detach().square().mean())
        self.sizes["input"].append(float(x.detach().norm()))
        return super().forward(x)

    def take_losses(self) -> Tensor:
        total = torch.stack(self.losses).sum() + 0.01 * len(self.sizes["input"])
        self.losses.clear()
        self.sizes["input"] = []
        return total


class Memory(Plain):
    """Reads a mean that the last call has kept as an attribute, as Transformer-XL does."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.weight)
        last, self.memory = self.memory, h.detach().mean(dim=(0, 1))
        return x + h if last is None else x + h + 0.5 * last


class LoRA(Plain):
    """Merges its product into the matrix in eval(), and takes it out in train(): both round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(D, 2))
        self.up = nn.Parameter(torch.zeros(2, D))
        self.merged = False

    def train(self, mode: bool = True) -> "LoRA":
        if self.merged == mode:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.down @ self.up)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return x + torch.tanh(y if self.merged else y + x @ self.down @ self.up)


class MergingInForward(LoRA):
    """The same, in the first pass of evaluation mode, and back in the first of training."""

    def train(self, mode: bool = True) -> "MergingInForward":
        return nn.Module.train(self, mode)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        LoRA.train(self, self.training)
        return super().forward(x)


class Spectral(Plain):
    """Divides by a norm that a power iteration finds, one turn in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Buffer(F.normalize(torch.randn(D), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.weight.T @ self.u, dim=0)
            self.u.copy_(F.normalize(self.weight @ v, dim=0))
        return x + torch.tanh(x @ (self.weight / (self.u @ self.weight @ v)))


class Normed(Plain):
    """Batch norm, with running averages that training moves and evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.flatten(0, 1)).view_as(x))


class Cache:
    """Keys and the number of calls, in an object that is no module."""

    def __init__(self) -> None:
        self.keys, self.calls, self.room = [], 0, torch.zeros(64, D)  # type: ignore[var-annotated]


class KeyValueCache(Plain):
    """Reads the keys of earlier calls in evaluation mode, and adds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        key = x.detach().mean(dim=(0, 1))
        if not self.training:
            self.cache.room[self.cache.calls % 64] = key
            self.cache.calls += 1
            self.cache.keys.append(key)
        seen = self.cache.room.sum(0) + sum(self.cache.keys, torch.zeros(D))
        return super().forward(x + 0.1 * seen)


class OwnGenerator(Plain):
    """Draws noise from a generator that it holds, which goes on in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.random)
        return super().forward(x + 0.1 * noise)


class InPlace(Plain):
    """Adds to the tensor that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x.clone() @ self.weight)
        return x.add_(h) if not x.requires_grad else x + h


KINDS: dict[str, type[nn.Module]] = {
    "plain": Plain,
    "cached weights": CachedWeights,
    "counting experts": Experts,
    "fake quantisation": FakeQuantised,
    "auxiliary losses": AuxiliaryLosses,
    "memory": Memory,
    "LoRA merged in eval": LoRA,
    "LoRA merged in forward": MergingInForward,
    "power iteration": Spectral,
    "batch norm": Normed,
    "key-value cache": KeyValueCache,
    "own generator": OwnGenerator,
    "in place": InPlace,
    "unused draws": UnusedDraws,
}
NOISY: dict[str, tuple[type[nn.Module], str]] = {  # kind -> block, and the module that draws
    "attention dropout": (Dropping, r"blocks\.0 \(Dropping\)"),
    "random": (WithJitter, r"blocks\.0\.jitter \(Jitter\)"),
    "numpy": (WithNumPy, r"blocks\.0\.jitter \(Jitter\)"),
}


class Stack(nn.Module):
    """Blocks in a list, and a head if there is a vocabulary."""

    def __init__(self, kind: type[nn.Module], vocabulary: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, vocabulary) if vocabulary else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def draw(seed: int) -> Tensor:
    return torch.randn(BATCH, SEQ, D, generator=torch.Generator().manual_seed(seed))


def losses_of(model: Stack, steps: int) -> Iterator[tuple[int, torch.optim.Optimizer, Tensor]]:
    """Train; yield step, optimizer and loss after each step of the optimizer."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model.train()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        x = draw(step)
        loss = (model(x.clone()) - x.flip(1)).square().mean()
        for block in model.blocks:
            take: Callable[[], Tensor] | None = getattr(block, "take_losses", None)
            loss = loss if take is None else loss + take()
        loss.backward()
        optimizer.step()
        for block in model.blocks:
            if hasattr(block, "after_step"):
                block.after_step()
        yield step, optimizer, loss.detach()


def held(value: Any) -> Any:
    """All that a model or a value holds, as plain Python values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.detach().tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, (list, tuple)):
        return [held(each) for each in value]
    if isinstance(value, dict):
        return {name: held(each) for name, each in value.items()}
    if isinstance(value, (nn.Module, Cache)):
        return {name: held(each) for name, each in vars(value).items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(type(value))
