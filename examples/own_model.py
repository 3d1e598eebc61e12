"""A Llama in flax.nnx that knows nothing of kvqjax's models, over kvqjax's caches: `python examples/own_model.py`.

The lines that use kvqjax end with `# kvqjax`. Weights and tokenizer are those of the bundled model "demo".
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import kvqjax as kvq  # kvqjax
from kvqjax.flax_bridge import CacheModule  # kvqjax

FOLDER = Path(kvq.__file__).parent / "assets" / "demo"  # kvqjax
PROMPT = "It was late in the evening when the traveller came at last to the house. The door was open, and "


def rotary(x, positions, theta: float):
    """Rotate [B, T, heads, D] to its positions [B, T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.einsum("bt,p->btp", positions.astype(jnp.float32), frequencies)[:, :, None]
    cos, sin, (a, b) = jnp.cos(angles), jnp.sin(angles), jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nnx.Module):
    def __init__(self, config: dict, layer: int, linear):
        self.layer, self.size, self.theta = layer, config["head_dim"], config["rope_theta"]
        width, inner = config["hidden_size"], config["num_attention_heads"] * self.size
        self.q_proj, self.o_proj = linear(width, inner), linear(inner, width)
        self.k_proj, self.v_proj = (linear(width, config["num_key_value_heads"] * self.size) for _ in "kv")

    def __call__(self, x, cache):
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.size) for p in (self.q_proj, self.k_proj, self.v_proj))
        positions = cache.positions(x.shape[1])  # kvqjax
        q, k = rotary(q, positions, self.theta), rotary(k, positions, self.theta)
        out = cache[self.layer].attend(q, k, v)  # kvqjax
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    def __init__(self, config: dict, layer: int, linear, norm):
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.input_layernorm, self.post_attention_layernorm = norm(width), norm(width)
        self.self_attn = Attention(config, layer, linear)
        self.gate_proj, self.up_proj, self.down_proj = linear(width, inner), linear(width, inner), linear(inner, width)

    def __call__(self, h, cache):
        h = h + self.self_attn(self.input_layernorm(h), cache)
        x = self.post_attention_layernorm(h)
        return h + self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Llama(nnx.Module):
    def __init__(self, config: dict, rngs: nnx.Rngs):
        def linear(inputs, outputs):
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        def norm(width):
            return nnx.RMSNorm(width, epsilon=config["rms_norm_eps"], rngs=rngs)

        count = config["num_hidden_layers"]
        self.embed = nnx.Embed(config["vocab_size"], config["hidden_size"], rngs=rngs)
        self.blocks = nnx.List([Block(config, layer, linear, norm) for layer in range(count)])
        self.norm = norm(config["hidden_size"])

    def __call__(self, tokens, cache):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h, cache)
        return self.embed.attend(self.norm(h))


def load(folder: Path) -> tuple[Llama, dict]:
    """The model of a Hugging Face folder with tied embeddings, and its config."""
    config = json.loads((folder / "config.json").read_text())
    stored = {name: jnp.asarray(x, jnp.float32) for name, x in load_file(folder / "model.safetensors").items()}
    model = Llama(config, nnx.Rngs(0))
    model.embed.embedding[...] = stored["model.embed_tokens.weight"]
    model.norm.scale[...] = stored["model.norm.weight"]
    for layer, block in enumerate(model.blocks):
        parts = {"self_attn": block.self_attn, "mlp": block}
        for name, x in stored.items():
            if name.startswith(f"model.layers.{layer}."):
                *group, last, _ = name.split(".")[3:]
                module = getattr(parts[group[0]] if group else block, last)
                parameter = module.scale if isinstance(module, nnx.RMSNorm) else module.kernel
                parameter[...] = x.T
    return model, config


@nnx.jit(donate_argnames="cache")
def step(model: Llama, tokens, cache):
    """Logits after the last of the new tokens [B, T], which the cache then holds."""
    return model(tokens, cache)[:, -1]


def generate(model: Llama, config: dict, ids: list[int], count: int, spec: str) -> list[int]:
    """The `count` tokens that greedy decoding continues `ids` with, over a cache described by `spec`."""
    sizes = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"
    layers, heads, kv_heads, size = (config[name] for name in sizes)
    shape = kvq.KVShape(num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=size)  # kvqjax
    cache = CacheModule(kvq.init_cache(shape, spec, batch=1, capacity=len(ids) + count))  # kvqjax
    found, new = [], jnp.asarray([ids])
    for _ in range(count):
        new = jnp.argmax(step(model, new, cache), -1, keepdims=True)
        found.append(int(new[0, 0]))
    return found


def main() -> None:
    model, config = load(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(PROMPT)["input_ids"]
    for spec in ("exact", "kivi:bits=2,window=32"):
        print(f"--- {spec}\n{PROMPT}{tokenizer.decode(generate(model, config, ids, 64, spec))}")


if __name__ == "__main__":
    print(f"JAX {jax.__version__} on {jax.default_backend()}")
    main()
