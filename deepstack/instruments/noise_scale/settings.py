"""Setting, columns and memory of the gradient noise scale, without torch."""

from typing import Any

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from deepstack.config import (
    SNAPSHOTS,
    InstrumentSpec,
    MeasurementSizes,
    Section,
    declare,
    log_settings,
    unused_without,
)


@log_settings(place=50)
class NoiseScaleSettings(Section):
    noise_scale: bool = False
    """Whether a record has the gradient noise scale: a pass for each of the probe_sequences."""

    _check_noise_scale = unused_without(noise_scale={"log.layers_every": ()})

    @field_validator("noise_scale")
    @classmethod
    def _noise_needs_two_sequences(cls, chosen: bool, info: Any) -> bool:
        if chosen and info.data.get("probe_sequences") == 1:
            raise PydanticCustomError(
                "relation",
                "found true under log.probe_sequences=1; allowed false, or 2 sequences or more",
            )
        return chosen


COLUMNS = {
    "model_noise_scale": (
        "S/|G|²",
        "sequences",
        "Gradient noise scale of all trained parameters, S/|G|²; NaN where |G|² is not above 0.",
    ),
    "model_gradient_variance": (
        "S",
        "",
        "Unbiased trace of the covariance of a sequence's gradient, over all trained parameters.",
    ),
    "model_gradient_square": (
        "|G|²",
        "",
        "Unbiased square of the mean gradient, ‖ḡ‖² − S/B; noise can make it negative.",
    ),
}


def memory(sizes: MeasurementSizes) -> int:
    """Return the bytes of a gradient, and in double precision its rows and their sum."""
    return 5 * sizes.trained + sizes.saved


SPEC = declare(
    InstrumentSpec(
        "noise_scale",
        every=SNAPSHOTS,
        switch="noise_scale",
        columns=COLUMNS,
        memory=memory,
        module=__name__,
    )
)
