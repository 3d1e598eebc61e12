"""Decides whether a kernel may run on this chip: bodies to try it on, the comparison, and the store
of verdicts."""
