"""Residual blocks in plain PyTorch, from the papers' equations, each right or with one fault.

`block(scheme, fault)` has the names of a user's file: build, PARAMETERS, SETTINGS, optimizer.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAPS = ("q", "k", "v", "o", "w1", "w2")
VALUE_PATH = ("v", "o", "w1", "w2")


class BadNorm(nn.LayerNorm):
    """LN with eps outside the root."""

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.var(-1, correction=0, keepdim=True).sqrt() + self.eps
        return (x - x.mean(-1, keepdim=True)) / deviation * self.weight + self.bias


class Layer(nn.Module):
    """Attention and feed-forward with biases; subclasses join them to the stream.

    l: 1..N.  fault: what this layer does wrong, or ''.
    """

    norms: tuple[str, ...] = ("n1", "n2")

    def __init__(self, l: int, N: int, d: int, h: int, d_ff: int, fault: str) -> None:
        super().__init__()
        self.l, self.N, self.h, self.d, self.fault = l, N, h, d, fault
        for name in MAPS:
            n_in, n_out = (d_ff if name == "w2" else d), (d_ff if name == "w1" else d)
            linear = nn.Linear(n_in, n_out)
            if fault != "nn.Linear's start":
                nn.init.xavier_normal_(linear.weight, gain=self.gain(name))
                nn.init.zeros_(linear.bias)
            setattr(self, name, linear)
        for name in self.norms:
            kind = BadNorm if fault == "eps outside" else nn.LayerNorm
            setattr(self, name, kind(d_ff if name == "inner" else d))
        self.more(d)

    def more(self, d: int) -> None:
        """Make further parameters."""

    def gain(self, name: str) -> float:
        return 1.0

    def A(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        split = lambda y: y.view(B, T, self.h, d // self.h).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        size = d / self.h
        scores = q @ k.transpose(-2, -1) / (size if self.fault == "logits" else math.sqrt(size))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, d)
        return self.o(self.before_out(y))

    def before_out(self, y: Tensor) -> Tensor:
        return y

    def F(self, x: Tensor) -> Tensor:
        return self.w2(self.after_activation(torch.relu(self.w1(x))))

    def after_activation(self, y: Tensor) -> Tensor:
        return y


class PostLN(Layer):
    def forward(self, x: Tensor) -> Tensor:
        for G, n in ((self.A, self.n1), (self.F, self.n2)):
            x = n((x.detach() if self.fault == "detached stream" else x) + G(x))
        return x


class DSInit(PostLN):
    def gain(self, name: str) -> float:
        return self.l ** (-0.25 if self.fault == "exponent of the code" else -0.5)


class DeepNorm(Layer):
    def gain(self, name: str) -> float:
        beta = (8 * self.N) ** -0.25
        if self.fault == "beta upside down":
            beta = 1 / beta
        if self.fault == "decoder's constants":
            beta = (12 * self.N) ** -0.25
        if name in VALUE_PATH:
            return beta if self.fault != "no beta on v" or name != "v" else 1.0
        return beta if self.fault == "beta on q and k" else 1.0

    def alpha(self) -> float:
        others = {
            "alpha 1": 1.0,
            "N in sublayers": (4 * self.N) ** 0.25,
            "alpha of 32 layers": 2.8284271247461903,
            "decoder's constants": (3 * self.N) ** 0.25,
            "alpha for Adam": (2 * self.N) ** 0.5,
        }
        return others.get(self.fault, (2 * self.N) ** 0.25)

    def forward(self, x: Tensor) -> Tensor:
        a = self.alpha()
        for G, n in ((self.A, self.n1), (self.F, self.n2)):
            if self.fault == "beta at run time":
                x = n(a * x + G((8 * self.N) ** -0.25 * x))
            elif self.fault == "alpha outside":
                x = a * x + n(G(x))
            elif self.fault == "alpha in the last layer only" and self.l < self.N:
                x = n(x + G(x))
            elif self.fault == "alpha on the branch":
                x = n(x + a * G(x))
            else:
                x = n(a * x + G(x))
        return x


class PreLN(Layer):
    def forward(self, x: Tensor) -> Tensor:
        for G, n in ((self.A, self.n1), (self.F, self.n2)):
            if self.fault == "norm after the sum":
                x = n(x + G(x))
            elif self.fault == "normed stream":
                z = n(x)
                x = z + G(z)
            elif self.fault == "no norm of the feed-forward" and G == self.F:
                x = x + G(x)
            else:
                x = x + (2 if self.fault == "attention twice" and G == self.A else 1) * G(n(x))
        return x


class ScaledPreLN(PreLN):
    def gain(self, name: str) -> float:
        if self.fault == "gain of the last layer only" and self.l < self.N:
            return 1.0
        return (2 * self.N) ** -0.5 if name in ("o", "w2") else 1.0


class Peri(Layer):
    norms = ("n1", "n2", "m1", "m2")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.m1(self.A(self.n1(x)))
        y = self.F(self.n2(x))
        return x + (y if self.fault == "no output norm" else self.m2(y))


class Sandwich(Peri):
    def gain(self, name: str) -> float:
        return (2 * self.N) ** -0.5 if name in ("o", "w2") else 1.0


class ResPostNorm(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "norm before":
            x = x + self.A(self.n1(x))
            return x + self.F(self.n2(x))
        x = x + self.n1(self.A(x))
        return x + self.n2(self.F(x))


class LNScaling(Layer):
    def forward(self, x: Tensor) -> Tensor:
        c = self.l**-0.5
        for G, n in ((self.A, self.n1), (self.F, self.n2)):
            if self.fault == "scaled before the norm":
                x = x + G(n(c * x))
            elif self.fault == "scaled after":
                x = x + c * G(n(x))
            elif self.fault == "l from 2":
                x = x + G(n(x) * (self.l + 1) ** -0.5)
            else:
                x = x + G(n(x) * c)
        return x


class CompleteP(Layer):
    power = 1.0

    def forward(self, x: Tensor) -> Tensor:
        c = (self.N / 2) ** -(0.5 if self.fault == "power 1/2" else self.power)
        for G, n, last in ((self.A, self.n1, self.o), (self.F, self.n2, self.w2)):
            y = c * G(n(x))
            x = x + (y + (1 - c) * last.bias if self.fault == "bias not scaled" else y)
        return x


class DepthMuP(CompleteP):
    power = 0.5


class LayerScale(Layer):
    def more(self, d: int) -> None:
        N = 18 if self.fault == "one start" else self.N
        start = 0.1 if N <= 18 else 1e-5 if N <= 24 else 1e-6
        self.s1 = nn.Parameter(torch.full((d,), start))
        self.s2 = nn.Parameter(torch.full((d,), start), self.fault != "not trained")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.s1 * self.A(self.n1(x))
        return x + self.s2 * self.F(self.n2(x))


class ReZero(Layer):
    norms = ()

    def more(self, d: int) -> None:
        self.a = nn.Parameter(torch.tensor(1.0 if self.fault == "starts at 1" else 0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a * self.A(x)
        return x + self.a * self.F(x)


class TFixup(Layer):
    norms = ()

    def gain(self, name: str) -> float:
        return 0.67 * self.N**-0.25 if name in VALUE_PATH else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.A(x)
        return x + self.F(x)


class Keel(Layer):
    norms = ("n1", "n2", "m1", "m2")

    def forward(self, x: Tensor) -> Tensor:
        a = 2 * self.N if self.l > 1 or self.fault == "alpha in the first layer" else 1
        x = a * x + self.A(self.n1(x))
        x = x if self.l == 1 else self.m1(x)
        return self.m2(a * x + self.F(self.n2(x)))


class B2T(Layer):
    def forward(self, x: Tensor) -> Tensor:
        u = self.n1(x + self.A(x))
        return self.n2((0 if self.fault == "no lower connection" else x) + u + self.F(u))


class SubLN(Layer):
    norms = ("n1", "n2", "out", "inner")

    def gain(self, name: str) -> float:
        return math.sqrt(math.log(2 * self.N)) if name in VALUE_PATH else 1.0

    def before_out(self, y: Tensor) -> Tensor:
        return self.out(y)

    def after_activation(self, y: Tensor) -> Tensor:
        return y if self.fault == "no inner norm" else self.inner(y)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.A(self.n1(x))
        return x + self.F(self.n2(x))


class GPAS(Layer):
    def more(self, d: int) -> None:
        self.g = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for G, n in ((self.A, self.n1), (self.F, self.n2)):
            y = x + G(n(x))
            x = y - F.silu(self.g) * (y if self.fault == "no stop-gradient" else y.detach())
        return x


class HyperConnections(Layer):
    """Static: the matrix of each sublayer is [A_m | A_r | B], kept as its change."""

    n = 4

    def more(self, d: int) -> None:
        self.c1, self.c2 = (nn.Parameter(torch.zeros(self.n, self.n + 2)) for _ in range(2))

    def forward(self, H: Tensor) -> Tensor:  # (n, batch, seq, d)
        n = self.n
        for i, (G, norm, c) in enumerate(((self.A, self.n1, self.c1), (self.F, self.n2, self.c2))):
            one = torch.eye(n, dtype=H.dtype)
            read = one[:, (2 * (self.l - 1) + i) % n] + c[:, 0]
            mix, write = one + c[:, 1 : n + 1], 1 + c[:, n + 1]
            if self.fault == "transposed mixing":
                mix = mix.T
            y = G(norm(torch.einsum("i,ibtd->btd", read, H)))
            H = torch.einsum("ij,ibtd->jbtd", mix, H) + write.view(n, 1, 1, 1) * y
        return H


class Stack(nn.Module):
    def __init__(self, layers: list[Layer], d: int, entry: bool, final: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.entry = nn.LayerNorm(d) if entry else None
        self.final = nn.LayerNorm(d) if final else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.entry is None else self.entry(x)
        many = isinstance(self.layers[0], HyperConnections)
        x = torch.stack([x] * 4) if many else x
        for layer in self.layers:
            x = layer(x)
        x = x.sum(0) if many else x
        return x if self.final is None else self.final(x)


NORM = {"attention_norm": "n1", "feed_forward_norm": "n2"}
TWO = {
    "attention_norm_1": "n1", "attention_norm_2": "m1",
    "feed_forward_norm_1": "n2", "feed_forward_norm_2": "m2",
}  # fmt: skip
# scheme -> layer, whether norms begin and end the stack, norms, and other parameters of a layer
BLOCKS: dict[str, tuple[type[Layer], bool, bool, dict[str, str], dict[str, str]]] = {
    "post_ln": (PostLN, False, False, NORM, {}),
    "ds_init": (DSInit, False, False, NORM, {}),
    "deepnorm": (DeepNorm, False, False, NORM, {}),
    "pre_ln": (PreLN, False, True, NORM, {}),
    "pre_ln_scaled": (ScaledPreLN, False, True, NORM, {}),
    "peri_ln": (Peri, True, True, TWO, {}),
    "sandwich_ln": (Sandwich, False, True, TWO, {}),
    "res_post_norm": (ResPostNorm, False, True, NORM, {}),
    "ln_scaling": (LNScaling, False, True, NORM, {}),
    "complete_p": (CompleteP, False, True, NORM, {}),
    "depth_mup": (DepthMuP, False, True, NORM, {}),
    "layer_scale": (
        LayerScale, False, True, NORM, {"attention_scale": "s1", "feed_forward_scale": "s2"}
    ),
    "rezero": (ReZero, False, False, {}, {"scale": "a"}),
    "t_fixup": (TFixup, False, False, {}, {}),
    "keel": (Keel, False, False, TWO, {}),
    "b2t": (B2T, False, False, NORM, {}),
    "sub_ln": (
        SubLN, False, True, {**NORM, "before_out": "out", "after_activation": "inner"}, {}
    ),
    "gpas": (GPAS, False, True, NORM, {"gate": "g"}),
    "hyper_connections": (
        HyperConnections, False, True, NORM,
        {"attention_connections.static": "c1", "feed_forward_connections.static": "c2"},
    ),
}  # fmt: skip


def block(scheme: str, fault: str = "") -> Any:
    """The names of a user's file for this scheme."""
    kind, entry, final, norms, others = BLOCKS[scheme]
    entry, final = entry and fault != "no entry norm", final and fault != "no final norm"

    def build(depth: int, d_model: int, n_heads: int, d_ff: int) -> nn.Module:
        sizes = depth, d_model, n_heads, d_ff
        return Stack([kind(l, *sizes, fault) for l in range(1, depth + 1)], d_model, entry, final)

    names = {name: f"layers.{{l}}.{name}.weight" for name in MAPS}
    names |= {f"{name}.bias": f"layers.{{l}}.{name}.bias" for name in MAPS}
    norms = {name: f"layers.{{l}}.{own}" for name, own in norms.items()}
    norms |= {"entry_norm": "entry"} if entry else {}
    norms |= {"final_norm": "final"} if final else {}
    names |= {f"{name}.gain": f"{own}.weight" for name, own in norms.items()}
    names |= {f"{name}.bias": f"{own}.bias" for name, own in norms.items()}
    names |= {name: f"layers.{{l}}.{own}" for name, own in others.items()}
    is_static = scheme == "hyper_connections"
    settings = {"model.scheme_options.dynamic": False} if is_static else {}
    made = {"build": build, "PARAMETERS": names, "SETTINGS": settings}
    if scheme in ("complete_p", "depth_mup"):
        made["optimizer"] = rates(1.0 if scheme == "complete_p" else 0.5, fault)
    return SimpleNamespace(**made, __name__=f"{scheme}, {fault or 'right'}")


def rates(power: float, fault: str) -> Callable[..., torch.optim.Optimizer]:
    """Table 1 of CompleteP: in the layers, m = N/2: lr m^(a - 1) and eps m^(-a); SGD m^(2a - 1)."""

    def optimizer(module: Stack, name: str, lr: float, eps: float) -> torch.optim.Optimizer:
        m = len(module.layers) / 2
        inside = list(module.layers.parameters())
        ids = {id(p) for p in inside}
        outside = [p for p in module.parameters() if id(p) not in ids]
        if fault == "one rate":
            m = 1.0
        if name == "sgd":
            groups = [{"params": inside, "lr": lr * m ** (2 * power - 1)}, {"params": outside}]
            return torch.optim.SGD(groups, lr=lr)
        inner = {"params": inside, "lr": lr * m ** (power - 1), "eps": eps * m**-power}
        return torch.optim.Adam([inner, {"params": outside}], lr=lr, eps=eps)

    return optimizer
