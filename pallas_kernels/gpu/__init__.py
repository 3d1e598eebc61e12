"""Decode attention on packed bodies for NVIDIA GPUs (Mosaic GPU, Hopper)."""
