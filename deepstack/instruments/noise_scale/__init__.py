"""The gradient noise scale S/|G|², of the model and of every layer."""
