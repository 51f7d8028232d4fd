"""Settings and memory of the attribution of ‖ΔF‖, without torch."""

from typing import Literal

from deepstack.config import (
    InstrumentSpec,
    Interval,
    MeasurementSizes,
    Section,
    declare,
    log_settings,
    unused_without,
)


@log_settings(place=60)
class AttributionSettings(Section):
    attribution_every: Interval = 0
    """Steps between records of which roles and layers moved F: a forward of the probe for each."""
    attribution_from: Literal["initial", "current"] = "initial"
    """Whether a part's change is applied to the initial or taken back from current parameters."""


@log_settings(place=90)
class FirstOrderSettings(Section):
    first_order: bool = False
    """Whether the same is recorded of the linearised model too: a forward-mode pass for each."""

    _check_first_order = unused_without(first_order={"log.attribution_every": ()})


def memory(sizes: MeasurementSizes) -> int:
    """Return the bytes of θ_t and of a part's parameters."""
    return sizes.weights + 2 * sizes.bank


def memory_first_order(sizes: MeasurementSizes) -> int:
    """Return the bytes of θ_t, the difference, zeros, and the tangents of a part."""
    return 4 * sizes.weights + 2 * sizes.bank


ATTRIBUTION = declare(
    InstrumentSpec(
        "attribution",
        every="attribution_every",
        section="attribution",
        first_step=1,  # at step 0 nothing has moved yet
        needs_initial=True,
        memory=memory,
        module=__name__,
    )
)
FIRST_ORDER = declare(
    InstrumentSpec(
        "first_order",
        every="attribution_every",
        switch="first_order",
        section=None,  # it has the columns of the attribution
        first_step=1,
        needs_initial=True,
        memory=memory_first_order,
        module=__name__,
    )
)
