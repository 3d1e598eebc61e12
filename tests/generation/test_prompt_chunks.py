"""How prompts enter the cache in chunks: how many tokens at a time, and who hears of it."""

import dataclasses

import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation import loop
from kvqjax.generation.prompt_chunks import chunk_for, free_memory
from kvqjax.model.loading import config_of

GB = 10**9


def test_chip_and_memory_choose_the_chunk():
    """Llama-3.1-8B: a token's widest products take 4 (2 14336 + 4096 + 2 1024 + 2 4096) = 172
    KB."""
    config = config_of("llama-3.1-8b")
    assert chunk_for(config, "cpu", 1, 16 * GB) == 512
    assert chunk_for(config, "v6e", 1, None) == 2048
    assert chunk_for(config, "sm90", 1, 4 * GB) == 2048  # 0.35 GB of 0.5
    assert chunk_for(config, "sm90", 4, 4 * GB) == 512
    assert chunk_for(config, "sm90", 4, GB) == 128
    assert chunk_for(config, "sm90", 64, GB) == 128  # fewer would not be worth it
    assert chunk_for(dataclasses.replace(config, mlp_width=4 * 14336), "sm90", 1, 4 * GB) == 512


def test_free_memory_is_what_the_device_says(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 80 * GB, "bytes_in_use": 30 * GB}

    assert free_memory() > 0
    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    assert free_memory() == 50 * GB


def test_auto_is_the_chosen_chunk_and_progress_is_told(monkeypatch):
    model, told, chosen = tiny(), [], []

    def choose(config, target, batch, free):
        chosen.append((target, batch))
        return 16

    monkeypatch.setattr(loop, "chunk_for", choose)
    prompts, options = (
        [list(range(1, 41)), [5, 6, 7]],
        {"method": "kivi:bits=2,window=32", "max_new_tokens": 4},
    )
    found = kvq.generate(model, prompts, chunk="auto", progress=told.append, **options)
    assert found.tokens == kvq.generate(model, prompts, chunk=16, **options).tokens
    assert chosen == [("cpu", 2)]
    assert told == [16 / 40, 32 / 40, 1.0]


@pytest.mark.parametrize("chunk", ["many", 0, True])
def test_another_word_is_refused(chunk):
    with pytest.raises(kvq.UserError, match="chunk="):
        kvq.generate(tiny(), [[1, 2]], chunk=chunk, max_new_tokens=1)
