"""Decode attention on packed bodies for TPUs (Mosaic)."""
