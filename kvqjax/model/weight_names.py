"""Our parameters by the names that Hugging Face gives their tensors, and the language part of a larger checkpoint."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import jax

from kvqjax._errors import UserError
from kvqjax.model.checkpoint import Checkpoint, Tensor
from kvqjax.model.config import ModelConfig
from kvqjax.model.experts import Rows
from kvqjax.model.weight_trees import init_params

__all__ = ["MATRICES", "Parameter", "experts_apart", "language_part", "parameters"]

# Our name -> (Hugging Face name, whether it is a matrix, of which the last two axes are swapped). Names under "layers/"
# exist once per layer, those with {} once per expert too.
_NAMES = {
    "embed": ("model.embed_tokens.weight", False),
    "norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
    "layers/attn_norm": ("input_layernorm.weight", False),
    "layers/mlp_norm": ("post_attention_layernorm.weight", False),
    "layers/router": ("mlp.gate.weight", True),
    "layers/shared_router": ("mlp.shared_expert_gate.weight", True),
    **{f"layers/{n}": (f"mlp.{n}_proj.weight", True) for n in ("gate", "up", "down")},
    **{f"layers/experts_{n}": (f"mlp.experts.{{}}.{n}_proj.weight", True) for n in ("gate", "up", "down")},
    **{f"layers/shared_{n}": (f"mlp.shared_expert.{n}_proj.weight", True) for n in ("gate", "up", "down")},
    **{f"layers/{n}": (f"self_attn.{n}_proj.weight", True) for n in "qkvo"},
    **{f"layers/{n}_bias": (f"self_attn.{n}_proj.bias", False) for n in "qkv"},
    **{f"layers/{n}_norm": (f"self_attn.{n}_norm.weight", False) for n in "qk"},
}
MATRICES = frozenset(name for name, (_, matrix) in _NAMES.items() if matrix)
# What one family calls otherwise.
_OWN_NAMES = {
    "MixtralForCausalLM": {
        "layers/router": "block_sparse_moe.gate.weight",
        "layers/experts_gate": "block_sparse_moe.experts.{}.w1.weight",
        "layers/experts_down": "block_sparse_moe.experts.{}.w2.weight",
        "layers/experts_up": "block_sparse_moe.experts.{}.w3.weight",
    }
}
# A checkpoint of pictures and text: what stands in front of the language part's names, and of the vision part's.
_LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_WRAPPERS = ("module.", "_orig_mod.")  # of data parallel training, of torch.compile

# One tensor for all experts of a layer, as newer releases of transformers save them: the matrices that lie in it one
# after the other, expert by expert.
_FUSED = {"gate_up_proj": ("experts_gate", "experts_up"), "down_proj": ("experts_down",)}
_FUSED_NAME = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)(_scale_inv)?")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")


class Parameter(NamedTuple):
    """One entry of the params pytree. `layers` are the numbers of the layers that have it, None outside of layers;
    `shape` is that of one layer; `tensors` names, for each layer, the tensors of its experts or the one tensor."""

    name: str
    layers: tuple[int, ...] | None
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, ...], ...]
    matrix: bool
    rows: bool

    @property
    def by_expert(self) -> bool:
        return self.matrix and len(self.shape) == 3


def _hf_name(config: ModelConfig, name: str) -> str:
    return _OWN_NAMES.get(config.architecture, {}).get(name, _NAMES[name][0])


def parameters(config: ModelConfig) -> list[Parameter]:
    """All parameters of a model, from the one place that defines their shapes."""
    tree = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    layers, found = tree.pop("layers"), []
    for name, leaf in (tree | {f"layers/{name}": leaf for name, leaf in layers.items()}).items():
        hf_name, matrix = _hf_name(config, name), _NAMES[name][1]
        if not name.startswith("layers/"):
            found.append(Parameter(name, None, leaf.shape, ((hf_name,),), matrix, rows=False))
            continue
        rows = isinstance(leaf, Rows)
        numbers, shape = (leaf.layers, leaf.stack.shape) if rows else (tuple(range(leaf.shape[0])), leaf.shape)
        experts = range(shape[1] if "{}" in hf_name else 1)
        tensors = tuple(tuple(f"model.layers.{i}.{hf_name.format(x)}" for x in experts) for i in numbers)
        found.append(Parameter(name, numbers, shape[1:], tensors, matrix, rows))
    return found


def _without_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the names that transformers saves: without what wrappers of PyTorch put in front of all of
    them, and with the "model." that a decoder saved alone lacks."""
    for front in _WRAPPERS:
        if checkpoint and all(name.startswith(front) for name in checkpoint):
            checkpoint = {name.removeprefix(front): tensor for name, tensor in checkpoint.items()}
    if "embed_tokens.weight" in checkpoint:
        bare = lambda name: name.startswith(("embed_tokens.", "layers.", "norm."))  # noqa: E731
        return {f"model.{name}" if bare(name) else name: tensor for name, tensor in checkpoint.items()}
    return checkpoint


def language_part(checkpoint: Checkpoint, folder: Path, text_only: bool) -> Checkpoint:
    """The tensors of the language model under the names that it has alone. Raises UserError for those of a vision part,
    unless `text_only` leaves them out."""
    checkpoint = _without_wrappers(checkpoint)
    vision = sorted(name for name in checkpoint if name.startswith(_VISION))
    if vision and len(vision) == len(checkpoint):
        raise UserError(f"{folder}: holds a vision model alone ({vision[0]!r} and its like), no language model")
    if vision and not text_only:
        raise UserError(
            f"{folder}: tensor {vision[0]!r} is of the vision part ({len(vision)} such), which is not computed here; "
            "text_only=True (--text-only) loads the language part without it"
        )
    found = {}
    for name, tensor in checkpoint.items():
        if name not in vision:
            front = next((front for front in _LANGUAGE if name.startswith(front)), None)
            found[name if front is None else _LANGUAGE[front] + name.removeprefix(front)] = tensor
    return found


def experts_apart(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """The checkpoint with fused tensors of experts as the single matrices that they hold. Raises UserError for one of
    another shape."""
    if config.experts is None:
        return checkpoint
    found = {}
    for name, tensor in checkpoint.items():
        fused, router = _FUSED_NAME.fullmatch(name), _ROUTER.fullmatch(name)
        if fused:
            found |= _matrices(tensor, config, *fused.groups())
        else:
            found[router[1] + _hf_name(config, "layers/router") if router else name] = tensor
    return found


def _matrices(tensor: Tensor, config: ModelConfig, layer: str, fused: str, scales: str | None) -> Checkpoint:
    """The parts of one fused tensor [experts, parts * outputs, inputs] by the names that they have alone."""
    names = _FUSED[fused]
    if len(tensor.shape) != 3 or 0 in tensor.shape or tensor.shape[1] % len(names):
        wanted = f"[experts, {len(names)} x outputs, inputs]"
        raise UserError(f"{tensor.file}: {tensor.name!r} has shape {list(tensor.shape)}, wanted {wanted}")
    experts, outputs, inputs = tensor.shape
    size, found = tensor.nbytes // experts // len(names), {}
    for expert, (part, ours) in itertools.product(range(experts), enumerate(names)):
        name = layer + _hf_name(config, f"layers/{ours}").format(expert) + (scales or "")
        start = tensor.start + (expert * len(names) + part) * size
        found[name] = dataclasses.replace(
            tensor, name=name, shape=(outputs // len(names), inputs), start=start, nbytes=size
        )
    return found
