"""Learning rates of roles at another depth, from the depth exponents of a measurement.

Question: Which rate of each role keeps the update equal at another depth?
Asked in: docs/calibration.md
"""

PUBLIC = {
    "calibrate": ("calibrate", "calibrate"),
    "calibrate_model": ("model", "calibrate_model"),
}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
