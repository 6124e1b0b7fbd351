"""Local inference: the seam, and the core's own inferences."""
