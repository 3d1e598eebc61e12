"""A model and its cache on several devices and hosts."""
