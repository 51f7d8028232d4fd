"""`deepstack.conform` of other people's stacks: `python -m pytest -m others`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.others_stacks import (
    D_FF,
    FLAGS,
    HEADS,
    ROLES,
    SEQ,
    WIRINGS,
    D,
    package,
    torchscale,
)  # fmt: skip
from torch import Tensor, nn
from torch.func import functional_call

import deepstack

pytestmark = pytest.mark.others

SETTINGS = {
    "model.d_model": D, "model.n_heads": HEADS, "model.d_ff": D_FF, "task.seq_len": SEQ,
    "model.activation": "gelu", "model.init.distribution": "torch_linear",
}  # fmt: skip


class Torchscale(nn.Module):
    """Their encoder with softmax and activation in the precision of their inputs."""

    def __init__(self, scheme: str, depth: int) -> None:
        super().__init__()
        (self.stack,) = torchscale(FLAGS[scheme], "encoder", depth, depth)

    def forward(self, x: Tensor) -> Tensor:
        attention = package("torchscale.component.multihead_attention")
        softmax = SimpleNamespace(softmax=lambda z, dim, dtype: torch.softmax(z, dim))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "F", softmax)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return self.stack(None, token_embeddings=x, features_only=True)["encoder_out"]


TORCHSCALE = {role: f"stack.layers.{{l}}.{name}" for name, role in ROLES.items() if role[0] != "c"}
TORCHSCALE |= {
    "attention_norm": "stack.layers.{l}.self_attn_layer_norm",
    "feed_forward_norm": "stack.layers.{l}.final_layer_norm",
}
TORCHSCALE_MORE = {
    "pre_ln": {"final_norm": "stack.layer_norm"},
    "sub_ln": {
        "final_norm": "stack.layer_norm",
        "before_out": "stack.layers.{l}.self_attn.inner_attn_ln",
        "after_activation": "stack.layers.{l}.ffn.ffn_layernorm",
    },
}


@pytest.mark.parametrize("scheme", FLAGS)
def test_torchscales_encoders_agree(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks: their start is nn.Linear's, times the scheme's gain, biases included."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # theirs has a seed of its own
    deepstack.conform(
        lambda depth, *sizes: Torchscale(scheme, depth),
        scheme,
        parameters=TORCHSCALE | TORCHSCALE_MORE.get(scheme, {}),
        settings=SETTINGS,
    )


X_NORMS = {
    "pre": {"attention_norm": "{2l}.0.0", "feed_forward_norm": "{2l+1}.0.0"},
    "post": {"attention_norm": "{2l}.0.2", "feed_forward_norm": "{2l+1}.0.2"},
    "both": {
        "attention_norm_1": "{2l}.0.0", "attention_norm_2": "{2l}.0.1",
        "feed_forward_norm_1": "{2l+1}.0.0", "feed_forward_norm_2": "{2l+1}.0.1",
    },
}  # fmt: skip
VALUES = ("forward", "gradients")
# scheme -> norms and checks: theirs starts as nn.Linear, without a scheme's gains
X_TRANSFORMERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pre_ln": ("pre", (*VALUES, "start", "update")),
    "post_ln": ("post", (*VALUES, "start", "update")),
    "deepnorm": ("post", (*VALUES, "update")),
    "admin": ("post", (*VALUES, "update")),
    "sandwich_ln": ("both", (*VALUES, "update")),
    "layer_scale": ("pre", (*VALUES, "update")),
    "depth_mup": ("pre", VALUES),
    "complete_p": ("pre", VALUES),
    "deep_scale_lm": ("pre", (*VALUES, "start", "update")),
}


@pytest.mark.parametrize("scheme", X_TRANSFORMERS)
def test_x_transformers_encoders_agree(scheme: str) -> None:
    library = package("x_transformers")
    where, checks = X_TRANSFORMERS[scheme]

    # with the base 1 their factor is not 1 at 2 layers, where they leave out its module
    by_depth = scheme in ("depth_mup", "complete_p")

    def build(depth: int, *sizes: int) -> nn.Module:
        options = WIRINGS[scheme].theirs(2 * depth if by_depth else depth)
        return library.Encoder(
            dim=D, depth=depth, heads=HEADS, attn_dim_head=D // HEADS, attn_flash=True,
            ff_mult=D_FF / D, norm_add_unit_offset=False, verbose=False, **options,
        )  # fmt: skip

    options = WIRINGS[scheme].theirs(2)
    wrapped = "use_layerscale" in options or "depth_scale_residual" in options
    inner = ".fn" if wrapped else ""
    names = {role: f"{{2l}}.1{inner}.to_{role}" for role in "qkv"}
    names |= {"o": f"{{2l}}.1{inner}.to_out"}
    names |= {"w1": f"{{2l+1}}.1{inner}.ff.0.0", "w2": f"{{2l+1}}.1{inner}.ff.2"}
    names |= {name: f"{place}.gamma" for name, place in X_NORMS[where].items()}
    if scheme == "layer_scale":
        names |= {"attention_scale": "{2l}.1.gamma", "feed_forward_scale": "{2l+1}.1.gamma"}
    if scheme == "admin":
        names |= {"attention_omega": "{2l}.2.residual_scale"}
        names |= {"feed_forward_omega": "{2l+1}.2.residual_scale"}
    parameters = {name: f"layers.{own}" for name, own in names.items()}
    if where != "post":
        parameters["final_norm"] = "final_norm.gamma"
    settings = SETTINGS | ({"model.scheme_options.base": 1} if by_depth else {})
    deepstack.conform(build, scheme, parameters=parameters, settings=settings, checks=checks)


def test_admin_torchs_module_agrees() -> None:
    admin_torch = package("admin_torch")

    def residual(x: Tensor, G: Any, norm: Any, omega: Tensor, depth: int) -> Tensor:
        theirs = admin_torch.as_module(
            2 * depth, "O(logn)", as_parameter=True, embed_dim=len(omega)
        )
        return norm(functional_call(theirs, {"omega": omega}, (x, G(x))))

    deepstack.conform(residual, "admin", checks=VALUES)
