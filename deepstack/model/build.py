"""Building of an initialised model with storage from a configuration."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.base.kinds import check_definitions
from deepstack.model.banks import Bank, Banks
from deepstack.model.initialise import initialise
from deepstack.model.loop import loop_of
from deepstack.model.transformer import Transformer
from deepstack.schemes import NORMS, Optim, Scheme, StackScheme, stack_schemes


@dataclass(frozen=True)
class Built:
    """A model, its parameters by role, its trained parameters, and the scheme of each stack.

    optim: returns the factors of scheme and depth on a role's learning rate, decay and epsilon.
    """

    model: Transformer
    banks: Banks
    trained: list[Bank]
    schemes: Mapping[str, StackScheme]
    optim: Callable[[str], Optim]

    def projection(self) -> Callable[[], None] | None:
        """Return the scheme's constraint on trained matrices (for example unit norm), or None."""
        if not self.model.schemes[0].constrains:
            return None
        return partial(constrain, self.trained, self.schemes)

    def state(self) -> dict[str, Tensor]:
        """Return the weights of a checkpoint: parameters and running averages of batch norms."""
        return self.banks.state() | self.model.averages()

    def load(self, state: dict[str, Tensor]) -> None:
        """Overwrite the weights that `state` returns; a missing key raises KeyError."""
        self.banks.load(state)
        self.model.load_averages(state)

    def at_step(self, step: int) -> None:
        """Call `at_step` of schemes that change with the step: t = 1, 2, …; t = 0 before training.

        It costs nothing for other schemes.
        """
        if self.model.schemes[0].changes_by_step:
            for scheme in self.model.schemes:
                scheme.at_step(step)

    @torch.no_grad()
    def calibrate(self, tokens: Tensor) -> None:
        """Start a scheme's parameters from the first batch, layer by layer, if it reads data."""
        memory, inputs = self.model.first_memory(tokens), self.model.inputs(tokens)
        for stack, x in zip(self.model.stacks.values(), inputs, strict=True):
            memory = stack.calibrate(x, memory)
        self.banks.tie()
        self.at_step(0)


def build_model(
    config: conf.Config,
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
    draw: bool = True,
) -> Built:
    """Build the initialised model of this configuration, logits = head(F), on a device.

    vocab_size: the task's, 257 for text (its bytes and [MASK]).
    device: 'meta' has shapes only. The result has `model`, tokens (batch, seq) -> logits (batch,
        seq, vocab_size), with `model.hidden(tokens)`, F (batch, seq, d_model); `banks`, its
        parameters by role, which `banks.count()` counts; `trained`, the trained banks; `state()`
        and `load(state)`.

    A scheme that starts from data (Admin) is not calibrated yet: call `calibrate` on the first
    batch.  Parameters that `train.trainable` excludes have requires_grad False.  draw=False skips
    the initialisation, for callers that load values.  Raises ConfigError for a scheme that is
    unknown or has no equations for the family, PluginError for one that cannot form a stack.
    """
    device = torch.device(device)
    schemes = stack_schemes(conf.checked_config(config))
    check_definitions(config)
    first = next(iter(schemes.values()))  # its depth is model.depth
    refuse_unfit(config.model, first.scheme_class)
    refuse_unknown_token(config.model, vocab_size)
    optim = partial(optimizer_factors, config, first)
    seq_len, joins = config.task.seq_len, partial(one_treatment, config, optim)
    model = Transformer(config.model, schemes, vocab_size=vocab_size, seq_len=seq_len, joins=joins)
    layers = {side: stack.layers for side, stack in model.stacks.items()}
    banks = Banks(model, layers, device, stacked=config.runtime.banks, loop=loop_of(config.model))
    if draw and device.type != "meta":
        initialise(banks, config.model, schemes, config.seed)
        if first.scheme_class.constrains:
            constrain(banks, schemes)
        banks.tie()
    chosen = config.train.trainable
    trained = [b for b in banks if chosen == "all" or all(role in chosen for role in b.roles)]
    if not trained:
        there = ", ".join(dict.fromkeys(role for bank in banks for role in bank.roles))
        raise ConfigError(
            f"train.trainable: found {list(chosen)}, of which this model has none; it has {there}",
            key="train.trainable",
        )
    for bank in banks:
        for name in bank.names if bank not in trained else ():
            model.get_parameter(name).requires_grad_(False)
    built = Built(model, banks, trained, schemes, optim)
    if device.type != "meta":
        built.at_step(0)
    return built


def constrain(banks: Iterable[Bank], schemes: Mapping[str, StackScheme]) -> None:
    """Apply the scheme's constraint to the matrices of layers among some banks.

    Matrices are the parameters of layers with start 'matrix': q, k, v, o, w1, w2, w3, also of a
    cross-attention, and matrices of the scheme.
    """
    for bank in banks:
        if bank.stack is not None and bank.start == "matrix":
            bank.change(schemes[bank.stack].constrain)


def refuse_unfit(model: conf.Model, scheme: type[Scheme]) -> None:
    """Raise ConfigError for a model that the scheme's equations or the norm do not support."""
    norm, chosen = model.norm, f"model.scheme={scheme.name}"
    by_token = ", ".join(kind for kind, stack_norm in NORMS.items() if stack_norm.by_token)
    d_head, apart = model.d_model // model.n_heads, model.decoder_attention == "separate"
    other = f"{model.decoder_attention} attention, which turns nothing"
    turning = f"heads of {d_head}" if apart else other
    for key, is_unfit, problem in (
        (
            "family",
            model.family not in scheme.families,
            f"{model.family}, for which {scheme.label} has no equations here; allowed with "
            f"{chosen}: {', '.join(scheme.families)}",
        ),
        (
            "norm.final_gain",
            norm.final_gain is not None and not scheme.final_norm,
            f"{str(norm.final_gain).lower()}, unused under {chosen}, which has no final norm; "
            "allowed null",
        ),
        (
            "init.distribution",
            model.init.distribution == "ntk" and scheme.constrains,
            f"ntk, which divides products of large matrices; {chosen} puts them back to where it "
            "keeps them; allowed: another",
        ),
        (
            "norm.kind",
            model.family != "encoder" and not NORMS[norm.kind].by_token,
            f"{norm.kind}, whose statistics are over all positions, so that a decoder would "
            f"see those after it; allowed in a decoder: {by_token}",
        ),
        (
            "decoder_attention",
            model.decoder_attention == "merged" and not scheme.merges,
            f"merged, but the coefficients of {scheme.label} count three sublayers in a layer of "
            f"the decoder; allowed with {chosen}: separate",
        ),
        (
            "document_end",
            model.document_end is not None
            and (model.family == "encoder_decoder" or model.attention != "softmax"),
            f"{model.document_end} with model.family={model.family} and "
            f"model.attention={model.attention}; allowed null, or an encoder or a decoder with "
            "model.attention=softmax",
        ),
        (
            "n_kv_heads",
            model.n_kv_heads and not apart,
            f"{model.n_kv_heads} with {model.decoder_attention} attention, which groups no heads; "
            "allowed null, or model.decoder_attention=separate",
        ),
        (
            "positions",
            model.positions == "rotary" and (d_head % 2 or not apart),
            f"rotary with {turning}; allowed with an even "
            "model.d_model / model.n_heads and model.decoder_attention=separate, or learned",
        ),
    ):
        if is_unfit:
            raise ConfigError(f"model.{key}: found {problem}", key=f"model.{key}")


def refuse_unknown_token(model: conf.Model, vocab_size: int) -> None:
    """Raise ConfigError for an end of documents that is not a token."""
    end = model.document_end
    if end is not None and end >= vocab_size > 2:  # shallow models for checks have two tokens
        raise ConfigError(
            f"model.document_end: found {end}; allowed a token of the task, 0 to {vocab_size - 1}",
            key="model.document_end",
        )


def optimizer_factors(config: conf.Config, scheme: StackScheme, role: str) -> Optim:
    """Return the scheme's factors on a role's training times the factors of the configuration."""
    train, factors = config.train, scheme.optim(role)
    exponents = {str(key): power for key, power in train.lr_exponents.items()}
    multiple = scheme.depth / train.base_depth
    rate = multiple ** -exponents.get(role, 0.0)
    decay = 1.0 if train.decay_by_depth == "with_lr" else 1 / rate
    eps = multiple**-train.eps_exponent
    return Optim(factors.lr * rate, factors.weight_decay * decay, factors.eps * eps)


def one_treatment(
    config: conf.Config, optim: Callable[[str], Optim], roles: tuple[str, ...]
) -> bool:
    """Return whether these roles have the same optimizer settings and so can share one tensor."""
    train, chosen = config.train, config.train.trainable
    treatments = {(chosen == "all" or r in chosen, train.lr_factor(r), optim(r)) for r in roles}
    return len(treatments) == 1
