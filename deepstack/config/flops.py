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
trained parameter.  With `train.trainable`, `step_flops` counts the first alone, and
`deepstack.model.flops_of` both.
"""

from collections.abc import Callable
from typing import NamedTuple

from deepstack.base.errors import ConfigError
from deepstack.config.estimate import recompute_every, stack_sizes
from deepstack.config.schema import Config
from deepstack.config.sizes import StackSizes, layer_counts, width_inside, width_of_keys

SchemeFlops = Callable[[StackSizes], int]
"""FLOPs of a scheme's own products in a forward pass of a stack."""


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
    scheme_backward: SchemeFlops | None = None,
) -> StepFlops:
    """Return the FLOPs of a training step.

    scheme_flops: `deepstack.schemes.scheme_flops(config)`.
    target_len: positions of the decoder that reads an encoder, `Task.target_len`; other models need
        none.
    scheme_backward: `deepstack.schemes.scheme_backward_flops(config)`; by default twice the forward
        pass's.

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
    head = {"embedding": 2 * tokens * d * vocab_size}
    if config.model.head == "separate":
        head = {"head": head["embedding"]}
    elif config.model.head == "bert":
        head["head"] = 2 * tokens * d * d
    trained = config.train.trainable
    by_role = [*layers.items(), *head.items()]
    forward = sum(flops for _, flops in by_role)
    # "" names products without a matrix of parameters
    learnt = sum(flops for role, flops in by_role if trained == "all" or role in ("", *trained))
    stacks = stack_sizes(config, batch, target_len)
    if scheme_backward is not None:
        learnt += sum(scheme_backward(one) - 2 * scheme_flops(one) for one in stacks)
    of_layers = sum(layers.values())
    probe = layer_flops(config, config.log.probe_sequences, scheme_flops, target_len)
    recompute = of_layers if recompute_every(config) else 0
    return StepFlops(forward, forward + learnt, recompute, sum(probe.values()))


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
