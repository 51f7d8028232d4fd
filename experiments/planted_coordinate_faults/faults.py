"""Twenty faults in five models: the line that is replaced, and the module and cause to be named."""

from pathlib import Path
from typing import Any, NamedTuple

MODELS = Path(__file__).parent / "models"
RULES = {
    "encoder": "completep",
    "decoder": "depth-mup",
    "mixer": "completep",
    "convolutional": "depth-mup",
    "hugging_face": "completep",
}
SIZES: dict[str, dict[str, Any]] = {
    name: {"widths": (16, 32, 64) if name == "convolutional" else (32, 64, 128)} for name in RULES
}


class Fault(NamedTuple):
    """A fault of a model: `old` becomes `new`; the check names module and cause."""

    model: str
    old: str
    new: str
    module: str
    cause: str


FAULTS = [
    Fault(
        "encoder", "RATE * BASE_WIDTH / width", "RATE",
        "encoder.layers.first.self_attn", "learning rate of a hidden matrix",
    ),
    Fault(
        "encoder", "self.multiplier = BASE_DEPTH / depth", "self.multiplier = 1.0",
        "encoder.layers.first", "residual multiplier",
    ),
    Fault(
        "encoder", "x = self.tokens(tokens)",
        "x = self.classes.in_features**0.5 * self.tokens(tokens)",
        "encoder.layers.first input", "scale of the embedding",
    ),
    Fault(
        "encoder", "self.output_multiplier = BASE_WIDTH / width", "self.output_multiplier = 1.0",
        "", "output multiplier",
    ),
    Fault(
        "decoder", "scale = 4 / q.shape[-1]", "scale = q.shape[-1] ** -0.5",
        "transformer.h.first.attn softmax", "attention scale",
    ),
    Fault(
        "decoder", '"gain": 0.004 / m_depth**0.5', '"gain": 0.004',
        "transformer.h.first.ln_1", "learning rate of norm gains",
    ),
    Fault(
        "decoder", "nn.init.normal_(p, std=std)",
        'nn.init.normal_(p, std=std / (2 * n_layer) ** 0.5 if "c_proj" in name else std)',
        "transformer.h.first.attn.c_proj", "initial scale",
    ),
    Fault(
        "decoder", "(n_layer / BASE_DEPTH) ** -0.5", "(n_layer / BASE_DEPTH) ** -1.0",
        "transformer.h.first", "residual multiplier",
    ),
    Fault(
        "mixer", "rate = ETA / m if is_hidden or is_head else ETA",
        "rate = ETA / m if p.ndim == 2 else ETA",
        "0", "learning rate of the input layer",
    ),
    Fault(
        "mixer", "std=linear.in_features**-0.5", "std=0.2",
        "first.channel_mixing.0", "initial scale",
    ),
    Fault(
        "mixer", "rate = ETA / m if is_hidden or is_head else ETA",
        'rate = ETA / m / (depth if is_hidden else 1) if is_hidden or is_head else ETA',
        "first.channel_mixing.0", "learning rate of a hidden matrix",
    ),
    Fault("mixer", "if is_hidden or is_head", "if is_hidden", "-1", "output multiplier"),
    Fault(
        "convolutional", "Block(planes, blocks**-0.5)", "Block(planes, 1.0)",
        "blocks.first", "residual multiplier",
    ),
    Fault(
        "convolutional",
        'elif name == "stem.weight":\n            groups.append({"params": [p], "lr": lr * m})',
        'elif name == "stem.weight":\n            groups.append({"params": [p], "lr": lr})',
        "stem", "learning rate of the input layer",
    ),
    Fault(
        "convolutional", "self.fc(x) * (16 / self.planes)", "self.fc(x)",
        "stem", "output multiplier",
    ),
    Fault(
        "convolutional",
        'else:\n            groups.append({"params": [p], "lr": lr * m})',
        'else:\n            groups.append({"params": [p], "lr": lr})',
        "blocks.first.bn1", "learning rate of norm gains",
    ),
    Fault(
        "hugging_face", "logits_scaling=width / BASE_WIDTH", "logits_scaling=1.0",
        "logits of the loss", "output multiplier",
    ),
    Fault(
        "hugging_face", "4.0 / (width // HEADS)", "(width // HEADS) ** -0.5",
        "model.layers.first.self_attn softmax", "attention scale",
    ),
    Fault(
        "hugging_face", "p.mul_((width / BASE_WIDTH) ** -0.5)", "p.mul_(1.0)",
        "model.layers.first.self_attn.q_proj", "initial scale",
    ),
    Fault(
        "hugging_face", '"layers." in name and p.ndim == 2', "p.ndim == 2",
        "model.embed_tokens", "learning rate of the embedding",
    ),
]  # fmt: skip


HELD_OUT = [
    Fault(
        "encoder", '{"params": others, "lr": RATE}',
        '{"params": others, "lr": RATE * BASE_WIDTH / width}',
        "tokens", "learning rate of the embedding",
    ),
    Fault(
        "encoder", "self.multiplier = BASE_DEPTH / depth",
        "self.multiplier = (BASE_DEPTH / depth) ** 0.5",
        "encoder.layers.first", "residual multiplier",
    ),
    Fault(
        "encoder", "inputs = p.shape[-1] if", "inputs = BASE_WIDTH if",
        "encoder.layers.first.self_attn", "initial scale",
    ),
    Fault(
        "encoder", "self.multiplier * super()._ff_block(x)", "super()._ff_block(x)",
        "encoder.layers.first", "residual multiplier",
    ),
    Fault(
        "decoder", "0.004 / m_width / m_depth**0.5", "0.004 / m_width",
        "transformer.h.first.attn.c_attn", "learning rate of a hidden matrix",
    ),
    Fault(
        "decoder", '"gain": 0.004 / m_depth**0.5', '"gain": 0.004 / m_width / m_depth**0.5',
        "transformer.h.first.ln_1", "learning rate of norm gains",
    ),
    Fault(
        "decoder", "self.logit_scale = BASE_WIDTH / n_embd",
        "self.logit_scale = (BASE_WIDTH / n_embd) ** 0.5",
        "logits of the loss", "output multiplier",
    ),
    Fault(
        "decoder", "if hidden else 0.2", "if hidden else 0.2 * (BASE_WIDTH / n_embd) ** 0.5",
        "transformer.wte", "scale of the embedding",
    ),
    Fault(
        "mixer", 'scale = BASE["depth"] / depth', 'scale = (BASE["depth"] / depth) ** 0.5',
        "first", "residual multiplier",
    ),
    Fault(
        "mixer", "if is_hidden or is_head", "if is_head",
        "first.channel_mixing.0", "learning rate of a hidden matrix",
    ),
    Fault(
        "mixer", "std=PIXELS**-0.5", "std=width**-0.5", "0", "scale of the input layer",
    ),
    Fault(
        "mixer", "if is_hidden or is_head", 'if is_hidden or is_head or "norm" in name',
        "first.token_norm", "learning rate of norm gains",
    ),
    Fault(
        "convolutional", "nn.init.kaiming_normal_(conv.weight)",
        "nn.init.normal_(conv.weight, std=0.1)",
        "blocks.first.conv1", "initial scale",
    ),
    Fault(
        "convolutional", '{"params": [p], "lr": lr})\n        elif',
        '{"params": [p], "lr": lr * m})\n        elif',
        "blocks.first.conv1", "learning rate of a hidden matrix",
    ),
    Fault(
        "convolutional", '{"params": [p], "lr": lr})\n        elif',
        '{"params": [p], "lr": lr * depth**-0.5})\n        elif',
        "blocks.first.conv1", "learning rate of a hidden matrix",
    ),
    Fault(
        "convolutional", "nn.init.normal_(self.fc.weight)",
        "nn.init.normal_(self.fc.weight)\n"
        "        nn.init.normal_(self.stem.weight, std=planes**-0.5)",
        "stem", "scale of the input layer",
    ),
    Fault(
        "hugging_face", "residual_multiplier=BASE_DEPTH / depth", "residual_multiplier=1.0",
        "model.layers.first", "residual multiplier",
    ),
    Fault(
        "hugging_face", "embedding_multiplier=4.0",
        "embedding_multiplier=4.0 * (width / BASE_WIDTH) ** 0.5",
        "model.layers.first input", "scale of the embedding",
    ),
    Fault(
        "hugging_face", '"lr": 2e-3 * BASE_WIDTH / width', '"lr": 2e-3',
        "model.layers.first.self_attn.q_proj", "learning rate of a hidden matrix",
    ),
    Fault(
        "hugging_face", '"layers." in name and p.ndim == 2', '"layers." in name',
        "model.layers.first.input_layernorm", "learning rate of norm gains",
    ),
]  # fmt: skip
"""Faults that were written after the check, and changed nothing in it."""


def planted(fault: Fault, folder: Path) -> Path:
    """Write the model with its fault into a folder, and return the file."""
    text = (MODELS / f"{fault.model}.py").read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, fault
    path = folder / f"{fault.model}.py"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return path
