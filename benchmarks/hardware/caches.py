"""Models and caches for measuring: a geometry with random weights, and caches of any length that
are full of real codes without a prefill. What measures uses the library's inner names here
alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax as kvq
from kvqjax.cache.runs import bound_for, runs_of
from kvqjax.cache.state import bounded, units_due
from kvqjax.generation.loop import decode_steps, unbegun
from kvqjax.generation.sampling import make_sampling
from kvqjax.hardware.planner import parameter_shapes
from kvqjax.kernel_checks.trial import made_up
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import config_of
from kvqjax.model.weight_trees import unrolled
from kvqjax.pallas_kernels.chips import target_of

TILE = 4096  # encoded tokens that bodies are made of, again and again
PLAIN = {"form": "heads", "kernels": "off"}  # what XLA reads on GPUs


def target() -> str:
    """Return the kernel target of the device in use; a CPU stands in for a Hopper GPU, so that the
    same is traced."""
    name = target_of(jnp.zeros(()))
    return "sm90" if name == "cpu" else name


def layer_shape(config: ModelConfig) -> kvq.KVShape:
    """Return the shape of one layer's cache."""
    sizes = {
        name: getattr(config, name)
        for name in ("num_heads", "num_kv_heads", "head_dim", "width", "rope")
    }
    return kvq.KVShape(num_layers=1, **sizes)


LAYER = layer_shape(config_of("llama-3.1-8b"))


def small_config(layers: int = 2) -> ModelConfig:
    """Return a small geometry with heads of 128 channels."""
    sizes = {
        "vocab_size": 512,
        "width": 512,
        "mlp_width": 1024,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
    }
    return ModelConfig(num_layers=layers, rope=kvq.Rope(theta=5e5), **sizes)


def abstract_model(config: ModelConfig) -> kvq.Model:
    """Return a model of shapes, every layer by itself, as `load` stores it on GPUs."""
    return kvq.Model(
        jax.eval_shape(unrolled, parameter_shapes(config, "bfloat16")), (), config=config
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5


def random_weights(shapes: kvq.Model) -> kvq.Model:
    """Return the model with random weights on the device, made one array after the other."""
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def array(x):
        return (
            jnp.ones(x.shape, x.dtype)
            if len(x.shape) == 1
            else _normal(next(keys), x.shape, x.dtype)
        )

    return shapes.replace(params=jax.block_until_ready(jax.tree.map(array, shapes.params)))


def random_constants(layout, seed: int = 0) -> tuple:
    """Make up the calibrated constants of every run, the same for a seed whatever the dtype."""
    random = np.random.default_rng(seed)

    def run_constants(run) -> dict:
        def make(name, x):
            return jnp.asarray(made_up(name, x.shape, random), x.dtype)

        groups = run.wiring.constants(run.count, layout.dtype).items()
        return {
            group: {name: make(name, x) for name, x in names.items()} for group, names in groups
        }

    return tuple(run_constants(run) for run in runs_of(layout))


def abstract_cache(of, text: str, batch: int, capacity: int, **form):
    """Return a cache of shapes for a GPU. `of` is a model or one layer's shape; `form` says how
    bodies are stored and by which kernels they are read, by default as XLA reads them."""
    about = {"layers": "unroll", "target": target()} | (form or PLAIN)
    about |= {} if isinstance(of, kvq.Model) else {"dtype": "bfloat16"}
    return jax.eval_shape(lambda: kvq.init_cache(of, text, batch, capacity, **about))


def random_tile(text: str, layer: kvq.KVShape = LAYER, **form) -> tuple:
    """Return (a small cache of one layer that is full of random tokens, its constants)."""
    layout = abstract_cache(layer, text, 1, 2 * TILE, **form).layout
    clocks = [clock for run in runs_of(layout) for clock in run.wiring.storage.clocks]
    tokens = TILE + layout.method.sinks + max(clock.window for clock in clocks)
    cache = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), abstract_cache(layer, text, 1, tokens, **form)
    )
    fixed, keys = random_constants(layout), jax.random.split(jax.random.key(1), 4)

    def numbers(key, w):
        return jax.random.normal(key, (1, tokens, w)) + jax.random.normal(keys[3], (w,))

    widths = {name: array.shape[-1] for name, array in cache.runs[0].window.items()}
    sources = {
        name: numbers(key, width).astype("bfloat16")
        for key, (name, width) in zip(keys, widths.items())  # noqa: B905
    }
    return kvq.append(cache, [sources], jnp.full((1,), tokens, jnp.int32), constants=fixed), fixed


@functools.partial(jax.jit, static_argnames="shape")
def _stretched(x, shape):
    """`x` repeated along every axis up to `shape`, in memory of its own."""
    turns = [-(-want // max(1, have)) for want, have in zip(shape, x.shape, strict=True)]
    return jnp.copy(jax.lax.slice(jnp.tile(x, turns), (0,) * x.ndim, shape))


def full_cache(shapes, tile, tokens: int):
    """Return a cache of the shapes `shapes` whose rows hold `tokens` tokens. Their codes and scales
    are real: those of the one-layer cache `tile`, repeated."""
    lengths = jnp.full(shapes.lengths.shape, tokens, jnp.int32)
    past_sinks = lengths - shapes.layout.method.sinks
    source, parts = tile.runs[0], ("body", "sinks", "window")

    def fill(run, want):
        def stretch(want, x):
            return _stretched(x, want.shape)

        arrays = {
            name: jax.tree.map(stretch, getattr(want, name), getattr(source, name))
            for name in parts
        }
        state = want.replace(
            **arrays, flushed=tuple(jnp.zeros(x.shape, x.dtype) for x in want.flushed)
        )
        return state.replace(flushed=units_due(run, state, past_sinks))

    runs = tuple(map(fill, runs_of(shapes.layout), shapes.runs))
    return shapes.replace(
        runs=runs, lengths=lengths, finite=jnp.copy(lengths), overflow=lengths < 0
    )


def loop_state(cache, room: int):
    """Return the state of `generate`'s decode loop whose rows all want `room` tokens and more."""
    cache = bounded(cache, bound_for(cache.layout, [cache.layout.capacity] * cache.batch))

    def make(cache):
        return unbegun(cache, room)

    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(cache)):
        return jax.eval_shape(make, cache)

    def filled(value):
        return jnp.full((cache.batch,), value, jnp.int32)

    return make(cache).replace(
        uncached=jnp.ones((cache.batch,), bool), left=filled(10**6), newest=filled(1)
    )


def lower_loop(model: kvq.Model, shapes, room: int):
    """Lower `generate`'s decode loop for shapes; it takes (model, state, *settings(), steps)."""
    return decode_steps.lower(model, loop_state(shapes, room), *settings(), jnp.int32(0))


def settings() -> tuple:
    """Return greedy sampling, and an end token that no row draws."""
    return make_sampling(), jnp.full((1,), -1, jnp.int32)
