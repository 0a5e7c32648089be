"""Module paths that people's old start scripts name."""
