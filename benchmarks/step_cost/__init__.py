"""One decode step against the bound of an ideal bf16 cache, from programs compiled ahead of time."""
