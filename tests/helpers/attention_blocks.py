"""Pre-LN stacks in plain PyTorch whose attention is right, or has one fault."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAPS = ("q", "k", "v", "o", "w1", "w2")
ROTARY = {"model.positions": "rotary"}
DECODER = {"model.family": "decoder"}


def rotated(h: Tensor, layout: str, base: float = 10000.0, sign: int = 1) -> Tensor:
    """Pairs as complex numbers times e^(i p θ): (2i, 2i + 1), in `halves` (i, i + d/2)."""
    angles = base ** (-2 * torch.arange(h.shape[-1] // 2, dtype=h.dtype) / h.shape[-1])
    turn = torch.exp(sign * 1j * torch.arange(h.shape[-2], dtype=h.dtype)[:, None] * angles)
    if layout == "halves":
        turned = torch.complex(*h.chunk(2, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)
    pairs = torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


class Layer(nn.Module):
    """fault: of attention, feed-forward or axes, or ''.  settings: of the reference."""

    def __init__(self, d: int, heads: int, d_ff: int, fault: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.fault, self.settings = heads, fault, settings
        self.kv_heads = settings.get("model.n_kv_heads", heads)
        d_kv = d * self.kv_heads // heads
        sizes = {"q": (d, d), "k": (d, d_kv), "v": (d, d_kv), "o": (d, d), "w1": (d, d_ff)}
        for name, (n_in, n_out) in (sizes | {"w2": (d_ff, d), "w3": (d, d_ff)}).items():
            if name in (*MAPS, *(("w3",) if settings.get("model.gated") else ())):
                linear = nn.Linear(n_in, n_out, bias=False)
                nn.init.xavier_normal_(linear.weight)
                setattr(self, name, linear)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def product(self, name: str, x: Tensor) -> Tensor:
        """x Wᵀ of q, k, v or o, each possibly another matrix or its transpose."""
        order = {"exchanged": {"k": "v", "v": "k"}}.get(self.fault, {})
        W = getattr(self, order.get(name, name)).weight
        if self.fault == "packed by head" and name != "o":
            packed = torch.cat([getattr(self, one).weight for one in "qkv"])
            by_head = packed.view(self.heads, 3, -1, packed.shape[1])
            W = by_head[:, "qkv".index(name)].flatten(0, 1)
        return x @ (W if self.fault == "transposed" and name == "o" else W.T)

    def split(self, y: Tensor, heads: int) -> Tensor:
        if self.fault == "heads interleaved":
            return y.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)
        if self.fault == "heads split":
            return y.reshape(len(y), heads, y.shape[1], -1)
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    def attention(self, x: Tensor) -> Tensor:
        counts = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        q, k, v = (self.split(self.product(name, x), n) for name, n in counts.items())
        layout = self.settings.get("layout", "pairs")
        if self.fault.startswith("rotary positions"):
            q, k = (rotated(h, self.fault.split(", ")[1]) for h in (q, k))
        elif "model.positions" in self.settings and self.fault != "no rotary positions":
            base = 500_000.0 if self.fault == "rotary base" else 10000.0
            sign = -1 if self.fault == "rotary backwards" else 1
            q, k = (rotated(h, layout, base, sign) for h in (q, k))
        repeats = self.heads // self.kv_heads
        if self.fault == "key heads in turn":
            k, v = (h.repeat(1, repeats, 1, 1) for h in (k, v))
        else:
            k, v = (h.repeat_interleave(repeats, dim=1) for h in (k, v))
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        y = self.masked(logits).softmax(-1) @ v
        if self.fault != "heads joined":
            y = y.transpose(1, 2)
        return self.product("o", y.reshape(x.shape))

    def masked(self, logits: Tensor) -> Tensor:
        at = torch.arange(logits.shape[-1])
        apart = at[:, None] - at
        if self.settings.get("model.family") == "decoder":
            ahead = {"mask off by one, ahead": 1, "mask off by one, before": -1, "added": -1}
            hidden = apart < -ahead.get(self.fault, 0)
            hidden = apart > 0 if self.fault == "mask of later positions" else hidden
            if self.fault == "added":
                return logits + torch.where(hidden, -1e9, 0.0)
            logits = logits.masked_fill(hidden, -1e9)
        window = self.settings.get("model.attention_options.window")
        if window is not None:
            wider = {"window wider": 1, "window narrower": -1}.get(self.fault, 0)
            logits = logits.masked_fill(apart.abs() >= window + wider, -1e9)
        return logits

    def feed_forward(self, x: Tensor) -> Tensor:
        kind = "tanh" if self.fault == "activation gelu by tanh" else "none"
        is_gelu = self.settings.get("model.activation") == "gelu"
        phi = (lambda z: F.gelu(z, approximate=kind)) if is_gelu else torch.relu
        if not self.settings.get("model.gated"):
            return self.w2(phi(self.w1(x)))  # type: ignore[no-any-return]
        one, two = (self.w3, self.w1) if self.fault == "gate" else (self.w1, self.w3)
        return self.w2(phi(one(x)) * two(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "in place":
            x += self.attention(self.n1(x.clone()))
            x += self.feed_forward(self.n2(x.clone()))
            return x
        x = x + self.attention(self.n1(x))
        return x + self.feed_forward(self.n2(x))


class Stack(nn.Module):
    def __init__(self, layers: list[Layer], d: int, fault: str) -> None:
        super().__init__()
        self.layers, self.final, self.fault = nn.ModuleList(layers), nn.LayerNorm(d), fault

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.fault == "axes" else x
        for layer in self.layers:
            x = layer(x)
        x = self.final(x)
        return x.transpose(0, 1) if self.fault == "axes" else x


def block(fault: str = "", **settings: Any) -> Any:
    """The names of a user's file.  settings: with `layout`, of the block's rotary positions."""

    def build(depth: int, d_model: int, n_heads: int, d_ff: int) -> nn.Module:
        layers = [Layer(d_model, n_heads, d_ff, fault, settings) for _ in range(depth)]
        return Stack(layers, d_model, fault)

    maps = (*MAPS, *(("w3",) if settings.get("model.gated") else ()))
    names = {name: f"layers.{{l}}.{name}" for name in maps}
    names |= {"attention_norm": "layers.{l}.n1", "feed_forward_norm": "layers.{l}.n2"}
    names["final_norm"] = "final"
    given = {key: value for key, value in settings.items() if key != "layout"}
    return SimpleNamespace(
        build=build, PARAMETERS=names, SETTINGS=given, __name__=f"pre_ln, {fault or 'right'}"
    )
