"""Whether the best learning rate stays the same over depth or width."""
