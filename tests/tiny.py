"""A tiny random model that tests share, so that they share compiled programs too."""

import functools

import jax
import jax.numpy as jnp

import kvqjax as kvq
from kvqjax.model import decoder, weight_trees
from kvqjax.model.config import ModelConfig


@functools.cache
def tiny(**changes) -> kvq.Model:
    """2 layers, width 32, 4 query and 2 KV heads of 16, 50 tokens; random weights, no tokenizer."""
    base = {
        "vocab_size": 50,
        "width": 32,
        "mlp_width": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    config = ModelConfig(**(base | {"head_dim": 16} | changes))
    return kvq.Model(
        params=weight_trees.init_params(jax.random.key(0), config), constants=(), config=config
    )


def in_form(params: dict, form: str) -> dict:
    """The weights with their layers as `kvqjax.load(layers=form)` stores them."""
    make = {
        "scan": weight_trees.stacked,
        "switch": weight_trees.switched,
        "unroll": weight_trees.unrolled,
    }
    return make[form](params)


def spoiling() -> kvq.Model:
    """A tiny model that answers [1, 2] with token 7, whose embedding is not finite."""
    model = tiny()
    params = model.params | {"embed": model.params["embed"].at[7].set(jnp.nan)}
    h = decoder.hidden_states(params, jnp.asarray([[1, 2]]), model.config)[0, -1]
    return model.replace(params=params | {"head": params["head"].at[:, 7].set(50 * h)})


def repeating() -> kvq.Model:
    """A tiny model that answers everything with one token, again and again."""
    model = tiny()
    same = {"embed": jnp.ones_like(model.params["embed"]), "head": model.params["head"] * 1000}
    return model.replace(params=model.params | same)


def tokens(rows: int, length: int, seed: int = 1):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, 50)
