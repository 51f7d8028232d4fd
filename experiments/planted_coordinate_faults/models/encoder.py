"""torch's own encoder under CompleteP and Adam: classify sequences; heads grow with width."""

import torch
from torch import nn

BASE_WIDTH, BASE_DEPTH, HEAD = 32, 4, 8
VOCABULARY, CLASSES, LENGTH, SEQUENCES = 24, 10, 8, 4
RATE = 3e-3


class Layer(nn.TransformerEncoderLayer):
    def __init__(self, width, depth):
        super().__init__(
            width, width // HEAD, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.multiplier = BASE_DEPTH / depth

    def _sa_block(self, *args, **options):
        return self.multiplier * super()._sa_block(*args, **options)

    def _ff_block(self, x):
        return self.multiplier * super()._ff_block(x)


class Classifier(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        layers = [Layer(width, depth) for _ in range(depth)]
        self.encoder = nn.TransformerEncoder(layers[0], 1, enable_nested_tensor=False)
        self.encoder.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, CLASSES)
        self.output_multiplier = BASE_WIDTH / width
        for name, p in self.named_parameters():
            if p.ndim > 1:
                inputs = p.shape[-1] if "encoder" in name else 1
                nn.init.normal_(p, std=inputs**-0.5)
            elif "norm" not in name:
                nn.init.zeros_(p)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.norm(self.encoder(x)).mean(1)
        return self.output_multiplier * self.classes(x)


def build(width, depth, seed):
    return Classifier(width, depth)


def batch(seed):
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    return tokens, torch.randint(CLASSES, (SEQUENCES,))


def optimizer(model, width, depth):
    matrices = [p for n, p in model.named_parameters() if "encoder" in n and p.ndim > 1]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": matrices, "lr": RATE * BASE_WIDTH / width},
        {"params": others, "lr": RATE},
    ]
    return torch.optim.Adam(groups)
