"""FLOPs of a training step from its configuration, two for each multiply-add.  No torch.

Matrix products count, and the products that a scheme states; norms, activations, softmax, lookups
and the optimizer do not.  With T = batch * n tokens of a stack, n its positions and d = d_model, a
forward pass has these multiply-adds.  S = batch * m are the tokens of the encoder that a decoder
reads; m = seq_len, and the task determines the decoder's n.

| part                        | multiply-adds                                        |
|-----------------------------|------------------------------------------------------|
| q, k, v, o                  | 4 T d² in self-attention, k and v of grouped queries |
|                             | n_kv_heads/n_heads of theirs; 2 (T + S) d² in        |
|                             | cross-attention; (3 T + 2 S) d² in a merged one;     |
|                             | 6 T d² in an average                                 |
| logits and weighted values  | 2 T n d in self-attention; a causal one counts all   |
|                             | n; 2 T m d in cross-attention and in a merged one;   |
|                             | none in an average                                   |
| w1, w2, and w3 of a gate    | T d d_ff each                                        |
| head                        | T d vocab of the last stack; T d² more with BERT's   |
| scheme, other sublayers     | what `extra_flops` of their classes states           |

The backward pass has twice as many: one product for the gradient of each factor.  A matrix that is
not trained needs none for its own gradient, and no gradient passes the products before the first
trained parameter.  Of fixed roles the count is exact for one stack whose scheme has no products,
in the order of Pre-LN.  Two stacks count all of their first layers, and a scheme's products count
for both factors if its role is trained, else for one.  These are right to about a tenth, and to a
third if roles of cross-attention alone are trained.
"""

from collections.abc import Callable
from typing import NamedTuple

from deepstack.base.errors import ConfigError
from deepstack.config.estimate import recompute_every, stack_sizes
from deepstack.config.schema import Config
from deepstack.config.sizes import StackSizes, layer_counts, width_inside, width_of_keys

SchemeFlops = Callable[[StackSizes], int]
"""FLOPs of a scheme's own products in a forward pass of a stack."""

BEFORE_LAYERS = {"embedding", "position", "norm_gain", "norm_bias", "scheme"}
"""Roles with parameters before the first product of the first layer."""
AFTER_LAYERS = {"final_norm", "head"}
"""Roles whose parameters all lie after the layers of a stack."""
ONE_PRODUCT = {"q", "k", "v"}, {"w1", "w3"}
"""Roles whose matrices one product multiplies: all their gradients come together."""


class StepFlops(NamedTuple):
    """The FLOPs of a training step, part by part.

    forward, backward: of the training batch.
    recompute: the layers' second forward pass with `runtime.recompute_every`.
    probe: the forward pass of the probe batch after the update.
    """

    forward: int
    backward: int
    recompute: int
    probe: int

    @property
    def step(self) -> int:
        """Forward and backward pass of the training batch: the FLOPs of `train.flops`."""
        return self.forward + self.backward

    @property
    def total(self) -> int:
        """Every part: also the recomputed layers and the probe."""
        return sum(self)


def step_flops(
    config: Config,
    vocab_size: int,
    scheme_flops: SchemeFlops,
    target_len: int | None = None,
) -> StepFlops:
    """Return the FLOPs of a training step.

    scheme_flops: `deepstack.schemes.scheme_flops(config)`.
    target_len: positions of the decoder that reads an encoder, `Task.target_len`; other models need
        none.

    Raises ConfigError without it for an encoder-decoder.
    """
    if target_len is None and config.model.family == "encoder_decoder":
        raise ConfigError(
            "step_flops: an encoder_decoder needs target_len, the length of its targets; "
            "give target_len=deepstack.tasks.task_of(config).target_len"
        )
    batch, d = config.train.batch_size, config.model.d_model
    tokens = batch * stack_sizes(config, batch, target_len)[-1].seq
    layers = layer_flops(config, batch, scheme_flops, target_len)
    table = "head" if config.model.head == "separate" else "embedding"
    head = {"head": 2 * tokens * d * d} if config.model.head == "bert" else {}
    head |= {table: 2 * tokens * d * vocab_size}
    backward = backward_flops(config, layers, head, target_len)
    of_layers = sum(layers.values())
    probe = layer_flops(config, config.log.probe_sequences, scheme_flops, target_len)
    recompute = of_layers if recompute_every(config) else 0
    return StepFlops(of_layers + sum(head.values()), backward, recompute, sum(probe.values()))


def backward_flops(
    config: Config, layers: dict[str, int], head: dict[str, int], target_len: int | None
) -> int:
    """Return the FLOPs of the backward pass with the trained roles of a configuration.

    layers, head: FLOPs of a forward pass by role; the head's are in its order.
    """
    trained = config.train.trainable
    if trained == "all":
        return 2 * (sum(layers.values()) + sum(head.values()))
    passes = trains_layers(config)
    computed = {role for group in ONE_PRODUCT if group & {*trained} for role in group}
    alone = layer_flops(config, config.train.batch_size, lambda sizes: 0, target_len)[""]
    own = {**layers, "": alone * passes, "scheme": layers[""] - alone}
    products = [*own.items(), *head.items()]
    flops = sum(each for role, each in products if not role or role in computed.union(trained))
    if passes:
        flops += sum(layers.values()) - skipped_flops(config)
    passes = passes or "final_norm" in trained
    for role, each in head.items():
        flops += each * passes
        passes = passes or role in trained
    return flops


def trains_layers(config: Config) -> bool:
    """Return whether a trained parameter lies in the layers or before them."""
    after = {"head"} if config.model.family == "encoder_decoder" else AFTER_LAYERS
    return not after.issuperset(config.train.trainable)


def skipped_flops(config: Config) -> int:
    """Return the FLOPs of the gradients that no pass needs before the first trained parameter."""
    trained, model, batch = set(config.train.trainable), config.model, config.train.batch_size
    if trained & BEFORE_LAYERS:
        return 0
    if model.family == "encoder_decoder":
        in_encoder = {role for role in trained - AFTER_LAYERS if not role.startswith("cross_")}
        encoder = config.model_copy(
            update={"model": model.model_copy(update={"family": "encoder"})}
        )
        return 0 if in_encoder else sum(layer_flops(encoder, batch, lambda sizes: 0).values())
    layers = layer_flops(config, batch, lambda sizes: 0)
    first = {role: flops // model.depth for role, flops in layers.items()}
    q, k, v = (bool(trained & {role, "bias"}) for role in "qkv")
    # gradients of queries, keys, weights and values
    flops = first[""] * ((not q) + (not k) + (not q and not k) + (not v)) // 2
    seen = {"bias"}
    for roles in (("q", "k", "v"), ("o",), ("w1", "w3"), ("w2",)):
        is_after = roles[0] != "q" and trained & seen
        flops += 0 if is_after else sum(first[role] for role in roles)
        seen.update(roles)
    return flops


def layer_flops(
    config: Config, batch: int, scheme_flops: SchemeFlops, target_len: int | None = None
) -> dict[str, int]:
    """Return the FLOPs of a forward pass of all layers by role; products without a role have ""."""
    model, layers, d = config.model, layer_counts(config), config.model.d_model
    stacks = stack_sizes(config, batch, target_len)
    # summed over all layers: tokens that pass a matrix, and pairs of positions in attention
    tokens = sum(stack.depth * batch * stack.seq for stack in stacks)
    pairs = sum(stack.depth * batch * stack.seq**2 for stack in stacks)
    passes = dict.fromkeys(("q", "k", "v", "o", "w1", "w2"), tokens)
    passes["w3"] = tokens * model.gated
    if layers.decoder:
        source, target = (layers.decoder * batch * stack.seq for stack in stacks)
        pairs += target * stacks[0].seq  # of cross-attention
        if model.decoder_attention != "separate":  # no self-attention
            pairs -= target * stacks[1].seq
        if model.decoder_attention == "average":  # gates that read two streams
            passes["q"] += target
            passes["k"] += target
        if model.decoder_attention == "merged":  # keys of the encoder's output, values of both
            passes["k"] += source - target
            passes["v"] += source
        else:
            passes |= dict.fromkeys(("cross_q", "cross_o"), target)
            passes |= dict.fromkeys(("cross_k", "cross_v"), source)
    inside = {role: width_inside(config) for role in ("w1", "w2", "w3")}
    inside |= dict.fromkeys(("k", "v"), width_of_keys(config))
    products = {role: 2 * count * d * inside.get(role, d) for role, count in passes.items()}
    return products | {"": 4 * pairs * d + sum(map(scheme_flops, stacks))}
