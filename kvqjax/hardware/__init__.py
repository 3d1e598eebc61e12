"""Chips, time and memory: what fits, how fast it could be, programs compiled for chips that are not
there."""
