"""Measurements inside this process: kernels, offline throughput, and models made up for them."""
