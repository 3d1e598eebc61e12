"""Caches for other libraries' loops, one file each: their interfaces, and nothing of theirs is
imported before it is used.

    kvqjax.adapters.tunix        the cache that tunix's `Sampler` carries, with beams
    kvqjax.adapters.tpu_inference    the paged attention of vLLM's TPU engine: flat tokens and block tables
"""
