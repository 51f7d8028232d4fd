"""Constants that published folders hold beside the weights: masks, rotary rates, positions.

A model computes them itself.  Each is known by its content, so that no weight passes for one.
"""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError

MASK_TYPES = ("U8", "BOOL")
LARGEST_MASK = 2**28  # entries


def may_be_mask(shape: Iterable[int]) -> bool:
    """Return whether a tensor of integers has the shape of a mask, (1, …, n, n), or of a number."""
    sizes = [size for size in shape if size != 1]
    return not sizes or (len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] ** 2 <= LARGEST_MASK)


def is_mask(x: Tensor) -> bool:
    """Return whether (1, …, n, n) holds 1 for earlier positions, 0 for others, by distance alone.

    The mask of a window is one, and so is a single 0 or 1.
    """
    if not may_be_mask(x.shape):
        return False
    n = max((1, *x.shape))
    square = x.reshape(n, n)
    ones, zeros = square == 1, square == 0
    by_distance = torch.equal(ones[1:, 1:], ones[:-1, :-1])
    earlier = not ones.triu(1).any() and bool(ones[0, 0] or n == 1)
    return bool((ones | zeros).all()) and by_distance and earlier


def is_constant(name: str, x: Tensor, model: nn.Module) -> bool:
    """Return whether a tensor of a file is one that the model computes itself.

    `masked_bias` is the logit of a masked position; `inv_freq` must be the model's.
    """
    last = name.rpartition(".")[2]
    if last == "masked_bias":
        return x.numel() == 1 and float(x) <= -1e4
    if last == "inv_freq":
        own = [b for n, b in model.named_buffers() if n.rpartition(".")[2] == "inv_freq"]
        return any(are_close(x, rates) for rates in own)
    if last == "position_ids":
        return torch.equal(x.flatten(), torch.arange(x.numel()))
    return x.ndim > 1 and is_mask(x)


def are_close(x: Tensor, rates: Tensor) -> bool:
    """Return whether two lists of rates are equal up to the rounding of the first one's type."""
    if x.shape != rates.shape or not x.is_floating_point():
        return False
    tolerance = 4 * torch.finfo(x.dtype).eps
    return torch.allclose(x.double(), rates.double(), rtol=tolerance, atol=tolerance)


def refuse_quantized(files: Iterable[Path]) -> None:
    """Raise ConfigError for a tensor of bytes that is not a mask."""
    for file in files:
        for name, x in tensors_in(file, kinds=MASK_TYPES).items():
            if not is_mask(x):
                raise ConfigError(
                    f"{file}: tensor {name} is {str(x.dtype).removeprefix('torch.')}, and not a "
                    "mask; allowed fp32, fp16, bf16: dequantize the model and save it again"
                )


def tensors_in(
    file: Path, chooses: Callable[[str], bool] = lambda name: True, kinds: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors of a file with chosen names, of some types, by default of all."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        names = [name for name in content.keys() if chooses(name)]  # not a mapping
        if kinds:
            names = [name for name in names if content.get_slice(name).get_dtype() in kinds]
        return {name: content.get_tensor(name) for name in names}
