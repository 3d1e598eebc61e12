"""JAX's splash attention for prompts and chunks, in the interpreter, against the plain path."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

import kvqjax as kvq
from kvqjax.cache.runs import tiles_of
from kvqjax.kernel_checks import check, choose, prompt_kernels
from kvqjax.kernel_checks.compare import Speed
from kvqjax.kernel_checks.store import Verdict
from kvqjax.ops.attention import segment_attention
from kvqjax.pallas_kernels.forms import CUDNN, SPLASH
from kvqjax.pallas_kernels.splash import Blocks, block_sizes, fits, seen_blocks, splash_attention
from kvqjax.step import new_cache
from kvqjax.step.prompt import path_of

SHAPE = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)


def random(*shape: int, seed: int = 0):
    return jax.random.normal(jax.random.key(seed), shape)


# queries, keys, first query's position, sliding window, head_dim, rows
@pytest.mark.parametrize(
    ("length", "keys", "start", "sliding", "dim", "batch"),
    [
        pytest.param(128, 384, 0, None, 128, 2, marks=pytest.mark.nightly),
        pytest.param(256, 512, 256, None, 64, 1, marks=pytest.mark.nightly),
        (128, 512, 300, 100, 96, 2),
        pytest.param(128, 256, 100, 130, 256, 1, marks=pytest.mark.nightly),
        (128, 256, -40, None, 128, 1),  # the first 40 queries see nothing
        pytest.param(128, 256, -40, 20, 64, 2, marks=pytest.mark.nightly),
        pytest.param(128, 256, -500, None, 64, 1, marks=pytest.mark.nightly),  # none does
        pytest.param(
            128, 128, 4000, None, 64, 1, marks=pytest.mark.nightly
        ),  # every query sees every key
    ],
)
def test_equals_the_plain_path(length, keys, start, sliding, dim, batch):
    q, k, v = (
        random(batch, length, 4, dim),
        random(batch, keys, 2, dim, seed=1),
        random(batch, keys, 2, dim, seed=2),
    )
    newest = jnp.maximum(start + jnp.arange(length), -1)
    key = jnp.arange(keys)[None]
    mask = key <= newest[:, None]
    mask = mask if sliding is None else mask & (key > newest[:, None] - sliding)
    wanted = segment_attention(q, k, v, jnp.broadcast_to(mask[None], (batch, length, keys)))
    by_head = (x.swapaxes(1, 2).reshape(-1, keys, dim) for x in (k, v))
    found = jax.jit(splash_attention, static_argnums=(4, 5))(q, *by_head, newest, sliding, True)
    np.testing.assert_allclose(found.out, wanted.out, atol=1e-5)
    np.testing.assert_allclose(found.lse, wanted.lse, atol=1e-5)


def test_bfloat16_rounds_the_output_alone():
    """Against float64. A float32 sum of n products is off by at most n * 2^-24 of the sum of their
    magnitudes. So a score is, and with it its weight, above and below the fraction alike; the
    output is then rounded to 8 bits."""
    dim, keys, unit = 128, 384, 2.0**-24
    shapes = ((1, 128, 2, dim), (2, keys, dim), (2, keys, dim))
    q, k, v = (random(*shape, seed=seed).astype("bfloat16") for seed, shape in enumerate(shapes))
    newest = 200 + np.arange(128)
    found = jax.jit(splash_attention, static_argnums=(4, 5))(
        q, k, v, jnp.asarray(newest), 150, True
    )
    scaled = q * jnp.asarray(dim**-0.5, q.dtype)  # in the inputs' dtype, as everywhere
    wide_q, wide_k, wide_v = (np.asarray(x, np.float64) for x in (scaled[0].swapaxes(0, 1), k, v))
    scores = wide_q @ wide_k.swapaxes(1, 2)
    seen = (np.arange(keys) <= newest[:, None]) & (np.arange(keys) > newest[:, None] - 150)
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    out, lse = (weights / total @ wide_v).swapaxes(0, 1), np.log(total[..., 0]).T
    score = unit * (dim + 2) * float((np.abs(wide_q) @ np.abs(wide_k).swapaxes(1, 2)).max())
    by_weights = 2 * (score + unit * keys) * float(np.abs(wide_v).max())
    wrong = np.abs(np.asarray(found.out[0], np.float64) - out)
    np.testing.assert_array_less(wrong, by_weights + 2.0**-8 * np.abs(out))
    assert (wrong > by_weights).any()  # it was rounded
    np.testing.assert_array_less(
        np.abs(np.asarray(found.lse[0]) - lse), score + unit * (keys + 2 * np.abs(lse))
    )


def test_one_program_for_every_offset():
    traced = []

    @jax.jit
    def attend(q, k, v, newest):
        traced.append(None)
        return splash_attention(q, k, v, newest, interpret=True)

    q, k = random(1, 128, 2, 64), random(1, 256, 64)
    for start in (0, 77, 128):
        attend(q, k, k, start + jnp.arange(128))
    assert len(traced) == 1


def test_blocks_that_no_query_sees_are_left_out():
    blocks = Blocks(128, 256, 128)
    newest = jnp.concatenate([jnp.arange(600, 728), jnp.full(128, -1)])
    first, last = seen_blocks(newest, 2048, blocks, None)
    np.testing.assert_array_equal(first, [0, 0])
    np.testing.assert_array_equal(last, [3, 0])
    first, last = seen_blocks(newest, 2048, blocks, 64)
    np.testing.assert_array_equal(first, [2, 0])
    np.testing.assert_array_equal(last, [3, 0])


def test_what_has_no_blocks_of_whole_lanes_has_no_kernel():
    assert block_sizes(2048, 32768) == Blocks(1024, 2048, 1024)
    assert fits(512, 640, 64)
    assert not fits(500, 640, 64)
    assert not fits(512, 100, 64)
    assert not fits(512, 640, 80)


@pytest.mark.parametrize(("fault", "outcome"), [(0.0, "faster"), (0.02, "wrong")])
def test_it_is_checked_as_our_kernels_are(fault, outcome):
    """In the interpreter as it is, and with every output 2 % too large."""

    def kernel(body, q):
        found = prompt_kernels._by_splash(body, q, interpret=True)
        return found._replace(out=found.out * (1 + fault))

    form = prompt_kernels.PromptKernel(SPLASH, num_heads=4, num_kv_heads=2, head_dim=64)
    found = prompt_kernels.check_prompt_kernel(
        form, kernel=kernel, timed=lambda *_: Speed(1.0, 2.0)
    )
    assert found.outcome == outcome
    assert outcome == "wrong" or found.error < 0.01


@pytest.fixture
def tpu(tmp_path, monkeypatch):
    """A TPU is imitated, on which splash attention is found to be what is asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(new_cache, "target_of", lambda held: "v6e")
    monkeypatch.setattr(choose, "target_of", lambda held: "v6e")
    monkeypatch.setattr(choose, "_chip_of", lambda held: "imitated v6e")

    def become(outcome: str):
        verdict = Verdict(outcome=outcome, error=0.0, seconds=0.1)
        monkeypatch.setattr(check, "check_prompt_kernel", lambda form: verdict)
        choose._usable.cache_clear()

    yield become
    choose._usable.cache_clear()


@pytest.mark.parametrize(("fault", "outcome"), thinned([(0.0, "faster"), (0.02, "wrong")], 2))
def test_cudnn_is_checked_by_the_same_rule(fault, outcome):
    """XLA's products stand in for cuDNN on a CPU, as they are and with every output 2 % too
    large."""

    def kernel(body, q):
        found = prompt_kernels._by_cudnn(body, q)
        return found._replace(out=found.out * (1 + fault))

    form = prompt_kernels.PromptKernel(CUDNN, num_heads=4, num_kv_heads=2, head_dim=64)
    assert (
        prompt_kernels.check_prompt_kernel(
            form, kernel=kernel, timed=lambda *_: Speed(1.0, 2.0)
        ).outcome
        == outcome
    )


def test_a_cache_for_a_gpu_says_that_prompts_take_cudnn():
    cache = kvq.init_cache(SHAPE, "exact", 1, 2048, kernels="cudnn", target="sm90", dtype="bf16")
    assert "kernels cudnn: cuDNN for prompts (forced)" in repr(cache)
    assert path_of(cache.layout, 1, 8192).kernels == "cudnn"
    # Nobody checked it where the chip is not here.
    planned = kvq.init_cache(SHAPE, "exact", 1, 2048, target="sm90", dtype="bf16")
    assert path_of(planned.layout, 1, 8192).kernels == "tiles"


def test_a_cache_says_whether_chunks_take_it(tpu):
    make = functools.partial(kvq.init_cache, SHAPE, "exact", 1, 2048)
    tpu("faster")
    assert tiles_of(make().layout) == "splash"
    assert make().layout.kernels.text("v6e") == "kernels auto: splash for chunks (checked)"
    assert tiles_of(make(kernels="off").layout) == "off"
    assert make(kernels="splash").layout.kernels.basis == "forced"
    other = dataclasses.replace(SHAPE, head_dim=80)
    with pytest.raises(kvq.UserError, match="here: 80 channels in float32, for v6e"):
        kvq.init_cache(other, "exact", 1, 2048, kernels="splash")


def test_what_it_was_found_to_be_counts(tpu):
    tpu("wrong")
    with pytest.warns(
        UserWarning, match="kernel for splash, 2 KV heads of 64, 2 queries each is not used"
    ):
        layout = kvq.init_cache(SHAPE, "exact", 1, 2048).layout
    assert tiles_of(layout) == "off"
    assert tiles_of(dataclasses.replace(layout, target="cpu")) == "off"
