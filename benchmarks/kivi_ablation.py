"""KIVI's Table 2 (which axis to quantise along) and Table 5 (group size, residual length) on a model.

    python benchmarks/kivi_ablation.py [--text valid.txt] [--out benchmarks/records/kivi_ablation.json]

Table 2: 2 bits, groups of 32, the library's codecs on every layer's keys (after RoPE) and values of whole windows, with
no exact window. Relative errors are Frobenius norms in percent: of the tensor, of the attention weights softmax(q k^T)
for keys, of the attention's output for values. Sparsity: the share of causal attention weights below 1 % of their row's
largest.

Table 5: the released code's rule (`rule=published`: keys leave all at once, values one by one), 2 bits. The paper's
GSM8K needs a model that can solve it; here are the perplexity and the KL divergence of `--model` on the text, in the
loop, and stored pairs answered by `recall`, the prompt attended exactly, and in the loop.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvqjax as kvq
from kvqjax.codecs import Uniform
from kvqjax.eval import perplexity, retrieval
from kvqjax.eval.corpora import read_text
from kvqjax.eval.stamp import stamp
from kvqjax.eval.windows import windows
from kvqjax.model import decoder
from kvqjax.model.rope import rotate
from kvqjax.ops.attention import segment_attention

WINDOW = 1024
SETTINGS = ((32, 128), (64, 128), (128, 128), (32, 32), (32, 64), (32, 96))  # (group, residual length)


def layers(model: kvq.Model, tokens):
    """q [B,T,H,D], k (rotated) and v [B,T,K,D] of every layer."""
    config = model.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    h, masks = decoder.embed(model.params, tokens), decoder.window_table(config)
    for index in range(config.num_layers):
        weights = decoder.layer(model.params, index)
        made = decoder.project(weights, h, positions, config)
        k = rotate(made.k, positions, config)
        mask = decoder.causal_mask(tokens.shape[1], masks[index])
        mask = jnp.broadcast_to(mask[None], (tokens.shape[0], *mask.shape))
        h = decoder.finish(weights, h, segment_attention(made.q, k, made.v, mask).out, config)
        yield made.q, k, made.v


def coded(x, along: str):
    """[B,T,K,D] at 2 bits along tokens (per channel) or along channels (per token)."""
    batch, length, heads, size = x.shape
    codec = Uniform(bits=2, along=along, group=32).build(heads * size)
    back = codec.decode(None, codec.encode(None, x.reshape(batch * length, -1)))
    return back.reshape(x.shape)


def attention(q, k):
    """Causal weights [B,H,T,T], float32."""
    wide = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, wide) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(causal[None, None], scores, -jnp.inf), axis=-1)


def output(weights, v):
    return jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(v, weights.shape[1] // v.shape[2], axis=2))


def error(got, want) -> float:
    return float(100 * jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def table2(model: kvq.Model, tokens) -> list[dict]:
    """One row for each layer, and their mean."""
    rows = []
    for index, (q, k, v) in enumerate(layers(model, tokens)):
        weights = attention(q, k)
        causal = jnp.tril(jnp.ones(weights.shape[-2:], bool))
        small = (weights < 0.01 * weights.max(-1, keepdims=True)) & causal[None, None]
        row = {"layer": index, "sparsity": float(100 * small.sum() / (causal.sum() * weights[..., 0, 0].size))}
        for name, along in (("per token", "channels"), ("per channel", "tokens")):
            key, value = coded(k, along), coded(v, along)
            row |= {
                f"K {name}": error(key, k),
                f"attention, K {name}": error(attention(q, key), weights),
                f"V {name}": error(value, v),
                f"output, V {name}": error(output(weights, value), output(weights, v)),
            }
        rows.append(row)
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0] if name != "layer"}
    return [*rows, {"layer": "mean"} | means]


def table5(model: kvq.Model, ids: np.ndarray, tokens: int, samples: int) -> list[dict]:
    recall, rows = kvq.load("recall"), []
    for group, residual in SETTINGS:
        method = kvq.kivi(bits=2, group=group, window=residual, rule="published")
        read = perplexity(model, ids, method, window=WINDOW, chunk=32, tokens=tokens)
        row = {"group": group, "residual": residual, "bits_method": read["bits_method"]}
        row |= {name: read[name] for name in ("bits_stored", "ppl", "ppl_exact", "kld", "top1")}
        for name, chunk in (("recall, prompt exact", None), ("recall, in the loop", 32)):
            row[name] = retrieval(recall, method, length=512, samples=samples, batch=16, chunk=chunk)["accuracy"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", default="synthetic", help="a UTF-8 file; default: our own sentences")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = kvq.load(given.model)
    text, source = read_text(given.text, given.tokens, 0)
    ids = np.asarray(model.tokenizer(text)["input_ids"], np.int32)
    report = {
        "about": stamp(model, given.model, 0) | {"data": source | {"name": Path(source["name"]).name}},
        "table 2": table2(model, jnp.asarray(windows(ids, 512, 2048))),
    }
    print(json.dumps(report["table 2"], indent=1), flush=True)
    report["table 5"] = table5(model, ids, given.tokens, given.samples)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
