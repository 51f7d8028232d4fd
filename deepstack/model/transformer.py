"""The model: tables, one or two stacks of layers, and a head that maps F to logits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.model.attention import same_document
from deepstack.model.stack import Layer, LayerRunner, Stack, run_layers
from deepstack.model.sublayers import Joins
from deepstack.schemes import BatchNorm, LayerNorm, Scheme, StackScheme, Statistics
from deepstack.schemes.role import parameter


class TiedHead(nn.Module):
    """logits = c F Eᵀ + b, E the token table.  F: (batch, seq, d_model), E: (vocab, d_model).

    c, `factor`, is 1 but for schemes with a rule for width (`Scheme.head_factor`).
    """

    factor = 1.0

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.bias = parameter(vocab_size, role="head", start="zero")

    def forward(self, final: Tensor, table: nn.Parameter) -> Tensor:
        return F.linear(*self.last_map(final, table))

    def last_map(self, final: Tensor, table: nn.Parameter) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the last linear map of the head reads, its matrix and its bias."""
        final = final if self.factor == 1 else final * self.factor
        return final, *self.first_map(table)

    def first_map(self, table: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        """Return the matrix that F enters, and its bias."""
        return table, self.bias


class SeparateHead(TiedHead):
    """logits = c F Wᵀ + b with a separate matrix, W ~ N(0, 1/d_model).  W: (vocab, d_model)."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        nn.Module.__init__(self)
        self.weight = parameter(vocab_size, d_model, role="head", start="table")
        self.bias = parameter(vocab_size, role="head", start="zero")

    def first_map(self, table: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        return self.weight, self.bias


class BertHead(TiedHead):
    """logits = LN(gelu(F Wᵀ + c)) Eᵀ + b, E the token table.  Devlin et al. 2018, arXiv:1810.04805.

    BERT's masked-token head: dense, activation, norm, then the tied table with a separate bias
    (`get_masked_lm_output` in google-research/bert run_pretraining.py).  W: (d_model, d_model).
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        nn.Module.__init__(self)
        self.dense = parameter(d_model, d_model, role="head", start="matrix")
        self.dense_bias = parameter(d_model, role="head", start="zero")
        self.norm = LayerNorm(d_model, eps=1e-5, gain=True, bias=True, roles=("head", "head"))
        self.bias = parameter(vocab_size, role="head", start="zero")

    def first_map(self, table: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
        return self.dense, self.dense_bias

    def last_map(self, final: Tensor, table: nn.Parameter) -> tuple[Tensor, Tensor, Tensor]:
        dense = F.linear(*super().last_map(final, table))
        return self.norm(F.gelu(dense)), table, self.bias


ReadOut = Callable[[Tensor, TiedHead, nn.Parameter], Tensor]
Functions = tuple[bool, list[LayerRunner], list[tuple[Any, ...]]]
"""`infers` of a model, the runner of each stack, and the functions of each layer."""

HEADS: dict[str, type[TiedHead]] = {"tied": TiedHead, "separate": SeparateHead, "bert": BertHead}


class Transformer(nn.Module):
    """logits = head(F), F = the last stack's output for x_0 = sqrt(d/2) (E[token] + P[position]).

    With tables N(0, 1/d) x_0 has unit variance per coordinate, and so have the logits of a tied
    head.  Sinusoidal positions have the same scale; with rotary positions there is no P, and
    x_0 = sqrt(d) E[token].

    | family          | F                                                    | stacks             |
    |-----------------|------------------------------------------------------|--------------------|
    | encoder         | encoder(x_0)                                         | encoder            |
    | decoder         | decoder(x_0), causal                                 | decoder            |
    | encoder_decoder | decoder(x_0 of the target, encoder(x_0 of the source)) | encoder, decoder |

    tokens: (batch, seq) integers; with two stacks the first seq_len are the source, and the rest
    are the decoder's input.  Both sides share the token table and have separate positions.
    logits: (batch, seq or target, vocab_size).
    """

    position: Tensor | None

    def __init__(
        self,
        model: conf.Model,
        schemes: Mapping[str, StackScheme],
        *,
        vocab_size: int,
        seq_len: int,
        joins: Joins,
    ) -> None:
        super().__init__()
        d = model.d_model
        self.seq_len = seq_len
        self.scale = math.sqrt(d if model.positions == "rotary" else d / 2)
        both = model.family == "encoder_decoder"
        self.source_len = seq_len if both else 0
        self.embedding = parameter(vocab_size, d, role="embedding", start="table")
        if model.positions == "learned":
            self.position = parameter((1 + both) * seq_len, d, role="position", start="table")
        else:
            is_added = model.positions == "sinusoidal"
            table = sinusoidal(seq_len, d).repeat(1 + both, 1) if is_added else None
            self.register_buffer("position", table, persistent=False)
        stacks = {side: Stack(model, scheme, seq_len, joins) for side, scheme in schemes.items()}
        self.encoder, self.decoder = stacks.get("encoder"), stacks.get("decoder")
        self.head = HEADS[model.head](vocab_size, d)
        self.head.factor = next(iter(schemes.values())).head_factor
        self.document_end = model.document_end
        self.infers = False  # whether a pass without gradients uses torch's inference mode
        self._fast: Functions | None = None  # those outside of `unfused`
        self.batch_norms = [norm for _, norm in self.named_batch_norms()]

    @property
    def stacks(self) -> Mapping[str, Stack]:
        """Return the stacks by side, in the order in which data passes them; the last gives F."""
        both = ("encoder", self.encoder), ("decoder", self.decoder)
        return {side: stack for side, stack in both if stack is not None}

    @property
    def last(self) -> Stack:
        """Return the stack whose output is F."""
        return list(self.stacks.values())[-1]

    @property
    def layers(self) -> list[Layer]:
        """Return the layers of all stacks."""
        return [layer for stack in self.stacks.values() for layer in stack.layers]

    @property
    def schemes(self) -> list[Scheme]:
        """Return the schemes of all layers."""
        return [scheme for stack in self.stacks.values() for scheme in stack.schemes]

    @contextmanager
    def statistics(self, which: Statistics) -> Iterator[None]:
        """Make batch norms use these statistics inside the block; outside, their own batch's.

        A training step updates the running averages and validation uses them.  All other passes
        (the probe, snapshots, a recomputed layer) use the batch's own statistics.
        """
        for norm in self.batch_norms:
            norm.statistics = which
        try:
            yield
        finally:
            for norm in self.batch_norms:
                norm.statistics = "own"

    @contextmanager
    def replace_runner(self, change: Callable[[LayerRunner], LayerRunner]) -> Iterator[None]:
        """Replace the function that runs each stack's layers by change(function) in the block."""
        before = [(stack, stack.runner) for stack in self.stacks.values()]
        for stack, runner in before:
            stack.runner = change(runner)
        try:
            yield
        finally:
            for stack, runner in before:
                stack.runner = runner

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Run all layers one after the other as modules inside the block."""
        before = self._functions()
        self._fast = before if self._fast is None else self._fast
        self.infers = False
        for layer in self.layers:
            layer.call_modules()
        for stack in self.stacks.values():
            stack.runner = run_layers
        try:
            yield
        finally:
            self._fast = None if self._fast is before else self._fast
            self._set_functions(before)

    @contextmanager
    def with_fast_paths(self) -> Iterator[None]:
        """Run the layers by the fast paths again, in a block inside of `unfused`."""
        before = self._functions()
        if self._fast is not None:
            self._set_functions(self._fast)
        try:
            yield
        finally:
            self._set_functions(before)

    def _functions(self) -> Functions:
        """Return all that decides how layers run: modules, or fast paths."""
        runners = [stack.runner for stack in self.stacks.values()]
        return self.infers, runners, [layer.functions for layer in self.layers]

    def _set_functions(self, functions: Functions) -> None:
        self.infers, runners, of_layers = functions
        for stack, runner in zip(self.stacks.values(), runners, strict=True):
            stack.runner = runner
        for layer, of_layer in zip(self.layers, of_layers, strict=True):
            layer.functions = of_layer

    def named_batch_norms(self) -> list[tuple[str, BatchNorm]]:
        """Return every batch norm with its path: `encoder.layers.0.…`, `encoder.final_norm`."""
        return [(name, m) for name, m in self.named_modules() if isinstance(m, BatchNorm)]

    def averages(self) -> dict[str, Tensor]:
        """Return the running averages of all batch norms, concatenated; empty without any."""
        return {
            f"running.{name}": torch.cat([norm.get_buffer(name) for norm in self.batch_norms])
            for name in (BatchNorm.REMEMBERED if self.batch_norms else ())
        }

    def load_averages(
        self, state: dict[str, Tensor], norms: Sequence[BatchNorm] | None = None
    ) -> None:
        """Load the running averages that `averages` returned from a checkpoint.

        norms: the batch norms that they belong to, in order; by default all of the model.
        """
        norms = self.batch_norms if norms is None else norms
        for name in BatchNorm.REMEMBERED if norms else ():
            buffers = [norm.get_buffer(name) for norm in norms]
            parts = state[f"running.{name}"].split([len(buffer) for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part)

    def embed(self, tokens: Tensor, at: int = 0) -> Tensor:
        """Return x_0 of all tokens, (batch, seq, d_model); the first has position `at`."""
        x = F.embedding(tokens, self.embedding)
        if self.position is not None:
            x = x + self.position[at : at + tokens.shape[1]]
        return x * self.scale

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split (batch, source + target, …) into source and target; one stack has no source."""
        return x[:, : self.source_len], x[:, self.source_len :]

    def inputs(self, tokens: Tensor) -> list[Tensor]:
        """Return x_0 of each stack, (batch, seq or source or target, d_model)."""
        if not self.source_len:
            return [self.embed(tokens)]
        source, target = self.split(tokens)
        return [self.embed(source), self.embed(target, self.source_len)]

    def first_memory(self, tokens: Tensor) -> Tensor | None:
        """Return what the first stack reads beside its stream: the mask of documents, or None."""
        return None if self.document_end is None else same_document(tokens, self.document_end)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return F, the last hidden state after the last norm, (batch, seq or target, d_model)."""
        return self._hidden(tokens)

    def _hidden(self, tokens: Tensor) -> Tensor:
        # apart from `hidden`: FSDP2 gathers parameters on entry of `hidden` and of `forward`
        infers = self.infers and not torch.is_grad_enabled()
        output = self.first_memory(tokens)
        # Tracking of views and versions takes a tenth of an eager pass of narrow layers.
        with torch.inference_mode() if infers else nullcontext():
            for stack, x in zip(self.stacks.values(), self.inputs(tokens), strict=True):
                output = stack(x, output)
        assert output is not None
        return output.clone() if infers else output  # an ordinary tensor

    def forward(self, tokens: Tensor, read: ReadOut | None = None) -> Tensor:
        """Return the logits, or the value that `read` computes of F, head and token table."""
        final = self._hidden(tokens)
        if read is not None:
            return read(final, self.head, self.embedding)
        return self.head(final, self.embedding)


def sinusoidal(seq_len: int, d: int) -> Tensor:
    """Return P[p, 2i] = sqrt(2/d) sin(p / 10000^(2i/d)), P[p, 2i+1] = sqrt(2/d) cos(the same).

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5, times sqrt(2/d) so that a row has norm 1
    like a row of a learned table N(0, 1/d).
    """
    at = torch.arange(seq_len, dtype=torch.float64, device="cpu")[:, None]
    rate = 10000 ** (-torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d)
    pairs = torch.stack([torch.sin(at * rate), torch.cos(at * rate)], dim=2)
    table = pairs.flatten(1)[:, :d] * math.sqrt(2 / d)
    return table.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
