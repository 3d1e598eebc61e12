"""Which tensors of a checkpoint each parameter is read from, and that they are all there and all read."""

import itertools
from pathlib import Path

from kvqjax._errors import UserError
from kvqjax.model.checkpoint import Checkpoint, read, sample
from kvqjax.model.config import ModelConfig
from kvqjax.model.stored import Scheme, Stored, find
from kvqjax.model.weight_names import parameters

__all__ = ["sources"]

_IGNORED = ("rotary_emb.inv_freq", ".activation_scale", ".input_scale")  # the last two round activations, not weights


def _check_unread(checkpoint: Checkpoint, used: set[str], config: ModelConfig, folder: Path):
    """Refuse tensors that nothing would read: the model would not be the checkpoint's."""
    unread = sorted(name for name in checkpoint.keys() - used if not name.endswith(_IGNORED))
    if config.tied_embeddings and "lm_head.weight" in unread:
        unread.remove("lm_head.weight")
        if sample(checkpoint["lm_head.weight"]) != sample(checkpoint["model.embed_tokens.weight"]):
            raise UserError(
                f"{folder}: tie_word_embeddings = true, but lm_head.weight differs from embed_tokens.weight"
            )
    # GPTQ's tools write biases of zeros for every matrix.
    unread = [name for name in unread if not _is_zero_bias(checkpoint, name)]
    if unread:
        raise UserError(f"{folder}: tensor {unread[0]!r} is not part of {config.architecture} ({len(unread)} such)")


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    coded = name.endswith(".bias") and f"{name.removesuffix('.bias')}.qweight" in checkpoint
    return coded and not read(checkpoint[name], (slice(None),)).any()


def sources(
    checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme | None, folder: Path
) -> dict[str, list[list[Stored]]]:
    """Find what is read for each parameter, by row of its stack. Raises UserError for a checkpoint that lacks a tensor,
    has one of another shape or dtype, or one that nothing would read."""
    used, found = set(), {}
    for parameter in parameters(config):
        shape = parameter.shape[1:] if parameter.by_expert else parameter.shape
        wanted = shape[::-1] if parameter.matrix else shape
        rows = [[find(checkpoint, name, scheme) for name in names] for names in parameter.tensors]
        for name, stored in zip(itertools.chain(*parameter.tensors), itertools.chain(*rows), strict=True):
            if stored is None:
                reason = "; config.json says tie_word_embeddings = false" if parameter.name == "head" else ""
                raise UserError(f"{folder}: tensor {name!r} is missing{reason}")
            if stored.shape != wanted:
                file = next(iter(stored.parts.values())).file
                raise UserError(f"{file}: {name!r} has shape {list(stored.shape)}, wanted {list(wanted)}")
            stem = name.removesuffix(".weight")
            used.update({name, *(f"{stem}.{part}" for part in stored.parts), f"{stem}.g_idx"})
        found[parameter.name] = rows
    _check_unread(checkpoint, used, config, folder)
    return found
