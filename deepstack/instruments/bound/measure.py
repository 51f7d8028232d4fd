"""Right-hand side of DeepNet's Theorem 4.2 for each sublayer, from the current weights."""

import math
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.diagnostics import (
    Snapshot,
    diagnostic,
    evaluating,
    has_plain_norm_and_relu,
    variance,
)
from deepstack.schemes import Scheme, StackNorm, Tap, tapped

# sublayer -> the roles of the theorem's w (the inner matrix) and v (the outer one), and the factor
# of the operation between them on a second moment: 1/2 for ReLU, at most 1 for a weighted mean
MATRICES = {
    "attention": ("v", "o", 1.0),
    "cross_attention": ("cross_v", "cross_o", 1.0),
    "feed_forward": ("w1", "w2", 0.5),
}


class Terms(NamedTuple):
    """The symbols of the theorem, each (depth, S), S the sublayers of a layer.

    alpha: NaN where the sublayer is not LN(alpha x + G(x)).
    v, w: effective gains.
    moved: ‖θ_t − θ_0‖ of the sublayer's two matrices of the value path.
    """

    alpha: Tensor
    v: Tensor
    w: Tensor
    moved: Tensor


def covers(model: conf.Model) -> bool:
    """Return whether Theorem 4.2 covers a model: its norm, activation, products and attention.

    The theorem assumes products x Wᵀ, which the NTK parameterisation divides by √n_in, and
    attention that is linear in the values.
    """
    other = model.init.distribution == "ntk" or model.decoder_attention == "average"
    return has_plain_norm_and_relu(model) and not other


@diagnostic("bound", "√(v²+w²)/α·‖θ_i,t − θ_i,0‖", covers=covers)
def bound(snapshot: Snapshot) -> Tensor:
    """√(v² + w²)/α · ‖θ_i,t − θ_i,0‖, a sublayer's term of the bound on ‖ΔF‖ of Theorem 4.2.

    The sum over all sublayers of an encoder or a decoder is the theorem's right-hand side.  For an
    encoder-decoder (Theorem 4.3), the encoder's sum is multiplied by the sum of `effective_gain`
    over the decoder's cross-attentions, and the decoder's sum is added.  Gains use the current
    weights.  A feed-forward with ReLU has w² = n_in Var(W_1)/2 and v² = n_in Var(W_2).  An
    attention has w² = n_in Var(W_v) and v² = n_in Var(W_o).  NaN where the theorem does not apply
    (see `alphas`, `covers`).  For real steps it is an estimate and no bound: it treats
    changes as independent of their inputs.
    Wang et al. 2022, arXiv:2203.00555, section 4.3.
    """
    t = terms(snapshot)
    return torch.sqrt(t.v**2 + t.w**2) / t.alpha * t.moved


@diagnostic("effective_gain", "v·w/α", covers=covers)
def effective_gain(snapshot: Snapshot) -> Tensor:
    """v w/α, the factor of a sublayer on a change of its branch's input, in the same theorem.

    Over the cross-attentions of a decoder its sum is the factor of the encoder in Theorem 4.3.
    """
    t = terms(snapshot)
    return t.v * t.w / t.alpha


def terms(snapshot: Snapshot) -> Terms:
    """Return the theorem's symbols for every sublayer of a stack, computed once per snapshot."""
    known: Terms | None = snapshot.shared.get("terms")
    if known is not None:
        return known
    columns = []
    for name in snapshot.sublayers:
        inner, outer, fixed = MATRICES[name]
        W, V = snapshot.matrices[inner], snapshot.matrices[outer]
        w = torch.sqrt(W.shape[-1] * variance(W.flatten(1)) * fixed)
        v = torch.sqrt(V.shape[-1] * variance(V.flatten(1)))
        changes = [m - snapshot.initial[r].to(m.device) for r, m in ((inner, W), (outer, V))]
        lengths = [torch.linalg.vector_norm(c.flatten(1), dim=1) for c in changes]
        columns.append((v, w, torch.linalg.vector_norm(torch.stack(lengths), dim=0)))
    v, w, moved = (torch.stack(parts, dim=1) for parts in zip(*columns, strict=True))
    alphas = [alphas_of(s, W.shape[-1], W.device) for s in snapshot.schemes]
    result = Terms(torch.tensor(alphas, device=v.device, dtype=v.dtype), v, w, moved)
    snapshot.shared["terms"] = result
    return result


# Cached `alphas` of schemes that do not change during training.
_tried: WeakKeyDictionary[Scheme, list[float]] = WeakKeyDictionary()


def alphas_of(scheme: Scheme, d_model: int, device: torch.device) -> list[float]:
    """Return `alphas`, computed on the CPU to avoid launches, or where the scheme's tensors are.

    Cached for a scheme without tensors or changes by step: it costs a tenth of a snapshot.
    """
    parts = [module for module in scheme.modules() if not isinstance(module, StackNorm)]
    if any(part._parameters or part._buffers for part in parts):
        return alphas(scheme, d_model, device)
    if scheme not in _tried or scheme.changes_by_step:
        _tried[scheme] = alphas(scheme, d_model, torch.device("cpu"))
    return _tried[scheme]


@torch.no_grad()
def alphas(scheme: Scheme, d_model: int, device: torch.device) -> list[float]:
    """Measure α of each sublayer of the form LN(α x + G(x)) in a layer; NaN for other forms.

    The scheme's layer runs once with sublayers and norms that return random numbers and record
    their inputs.  A sublayer has the theorem's form under three conditions.  Its branch reads x
    itself; its only norm reads c_1 x + c_2 g for numbers c_1 and c_2 (g: the branch's output); the
    next sublayer reads the norm's output.  Then α = c_1/c_2, whatever name or `alpha` the scheme
    has.  All NaN, without a run, for a final norm of the stack, several streams, slots inside
    sublayers, or an attention that reads both streams.
    """
    position = scheme.place
    reads = position.family == "encoder_decoder" and position.side == "decoder"
    merged = reads and len(scheme.sublayers) == 2
    unknown = [math.nan] * len(scheme.sublayers)
    if merged or scheme.maps_stream or scheme.final_norm or len(scheme.slots):
        return unknown
    tap = RandomValues(d_model, device)
    try:
        with tapped([scheme], tap), evaluating(scheme):  # as in every measurement: without dropout
            last = scheme.layer(tap.expected, *(lambda y: y for _ in scheme.sublayers))
    except Exception:  # a plugin's layer that uses more of a sublayer than its output
        return unknown
    complete = len(tap.alphas) == len(unknown) and isinstance(last, Tensor)
    return tap.alphas if complete and torch.equal(last, tap.expected) else unknown


class RandomValues(Tap):
    """Replace the outputs of sublayers and norms by random numbers and fit α of each sublayer."""

    def __init__(self, d_model: int, device: torch.device) -> None:
        self.d_model, self.device = d_model, device
        self.random = torch.Generator().manual_seed(0)
        self.alphas: list[float] = []
        self.expected = self.draw()  # the stream that the next sublayer should read

    def draw(self) -> Tensor:
        """Draw a stream of two tokens, (1, 2, d_model), without the global random state."""
        return torch.randn(1, 2, self.d_model, generator=self.random).to(self.device)

    def enter(self, x: Tensor) -> None:
        self.g, self.out = self.draw(), self.draw()
        self.x = x.clone()
        self.branch_inputs: list[Tensor] = []
        self.norm_inputs: list[Tensor] = []

    def branch(self, G: object, y: Tensor) -> Tensor:
        self.branch_inputs.append(y.clone())
        return self.g.clone()

    def norm(self, norm: object, z: Tensor, last: bool) -> Tensor:
        self.norm_inputs.append(z.clone())
        return self.out

    def leave(self, x: Tensor) -> None:
        fits = (
            len(self.branch_inputs) == len(self.norm_inputs) == 1
            and torch.equal(self.x, self.expected)
            and torch.equal(self.branch_inputs[0], self.x)
            and torch.equal(x, self.out)
        )
        self.alphas.append(ratio(self.norm_inputs[0], self.x, self.g) if fits else math.nan)
        self.expected = x


def ratio(z: Tensor, x: Tensor, g: Tensor) -> float:
    """Return c_1/c_2 of z = c_1 x + c_2 g, or NaN where z does not have that form.

    A vector in place of c_1, such as Admin's, passes while it is constant to within 1 %.
    """
    if not z.isfinite().all():
        return math.nan
    columns = torch.stack([x.flatten(), g.flatten()], dim=1).double().cpu()
    target = z.flatten().double().cpu()
    coefficients = torch.linalg.lstsq(columns, target).solution
    if (columns @ coefficients - target).norm() > 0.01 * target.norm():
        return math.nan
    c1, c2 = coefficients.tolist()
    return c1 / c2 if abs(c2) > 1e-6 * abs(c1) else math.inf
