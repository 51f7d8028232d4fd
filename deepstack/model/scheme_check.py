"""A check of a scheme before a run: pass a small stream through the first layer of each side."""

from typing import Any

import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base.errors import PluginError
from deepstack.model.build import build_model
from deepstack.model.initialise import IN_LAYERS
from deepstack.model.stack import Stack, norm_maker
from deepstack.schemes import (
    Scheme,
    StackNorm,
    Tap,
    check_norm,
    check_roles,
    defined_at,
    reads_later,
    stack_schemes,
    visible,
)

WIDEST = 1024  # beyond it even two layers take long
TOKENS = 5  # of two sequences, at most


def check_scheme(config: conf.Config) -> None:
    """Check the norm; compute the scheme's gains and pass two short sequences through a layer.

    Raises PluginError for a norm without roles or of another shape.  Raises it too if the scheme
    returns a value other than a stream, (batch, seq, d_model), or changes in place x or the G(x) of
    a sublayer, which other code reads, and if norm or scheme let a position of a decoder read later
    ones.  Torch's random state is restored.
    """
    check_roles(norm_maker(config.model)(config.model.d_model))
    for scheme in stack_schemes(config).values():
        scheme.gain("embedding", 0)
        for role in IN_LAYERS:
            scheme.gain(role, 1)
            scheme.gain(role, scheme.place.depth)
    width = config.model.d_model
    if width > WIDEST:
        return
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build_model(shallow(config), vocab_size=2, draw=False).model.eval()
        tokens = min(TOKENS, config.task.seq_len)  # rotary positions have so many angles
        x = torch.randn(2, tokens, width, generator=random)
        for parameter in model.parameters():
            parameter.normal_(0.0, width**-0.5, generator=random)
        norms = (one for one in model.modules() if isinstance(one, StackNorm))
        if first := next(norms, None):
            check_norm(first, x[..., : first.shape[0]])  # some are of one head
        for side, stack in model.stacks.items():
            memory = model.first_memory(torch.zeros(2, tokens, dtype=torch.int64))
            memory = x.clone() if memory is None else memory
            check_layer(stack, x.clone(), memory)
            if side == "decoder":
                check_order(stack, x, memory)


def shallow(config: conf.Config) -> conf.Config:
    """Return the configuration with at most two layers, for checks independent of depth.

    One layer is a special case of many schemes' functions of depth, such as 1/log(N).
    """
    depths: dict[str, int | None] = {"model.depth": min(2, config.model.depth)}
    depths |= {"model.prelude_layers": 0, "model.coda_layers": 0}
    depths["model.unique_layers"] = None  # need not divide two layers
    if config.model.decoder_depth:
        depths["model.decoder_depth"] = min(2, config.model.decoder_depth)
    return conf.with_overrides(config, depths)


def check_layer(stack: Stack, x: Tensor, memory: Tensor) -> None:
    """Check the first layer of one stack; memory: of sublayers that read one."""
    layer = stack.layers[0]
    scheme, outputs = layer.scheme, []

    class ResultCheck(Tap):
        def leave(self, out: Tensor) -> None:
            refuse_no_stream(scheme, "residual", out, x)

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((output, output._version))

    scheme.tap = ResultCheck()
    for name in layer.names:
        layer.get_submodule(name).register_forward_hook(note)
    entered = refuse_no_stream(scheme, "enter", stack.enter(x), x)
    before = visible(entered)._version
    left = refuse_no_stream(
        scheme, "layer", layer(entered, memory if any(layer.readers) else None), x
    )
    name = "layer" if scheme.joins_sublayers else "residual"
    shape = f"a tuple of {len(left)}" if isinstance(left, tuple) else "one tensor"
    if scheme.stream_norms and shape != (allowed := f"a tuple of {scheme.stream_norms}"):
        raise PluginError(
            f"{defined_at(type(scheme), name)}the stream is {shape}; allowed {allowed}, returned "
            f"by enter and layer; or remove stream_norms = {scheme.stream_norms}"
        )
    changed = "x" if visible(entered)._version != before else ""
    if any(output._version != was for output, was in outputs):
        changed = "G(x)"
    if changed:
        raise PluginError(
            f"{defined_at(type(scheme), name)}{name} changes {changed} in place (+=, mul_, …), "
            f"which the backward pass and the measurements read; write {changed} + …"
        )
    refuse_no_stream(scheme, "leave", stack.leave(left), x)


def check_order(stack: Stack, x: Tensor, memory: Tensor) -> None:
    """Raise PluginError if a position of a decoder reads a later one, which is what it predicts."""
    given = memory if any(any(layer.readers) for layer in stack.layers) else None
    if reads_later(lambda one: stack(one, given), x):
        scheme = type(stack.schemes[0])
        name = "layer" if scheme.joins_sublayers else "residual"
        raise PluginError(
            f"{defined_at(scheme, name)}a position of the decoder reads later ones, which it is to "
            "predict; allowed in a decoder: values of the same position and of those before it"
        )


def refuse_no_stream(scheme: Scheme, method: str, found: Any, x: Tensor) -> Any:
    """Return `found` if it is a tensor like x, or between layers a tuple that begins with one.

    The `residual` that a scheme's own `layer` calls may return a tensor of another shape.  Raises
    PluginError otherwise.
    """
    several = method in ("enter", "layer")
    first = found[0] if several and isinstance(found, tuple) and found else found
    is_any = method == "residual" and scheme.joins_sublayers
    is_tensor = isinstance(first, Tensor)
    if is_tensor and (is_any or (first.shape == x.shape and first.dtype == x.dtype)):
        return found
    text = "None, as without `return`" if first is None else type(first).__name__
    if is_tensor:
        text = f"{tuple(first.shape)} of {first.dtype}"
    others = ", or a tuple that begins with one" if several else ""
    if method == "residual":
        others = "; a scheme of several streams calls residual with x alone, in its own `layer`"
    raise PluginError(
        f"{defined_at(type(scheme), method)}{method} gave {text} for x (batch, seq, d_model) = "
        f"{tuple(x.shape)} of {x.dtype}; allowed a tensor like x{others}"
    )
