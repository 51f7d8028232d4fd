"""An MLP-mixer under CompleteP and Adam: regression of patches, the head's matrix starts at 0."""

import torch
from torch import nn

PATCHES, PIXELS, OUTPUTS = 9, 12, 4
BASE = {"width": 32, "depth": 4}
ETA = 2e-3


class Mlp(nn.Sequential):
    def __init__(self, size, hidden):
        super().__init__(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))
        for linear in (self[0], self[2]):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)


class MixerLayer(nn.Module):
    def __init__(self, channels, scale):
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.token_mixing = Mlp(PATCHES, 16)
        self.channel_mixing = Mlp(channels, 2 * channels)
        self.scale = scale

    def forward(self, x):
        mixed = self.token_mixing(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.scale * mixed
        return x + self.scale * self.channel_mixing(self.channel_norm(x))


def build(width, depth, seed):
    scale = BASE["depth"] / depth
    stem = nn.Linear(PIXELS, width)
    nn.init.normal_(stem.weight, std=PIXELS**-0.5)
    head = nn.Linear(width, OUTPUTS)
    nn.init.zeros_(head.weight)
    layers = [MixerLayer(width, scale) for _ in range(depth)]
    return nn.Sequential(stem, *layers, nn.LayerNorm(width), head)


def batch(seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    return (
        torch.randn(3, PATCHES, PIXELS, generator=generator),
        torch.randn(3, PATCHES, OUTPUTS, generator=generator),
    )


def optimizer(model, width, depth):
    m = width / BASE["width"]
    groups = []
    for name, p in model.named_parameters():
        is_hidden = "channel_mixing" in name and p.ndim == 2
        is_head = p.shape[0] == OUTPUTS and p.ndim == 2
        rate = ETA / m if is_hidden or is_head else ETA
        groups.append({"params": [p], "lr": rate})
    return torch.optim.Adam(groups)
