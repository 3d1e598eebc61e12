"""Whole decode steps and prompts of Llama-3.1-8B's geometry with random weights, through
`generate`'s own loop."""

import dataclasses
import gzip
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

import kvqjax as kvq
from benchmarks.hardware.attention import temporaries
from benchmarks.hardware.caches import (
    PLAIN,
    abstract_cache,
    abstract_model,
    full_cache,
    layer_shape,
    loop_state,
    lower_loop,
    random_tile,
    random_weights,
    settings,
    small_config,
)
from benchmarks.hardware.ceilings import NO_COMMAND_BUFFERS, on_gpu
from benchmarks.hardware.log import ceiling, read_rate
from benchmarks.hardware.timing import profiled, slopes, spread
from kvqjax.cache.accounting import array_bytes
from kvqjax.hardware.prompts import prompt_operations
from kvqjax.model.loading import config_of

METHODS = ("exact", "kivi:bits=4,group=128", "kivi:bits=2,group=128")
SHAPES = ((131072, 1), (32768, 8), (8192, 1))
TINY = ((512, 2), (768, 1))
FEW, MANY, REPEATS = 4, 20, 5  # steps of a slope's ends
PROFILED = 2
ROOM = (REPEATS + 1) * (FEW + MANY) + PROFILED + 2  # tokens that rows get in all
# Texts to keep.
LISTED = {
    "exact 131072 x 1": "step_exact.hlo.gz",
    f"{METHODS[-1]} 131072 x 1": "step_kivi2.hlo.gz",
}
PROMPT_LAYERS = 8  # five programs of 32 layers were not compiled after 80 s on 16 cores
WARMED = 1  # calls of a prompt before those that count


class Case:
    """A decode loop to be measured: a method at a context and number of rows, in a form, with
    compiler options."""

    def __init__(
        self,
        text: str,
        context: int,
        batch: int,
        form: dict | None = None,
        options: dict | None = None,
    ):
        self.text, self.context, self.batch = text, context, batch
        self.form, self.options = form or PLAIN, options or {}

    def name(self, prefix: str = "") -> str:
        return f"{prefix or self.text} {self.context} x {self.batch}"


class _Model:
    """The model that cases share, and small full caches by method."""

    def __init__(self, options) -> None:
        self.options, self.config = (
            options,
            small_config() if options.tiny else config_of("llama-3.1-8b"),
        )
        self.shapes, self.rate, self.tiles = (
            abstract_model(self.config),
            read_rate(options.out, options.commit),
            {},
        )
        self.weights = random_weights(self.shapes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: all but the embedding."""
        return array_bytes(self.shapes.params | {"embed": ()})

    def compiled(self, case: Case):
        """Compile a case; also the seconds that it took."""
        begun = time.monotonic()
        shapes = abstract_cache(self.shapes, case.text, case.batch, case.context, **case.form)
        return lower_loop(self.shapes, shapes, ROOM).compile(case.options), time.monotonic() - begun

    def row(self, case: Case, name: str, compiled, repeats: int = REPEATS) -> dict:
        """Time a decode loop over rows that are nearly full."""
        program, compiled_in = compiled
        shapes = abstract_cache(self.shapes, case.text, case.batch, case.context, **case.form)
        key = case.text, str(case.form)
        if key not in self.tiles:
            self.tiles[key] = random_tile(case.text, layer_shape(self.config), **case.form)[0]
        loop = [loop_state(full_cache(shapes, self.tiles[key], case.context - ROOM), ROOM)]

        def run(steps: int) -> None:
            loop[0] = jax.block_until_ready(
                program(self.weights, loop[0], *settings(), jnp.int32(steps))
            )

        times = spread(slopes(run, FEW, MANY, repeats), 1e3)
        words = profiled(self.options.out, f"step {name}", lambda: run(PROFILED))
        cache = loop[0].cache
        sound = bool((~cache.overflow & ~cache.nonfinite & ~loop[0].done).all())
        row = (
            times
            | self._about(times["median"], case, shapes)
            | {"compiled_s": round(compiled_in, 1)}
        )
        row |= {
            "temp_bytes": temporaries(program),
            "peak_bytes": _peak(),
            "state": "done" if sound else "wrong",
        }
        short = f"{times['median']:8.3f} ms ({times['min']:.3f}..{times['max']:.3f}) {row['over_bf16']:5.2f} x bf16"
        return row | {"short": f"{short}, {row['over_own']:.2f} x own bytes, {words}"}

    def _about(self, ms: float, case: Case, shapes) -> dict:
        """Return a step's time over that of its bytes at the measured bandwidth: of a bfloat16
        cache, and its own."""
        stored = kvq.ledger(shapes).bytes
        exact = 4 * self.config.num_layers * self.config.kv_width * case.context * case.batch
        bounds = [(self.weight_bytes + size) / self.rate * 1e-6 for size in (exact, stored)]
        row = {
            "tokens_s": 1e3 * case.batch / ms,
            "cache_bytes": stored,
            "bf16_ms": bounds[0],
            "own_bytes_ms": bounds[1],
        }
        return row | {"over_bf16": ms / bounds[0], "over_own": ms / bounds[1]}


def _peak() -> int:
    """Return the most bytes that this process held on the device so far."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def measure_steps(log, options, groups: list[dict[str, Case]]) -> None:
    """Measure cases by name. Those of a group are compiled at once, then timed one after the
    other."""
    shared = _Model(options)
    with ThreadPoolExecutor(8) as pool:
        for group in groups:
            cases = {name: case for name, case in group.items() if log.new(name)}
            programs = {name: pool.submit(shared.compiled, case) for name, case in cases.items()}
            for future in programs.values():
                future.exception()  # all are compiled before anything is timed
            for name, case in cases.items():
                log.item(name, lambda: shared.row(case, name, programs[name].result()))  # noqa: B023
                if name in LISTED and not programs[name].exception():
                    with gzip.open(options.out / LISTED[name], "wt", encoding="utf-8") as file:
                        file.write(programs[name].result()[0].as_text())


def steps(log, options) -> None:
    """Measure decode steps; two programs also without command buffers."""
    bare, groups = NO_COMMAND_BUFFERS if on_gpu() else {}, []
    shapes = TINY if options.tiny else SHAPES
    for places in (shapes[:1], shapes[1:]):
        group = [Case(text, *place) for place in places for text in METHODS]
        case_of = {case.name(): case for case in group}
        for place in places[:1]:
            case = Case(METHODS[-1], *place, options=bare)
            case_of[case.name("no command buffers")] = case
        groups.append(case_of)
    measure_steps(log, options, groups)


def prompts(log, options) -> None:
    """Measure the exact prefill of one prompt by some of the model's layers, with and without
    cuDNN."""
    geometry = config_of("llama-3.1-8b")
    config = (
        small_config() if options.tiny else dataclasses.replace(geometry, num_layers=PROMPT_LAYERS)
    )
    lengths = (256,) if options.tiny else (8192, 32768)
    jobs = [("exact", length, "off") for length in lengths]
    if on_gpu():
        jobs += [("exact", length, "cudnn") for length in lengths] + [(METHODS[-1], 8192, "cudnn")]
    shapes = abstract_model(config)
    with ThreadPoolExecutor(3) as pool:
        programs = {job: pool.submit(_compiled_prompt, shapes, *job) for job in jobs}
        model = random_weights(shapes)
        for future in programs.values():
            future.exception()
        for (text, length, kernels), future in programs.items():
            name = f"{text} {length}, {config.num_layers} layers" + ", cuDNN" * (kernels == "cudnn")
            log.item(name, lambda: _prompt(model, future, length, options))  # noqa: B023


def _compiled_prompt(shapes: kvq.Model, text: str, length: int, kernels: str) -> tuple:
    cache = abstract_cache(shapes, text, 1, length + 256, form="heads", kernels=kernels)
    begun = time.monotonic()
    ids, counts = (
        jax.ShapeDtypeStruct((1, length), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    program = jax.jit(kvq.prefill, donate_argnums=3).lower(shapes, ids, counts, cache).compile()
    return program, cache, time.monotonic() - begun


def _prompt(model: kvq.Model, future, length: int, options) -> dict:
    program, cache, compiled_in = future.result()
    ids = jax.random.randint(jax.random.key(5), (1, length), 0, model.config.vocab_size)
    counts, spent, logits = jnp.full((1,), length, jnp.int32), [], None
    for _ in range(WARMED + 3):
        fresh = jax.block_until_ready(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache))
        begun = time.perf_counter()
        logits, _ = jax.block_until_ready(program(model, ids, counts, fresh))
        spent.append(time.perf_counter() - begun)
    times, product_rate = (
        spread(spent[WARMED:]),
        ceiling(options.out, options.commit, "product TFLOP/s"),
    )
    reached = prompt_operations(model.config, 0, length) / times["median"] * 1e-12
    row = times | {
        "TFLOP_s": reached,
        "share": reached / product_rate if product_rate else None,
        "compiled_s": round(compiled_in, 1),
    }
    row |= {"temp_bytes": temporaries(program), "peak_bytes": _peak()}
    share = f", {row['share']:.0%} of the product's" if product_rate else ""
    short = f"{times['median']:.3f} s ({times['min']:.3f}..{times['max']:.3f}), {reached:.0f} TFLOP/s{share}"
    return row | {"state": "done" if bool(jnp.isfinite(logits).all()) else "wrong", "short": short}


def million(log, options) -> None:
    """Measure steps over 2^20 tokens at 2 bits."""
    case = Case(METHODS[-1], 1024 if options.tiny else 2**20, 1)

    def measure() -> dict:
        shared = _Model(options)
        row = shared.row(case, case.name(), shared.compiled(case), repeats=3)
        book = kvq.ledger(abstract_cache(shared.shapes, case.text, 1, case.context))
        row |= {"ledger_bytes": book.bytes, "bits_stored": book.bits_stored}
        return row | {
            "short": f"{row['short']}, cache {book.bytes / 1e9:.2f} GB, peak {row['peak_bytes'] / 1e9:.1f} GB"
        }

    log.item(case.name(), measure)
