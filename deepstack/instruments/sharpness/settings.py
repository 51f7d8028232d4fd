"""Setting, columns and memory of the sharpness, without torch."""

from deepstack.config import (
    InstrumentSpec,
    Interval,
    MeasurementSizes,
    Section,
    declare,
    log_settings,
)


@log_settings(place=70)
class SharpnessSettings(Section):
    sharpness_every: Interval = 0
    """Steps between records of the Hessian's largest eigenvalue: 50 to 800 forward passes each."""


COLUMNS = {
    "sharpness": ("λ_{max}(H)", "", "Largest eigenvalue of the Hessian of the probe batch's loss."),
    "sharpness_residual": ("‖Hv − λv‖", "", "An eigenvalue of H is at most this far from λ."),
    "preconditioned_sharpness": (
        "λ_{max}(P⁻¹H)",
        "",
        "Largest eigenvalue of P^(−1/2) H P^(−1/2); the optimizer moves by −lr m / P.",
    ),
    "preconditioned_residual": ("‖Hv − λv‖", "", "The residual of preconditioned_sharpness."),
    "stability_threshold": (
        "λ*",
        "",
        "Preconditioned sharpness above which the optimizer diverges on a quadratic function.",
    ),
    "hessian_products": ("", "", "Hessian-vector products that both eigenvalues took."),
}


def memory(sizes: MeasurementSizes) -> int:
    """Return the bytes of vectors in double precision, gradients, and the graph of a gradient."""
    return 22 * sizes.trained + 4 * sizes.saved


SPEC = declare(
    InstrumentSpec(
        "sharpness",
        every="sharpness_every",
        columns=COLUMNS,
        needs_whole_matrices=True,
        memory=memory,
        module=__name__,
    )
)
