"""Bodies that a few queries on a TPU read in large blocks, by what TPUs compute: the last block may
begin within the one before it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, model_and_method
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.cache import runs, runs_of
from kvqjax.cache.layout import few_block

LENGTHS = (720, 300)  # of 768 slots: three blocks of 256 tokens


def of_tpus(*given, default, tpu=None, **_):
    """What `jax.lax.platform_dependent` chooses in a program for a TPU."""
    return (tpu or default)(*given)


def logits(model, method, target):
    """Logits of one new token of every row after a prompt, and the cache's last run."""
    cache = kvq.init_cache(model, method, 2, 772, target=target)
    text = tokens(2, LENGTHS[0] + 1)
    _, cache = jax.jit(kvq.prefill)(model, text[:, : LENGTHS[0]], jnp.asarray(LENGTHS), cache)
    found, _ = jax.jit(lambda *given: kvq.forward(*given))(
        model, text[:, LENGTHS[0] :], jnp.ones(2, jnp.int32), cache
    )
    return np.asarray(found), runs_of(cache.layout)[-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param("aqua", marks=pytest.mark.nightly), "xquant-cl"]
)  # keys and values of every head; values summed for all heads
def test_what_flows_between_layers_is_replaced_once(name, monkeypatch):
    model, method = (
        model_and_method(name, num_layers=3)[0],
        kvq.parse(re.sub(":bits=.", ":bits=4", CASES[name][0])),
    )
    wanted, _ = logits(model, method, "cpu")
    carried = max(
        runs_of(kvq.init_cache(model, method, 1, 1).layout)[-1].wiring.chain.carry.values()
    )
    monkeypatch.setitem(runs.CARRIED, "tpu", 2 * 512 * carried)
    monkeypatch.setattr(jax.lax, "platform_dependent", of_tpus)
    got, run = logits(model, method, "v6e")
    size = few_block(run, 2, 4)
    assert (size, run.slots_here % size) == (512, 256)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.nightly
def test_no_token_of_an_evicted_body_is_seen_twice(monkeypatch):
    wanted, _ = logits(tiny(), kvq.parse("exact:keep=streaming:640"), "cpu")
    monkeypatch.setattr(runs, "TPU_LANES", 512)
    got, run = logits(tiny(), kvq.parse("exact:keep=streaming:640"), "v6e")
    size = few_block(run, 2, 4)
    assert (size, run.slots_here % size) == (512, 256)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)
