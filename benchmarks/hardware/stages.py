"""What `benchmarks.hardware` measures, in order of worth. A stage is a name and its items: (name, function -> rows)."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kvqjax as kvq
from benchmarks.random_model import peak_bytes, random_model
from kvqjax._timing import copy_rate, median_seconds, product_rate
from kvqjax.cache.accounting import array_bytes, ledger
from kvqjax.cache.cache_layout import CacheLayout, stored_form
from kvqjax.cli.bench import decoding as decode_steps
from kvqjax.hardware.devices import DEVICES, find_device
from kvqjax.kernel_checks import report
from kvqjax.kernel_checks.check import verdict_folder
from kvqjax.kernel_checks.choose import choose
from kvqjax.kernel_checks.trial import Candidate, decoding, full, make
from kvqjax.model import weight_trees
from kvqjax.model.config import ModelConfig, RopeConfig
from kvqjax.pallas_kernels.packed import family, target_of

__all__ = ["FULL", "STAGES", "TINY", "Sizes", "items"]

Row = dict[str, Any]
Item = tuple[str, Callable[[], list[Row]]]


class Sizes(NamedTuple):
    """How large everything is. `model` is a geometry's name, or a config; `copy` in bytes, `product` the order of
    square matrices; `million` tokens of the last stage."""

    methods: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]  # (context, rows)
    prompts: tuple[int, ...]
    million: int
    model: Any
    layers: int
    dtype: str
    copy: int
    product: int
    doctor: tuple
    repeats: int


METHODS = ("exact", "kivi:bits=2,group=128", "kivi:bits=4,group=128", "kivi:bits=2", "uniform:bits=4")
METHODS += ("kivi:bits=2,rope=pre,group=128", "kvquant:bits=3,outliers=0.01", "kvquant:bits=2,outliers=0")
METHODS += ("higgs:bits=2", "higgs:bits=4", "commvq:bits=1", "commvq:bits=2", "xquant:bits=2,latent=true")
FULL = Sizes(
    methods=METHODS,
    contexts=(8192, 131072, 32768, 524288),
    batches=(1, 8, 32),
    steps=((8192, 1), (131072, 1), (32768, 8), (32768, 1)),
    prompts=(8192, 32768),
    million=2**20,
    model="llama-3.1-8b",
    layers=32,
    dtype="bfloat16",
    copy=2**31,
    product=8192,
    doctor=report.FULL,
    repeats=10,
)
SMALL = {"vocab_size": 64, "width": 128, "mlp_width": 128, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
TINY = Sizes(
    methods=("exact", "kivi:bits=2"),
    contexts=(512,),
    batches=(1,),
    steps=((512, 1),),
    prompts=(64,),
    million=1024,
    model=ModelConfig(**SMALL, head_dim=32, rope=RopeConfig()),
    layers=1,
    dtype="float32",
    copy=2**20,
    product=64,
    doctor=(),
    repeats=1,
)


def _chip() -> str:
    """The name under which `DEVICES` knows this chip; "" where it does not."""
    try:
        return find_device(jax.local_devices()[0].device_kind).name
    except kvq.UserError:
        return ""


def _doctor(sizes: Sizes) -> Iterator[Item]:
    target, chip = target_of(jnp.zeros(())), jax.local_devices()[0].device_kind
    yield "plain paths", lambda: list(report.plain_rows(sizes.methods, target))
    if target == "cpu":
        return
    for shape in sizes.doctor:
        name = f"{shape.num_heads} heads, {shape.num_kv_heads} KV heads of {shape.head_dim}, norm {shape.qk_norm}"
        yield name, lambda shape=shape: list(report.kernel_rows(target, chip, (shape,), verdict_folder(), print))


def _ceiling(sizes: Sizes) -> Iterator[Item]:
    stated = DEVICES.get(_chip())

    def copy() -> list[Row]:
        rate = copy_rate(sizes.copy, sizes.repeats)
        return [{"what": "copy", "GB_s": rate / 1e9, "share_of_stated": stated and rate / 1e9 / stated.bandwidth}]

    def product() -> list[Row]:
        rate = product_rate(sizes.product, sizes.repeats, inner=8, dtype="bfloat16")
        return [{"what": "product", "TFLOP_s": rate / 1e12, "share_of_stated": stated and rate / 1e12 / stated.tflops}]

    yield "copy", copy
    yield "product", product


def _geometry(sizes: Sizes) -> ModelConfig:
    from kvqjax.model.loading import config_of

    return config_of(sizes.model) if isinstance(sizes.model, str) else sizes.model


def _library(context: int, batch: int, config: ModelConfig, sizes: Sizes) -> list[Row]:
    """bfloat16 keys and values through `jax.nn.dot_product_attention`: cuDNN on GPUs, XLA elsewhere."""
    name, inner = ("cudnn" if jax.default_backend() == "gpu" else "xla"), 8
    kv = jnp.zeros((batch, context, config.num_kv_heads, config.head_dim), jnp.bfloat16)
    q = jnp.ones((batch, 1, config.num_heads, config.head_dim), jnp.bfloat16)

    @jax.jit
    def chain(q, k, v):
        with jax.numpy_dtype_promotion("standard"):  # it mixes types itself
            step = lambda _, x: q + 1e-3 * jax.nn.dot_product_attention(x, k, v, implementation=name).astype(q.dtype)  # noqa: E731
            return jax.lax.fori_loop(0, inner, step, q)

    spent = median_seconds(lambda: chain(q, kv, kv), sizes.repeats) / inner
    return [_attention_row(f"bfloat16, {name}", "library", context, batch, array_bytes((kv, kv)), spent)]


def _attention_row(name: str, kernels: str, context: int, batch: int, stored: int, seconds: float) -> Row:
    stated = DEVICES.get(_chip())
    bound = None if stated is None else stored / stated.bandwidth / 1e3
    row = {"way": name, "kernels": kernels, "context": context, "batch": batch, "bytes": stored}
    row |= {"us": 1e6 * seconds, "GB_s": stored / seconds / 1e9}
    return row | {"bound_us": bound, "over_bound": None if bound is None else 1e6 * seconds / bound}


def _attention_of(text: str, context: int, batch: int, config: ModelConfig, sizes: Sizes) -> list[Row]:
    """One layer's decode attention over a full body of `method`, by what kernels="auto" takes here."""
    held = jnp.zeros(())
    method, target = kvq.parse(text), target_of(held)
    shape = dataclasses.replace(config.layer(0), width=config.width)
    about = {"capacity": context, "dtype": "bfloat16", "form": stored_form(target), "target": target}
    layout = choose(CacheLayout(shape=shape, method=method, **about), "auto", held)
    inner = 8
    trial = full(make(Candidate(None, method.layer, shape), 600, target, layout.kernels, layout.form), context, batch)
    stored = array_bytes(trial.cache.runs[0].body)
    spent = median_seconds(decoding(trial, inner), sizes.repeats) / inner
    return [_attention_row(text, layout.kernels.text(target), context, batch, stored, spent)]


def _attention(sizes: Sizes) -> Iterator[Item]:
    config = _geometry(sizes)
    for context, batch in itertools.product(sizes.contexts, sizes.batches):
        yield f"library {context} x {batch}", functools.partial(_library, context, batch, config, sizes)
        for text in sizes.methods:
            yield f"{text} {context} x {batch}", functools.partial(_attention_of, text, context, batch, config, sizes)


@functools.lru_cache(maxsize=1)
def _model(sizes: Sizes) -> kvq.Model:
    """Random weights; every layer by itself on GPUs, which read them faster so."""
    if isinstance(sizes.model, str):
        model = random_model(sizes.model, sizes.layers, sizes.dtype)
    else:
        model = kvq.Model(weight_trees.init_params(jax.random.key(0), sizes.model), (), config=sizes.model)
    on_gpu = family(target_of(jnp.zeros(()))) == "gpu"
    return model.replace(params=weight_trees.unrolled(model.params)) if on_gpu else model


def _step(text: str, context: int, batch: int, sizes: Sizes) -> list[Row]:
    model, method = _model(sizes), kvq.parse(text)
    size, run = decode_steps(model, method, context, batch, 4, sizes.repeats + 2)
    spent = median_seconds(run, sizes.repeats) / 4
    peak, of = peak_bytes()
    weights = array_bytes(model.params)
    row = {"cache": text, "context": context, "batch": batch, "ms": 1e3 * spent, "cache_bytes": size}
    return [row | {"weight_bytes": weights, "peak_bytes": peak, "peak_of": of}]


def _steps(sizes: Sizes) -> Iterator[Item]:
    plain = [text for text in sizes.methods if not text.startswith(("kvquant", "commvq", "xquant"))]
    for (context, batch), text in itertools.product(sizes.steps, plain):  # the others want calibrated constants
        yield f"{text} {context} x {batch}", functools.partial(_step, text, context, batch, sizes)


def _prompt(text: str, length: int, sizes: Sizes) -> list[Row]:
    model = _model(sizes)
    tokens, counts = jnp.ones((1, length), jnp.int32), jnp.asarray([length], jnp.int32)
    call = jax.jit(kvq.prefill)
    empty = kvq.init_cache(model, text, 1, length + 256)
    spent = median_seconds(lambda: call(model, tokens, counts, empty)[0], min(3, sizes.repeats))
    return [{"cache": text, "prompt": length, "seconds": spent, "tokens_s": length / spent}]


def _prompts(sizes: Sizes) -> Iterator[Item]:
    for length, text in itertools.product(sizes.prompts, sizes.methods[:2]):
        yield f"{text} {length}", functools.partial(_prompt, text, length, sizes)


def _million(sizes: Sizes) -> Iterator[Item]:
    def run() -> list[Row]:
        begun = time.perf_counter()
        (row,) = _step("kivi:bits=2", sizes.million, 1, sizes)
        book = ledger(jax.eval_shape(lambda: kvq.init_cache(_model(sizes), "kivi:bits=2", 1, sizes.million)))
        return [row | {"bits_stored": book.bits_stored, "seconds_in_all": time.perf_counter() - begun}]

    yield f"{sizes.million} tokens", run


STAGES: dict[str, Callable[[Sizes], Iterator[Item]]] = {
    "doctor": _doctor,
    "ceiling": _ceiling,
    "attention": _attention,
    "steps": _steps,
    "prompts": _prompts,
    "million": _million,
}


def items(sizes: Sizes) -> Iterator[tuple[str, str, Callable[[], list[Row]]]]:
    """(stage, item, function) of all, in order of worth."""
    for stage, make_items in STAGES.items():
        for name, measure in make_items(sizes):
            yield stage, f"{stage}: {name}", measure
