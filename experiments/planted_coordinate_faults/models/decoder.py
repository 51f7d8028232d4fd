"""A decoder in the manner of nanoGPT under depth-µP and AdamW: fused q, k, v, tied embedding."""

import math

import torch
from torch import nn
from torch.nn import functional as F

BASE_WIDTH, BASE_DEPTH, HEADS = 32, 4, 2
VOCABULARY, LENGTH = 32, 16


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.c_attn(x).split(C, 2)
        )
        scale = 4 / q.shape[-1]
        att = (q @ k.transpose(-2, -1)) * scale
        mask = torch.ones(T, T).tril().view(1, 1, T, T)
        att = F.softmax(att.masked_fill(mask == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_layer):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.attn = CausalSelfAttention(n_embd)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=False)
        self.residual = (n_layer / BASE_DEPTH) ** -0.5

    def forward(self, x):
        x = x + self.residual * self.attn(self.ln_1(x))
        return x + self.residual * self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, n_embd, n_layer):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, n_embd),
                "wpe": nn.Embedding(LENGTH, n_embd),
                "h": nn.ModuleList(Block(n_embd, n_layer) for _ in range(n_layer)),
                "ln_f": nn.LayerNorm(n_embd, bias=False),
            }
        )
        self.lm_head = nn.Linear(n_embd, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.logit_scale = BASE_WIDTH / n_embd
        for name, p in self.named_parameters():
            if p.ndim == 2:
                hidden = ".h." in name
                std = 0.2 / math.sqrt(n_embd / BASE_WIDTH) if hidden else 0.2
                nn.init.normal_(p, std=std)

    def forward(self, idx, targets):
        x = self.transformer.wte(idx) + self.transformer.wpe.weight
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x)) * self.logit_scale
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def build(width, depth, seed):
    torch.manual_seed(seed)
    return GPT(width, depth)


def batch(seed):
    text = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def loss(model, batch):
    return model(*batch)[1]


def optimizer(model, width, depth):
    m_width, m_depth = width / BASE_WIDTH, depth / BASE_DEPTH
    rates = {
        "matrix": 0.004 / m_width / m_depth**0.5,
        "gain": 0.004 / m_depth**0.5,
        "other": 0.004,
    }
    groups = {kind: [] for kind in rates}
    for name, p in model.named_parameters():
        kind = "other" if ".h." not in name else "gain" if p.ndim == 1 else "matrix"
        groups[kind].append(p)
    return torch.optim.AdamW(
        [{"params": groups[kind], "lr": rate} for kind, rate in rates.items()], weight_decay=0.0
    )
