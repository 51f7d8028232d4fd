"""Operations of layer norms and matrix products are counted by hand and by the counter."""

import pytest
import torch
import torch.nn.functional as F

from deepstack_lab.ledger.claims.folding import norm_and_map
from deepstack_lab.ledger.operations import count_operations

TOKENS, WIDTH, OUTPUTS = 4, 8, 5
X, W, B = torch.randn(TOKENS, WIDTH), torch.randn(OUTPUTS, WIDTH), torch.zeros(OUTPUTS)
GAIN, BIAS = torch.randn(2, WIDTH)
PRODUCTS = 2 * TOKENS * WIDTH * OUTPUTS


def test_a_product_has_two_operations_a_term() -> None:
    assert count_operations(lambda: F.linear(X, W, B)) == PRODUCTS


def test_gain_and_bias_add_two_operations_a_number() -> None:
    plain = count_operations(lambda: norm_and_map(X, W, B)) - PRODUCTS
    affine = count_operations(lambda: norm_and_map(X, W, B, GAIN, BIAS)) - PRODUCTS
    assert affine - plain == 2 * X.numel()
    # mean, variance, x − μ and the quotient: 7 a number; σ² + ε and its root: 2 a token
    assert plain == 7 * X.numel() + 2 * TOKENS


def test_the_norm_whose_operations_are_counted_is_the_layer_norm() -> None:
    expected = F.linear(torch.layer_norm(X, (WIDTH,), GAIN, BIAS), W, B)
    torch.testing.assert_close(norm_and_map(X, W, B, GAIN, BIAS), expected)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="exp"):
        count_operations(X.exp)
