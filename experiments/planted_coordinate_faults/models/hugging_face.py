"""A Granite of Hugging Face under CompleteP and AdamW, from a configuration."""

import torch
from transformers import GraniteConfig, GraniteForCausalLM

BASE_WIDTH, BASE_DEPTH, HEADS = 32, 4, 2
VOCABULARY = 40


def build(width, depth, seed):
    torch.manual_seed(seed)
    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        initializer_range=0.1,
        embedding_multiplier=4.0,
        residual_multiplier=BASE_DEPTH / depth,
        attention_multiplier=4.0 / (width // HEADS),
        logits_scaling=width / BASE_WIDTH,
    )
    model = GraniteForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for p in layer.parameters():
                if p.ndim == 2:
                    p.mul_((width / BASE_WIDTH) ** -0.5)
    return model


def batch(seed):
    ids = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def optimizer(model, width, depth):
    hidden, rest = [], []
    for name, p in model.named_parameters():
        (hidden if "layers." in name and p.ndim == 2 else rest).append(p)
    return torch.optim.AdamW(
        [{"params": hidden, "lr": 2e-3 * BASE_WIDTH / width}, {"params": rest, "lr": 2e-3}],
        weight_decay=0.0,
    )
