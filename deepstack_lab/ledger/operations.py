"""Counts the arithmetic operations of a calculation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

ELEMENTWISE = ("add", "sub", "mul", "div", "sqrt")
REDUCTIONS = {"mean": 1, "var": 4}
"""Operations for each number that they read: var adds, subtracts the mean, squares, adds again."""


class Operations(TorchFunctionMode):
    """Counts two operations a term of a linear map, and one a number of elementwise ones."""

    count = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and add its count."""
        name, result = func.__name__, func(*args, **(kwargs or {}))
        if name in REDUCTIONS:
            self.count += REDUCTIONS[name] * args[0].numel()
        elif name in ELEMENTWISE:
            self.count += result.numel()
        elif name == "linear":
            self.count += 2 * args[0].numel() * len(args[1])
        else:
            raise NotImplementedError(f"{name}: its operations are not known")
        return result


def count_operations(calculate: Callable[[], object]) -> int:
    """Return the number of operations of a calculation of sums, means and linear maps.

    Raises NotImplementedError for another operation.
    """
    with Operations() as operations:
        calculate()
    return operations.count
