"""Ablations of single methods, from one table of cases."""
