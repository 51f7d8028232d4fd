"""Matrices that mix residual streams: doubly stochastic or orthogonal ones, and the identity."""

from itertools import permutations

import torch
from torch import Tensor, nn


class Mixing(nn.Module):
    """R -> A_r, the matrix (n, n) that mixes n streams: the identity, whatever R.

    R: (len(begin), batch, seq); A_r: (n, n, batch, seq), or (n, n, 1, 1) for all tokens.

    begin: where R starts.
    """

    begin: Tensor
    matrices: Tensor

    def __init__(self, n: int, begin: Tensor | None = None) -> None:
        super().__init__()
        self.n = n
        begin = torch.zeros(0) if begin is None else begin
        self.register_buffer("begin", begin, persistent=False)
        self.register_buffer("matrices", torch.eye(n).view(1, n, n), persistent=False)

    def forward(self, R: Tensor) -> Tensor:
        return self.matrices[0, :, :, None, None]


class SinkhornMixing(Mixing):
    """A_r = Sinkhorn(R): rows sum to one, and columns nearly.

    R[n i + j] is the logarithm of entry (i, j).  exp(R) is divided by its sums over i, then by its
    sums over j, `iterations` times.  R_0 is 0 on the diagonal and -8 elsewhere, as in the code of
    mHC-lite (arXiv:2601.05732).  So near the identity Sinkhorn's steps are short.  With normal
    noise of deviation 0.2 added to R, columns sum to 1 within 0.0014 after 20 steps, and within
    0.0015 after one division of the rows alone.
    """

    def __init__(self, n: int, iterations: int) -> None:
        super().__init__(n, -8 * (1 - torch.eye(n)).flatten())
        self.iterations = iterations

    def forward(self, R: Tensor) -> Tensor:
        return sinkhorn(R.view(self.n, self.n, *R.shape[1:]), self.iterations)


class PermutationMixing(Mixing):
    """A_r = sum over r of softmax(R)_r P_r, P_r all n! permutations: doubly stochastic, exactly.

    R_0 is 0 for the identity, the first P, and -8 for the others.  P_r has a 1 at (i, p[i]) for the
    r-th permutation p of 0 to n - 1 in lexicographic order.
    """

    def __init__(self, n: int) -> None:
        every = torch.tensor(list(permutations(range(n))))
        super().__init__(n, torch.cat([torch.zeros(1), torch.full((len(every) - 1,), -8.0)]))
        self.matrices = torch.eye(n)[every]

    def forward(self, R: Tensor) -> Tensor:
        return torch.einsum("rbs,rij->ijbs", torch.softmax(R, dim=0), self.matrices)


class KroneckerMixing(Mixing):
    """A_r = U_1 x … x U_K, U_i = p I + (1 - p) J, [p, 1 - p] = softmax(R_i), n = 2^K.

    I the identity and J the exchange of two streams; x is the Kronecker product, which is doubly
    stochastic as its factors are.  R_0 is [0, -8] for each of R_1, ..., R_K.
    """

    def __init__(self, n: int) -> None:
        super().__init__(n, torch.tensor([0.0, -8.0]).repeat(n.bit_length() - 1))

    def forward(self, R: Tensor) -> Tensor:
        A = R.new_ones(1, 1, *R.shape[1:])
        for pair in R.split(2):
            p, rest = torch.softmax(pair, dim=0)
            U = torch.stack([torch.stack([p, rest]), torch.stack([rest, p])])
            A = torch.einsum("ijbs,klbs->ikjlbs", A, U).flatten(2, 3).flatten(0, 1)
        return A


class CayleyMixing(Mixing):
    """A_r = (I - K)^-1 (I + K), K = 0.05 (R - Rᵀ): orthogonal, with determinant 1.

    R, row by row, starts at 0, so A_r at I.  Sengupta et al. 2026, arXiv:2602.18308, algorithm 8,
    as restated in the code of arXiv:2605.06729 (`arc_agi_trm/models/mixers.py` of
    arash-shahmansoori/edelta): two steps of Y <- I + K (I + Y) from Y = I + 2 K, with
    K = alpha/2 (R - Rᵀ), alpha = 0.1.  Here the equation that these steps approach is solved, so
    A_r is orthogonal to rounding for every R.
    """

    def __init__(self, n: int) -> None:
        super().__init__(n, torch.zeros(n * n))

    def forward(self, R: Tensor) -> Tensor:
        R = R.view(self.n, self.n, *R.shape[1:]).movedim((0, 1), (-2, -1))
        K, one = 0.05 * (R - R.mT), self.matrices[0]
        A: Tensor = torch.linalg.solve_ex(one - K, one + K)[0]
        return A.movedim((-2, -1), (0, 1))


def sinkhorn(R: Tensor, iterations: int) -> Tensor:
    """Divide the columns, then the rows, of exp(R) by their sums, `iterations` times.

    R: (n, n, …).  Sinkhorn & Knopp 1967: this converges to a matrix whose rows and columns sum to
    one.  In logarithms, a division by the sum is a log-softmax.
    """
    for _ in range(iterations):
        R = torch.log_softmax(torch.log_softmax(R, dim=0), dim=1)
    return torch.exp(R)
