"""Fused sublayers on a GPU; their attention by the kernels of F.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import FUSED_ACTIVATIONS, FusedSublayer
from deepstack.fast.gpu.available import kernels, since_ampere, splits_fp32
from deepstack.fast.gpu.products import DeviceProduct, DeviceProducts, Gradient

aten = torch.ops.aten

CUDNN = 3  # torch.nn.attention.SDPBackend.CUDNN_ATTENTION


def flash(dtype: torch.dtype) -> bool:
    """Return whether attention in this precision uses flash attention."""
    return dtype is not torch.float32 and since_ampere()


class DeviceAttention:
    """y = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h.  [q, k, v]: (tokens, 3 d); y: (tokens, d).

    Uses the kernels that F.scaled_dot_product_attention uses on a GPU.  In bf16 these are flash
    attention, or cuDNN's if torch prefers it and kernels need not be deterministic.  In fp32 and on
    old GPUs it is memory-efficient attention.

    causal: a position reads itself and earlier ones.
    """

    def __init__(self, n_heads: int, causal: bool = False) -> None:
        self.n_heads, self.causal = n_heads, causal

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        if small := self.small_kernels(seq, x.shape[1] // (3 * self.n_heads)):
            saved.append(x)
            return small.attend(x, seq, self.n_heads, self.causal)
        tokens, width = x.shape
        if x.dtype is torch.float32 and torch.is_inference_mode_enabled() and splits_fp32():
            split = kernels("split_attention").split_attention
            return split(x, seq, self.n_heads, self.causal)
        heads = x.view(tokens // seq, seq, 3, self.n_heads, width // (3 * self.n_heads))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, seq, d_head)
        if not flash(x.dtype):
            q, k, v = q.float(), k.float(), v.float()  # there is none for bf16 before Ampere
            attend = aten._scaled_dot_product_efficient_attention
            y, logsumexp, seed, offset = attend(q, k, v, None, True, 0.0, self.causal)
        elif self.by_cudnn(q, k, v):
            attend = aten._scaled_dot_product_cudnn_attention
            y, logsumexp, *_, seed, offset, _ = attend(q, k, v, None, True, 0.0, self.causal)
        else:
            attend = aten._scaled_dot_product_flash_attention
            y, logsumexp, *_, seed, offset, _ = attend(q, k, v, 0.0, self.causal)
        saved += (q, k, v, y, logsumexp, seed, offset)
        return y.transpose(1, 2).reshape(tokens, width // 3).to(x.dtype)

    def backward_with_sums(
        self, dy: Gradient, seq: int, saved: list[Tensor], wants_sums: bool
    ) -> Gradient:
        """Return the gradient of [q, k, v], with its sums if wanted and a kernel computes them."""
        tokens, width = dy.value.shape
        if small := self.small_kernels(seq, width // self.n_heads):
            qkv = saved.pop()
            return Gradient(small.attend_backward(qkv, dy.value, seq, self.n_heads, self.causal))
        gradients = self.head_gradients(dy.value, seq, saved)
        if wants_sums and (sums := kernels("sum_kernels")):
            return Gradient(*sums.merge(gradients))
        parts = [g.transpose(1, 2) for g in gradients]
        return Gradient(torch.stack(parts, dim=2).view(tokens, 3 * width))

    def head_gradients(self, dy: Tensor, seq: int, saved: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, each (batch, head, seq, d_head)."""
        q, k, v, y, logsumexp, seed, offset = saved[-7:]
        del saved[-7:]
        heads = dy.view(len(dy) // seq, seq, self.n_heads, -1).transpose(1, 2)
        if not flash(dy.dtype):
            *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
                heads.float(), q, k, v, None, y, logsumexp, seed, offset, 0.0,
                [True, True, True, False], self.causal,
            )  # fmt: skip
        elif self.by_cudnn(q, k, v):
            gradients = aten._scaled_dot_product_cudnn_attention_backward(
                heads, q, k, v, y, logsumexp, seed, offset, None, None, None, seq, seq, 0.0,
                self.causal,
            )  # fmt: skip
        else:
            gradients = aten._scaled_dot_product_flash_attention_backward(
                heads, q, k, v, y, logsumexp, None, None, seq, seq, 0.0, self.causal, seed, offset
            )
        return tuple(gradient.to(dy.dtype) for gradient in gradients)

    def by_cudnn(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether torch would use cuDNN's attention, whose backward has no fixed order."""
        if torch.are_deterministic_algorithms_enabled():
            return False
        return torch._fused_sdp_choice(q, k, v, None, 0.0, self.causal) == CUDNN

    def small_kernels(self, seq: int, d_head: int) -> Any:
        """Return the kernels for small layers if these sequences are short enough, else None."""
        small = kernels("small_kernels")
        return small if small and seq <= small.LONGEST and d_head <= small.WIDEST else None


def heads_fit(d_head: int) -> bool:
    """Return whether a GPU's attention kernels support heads of this width."""
    return d_head % 8 == 0 and d_head <= 128


Weights = tuple[nn.Parameter, nn.Parameter | None]


class DeviceSublayer(FusedSublayer):
    """A fused sublayer that begins and ends with a product, with an operation between them.

    A ReLU between them is part of both products.

    beside: of another first product, whose results follow those of `first`.
    """

    def __init__(
        self,
        first: Weights,
        between: Any,
        last: Weights,
        scaled: bool,
        beside: Weights | None = None,
    ) -> None:
        relu = between is FUSED_ACTIVATIONS["relu"]
        firsts = [DeviceProduct(*w, scaled, relu=relu) for w in (first, beside) if w is not None]
        into: Any = firsts[0] if beside is None else DeviceProducts(firsts)
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

        sums: of dy over blocks of tokens, (blocks, d_model), if they are known.
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
