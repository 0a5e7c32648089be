"""The command line: one module per verb; each only composes the rest."""
