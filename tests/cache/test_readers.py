"""Readers of encoded bodies (kvqjax/cache/layout.py, readers/): which one reads what, and that all
attend alike."""

import csv
import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import CacheLayout, attention, runs_of
from kvqjax.cache.layout import READERS, Ask, reader_of, stored_form
from kvqjax.cache.readers.blocks import body_blocks
from kvqjax.model.loading import config_of
from kvqjax.ops.attention import Partial

TABLE = Path(__file__).parents[1] / "data" / "readers.csv"
TARGETS = ("cpu", "sm90", "v5e", "v6e")
LENGTHS = (1, 8, 64, 512)  # new tokens of a row
LARGE = dataclasses.replace(config_of("llama-3.1-8b"), num_layers=2)
SOFTCAP = 0.5  # far below most scores of a tiny model, so that a reader without it would be far off


def read_by(config, spec: str, target: str) -> str:
    """Name what reads a cache of 8192 tokens with 1, 8, 64 and 512 new ones, "stored stored blocks
    blocks"; runs that are read alike count once."""
    layout = CacheLayout(
        shape=config.kv_shape,
        method=kvq.parse(spec),
        capacity=8192,
        dtype="bfloat16",
        layers="unroll" if target == "sm90" else "scan",
        form=stored_form(target),
        target=target,
    )
    evicted = layout.method.keep is not None
    names = [
        " ".join(reader_of(Ask(run, length, evicted, dtype=layout.dtype)) for length in LENGTHS)
        for run in runs_of(layout)
    ]
    return "; ".join(dict.fromkeys(names))


def rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_what_reads_each_body():
    """The recorded choice for every case on every kind of chip. A change here is a change of speed:
    look twice."""
    for row in rows():
        if row["model"] == "tiny":
            config, spec = tiny(**CASES[row["cache"]][1]).config, CASES[row["cache"]][0]
        else:
            config, spec = LARGE, row["cache"]
        read = {target: read_by(config, spec, target) for target in TARGETS}
        assert read == {target: row[target] for target in TARGETS}, row["cache"]


def test_every_case_has_its_row():
    assert {row["cache"] for row in rows() if row["model"] == "tiny"} == set(CASES)


def attend_densely(call, carry):
    """Attend to a body by one softmax over all of it, as no reader does."""
    run, softcap = call.view.run, call.ask.softcap
    read, first, last = body_blocks(call.view, call.tokens, run.reading, call.shared)
    blocks = []
    for number in range(run.slots_here // run.reading):
        *block, carry = read(first + number, carry)
        k, v, mask = block
        blocks.append((k, v, mask & (first + number < last)))
    k, v, mask = (
        jnp.concatenate(x, 2 if x[0].dtype == bool else 1) for x in zip(*blocks, strict=True)
    )
    group = call.q.shape[2] // call.kv_heads
    k = jnp.repeat(k, group, axis=2)
    v = jnp.repeat(v, call.q.shape[2] // v.shape[2], axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", call.q, k) * call.q.shape[3] ** -0.5
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(
        mask[:, None], jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None]), 0
    )
    v = jnp.where(mask.any(1)[:, :, None, None], v, 0)
    return Partial(jnp.einsum("bhts,bshd->bthd", weights, v), jnp.moveaxis(lse, 1, 2)), carry


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "form"),
    with_nightly(
        itertools.product(CASES, ["planes", "heads"]),
        [("kivi2", "heads")],
    ),
)
def test_capped_scores_equal_a_dense_oracle(name, form, monkeypatch):
    """Of ragged rows, decoded and drafted, through every codec and every reader that this machine
    has."""
    model, method = model_and_method(name, softcap=SOFTCAP)
    plain, _ = model_and_method(name)
    cache = kvq.init_cache(model, method, 2, 512, form=form)
    counts = jnp.asarray([290, 131])
    _, cache = kvq.forward(model, tokens(2, 290), counts, cache)
    new = model, tokens(2, 5, seed=3), jnp.asarray([5, 1]), cache

    def attend(*arguments):
        logits = jax.jit(functools.partial(kvq.attend, within="chunk"))(*arguments)[0]
        return logits[0], logits[1, :1]

    found = attend(*new)
    uncapped = attend(plain, *new[1:3], kvq.init_cache(plain, method, 2, 512, form=form))
    assert np.abs(np.asarray(found[0]) - np.asarray(uncapped[0])).max() > 1e-2
    monkeypatch.setattr(attention, "ATTEND", dict.fromkeys(READERS, attend_densely))
    for got, wanted in zip(found, attend(*new), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    "spec",
    with_nightly(
        ["exact", "kivi:bits=4,window=32", "kivi:bits=4,keep=streaming:64"],
        ["kivi:bits=4,window=32"],
    ),
)
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_sinks_take_their_share(spec, softcap):
    """A sink logit for each query head: as a key that every query sees and whose value is 0."""
    shape = kvq.KVShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32)
    cache = kvq.init_cache(shape, spec, 2, 256, dtype="f32")
    key = jax.random.key(0)
    q, k, v = (jax.random.normal(key, (2, 96, heads, 32)) for heads in (4, 2, 2))
    counts = jnp.asarray([96, 40])
    sinks = jnp.asarray([0.5, -1.0, 3.0, 0.0])
    out, _ = kvq.attend_layer(cache, 0, q, k, v, counts, softcap=softcap, sinks=sinks)
    scores = np.einsum("bthd,bshd->bhts", q, np.repeat(k, 2, axis=2)) * 32**-0.5
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(np.tril(np.ones((96, 96), bool)), scores, -np.inf)
    scores = np.concatenate(
        [scores, np.broadcast_to(sinks[None, :, None, None], (2, 4, 96, 1))], -1
    )
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    wanted = np.einsum("bhts,bshd->bthd", weights, np.repeat(v, 2, axis=2))
    for row, count in enumerate((96, 40)):
        np.testing.assert_allclose(out[row, :count], wanted[row, :count], atol=2e-5)


@pytest.mark.parametrize("options", [{"softcap": 0.0}, {"softcap": -1.0}, {"sinks": jnp.zeros(3)}])
def test_score_options_that_are_none_are_one_line(options):
    shape = kvq.KVShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32)
    q, k, v = (jnp.ones((1, 1, heads, 32)) for heads in (4, 2, 2))
    with pytest.raises(kvq.UserError, match=f"{next(iter(options))}") as caught:
        kvq.attend_layer(
            kvq.init_cache(shape, "exact", 1, 32, dtype="f32"),
            0,
            q,
            k,
            v,
            jnp.ones(1, int),
            **options,
        )
    assert "\n" not in str(caught.value)
