"""A fused sublayer on a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deepstack.fast.fused_sublayers import ACTIVATIONS, FusedSublayer
from deepstack.fast.gpu.attention import DeviceAttention
from deepstack.fast.gpu.products import DeviceProduct, Gradient

Weights = tuple[nn.Parameter, nn.Parameter | None]


class DeviceSublayer(FusedSublayer):
    """A fused sublayer that begins and ends with a product, with an operation between them.

    A ReLU between them is part of both products.
    """

    def __init__(self, first: Weights, between: Any, last: Weights, scaled: bool) -> None:
        relu = between is ACTIVATIONS["relu"]
        into = DeviceProduct(*first, scaled, relu=relu)
        out = DeviceProduct(*last, scaled, after_relu=relu)
        super().__init__([into, out] if relu else [into, between, out])
        self.into, self.out, self.between = into, out, None if relu else between

    def backward(
        self,
        dy: Tensor,
        saved: list[Tensor],
        sums: Tensor | None = None,
        add_to: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of x.

        sums: those of dy over blocks of tokens, (blocks, d_model), if they are known.
        add_to: (tokens, d_model) fp32, to which the gradient of x is added instead.
        """
        seq, width = dy.shape[-2:]
        tokens = dy.numel() // width
        wants_sums = not self.into.defers(tokens)
        gradient = Gradient(dy.reshape(-1, width), sums)
        gradient = self.out.backward_with_sums(gradient, saved, wants_sums)
        if isinstance(self.between, DeviceAttention):
            gradient = self.between.backward_with_sums(gradient, seq, saved, wants_sums)
        elif self.between is not None:
            gradient = Gradient(self.between.backward(gradient.value, seq, saved))
        return self.into.backward_with_sums(gradient, saved, False, add_to).value.view(dy.shape)
