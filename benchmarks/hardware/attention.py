"""One layer's attention of one new token a row, over long bodies: XLA's path over every method's
codes, and JAX's own functions over bfloat16 keys and values.

Bodies that a second-level cache could hold are timed with other data read between two calls, whose
time is taken off.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

import kvqjax as kvq
from benchmarks.hardware.caches import LAYER, abstract_cache, full_cache, random_tile
from benchmarks.hardware.ceilings import on_gpu
from benchmarks.hardware.log import read_rate
from benchmarks.hardware.timing import profiled, slopes, spread
from kvqjax.cache.accounting import array_bytes

METHODS = (
    "exact",
    "kivi:bits=2,group=128",
    "kivi:bits=4,group=128",
    "higgs:bits=2",
    "kvquant:bits=3",
)
MORE = ("kivi:bits=2", "turboquant:bits=2", "commvq:bits=1", "klt:bits=2", "aqua:bits=2")
SHAPES = ((131072, 1), (32768, 8), (8192, 1), (32768, 1), (131072, 8))
MORE_AT = ((32768, 8), (512, 1))
TINY = ((512, 1), (1024, 2))
INNER, FEW, MANY = 8, 1, 5  # calls in a program; programs of a slope's ends
BF16_BYTES = 2 * 8 * 128 * 2  # of a token's keys and values in a layer
# A second-level cache's bytes at most; what is read between two calls.
L2, SWEEP = (
    64 * 2**20,
    256 * 2**20,
)


def vectors(batch: int) -> list[jax.Array]:
    """A new token's query, key and value for every row: short queries, so that no token takes all
    the weight."""
    keys = jax.random.split(jax.random.key(2), 3)

    def draw(key, heads):
        return jax.random.normal(key, (batch, 1, heads, 128), jnp.bfloat16)

    return [draw(keys[0], 32) * jnp.bfloat16(0.25), draw(keys[1], 8), draw(keys[2], 8)]


def _swept(x, sweep):
    """Return `x`, after all of `sweep` was read."""
    if sweep is None:
        return x
    seed = jax.lax.bitcast_convert_type(x.ravel()[0], jnp.uint16).astype(jnp.uint32)
    return jnp.where(jnp.max(sweep ^ seed) == 0, x + 1, x)


def _fed(q, out):
    """Return the next query: the first one, hardly changed by what attention gave."""
    return q + (1e-3 * out.astype(jnp.float32)).astype(q.dtype)


@jax.jit
def layer_chain(x, cache, q, k, v, fixed, sweep):
    """Call `attend_layer` INNER times, each fed by the one before."""
    counts = jnp.ones((q.shape[0],), jnp.int32)

    def step(_, x):
        # So that nothing of the cache is done before the loop.
        loop_cache, x = jax.lax.optimization_barrier((cache, x))
        out, _ = kvq.attend_layer(loop_cache, 0, x, k, v, counts, constants=fixed)
        return _swept(_fed(q, out), sweep)

    return jax.lax.fori_loop(0, INNER, step, x)


@functools.partial(jax.jit, static_argnames="name")
def library_chain(x, kv, q, sweep, *, name: str):
    """Call `jax.nn.dot_product_attention` likewise."""

    def step(_, x):
        (k, v), x = jax.lax.optimization_barrier((kv, x))
        with jax.numpy_dtype_promotion("standard"):
            return _swept(
                _fed(q, jax.nn.dot_product_attention(x, k, v, implementation=name)), sweep
            )

    return jax.lax.fori_loop(0, INNER, step, x)


@jax.jit
def _sweep_chain(x, q, sweep):
    return jax.lax.fori_loop(0, INNER, lambda _, x: _swept(_fed(q, x), sweep), x)


def _timed(program, x, *arguments) -> tuple[list[float], jax.Array]:
    """Return the seconds of one of a program's INNER calls, and what it gave."""

    def run(turns: int) -> None:
        y = x
        for _ in range(turns):
            y = program(y, *arguments)
        jax.block_until_ready(y)

    return [s / INNER for s in slopes(run, FEW, MANY)], program(x, *arguments)


def temporaries(program) -> int:
    """Return the bytes that a compiled program takes beside its arguments."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes if memory else -1


class Bench:
    """Shared parts of the items of a block: the memory that is read between two calls, and its
    time."""

    def __init__(self, options) -> None:
        self.out, self.rate = options.out, read_rate(options.out, options.commit)
        self.sweep = jax.random.bits(
            jax.random.key(3), ((2**20 if options.tiny else SWEEP) // 4,), jnp.uint32
        )
        q = vectors(1)[0]
        seconds, _ = _timed(_sweep_chain.lower(q, q, self.sweep).compile(), q, q, self.sweep)
        self.sweep_us = spread(seconds, 1e6)["median"]

    def between(self, stored: float):
        """Return the array to read between two calls that read `stored` bytes; None where those are
        many."""
        return self.sweep if stored < 4 * L2 else None

    def row(
        self, name: str, program, x, arguments, stored: float, context: int, batch: int
    ) -> dict:
        """Time a program and say what it reached, against bfloat16 keys and values at the best
        bandwidth."""
        seconds, out = _timed(program, x, *arguments)
        words = profiled(
            self.out,
            f"layer {name} {context} x {batch}",
            lambda: jax.block_until_ready(program(x, *arguments)),
        )
        sweep_us = self.sweep_us if arguments[-1] is not None else 0.0
        us = {word: value - sweep_us for word, value in spread(seconds, 1e6).items()}
        bound = BF16_BYTES * context * batch / self.rate * 1e-3
        fine = bool(jnp.isfinite(out.astype(jnp.float32)).all()) and bool((out != x).any())
        row = us | {"bytes": stored, "GB_s": stored / us["median"] * 1e-3, "bf16_us": bound}
        row |= {
            "over_bf16": us["median"] / bound,
            "swept": sweep_us > 0,
            "state": "done" if fine else "wrong",
        }
        short = f"{us['median']:9.1f} us ({us['min']:.1f}..{us['max']:.1f}) {row['GB_s']:6.0f} GB/s"
        short += f" {row['over_bf16']:5.2f} x bf16, {words}"
        return row | {"temp_bytes": temporaries(program), "short": short}


def layer_program(text: str, body: tuple, context: int, batch: int, bench: Bench, **form) -> tuple:
    """Return (compiled chain, its arguments but the first, stored bytes) of a method at a shape.
    `body` is the method's `random_tile`."""
    (tile, fixed), (q, k, v) = body, vectors(batch)
    shapes = abstract_cache(LAYER, text, batch, context, **form)
    stored = kvq.ledger(shapes).bytes
    arguments = (full_cache(shapes, tile, context - 1), q, k, v, fixed, bench.between(stored))
    return layer_chain.lower(q, *arguments).compile(), arguments, stored


def _library_program(name: str, context: int, batch: int, bench: Bench) -> tuple:
    """Likewise of JAX's own attention."""
    q, keys = vectors(batch)[0], jax.random.split(jax.random.key(4))
    kv = tuple(jax.random.normal(key, (batch, context, 8, 128), jnp.bfloat16) for key in keys)
    stored = array_bytes(kv)
    arguments = (kv, q, bench.between(stored))
    return library_chain.lower(q, *arguments, name=name).compile(), arguments, stored


def attention(log, options) -> None:
    """Measure all shapes; the programs of a shape are compiled at once, and then timed one after
    the other."""
    bench = Bench(options)
    libraries = ("cudnn", "xla") if on_gpu() else ("xla",)
    with ThreadPoolExecutor(8) as pool:
        tiles = {text: pool.submit(random_tile, text) for text in (*METHODS, *MORE)}
        for context, batch in TINY if options.tiny else SHAPES:

            def build(text):
                return layer_program(text, tiles[text].result(), context, batch, bench)  # noqa: B023

            jobs = {
                text: (build, text) for text in (*METHODS, *MORE * ((context, batch) in MORE_AT))
            }
            jobs |= {name: (_library_program, name, context, batch, bench) for name in libraries}
            jobs = {f"{name} {context} x {batch}": job for name, job in jobs.items()}
            programs = {name: pool.submit(*job) for name, job in jobs.items() if log.new(name)}
            for future in programs.values():
                future.exception()  # all are compiled before anything is timed
            for name in list(programs):
                log.item(name, lambda: _measured(name, programs.pop(name), context, batch, bench))  # noqa: B023


def _measured(name: str, future, context: int, batch: int, bench: Bench) -> dict:
    program, arguments, stored = future.result()
    return bench.row(name, program, vectors(batch)[0], arguments, stored, context, batch)
