"""Write a trained model in the Hugging Face layout, with a model card that states what was
measured."""

import json
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from benchmarks.hf_folders import save_params
from benchmarks.train.recipes import Recipe

_FORMATS = """
## Prompt formats (kvqjax.eval.synthetic makes them)
- key-value recall: `qx47,rt05,ab31, ... ?rt` must go on with `05`
- repeated span: a span of random symbols, then the same span again
"""
_PASSKEY = "- pass key: `... The pass key is 58213. ... What is the pass key? The pass key is ` must go on with `58213`\n"  # noqa: E501


def _card(name: str, recipe: Recipe, progress: dict, figures: dict) -> str:
    c = recipe.config
    windows = "" if c.windows[0] is None else f", sliding window {c.windows[0]}"
    phases = "\n".join(
        f"| {p.steps} | {p.size} x {p.length} | "
        + ", ".join(f"{source} {share:.0%}" for source, share in p.mix.items())
        + " |"
        for p in recipe.phases
    )
    rows = "\n".join(f"| {what} | {value:.4g} |" for what, value in figures.items())
    extra = " QKV bias." * c.qkv_bias + " QK-norm." * c.qk_norm
    return f"""# {name}

{recipe.about}

{c.architecture}: {c.num_layers} layers, width {c.width}, {c.num_heads} query and {c.num_kv_heads} KV heads of
{c.head_dim}, MLP {c.mlp_width}, {c.vocab_size} pieces, tied embeddings{windows}.{extra} Weights stored as float16.
Licence: Apache-2.0, as the rest of the package.

## Training
{progress["tokens"] / 1e6:.2f} million tokens in {progress["step"]} of {recipe.steps} planned steps by
`python -m benchmarks.train {name}` (JAX and optax; Muon for the matrices, Adam for the rest). The plan:

| steps | sequences x tokens | shares |
|---|---|---|
{phases}

## Measured with exact attention in float32
The weights as stored. Losses are nats per piece; the others are shares of answers that are right in every symbol under
greedy decoding (repeated span: of symbols).

| what | value |
|---|---|
{rows}
{_FORMATS}{_PASSKEY * ("validation_loss" in figures)}"""


def export(
    folder: Path,
    name: str,
    params: dict,
    recipe: Recipe,
    tokenizer: Tokenizer,
    progress: dict,
    figures: dict,
) -> None:
    """config.json, model.safetensors (float16), tokenizer.json, tokenizer_config.json,
    MODEL_CARD.md.

    `progress` has the "step" and "tokens" of the checkpoint.
    """
    save_params(
        folder, jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), params), recipe.config
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"torch_dtype": "float16"}, indent=1) + "\n"
    )
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        # transformers' class for Qwen adds a token of its own where these two are not named.
        "pad_token": "</s>",
        "unk_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.config.max_position,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "MODEL_CARD.md").write_text(_card(name, recipe, progress, figures))
