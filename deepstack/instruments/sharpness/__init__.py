"""The largest eigenvalue of the loss's Hessian, plain and preconditioned."""
