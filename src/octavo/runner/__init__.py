"""Runs step plans on a loaded model."""
