"""Power laws of the loss over depth and compute, with their intervals."""
