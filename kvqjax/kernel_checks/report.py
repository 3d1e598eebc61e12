"""List every kernel that concerns a chip, each with its verdict, and compare with float64 what
decoding uses there where no kernel does: XLA's path over the form that the chip stores."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvqjax.cache.append import at_layer
from kvqjax.cache.layout import CacheLayout, stored_form
from kvqjax.cache.state import body_tokens
from kvqjax.kernel_checks.check import TIMED, Checker, check_either, key_of, obtain
from kvqjax.kernel_checks.compare import MOST, Attention, worst_error
from kvqjax.kernel_checks.prompt_kernels import PromptKernel, prompt_kernel
from kvqjax.kernel_checks.store import Verdict
from kvqjax.kernel_checks.trial import SINKS, Candidate, Trial, candidates, make, of_body, speed
from kvqjax.methods import Method, exact, parse
from kvqjax.model.config import KVShape, RopeConfig
from kvqjax.ops.attention import Partial
from kvqjax.pallas_kernels.forms import OFF
from kvqjax.pallas_kernels.support import COMPILED, lookup, verified

CLOSE = 1e-4  # relative error of a plain path in float32

METHODS = (
    "kivi:bits=2,group=128",
    "kivi:bits=3,group=128",
    "kivi:bits=4,group=128",
    "kivi:bits=8,group=128",
    "kivi:bits=2",
    "kivi:bits=4",
    "kivi:bits=2,rope=pre,group=128",
    "kivi:bits=3,rope=pre,group=128",
    "kivi:bits=4,rope=pre,group=128",
    "omniscale:bits=2,group=32",
    "omniscale:bits=2,group=128",
    "omniscale:bits=4,group=32",
    "omniscale:bits=4,group=128",
    "kvarn:bits=2",
    "kvarn:bits=4",
    "kvarn:bits=4,value_bits=2",
    "oscar:bits=2,rotate=hadamard",
    "oscar:bits=4,rotate=hadamard",
    "turboquant:bits=2",
    "turboquant:bits=3",
    "turboquant:bits=4",
    "kvquant:bits=2,outliers=0",
    "kvquant:bits=3,outliers=0",
    "kvquant:bits=4,outliers=0",
    "kvquant:bits=2,outliers=0.01",
    "kvquant:bits=3,outliers=0.01",
    "kvquant:bits=4,outliers=0.01",
    "higgs:bits=2",
    "higgs:bits=3",
    "higgs:bits=4",
    "klt:bits=2,heads=own",
    "exact",
)
FEW_PLAIN = ("exact", "kivi:bits=2", "kvquant:bits=3,outliers=0.01", "higgs:bits=2")
PLAIN = (
    *FEW_PLAIN,
    "uniform:bits=4",
    "kivi:bits=3,group=128",
    "kivi:bits=4,rope=pre",
    "commvq:bits=1",
    "xquant:bits=4,latent=true",
    "kvquant:bits=2,outliers=0",
    "higgs:bits=4",
)


def _shape(heads: int, kv_heads: int, head_dim: int) -> KVShape:
    return KVShape(
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        width=heads * head_dim,
        rope=RopeConfig(theta=5e5),
    )


SHAPES = (_shape(32, 8, 128),)  # a layer of Llama-3.1-8B
FULL = (
    *SHAPES,
    _shape(32, 8, 64),  # a layer of Llama-3.2-1B
    _shape(28, 4, 128),  # 7 query heads a KV head, no power of two
    _shape(8, 8, 128),  # one query head a KV head
)
SMALL = (_shape(8, 2, 64),)  # on a CPU


def all_candidates(target: str, shapes: tuple[KVShape, ...]) -> list[Candidate | PromptKernel]:
    """List everything that has a kernel for `target`, once."""
    # Several methods may share a kernel, whose verdict is kept under its name.
    by_name: dict[str, Candidate | PromptKernel] = {}

    def layout_of(shape: KVShape, method: Method) -> CacheLayout:
        return CacheLayout(
            shape=shape, method=method, capacity=2048, dtype="bfloat16", target=target
        )

    for shape in shapes:
        for text in METHODS:
            candidate = candidates(layout_of(shape, parse(text)))[0]
            if candidate is not None:
                by_name.setdefault(candidate.name, candidate)
    for shape in shapes:
        kernel = prompt_kernel(layout_of(shape, exact()), shape)
        if kernel is not None:
            by_name.setdefault(kernel.name, kernel)
    return list(by_name.values())


def _level(
    candidate: Candidate | PromptKernel, target: str, chip: str, verdict: Verdict | None
) -> str:
    """Name the level of a kernel: verified where this chip found it right, else the table's."""
    if verdict is not None and verdict.sound:
        return verified(chip)
    entry = lookup(candidate.form, target)
    # Kernels of other projects are not in the table.
    return COMPILED if entry is None else entry.level


@functools.lru_cache(maxsize=16)
def exact_milliseconds(shape: KVShape, target: str) -> float:
    """Measure a decode step's attention over exact bfloat16 keys and values by this chip's plain
    path."""
    trial = make(Candidate(None, exact().layer, shape), 600, target, OFF, stored_form(target))
    return speed(trial, trial, TIMED).plain


def kernel_rows(
    target: str,
    chip: str,
    shapes: tuple[KVShape, ...],
    folder: Path,
    tell: Callable[[str], None],
    checker: Checker = check_either,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every candidate: its verdict, kept or made now, and its speed. `tell` is
    given a line where there is no verdict."""
    for candidate in all_candidates(target, shapes):
        run = functools.partial(checker, candidate, target, stored_form(target))
        verdict = obtain(folder, key_of(candidate, chip), run, tell)
        # The order is that of the columns.
        row: dict[str, Any] = {
            "form": candidate.name,
            "level": _level(candidate, target, chip, verdict),
            "verdict": "unknown",
            "error": None,
            "ms": None,
            "speed_against_plain": None,
            "speed_against_exact": None,
            "note": "",
        }
        if verdict is None:
            yield row
            continue
        row["verdict"] = verdict.outcome
        row["error"] = verdict.error
        row["ms"] = verdict.kernel_ms
        row["note"] = verdict.note
        if verdict.kernel_ms and verdict.plain_ms:
            row["speed_against_plain"] = verdict.plain_ms / verdict.kernel_ms
            # A kernel for prompts has no decode step to compare with.
            if isinstance(candidate, Candidate):
                exact_ms = exact_milliseconds(candidate.shape, target)
                row["speed_against_exact"] = exact_ms / verdict.kernel_ms
        yield row


def in_float64(trial: Trial, q: jax.Array) -> Partial:
    """Attend in float64, in numpy, to the keys and values that the body decodes to."""
    run = trial.run
    cache = trial.cache
    maps = run.wiring.maps
    constants = maps.prepare(at_layer(trial.constants, 0))
    body = cache.runs[0].body
    payload = {}
    for source, codec in run.wiring.storage.codecs.items():
        payload[source] = {}
        for name, field in codec.fields.items():
            array = body[source][name]
            payload[source][name] = field.packing.read(array, 0, 0, run.slots)
    # Body tokens come after the sinks.
    positions = jnp.broadcast_to(SINKS + jnp.arange(run.slots)[None], (cache.batch, run.slots))
    sources, _ = maps.decode(constants, payload, {})
    decoded = {name: x.astype(jnp.float32) for name, x in sources.items()}
    expand = maps.expand_body or maps.expand
    group = run.shape.num_heads // run.shape.num_kv_heads

    def by_query_head(x) -> np.ndarray:
        """Repeat every KV head for its query heads: [B, S, K, D] to [B, S, H, D]."""
        return np.repeat(np.asarray(x, np.float64), group, axis=2)

    k, v = map(by_query_head, expand(trial.weights, constants, decoded, positions))
    scores = np.einsum("bthd,bshd->bths", np.asarray(q, np.float64), k) * run.shape.head_dim**-0.5
    seen = np.arange(run.slots) < np.asarray(body_tokens(run, cache.runs[0]))[:, None]  # [B, S]
    scores = np.where(seen[:, None, None], scores, -np.inf)
    # A row without body tokens has the maximum -inf, from which nothing can be subtracted: 0 there.
    peak = np.where(seen.any(1), 1, 0)[:, None, None] * np.nan_to_num(scores.max(-1), neginf=0.0)
    weights = np.exp(scores - peak[..., None])
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + peak  # -inf for such a row
    out = np.einsum("bths,bshd->bthd", weights, v) / np.where(total > 0, total, 1)[..., None]
    return Partial(out, lse)


def plain_rows(
    methods: tuple[str, ...],
    target: str = "cpu",
    attention: Callable[[Trial], Attention] = of_body,
) -> Iterator[dict[str, Any]]:
    """Compare with float64 how a chip decodes without a kernel: XLA's path over bodies in the form
    that it stores. It computes in float32 on a CPU and in bfloat16 elsewhere, as models do there.

    Args:
        methods: policies.
        target: the chip's name (kvqjax.pallas_kernels.chips.TARGETS), which must be this process's.
        attention: makes attention to a trial's body.

    Yields:
        A row for every method: its name, the verdict and the largest relative error of a query.
    """
    on_cpu = target == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    tolerance = CLOSE if on_cpu else MOST
    shape = SMALL[0] if on_cpu else SHAPES[0]
    stored = stored_form(target)
    for text in methods:
        candidate = Candidate(None, parse(text).layer, shape)
        trial = make(candidate, 600, target, OFF, stored, dtype=dtype)
        rng = np.random.default_rng(0)
        size = (trial.cache.batch, 2, shape.num_heads, shape.head_dim)
        # Rounded here, so that both sides get the same queries.
        q = jnp.asarray(rng.normal(scale=0.1, size=size), dtype)
        with jax.default_matmul_precision("highest"):
            reference = in_float64(trial, q.astype(jnp.float32))
        error = worst_error(attention(trial)(q), reference)
        name = text if on_cpu else f"{text}, XLA in {stored}"
        verdict = "sound" if error <= tolerance else "wrong"
        yield {"form": name, "verdict": verdict, "error": error}


def unchecked(platform: str) -> str:
    """Say in one line what this machine cannot check."""
    if platform == "cpu":
        return (
            "not checked on a CPU: Pallas kernels for TPUs and GPUs, their speed, and cuDNN; methods whose "
            "layers feed each other (aqua, xquant_cl) are left to the tests"
        )
    return "not checked here: kernels for other chips; methods whose layers feed each other (aqua, xquant_cl)"
