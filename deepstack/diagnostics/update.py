"""The model update ‖ΔF‖ on a fixed probe batch, measured after every step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deepstack.base.errors import PluginError
from deepstack.model import Transformer


def token_distance(change: Tensor, kept: int = 0) -> Tensor:
    """Return the mean over tokens of ‖change‖₂, the distance that every measure of ‖ΔF‖ uses.

    change: (…, width), one row per token.
    kept: number of first dimensions over which the mean is not taken, such as layers.
    """
    lengths = change.norm(dim=-1)
    return lengths.mean(dim=tuple(range(kept, lengths.ndim)))


def model_update(F: Tensor, initial: Tensor, previous: Tensor, size: Tensor) -> dict[str, Tensor]:
    """Return the values of MODEL_UPDATE_COLUMNS from F_t, F_0, F_{t−1} and ‖F_0‖_F.

    They are 0-d tensors on the device.

    F, initial, previous: (…, width), one row per token.
    """
    moved = F - initial
    frobenius = torch.linalg.vector_norm(moved)
    return {
        "model_update": token_distance(moved),
        "model_update_step": token_distance(F - previous),
        "model_update_fro": frobenius,
        "model_update_rel": frobenius / size,
    }


class ModelUpdate:
    """‖ΔF‖_t = mean over probe tokens of ‖F_t − F_0‖₂, and related values.

    F: the last hidden state, after the last norm, in evaluation mode, in fp32, on the probe batch.
    DeepNet accumulates from initialisation (Wang et al. 2022, arXiv:2203.00555, section 3 and
    Figure 4) and states no norm; the mean over tokens is the reading its magnitudes support.
    """

    def __init__(self, model: Transformer, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        state = random_state(tokens.device)
        self.initial = self.hidden(tokens)
        if not torch.equal(state, random_state(tokens.device)):
            name = model.schemes[0].name
            raise PluginError(
                f"the scheme {name} draws random numbers in evaluation, so that ‖ΔF‖ would be "
                "noise; draw them `if self.training`, and give model.dropout > 0"
            )
        self.size = torch.linalg.vector_norm(self.initial)
        self.previous = self.initial.clone()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return F of these tokens, (batch, seq, d_model), without a graph."""
        with torch.no_grad(), evaluating(self.model):
            return self.model.hidden(tokens)

    def measure(self) -> dict[str, Tensor]:
        """Return the columns as 0-d tensors on the device, without waiting for it."""
        current = self.hidden(self.tokens)
        values = model_update(current, self.initial, self.previous, self.size)
        self.previous.copy_(current)  # in place: a captured step reads the same tensor every time
        return values

    def begin(self, measure: Callable[[Tensor], Tensor]) -> None:
        """Measure F_0 anew by `measure`, which computes F from the tokens as the steps will.

        Otherwise ‖ΔF‖ of weights that do not move would be the rounding between two codes, not 0.
        """
        with torch.no_grad():
            F = measure(self.tokens)
            self.load({"initial": F, "previous": F})

    def state(self) -> dict[str, Tensor]:
        """Return F_0 and F_{t−1}, which a checkpoint must store."""
        return {"initial": self.initial, "previous": self.previous}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore F_0 and F_{t−1} from a checkpoint."""
        self.initial.copy_(state["initial"])
        self.size.copy_(torch.linalg.vector_norm(self.initial))
        self.previous.copy_(state["previous"])


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's random generator on this device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def measuring(model: Transformer) -> Iterator[None]:
    """Set evaluation mode, plain layers and full precision inside the block.

    Hooks and taps then see every call of a module.  Every method of an instrument runs inside.
    """
    full = torch.autocast(model.embedding.device.type, enabled=False)
    with evaluating(model), model.unfused(), full:
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block and restore the mode afterwards."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()
