"""One query over CommVQ keys and values: commuted tables, fused gathers, summed bits, and the naive paths.

    python benchmarks/commvq_scores.py [--tokens 8192 32768] [--heads 32 --kv-heads 8 --head-dim 128] [--record FILE]

The naive path decodes all keys to memory, rotates them into a second array, repeats them for every query head and
multiplies, one program after the other, as an eager framework does. The other two work in blocks of tokens inside one
program. Values likewise: decoded whole and repeated, or bits summed first and multiplied by the codebook once, in
blocks. Least of several turns, CPU time over all threads; the shape of the paper's Table 5, not its numbers.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from kvqjax.codecs.commvq_keys import CommVQKeys
from kvqjax.config import ModelConfig
from kvqjax.methods import commvq
from kvqjax.pallas_kernels.commvq_scores import commuted_scores, fused_scores, score_operations
from kvqjax.rope import inverse_frequencies, rotate


def blockwise(scores, block: int, q, codebook, codes, prescale, positions, frequencies, kv_heads: int):
    """Scores of every block in turn, so that only one block of gathered rows exists."""

    def one(piece):
        codes, prescale, positions = piece
        return scores(q, codebook, codes[None], prescale[None], positions[None], frequencies, kv_heads=kv_heads)

    split = tuple(x[0].reshape(-1, block, *x.shape[2:]) for x in (codes, prescale, positions))
    return jnp.moveaxis(jax.lax.map(one, split), 0, 2).reshape(1, q.shape[1], -1)


def naive(config: ModelConfig, codec):
    """Three programs with whole arrays between them."""
    decode = jax.jit(lambda book, codes, scale: codec.decode({"codebook": book}, {"codes": codes, "prescale": scale}))
    turn = jax.jit(lambda k, at: rotate(k.reshape(*k.shape[:2], config.num_kv_heads, -1), at, config))
    ratio = config.num_heads // config.num_kv_heads
    repeat = jax.jit(lambda k: jnp.repeat(k, ratio, axis=2))
    dot = jax.jit(lambda q, k: jnp.einsum("bhd,bnhd->bhn", q, k) * config.head_dim**-0.5)
    return lambda q, book, codes, scale, at: dot(q, repeat(turn(decode(book, codes, scale[:, None]), at)))


def cost(run, turns: int) -> tuple[float, float]:
    """Least (wall, CPU) milliseconds of one call, after a first that compiles."""
    jax.block_until_ready(run())
    found = []
    for _ in range(turns):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(run())
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return tuple(1e3 * min(column) for column in zip(*found, strict=True))


def key_runs(options, config: ModelConfig, tokens: int) -> dict:
    """The three ways to the scores of one query."""
    codec = CommVQKeys(head_dim=options.head_dim, rounds=options.rounds).build(config.kv_width)
    rng = np.random.default_rng(0)
    book = jnp.asarray(rng.normal(size=codec.needs["codebook"]), jnp.float32)
    codes = jnp.asarray(rng.integers(0, 64, (1, tokens, codec.fields["codes"].width)), jnp.uint32)
    scale = jnp.asarray(rng.uniform(1, 2, (1, tokens)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(1, options.heads, options.head_dim)), jnp.float32)
    at, frequencies = jnp.arange(tokens)[None], jnp.asarray(inverse_frequencies(config))
    plain = naive(config, codec)
    runs = {"naive": lambda: plain(q, book, codes, scale, at)}
    for name, scores in (("commuted", commuted_scores), ("fused", fused_scores)):
        program = jax.jit(functools.partial(blockwise, scores, options.block, kv_heads=options.kv_heads))
        runs[name] = functools.partial(program, q, book, codes, scale, at, frequencies)
    return runs


def value_runs(options, config: ModelConfig, tokens: int) -> dict:
    """The two ways to the sum of 1-bit values, weighted by one query's attention, without and with whole values."""
    wiring = commvq(bits=1).layer.build(config)
    shared, codec, rng = wiring.shared, wiring.codecs["v"], np.random.default_rng(1)
    bits = jnp.asarray(rng.integers(0, 2, (1, tokens, shared.width)), jnp.uint32)
    gain = jnp.asarray(rng.uniform(1, 2, (1, 1, tokens)), jnp.float32)
    constants = {"codebook": jnp.asarray(rng.normal(size=codec.needs["codebook"]), jnp.float32)}
    weights = jax.nn.softmax(jnp.asarray(rng.normal(size=(1, options.heads, tokens)), jnp.float32))
    ratio = config.num_heads // config.num_kv_heads
    by_head = lambda v: v.reshape(*v.shape[:2], config.num_kv_heads, -1)  # noqa: E731
    decode = jax.jit(lambda bits, gain: codec.decode(constants, {"bits": bits, "gain": gain}))
    repeat = jax.jit(lambda v: jnp.repeat(by_head(v), ratio, axis=2))
    dot = jax.jit(lambda w, v: jnp.einsum("bhn,bnhd->bhd", w, v))

    @jax.jit
    def summed(bits, gain, weights):
        blocks = tuple(jnp.moveaxis(x.reshape(*x.shape[:2], -1, options.block), 2, 0) for x in (gain, weights))
        pieces = (bits[0].reshape(-1, 1, options.block, shared.width), *blocks)

        def add(total, piece):
            bits, gain, weights = piece
            stored = shared.read(constants, {"v": {"bits": bits, "gain": gain}})
            return total + jnp.einsum("bhn,bni->bhi", weights, stored), None

        mass = jax.lax.scan(add, jnp.zeros((1, options.heads, shared.width)), pieces)[0]
        return shared.finish({"v": constants}, mass[:, None])[:, 0]

    whole = lambda: dot(weights, repeat(decode(bits, gain)))  # noqa: E731
    return {"values, naive": whole, "values, bits summed first": lambda: summed(bits, gain, weights)}


def measure(options, tokens: int) -> list[dict]:
    """One row for every path: milliseconds and how many times the naive path's CPU time."""
    sizes = {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
    config, rows = ModelConfig(vocab_size=1, width=1, mlp_width=1, num_layers=1, **sizes), []
    for runs in (key_runs(options, config, tokens), value_runs(options, config, tokens)):
        first = next(iter(runs))
        wanted, costs = np.asarray(runs[first]()), {name: cost(run, options.turns) for name, run in runs.items()}
        for name, run in runs.items():
            error = float(np.abs(np.asarray(run()) - wanted).max() / np.abs(wanted).max())
            wall, cpu = costs[name]
            ratio = costs[first][1] / cpu
            row = {"tokens": tokens, "path": name, "wall_ms": wall, "cpu_ms": cpu, "naive_over_this": ratio}
            rows.append(row | {"largest_relative_difference": error})
    return rows


def operations(options) -> Table:
    """Counts per cached token, for multi-head attention and 4 and 8 query heads to a KV head."""
    table = Table(title=f"operations per cached token, D={options.head_dim}, R={options.rounds}, L=64")
    for column in ("query heads", "KV heads", "form", "gathered numbers", "adds", "multiplies", "per step"):
        table.add_column(column)
    for ratio in (1, 4, 8):
        heads = options.kv_heads * ratio
        sizes = {"kv_heads": options.kv_heads, "head_dim": options.head_dim, "rounds": options.rounds}
        for name, counts in score_operations(heads=heads, levels=64, **sizes).items():
            row = [counts[key] for key in ("gathers", "adds", "multiplies", "per_step")]
            table.add_row(*(str(x) for x in (heads, options.kv_heads, name, *row)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("heads", 32),
        ("kv-heads", 8),
        ("head-dim", 128),
        ("rounds", 11),
        ("block", 512),
        ("turns", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--record", type=Path, help="JSON file to write the rows to")
    options = parser.parse_args()
    rows = [row for tokens in options.tokens for row in measure(options, tokens)]
    table = Table(*rows[0], title=f"{options.heads} query heads, {options.kv_heads} KV heads, one core or more")
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()))
    console = Console(width=140)
    console.print(operations(options))
    console.print(table)
    if options.record:
        about = {name: value for name, value in vars(options).items() if name != "record"} | {"jax": jax.__version__}
        options.record.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
