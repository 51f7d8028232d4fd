"""Two forms of one module compared: their outputs and all gradients."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Form = Callable[[Tensor], Tensor]


def assert_same_gradients(
    module: nn.Module, wanted: Form, make: Callable[[], Form], x: Tensor, *, atol: float = 1e-5
) -> None:
    """Assert that a form of a module gives the output and the gradients of the wanted form.

    Gradients are taken with respect to x and the module's parameters.

    make: returns the form, which may hold the tensors to which it adds gradients.
    """
    leaves = [*module.parameters()]
    x = x.detach().requires_grad_()
    expected = wanted(x)
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, *leaves), direction)
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    y = make()(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.backward(direction)
    found = [leaf.grad for leaf in (x, *leaves)]
    torch.testing.assert_close(found, [*gradients], rtol=1e-3, atol=atol)
