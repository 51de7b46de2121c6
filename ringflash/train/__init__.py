"""Training around the ring: start of the ranks, gradients summed once, the loop, evaluation, what a run leaves behind."""
