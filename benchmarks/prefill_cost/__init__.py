"""Prompts against the matrix unit's peak: a whole prompt, or one chunk of it through a cache, compiled and counted."""
