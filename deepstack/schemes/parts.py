"""What a scheme is built from: the position of its stack, and the parts of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

Family = Literal["encoder", "decoder", "encoder_decoder"]
FAMILIES: tuple[Family, ...] = ("encoder", "decoder", "encoder_decoder")


class StackPosition(NamedTuple):
    """The position of a stack in its model: family, side, and the depths of both sides.

    encoder_depth N and decoder_depth M count layers; a side that the family lacks has 0.
    decoder_sublayers counts the sublayers of a decoder layer that reads an encoder: 3, or 2 if one
    merged attention replaces two sublayers.

    unique_layers: how many layers of a side repeat, after those of the prelude and before those of
        the coda; 0: none.
    """

    family: Family = "encoder"
    side: Literal["encoder", "decoder"] = "encoder"
    encoder_depth: int = 0
    decoder_depth: int = 0
    decoder_sublayers: int = 3
    unique_layers: int = 0
    prelude_layers: int = 0
    coda_layers: int = 0

    @property
    def depth(self) -> int:
        """The number of layers of this side."""
        return self.encoder_depth if self.side == "encoder" else self.decoder_depth


Place = StackPosition
"""The name of the class in earlier plugins."""

ALONE = StackPosition()
"""The default position: an encoder without a decoder, of any depth."""


@dataclass(frozen=True)
class Parts:
    """The parts from which a scheme is built: the stack's sizes, its norm and its sublayers.

    sublayers: their names in the order in which the stream passes them.
    place: see `StackPosition`.
    gated: whether the feed-forward has a gate.  make_norm builds a norm of a given width.
    """

    d_model: int
    d_ff: int
    n_heads: int
    make_norm: Callable[[int], nn.Module]
    sublayers: tuple[str, ...] = ("attention", "feed_forward")
    place: StackPosition = ALONE
    gated: bool = False

    def norm(self, width: int | None = None) -> nn.Module:
        """Return a norm of the stack's kind; the default width is d_model."""
        return self.make_norm(width or self.d_model)
