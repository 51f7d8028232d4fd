"""Changes of the reference: each is a fault that a block may have, applied and taken back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.schemes import StackNorm, hyper_connections
from deepstack.tools.conform.reference import Reference
from deepstack.tools.conform.weights import Key

One = Callable[[Tensor], Tensor]
Place = tuple[int, str]
"""A layer, 1..N, and the name of a sublayer."""


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object inside the block."""
    there = vars(owner)
    before = there.get(name, patched)
    there[name] = value
    try:
        yield
    finally:
        if before is patched:
            del there[name]
        else:
            there[name] = before


def on_output(change: One, y: Any) -> Any:
    """Change a sublayer's output, which may come with a tensor for the next layer."""
    return change(y) if isinstance(y, Tensor) else (change(y[0]), *y[1:])


@contextmanager
def branches(
    reference: Reference, places: Iterable[Place], before: One, after: One
) -> Iterator[None]:
    """Replace G by z -> after(G(before(z))) at these places."""

    def wrap(G: Any) -> Any:
        return lambda z, *more, **kw: on_output(after, G(before(z), *more, **kw))

    chosen = set(places)
    with ExitStack() as stack:
        for number, layer in enumerate(reference.stack.layers, start=1):
            functions = tuple(
                wrap(G) if (number, name) in chosen else G
                for name, G in zip(layer.names, layer.modules_in_order(), strict=True)
            )
            stack.enter_context(patched(layer, "sublayer_functions", functions))
        yield


@contextmanager
def residuals(
    reference: Reference, places: Iterable[Place], change: Callable[..., Tensor]
) -> Iterator[None]:
    """Replace `residual` at these places by change(residual, x, G, norms, layer, N)."""
    chosen = set(places)
    with ExitStack() as stack:
        for number, scheme in enumerate(reference.stack.schemes, start=1):
            calls = [0]

            def run(
                x: Tensor, G: Any, *norms: Any,
                layer: int = number, scheme: Any = scheme, calls: list[int] = calls,
                residual: Any = scheme.residual, **values: Any,
            ) -> Tensor:  # fmt: skip
                name = scheme.sublayers[calls[0] % len(scheme.sublayers)]
                calls[0] += 1
                if (layer, name) not in chosen:
                    return residual(x, G, *norms, **values)
                return change(
                    lambda *args: residual(*args, **values), x, G, norms, layer, reference.depth
                )

            stack.enter_context(patched(scheme, "residual", run))
        yield


def scaled_skip(c: float, detached: bool = False) -> Callable[..., Tensor]:
    """Return the change that multiplies the stream by c where no sublayer and no norm reads it."""

    def change(residual: Any, x: Tensor, G: Any, norms: Any, layer: int, N: int) -> Tensor:
        scaled = x.detach() if detached else c * x

        def of_x(f: Any) -> Any:
            return lambda z: f(x if z is scaled else z)

        return residual(scaled, of_x(G), *map(of_x, norms))

    return change


@contextmanager
def norms_as(
    reference: Reference, keys: Iterable[Key], function: Callable[[StackNorm, Tensor], Tensor]
) -> Iterator[None]:
    """Compute these norms by another function of the norm and its input."""
    with ExitStack() as stack:
        for key in keys:
            norm = reference.norms[key]
            stack.enter_context(patched(norm, "forward", lambda z, norm=norm: function(norm, z)))
        yield


def affine(norm: StackNorm, z: Tensor) -> Tensor:
    """Return g z + b."""
    return norm.scaled(z)


def eps_outside(norm: StackNorm, z: Tensor) -> Tensor:
    """Return LN with eps added to the deviation instead of the variance."""
    centred, size = statistics(norm, z, 0)
    return norm.scaled(centred / (size.sqrt() + norm.eps))


def unbiased(norm: StackNorm, z: Tensor) -> Tensor:
    """Return LN with the unbiased variance."""
    centred, size = statistics(norm, z, 1)
    return norm.scaled(centred / (size + norm.eps).sqrt())


def unbiased_outside(norm: StackNorm, z: Tensor) -> Tensor:
    """Return LN with the unbiased deviation, eps added to it."""
    centred, size = statistics(norm, z, 1)
    return norm.scaled(centred / (size.sqrt() + norm.eps))


def other_kind(norm: StackNorm, z: Tensor) -> Tensor:
    """Return RMSNorm in place of LN, and LN in place of RMSNorm."""
    if type(norm).__name__ == "RMSNorm":
        return norm.scaled(F.layer_norm(z, z.shape[-1:], eps=norm.eps))
    return norm.scaled(F.rms_norm(z, z.shape[-1:], eps=norm.eps))


def gain_plus_one(norm: StackNorm, z: Tensor) -> Tensor:
    """Return the norm with the gain 1 + g."""
    return type(norm).forward(norm, z) + (
        other if (other := norm_without_affine(norm, z)) is not None else 0.0
    )


def norm_without_affine(norm: StackNorm, z: Tensor) -> Tensor | None:
    """Return the norm's output before gain and bias."""
    if norm.gain is None:
        return None
    centred, size = statistics(norm, z, 0)
    return centred / (size + norm.eps).sqrt()


def statistics(norm: StackNorm, z: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    """Return z minus its mean, and its variance; for RMSNorm z and its mean square."""
    if type(norm).__name__ == "RMSNorm":
        return z, z.square().mean(-1, keepdim=True)
    return z - z.mean(-1, keepdim=True), z.var(-1, keepdim=True, correction=correction)


def other_eps(eps: float) -> Callable[[StackNorm, Tensor], Tensor]:
    """Return LN with another epsilon."""

    def norm_with(norm: StackNorm, z: Tensor) -> Tensor:
        centred, size = statistics(norm, z, 0)
        return norm.scaled(centred / (size + eps).sqrt())

    return norm_with


@contextmanager
def sublayers(
    reference: Reference, places: Iterable[Place], change: Callable[[Any], tuple[str, Any]]
) -> Iterator[None]:
    """Set an attribute of the sublayers at these places; change: module -> name, value."""
    chosen = set(places)
    with ExitStack() as stack:
        for number, layer in enumerate(reference.stack.layers, start=1):
            for name, module in zip(layer.names, layer.modules_in_order(), strict=True):
                if (number, name) in chosen:
                    stack.enter_context(patched(module, *change(module)))
        yield


def scaled_map(
    names: tuple[str, ...], weight: float, bias: float
) -> Callable[[Any], tuple[str, Any]]:
    """Return the change that multiplies matrices and biases of linear maps by two numbers."""

    def change(module: Any) -> tuple[str, Any]:
        def matrix(name: str) -> tuple[Tensor, Tensor | None]:
            W, b = type(module).matrix(module, name)
            if name not in names:
                return W, b
            return weight * W, None if b is None else bias * b

        return "matrix", matrix

    return change


def scaled_logits(c: float) -> Callable[[Any], tuple[str, Any]]:
    """Return the change that multiplies the logits of attention by c."""

    def change(module: Any) -> tuple[str, Any]:
        return "attend", lambda q, k, v, causal=False: type(module).attend(
            module, c * q, k, v, causal
        )

    return change


def other_mask(module: Any) -> tuple[str, Any]:
    """Return the change between causal attention and attention to all positions."""
    return "causal", not module.causal


@contextmanager
def transposed_mixing() -> Iterator[None]:
    """Mix the streams of hyper-connections by the transposed matrix A_r."""

    def mix(A: Tensor, H: Tensor) -> Tensor:
        n, k = len(H), A.shape[-1]
        square = A[..., k - n :].transpose(0, -1)
        return torch.einsum("ibsj,ibsd->jbsd", torch.cat([A[..., : k - n], square], dim=-1), H)

    with patched(hyper_connections, "mix", mix):
        yield


@contextmanager
def without_stop_gradient() -> Iterator[None]:
    """Let gradients flow where the scheme stops them."""
    owner: Any = Tensor
    before = owner.detach
    owner.detach = lambda self: self
    try:
        yield
    finally:
        owner.detach = before
