"""The matrix products of a training step alone: the lower limit of its time."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.peers import Shape
from deepstack.fast import Library, on, product_functions

Call = tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]


class Products:
    """All matrix products of forward and backward.

    T = batch seq tokens, B = batch n_heads, e = d_head.

    | product  | forward                   | backward, to both factors                          |
    |----------|---------------------------|----------------------------------------------------|
    | q, k, v  | (T, d) (d, 3d)            | (T, 3d) (3d, d)           and (3d, T) (T, d)       |
    | Q Kᵀ     | (B, seq, e) (B, e, seq)   | (B, seq, seq) (B, seq, e), twice                   |
    | A V      | (B, seq, seq) (B, seq, e) | (B, seq, e) (B, e, seq) and (B, seq, seq) (B, seq, e) |
    | o        | (T, d) (d, d)             | (T, d) (d, d)             and (d, T) (T, d)        |
    | w1       | (T, d) (d, d_ff)          | (T, d_ff) (d_ff, d)       and (d_ff, T) (T, d)     |
    | w1, w3   | with a gate: both at once, 2 d_ff for d_ff                                     |
    | w2       | (T, d_ff) (d_ff, d)       | (T, d) (d, d_ff)          and (d, T) (T, d_ff)     |
    | head     | (T, d) (d, vocab)         | (T, vocab) (vocab, d)     and (vocab, T) (T, d)    |

    Each layer has separate weights and gradients, (depth, …), so that they are as cold in the
    caches as in training; the layers share activations.  All results go into allocated memory.
    library: of large products in fp32 on a CPU, as in a run (see `fast.products`).
    On a GPU one CUDA graph holds all products.
    """

    def __init__(
        self,
        shape: Shape,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        library: Library = "mkl",
    ) -> None:
        self.device = device
        seq, d, d_ff, depth = shape.seq_len, shape.d_model, shape.d_ff, shape.depth
        inner = (1 + shape.gated) * d_ff
        tokens, heads, d_head = batch_size * seq, batch_size * shape.n_heads, d // shape.n_heads

        def random(*size: int) -> Tensor:
            # Neither zeros nor denormals, for which some processors take another time.
            return torch.randn(size, device=device, dtype=dtype) / size[-1] ** 0.5

        def product(left: Tensor, right: Tensor, out: Tensor) -> Call:
            functions = product_functions(library, out.numel() * left.shape[-1])
            return functions.mm if left.ndim == 2 else functions.bmm, left, right, out

        def linear(weight: Tensor) -> Call:
            n_out, n_in = weight.shape
            return product(read[n_in], weight.t(), write[n_out])

        def linear_back(weight: Tensor, grad: Tensor) -> list[Call]:
            n_out, n_in = weight.shape
            to_input = product(read[n_out], weight, write[n_in])
            return [to_input, product(read[n_out].t(), read[n_in], grad)]

        weights = [random(depth, *size) for size in ((3 * d, d), (d, d), (inner, d), (d, d_ff))]
        grads = [torch.zeros_like(weight) for weight in weights]
        # One tensor to read and one to write for every width that a layer's values have.
        read = {width: random(tokens, width) for width in {d, 3 * d, inner, d_ff, shape.vocab_size}}
        write = {width: torch.zeros_like(value) for width, value in read.items()}
        q, k, v = random(3, heads, seq, d_head).unbind(0)
        a, one_head = random(heads, seq, seq), torch.zeros(heads, seq, d_head).to(q)
        scores = torch.zeros_like(a)
        attend = [product(q, k.mT, scores), product(a, v, one_head)]
        attend_back = [
            product(q, v.mT, scores),  # by A: gradient of the output times Vᵀ
            product(a.mT, q, one_head),  # by V
            product(a, k, one_head),  # by Q
            product(a.mT, q, one_head),  # by K
        ]
        forward: list[Call] = []
        backward: list[Call] = []
        for layer in range(depth):
            qkv, o, w1, w2 = (linear(weight[layer]) for weight in weights)
            forward += [qkv, *attend, o, w1, w2]
        for layer in reversed(range(depth)):
            pairs = zip(weights, grads, strict=True)
            by_qkv, by_o, by_w1, by_w2 = (linear_back(w[layer], grad[layer]) for w, grad in pairs)
            backward += [*by_w2, *by_w1, *by_o, *attend_back, *by_qkv]
        table = random(shape.vocab_size, d)
        head = [linear(table), *linear_back(table, torch.zeros_like(table))]
        self.calls = forward + head + backward
        self.graph = self._capture() if device.type == "cuda" else None

    def flops(self) -> int:
        """Return the multiplications and additions of one pass."""
        return sum(2 * out.numel() * left.shape[-1] for _, left, _, out in self.calls)

    def seconds(self) -> float:
        """Run one pass and return its time."""
        if self.graph is None:
            began = time.perf_counter()
            self._run()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def _run(self) -> None:
        for multiply, left, right, out in self.calls:
            multiply(left, right, out=out)

    def _capture(self) -> torch.cuda.CUDAGraph:
        with on(torch.cuda.Stream()):
            self._run()  # libraries initialise themselves, which cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph
