"""The native backend: weights packed for integer dot products, a paged cache in bfloat16, and a forward replayed in one call."""
