"""The peers: other libraries' encoders at the same shape.  One function each registers it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base import DeepstackError, Registry


@dataclass(frozen=True)
class Shape:
    """The shape that all rows of a benchmark have in common.

    depth: layers, each attention and feed-forward.  tied: the output is the token table again.
    """

    depth: int
    d_model: int
    n_heads: int
    d_ff: int
    vocab_size: int
    seq_len: int
    activation: str
    dropout: float
    eps: float
    tied: bool
    gated: bool = False

    @property
    def in_matrices(self) -> int:
        """Numbers in W_q, W_k, W_v, W_o, W_1, W_2 and, with a gate, W_3 of all layers."""
        in_feed_forward = (2 + self.gated) * self.d_model * self.d_ff
        return self.depth * (4 * self.d_model**2 + in_feed_forward)


def shape_of(config: conf.Config, vocab_size: int) -> Shape:
    """Return the shape of a configuration."""
    model = config.model
    return Shape(
        depth=model.depth,
        d_model=model.d_model,
        n_heads=model.n_heads,
        d_ff=model.d_ff or 4 * model.d_model,
        vocab_size=vocab_size,
        seq_len=config.task.seq_len,
        activation=model.activation,
        dropout=model.dropout,
        eps=model.norm.eps,
        tied=model.head != "separate",
        gated=model.gated,
    )


class PeerModel(NamedTuple):
    """model: (batch, seq) tokens -> (batch, seq, vocab_size) logits; stack: its layers alone."""

    model: nn.Module
    stack: nn.Module

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def in_matrices(self) -> int:
        """The numbers in the weight matrices of the layers."""
        return sum(p.numel() for p in self.stack.parameters() if p.ndim > 1)


Build = Callable[[Shape], "PeerModel | PeerTrainer"]

TrainStep = Callable[[Tensor, Tensor], float]
"""Runs a training step on a batch, (inputs, targets), both (batch, seq), and returns its loss."""


class PeerTrainer(NamedTuple):
    """A library with its own training step.

    parameters: their number.  in_matrices: the numbers in the weight matrices of the layers.
    start: returns the training step under these settings of a run; called once.
    """

    parameters: int
    in_matrices: int
    start: Callable[[conf.Config], TrainStep]


@dataclass(frozen=True)
class Peer:
    """Another library: the label of its row, and a function that builds its model.

    package: the package that it imports; without it the peer is left out.  torch: whether it
    multiplies by torch, so that torch's settings of precision and library act on it.
    """

    label: str
    package: str
    build: Build
    torch: bool = True

    def installed(self) -> bool:
        """Return whether its package can be imported, without importing it."""
        return importlib.util.find_spec(self.package) is not None


PEERS: Registry[Peer] = Registry("peer")


def peer(name: str, *, label: str, package: str, torch: bool = True) -> Callable[[Build], Build]:
    """Register the decorated function Shape -> PeerModel or PeerTrainer as a peer."""

    def register(build: Build) -> Build:
        PEERS.register(name, Peer(label, package, build, torch))
        return build

    return register


class ShapeError(DeepstackError):
    """A peer cannot have the requested shape."""


class WithEnds(nn.Module):
    """logits = head(stack(E[token] + P[position])), for stacks without embedding and output layer.

    stack: (batch, seq, d_model) -> the same.
    """

    def __init__(self, shape: Shape, stack: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocab_size, shape.d_model)
        self.position = nn.Embedding(shape.seq_len, shape.d_model)
        self.stack = stack
        self.head = nn.Linear(shape.d_model, shape.vocab_size)
        if shape.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.stack(self.token(tokens) + self.position(positions)))


@peer("torch", label="nn.TransformerEncoder", package="torch")
def torch_encoder(shape: Shape) -> PeerModel:
    """torch's own nn.TransformerEncoder, Post-LN."""
    layer = nn.TransformerEncoderLayer(
        shape.d_model,
        shape.n_heads,
        shape.d_ff,
        dropout=shape.dropout,
        activation=shape.activation,
        layer_norm_eps=shape.eps,
        batch_first=True,
    )
    stack = nn.TransformerEncoder(layer, shape.depth, enable_nested_tensor=False)
    return PeerModel(WithEnds(shape, stack), stack)


@peer("torchscale", label="torchscale DeepNorm", package="torchscale")
def torchscale_encoder(shape: Shape) -> PeerModel:
    """torchscale's Encoder with deepnorm=True, by the authors of DeepNorm; attention unfused."""
    encoder = import_torchscale()
    settings = importlib.import_module("torchscale.architecture.config").EncoderConfig(
        encoder_embed_dim=shape.d_model,
        encoder_attention_heads=shape.n_heads,
        encoder_ffn_embed_dim=shape.d_ff,
        encoder_layers=shape.depth,
        activation_fn=shape.activation,
        dropout=shape.dropout,
        attention_dropout=shape.dropout,
        layernorm_eps=shape.eps,
        deepnorm=True,
    )
    embedding = importlib.import_module("torchscale.component.embedding")
    tokens = nn.Embedding(shape.vocab_size, shape.d_model)
    head = nn.Linear(shape.d_model, shape.vocab_size)
    if shape.tied:
        head.weight = tokens.weight
    # Its positions start from 2, as fairseq's do.
    positions = embedding.PositionalEmbedding(shape.seq_len + 2, shape.d_model)
    built = encoder.Encoder(
        settings, embed_tokens=tokens, embed_positions=positions, output_projection=head
    )
    return PeerModel(Select(built, lambda output: output["encoder_out"]), built.layers)


@peer("x_transformers", label="x-transformers", package="x_transformers")
def x_transformers_encoder(shape: Shape) -> PeerModel:
    """x-transformers' Encoder, Post-LN, flash attention; no biases in attention and norms."""
    library = importlib.import_module("x_transformers")
    stack = library.Encoder(
        dim=shape.d_model,
        depth=shape.depth,
        heads=shape.n_heads,
        attn_dim_head=shape.d_model // shape.n_heads,
        attn_flash=True,
        attn_dropout=shape.dropout,
        attn_sublayer_dropout=shape.dropout,
        ff_mult=shape.d_ff / shape.d_model,
        ff_custom_activation=nn.ReLU() if shape.activation == "relu" else nn.GELU(),
        ff_sublayer_dropout=shape.dropout,
        pre_norm=False,
        verbose=False,
    )
    model = library.TransformerWrapper(
        num_tokens=shape.vocab_size,
        max_seq_len=shape.seq_len,
        attn_layers=stack,
        tie_embedding=shape.tied,
    )
    return PeerModel(model, stack)


@peer("bert", label="Hugging Face BERT", package="transformers")
def bert(shape: Shape) -> PeerModel:
    """Hugging Face's BertModel (Post-LN, attention by torch's fused kernel) and an output layer."""
    library = import_library("transformers")
    settings = library.BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.n_heads,
        intermediate_size=shape.d_ff,
        hidden_act=shape.activation,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        max_position_embeddings=shape.seq_len,
        layer_norm_eps=shape.eps,
    )
    built = library.BertModel(settings, add_pooling_layer=False)
    head = nn.Linear(shape.d_model, shape.vocab_size)
    if shape.tied:
        head.weight = built.get_input_embeddings().weight
    hidden = Select(built, lambda output: output.last_hidden_state)
    return PeerModel(nn.Sequential(hidden, head), built.encoder)


class Select(nn.Module):
    """Applies a function to the output of a model."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, tokens: Tensor) -> Tensor:
        return self.pick(self.model(tokens))


def import_library(package: str) -> Any:
    """Import a peer's package, without torchvision if that belongs to another build of torch.

    Other libraries import torchvision if it is installed, and use none of it here.
    """
    try:
        if package != "torch":
            importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    return importlib.import_module(package)


def import_torchscale() -> Any:
    """Import torchscale's encoder without timm, which needs a torchvision for this build of torch.

    torchscale takes one function from it, for dropping whole layers at random, which is off here.
    """
    unused: Any = ModuleType("torchscale.component.droppath")
    unused.DropPath = nn.Identity
    sys.modules.setdefault(unused.__name__, unused)
    return importlib.import_module("torchscale.architecture.encoder")
