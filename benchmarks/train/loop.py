"""The training loop: data parallel over all devices, resumable, one checkpoint file replaced
atomically."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, muon
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.train import data, model
from benchmarks.train.recipes import Recipe
from benchmarks.train.start import starting_params


def _schedule(peak: float, recipe: Recipe):
    start = recipe.steps - int(recipe.decay * recipe.steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0, peak, recipe.warmup),
            optax.linear_schedule(peak, 0, recipe.steps - start),
        ],
        [start],
    )


def _optimizer(recipe: Recipe, params: dict) -> optax.GradientTransformation:
    """Stacked matrices [L, in, out] by Muon (orthogonalised momentum), embeddings, norms and biases
    by Adam."""
    dims = jax.tree.map(lambda p: MuonDimensionNumbers(1, 2) if p.ndim == 3 else None, params)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            _schedule(recipe.matrix_rate, recipe),
            adam_learning_rate=_schedule(recipe.rate, recipe),
            adam_b2=0.98,
            weight_decay=0.01,
            muon_weight_dimension_numbers=dims,
        ),
    )


def _step(recipe: Recipe, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh):
    def gradient(params, tokens, weights):
        return jax.lax.psum(
            jax.value_and_grad(model.loss)(params, tokens, weights, recipe.config), "data"
        )

    rows, replicated = PartitionSpec("data"), PartitionSpec()
    parallel = jax.shard_map(
        gradient,
        mesh=mesh,
        in_specs=(replicated, rows, rows),
        out_specs=replicated,
        check_vma=False,
    )

    def step(params, state, tokens, weights):
        total = jnp.maximum(weights.sum(), 1.0)
        loss, grads = parallel(params, tokens, weights / total)
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):  # optax needs both
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def _save(path: Path, state: dict) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(flax.serialization.to_bytes(jax.device_get(state)))
    os.replace(part, path)


def train(
    recipe: Recipe,
    corpus: data.Corpus,
    folder: Path,
    report: Callable[[dict, int], str],
    save_seconds: float = 180.0,
) -> dict:
    """Train to the end of the recipe, or go on from `folder`'s checkpoint; returns the params.

    `report(params, step)` is called at every checkpoint; its line and the loss are appended to
    `folder`/log.txt.
    """
    params = starting_params(recipe.seed, recipe.config, recipe.offsets, recipe.key_bias)
    optimizer = _optimizer(recipe, params)
    state = {"params": params, "optimizer": optimizer.init(params), "step": 0, "tokens": 0}
    checkpoint = folder / "checkpoint.msgpack"
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        state = flax.serialization.from_bytes(state, checkpoint.read_bytes())
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    params, opt_state = jax.device_put((state["params"], state["optimizer"]), replicated)
    step, losses, saved = _step(recipe, optimizer, mesh), [], time.monotonic()
    begun, first = time.monotonic(), int(state["tokens"])
    tokens_seen = first
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=recipe.steps, completed=int(state["step"]))
        for number in range(int(state["step"]), recipe.steps):
            phase = recipe.phase(number)
            tokens, weights = data.batch(recipe.seed, number, phase, corpus)
            params, opt_state, loss = step(
                params, opt_state, *jax.device_put((tokens, weights), rows)
            )
            losses.append(float(loss))
            tokens_seen += weights.size
            progress.update(bar, advance=1, description=f"loss {np.mean(losses[-50:]):.3f}")
            if time.monotonic() - saved > save_seconds or number + 1 == recipe.steps:
                saved = time.monotonic()
                _save(
                    checkpoint,
                    {
                        "params": params,
                        "optimizer": opt_state,
                        "step": number + 1,
                        "tokens": tokens_seen,
                    },
                )
                rate = (tokens_seen - first) / (saved - begun)
                line = f"step {number + 1} tokens {tokens_seen} {rate:.0f} tok/s loss {np.mean(losses[-50:]):.4f}"
                with (folder / "log.txt").open("a") as log:
                    log.write(f"{line} {report(jax.device_get(params), number + 1)}\n")
    return jax.device_get(params)
