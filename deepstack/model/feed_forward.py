"""Feed-forwards: the sublayer of every layer that reads each position alone."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from deepstack import config as conf
from deepstack.base.kinds import Definition, Kind
from deepstack.model.activations import activation_of
from deepstack.model.sublayers import Joins, LinearMaps, Slots

FEED_FORWARDS: Kind[FeedForwardSublayer] = Kind("feed_forward", "model.feed_forward")


class FeedForwardSublayer(LinearMaps, Definition, kind=FEED_FORWARDS):
    """The base of all feed-forwards, x -> G(x); each is a subclass with a name.

    x, G(x): (batch, seq, d_model).
    d_model, d_ff: the widths.  gated: `model.gated`.
    activation: z -> phi(z).  activation_name: its name.
    """

    SLOTS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: conf.Model, slots: Slots, joins: Joins) -> None:
        super().__init__(model, slots, joins)
        self.d_model, self.d_ff = model.d_model, model.d_ff or 4 * model.d_model
        self.activation_name, self.gated = model.activation, model.gated
        self.activation = activation_of(model)
        self.setup()

    @classmethod
    def extra_memory(cls, sizes: conf.StackSizes) -> int:
        """Return the bytes that a stack keeps for gradients beside those of the mlp."""
        return 0

    @classmethod
    def extra_flops(cls, sizes: conf.StackSizes) -> int:
        """Return the FLOPs of a stack's forward pass beside those of the mlp."""
        return 0

    def setup(self) -> None:
        """Make the matrices, with `add_maps(n_out, n_in, role)`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return G(x)."""
        raise NotImplementedError


class FeedForward(FeedForwardSublayer, name="mlp"):
    """G(x) = phi(x W_1ᵀ + b_1) W_2ᵀ + b_2, phi the activation.

    gated: G(x) = (phi(x W_1ᵀ + b_1) * (x W_3ᵀ + b_3)) W_2ᵀ + b_2, element by element; with silu
        SwiGLU.  Shazeer 2020, arXiv:2002.05202, whose V is LLaMA's W_3.  One product computes both.

    x: (batch, seq, d_model); W_1, W_3: (d_ff, d_model); W_2: (d_model, d_ff).
    Vaswani et al. 2017, arXiv:1706.03762, section 3.3.
    """

    SLOTS = ("w1", "before_activation", "after_activation")

    def setup(self) -> None:
        self.first = "w13" if self.gated else "w1"
        self.add_maps(self.d_ff, self.d_model, self.first)
        self.add_maps(self.d_model, self.d_ff, "w2")

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.apply_map(self.first, x.flatten(0, 1)), None
        if self.gated:
            hidden, gate = hidden.chunk(2, dim=1)
        hidden = self.activation(self.fill("before_activation", hidden))
        if gate is not None:
            hidden = hidden * gate
        hidden = self.fill("after_activation", hidden)  # (batch * seq, d_ff)
        return self.drop(self.apply_map("w2", hidden).view(x.shape))

    def matrix(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a matrix and its bias; with a gate, W_1 above W_3 and b_1 above b_3."""
        matrix = super().matrix(name)
        return self.slots["w1"](*matrix) if name == self.first and "w1" in self.slots else matrix
