"""The experts of config.json: their number and widths, and which layers have them."""

from typing import Any

from kvqjax.model.config import ExpertConfig
from kvqjax.model.hf_families import SHARED_COUNT, ExpertFields
from kvqjax.model.hf_fields import is_integer, read_integer, read_number, refuse


def experts_from_hf(raw: dict, names: ExpertFields | None, num_layers: int) -> ExpertConfig | None:
    """Read the experts of a model.

    Args:
        raw: the contents of config.json, with the family's defaults.
        names: the family's fields; None for a family without experts.
        num_layers: how many layers the model has.

    Returns:
        The experts; None for a family, or a model, without them.

    Raises:
        UserError: for a field that is missing, malformed, or asks for what the decoder does not
            compute.
    """
    if names is None:
        return None
    # Transformers 5 writes the count under one name for all families.
    count_field = SHARED_COUNT if raw.get(SHARED_COUNT) is not None else names.count
    if not names.in_every_layer and raw.get(count_field) == 0:
        return None
    count = read_integer(raw, count_field)
    per_token = read_integer(raw, "num_experts_per_tok")
    if per_token > count:
        refuse("num_experts_per_tok", per_token, f"there are {count} experts")
    if names.sigmoid and per_token != 1:
        refuse(
            "num_experts_per_tok",
            per_token,
            "inputs scaled by their scores are computed for one; wanted 1",
        )
    if names.in_every_layer:
        return _experts_of_every_layer(raw, names, count, per_token)
    if names.sigmoid:
        dense_layers = _dense_by_step(raw, num_layers)
    else:
        dense_layers = _dense_layers(raw, names, num_layers)
    if len(dense_layers) == num_layers:
        return None
    width = read_integer(raw, names.width)
    shared_width = 0 if names.shared_width is None else read_integer(raw, names.shared_width)
    if names.shared_count is not None:
        # Some families give the shared part as a number of experts of the usual width.
        shared_width = width * read_integer(raw, names.shared_count)
    return ExpertConfig(
        count=count,
        per_token=per_token,
        width=width,
        shared_width=shared_width,
        normalised=not names.sigmoid and bool(raw.get("norm_topk_prob", False)),
        dense_layers=dense_layers,
        sigmoid=names.sigmoid,
        shared_gate=names.shared_gate,
    )


def _experts_of_every_layer(
    raw: dict, names: ExpertFields, count: int, per_token: int
) -> ExpertConfig:
    gate: dict[str, Any] = {}
    if names.limited:
        for name in ("swiglu_limit", "swiglu_alpha"):
            gate[name] = read_number(raw, name)
    return ExpertConfig(
        count=count,
        per_token=per_token,
        width=read_integer(raw, names.width),
        biases=names.biases,
        shared_width=0 if names.shared_width is None else read_integer(raw, names.shared_width),
        **gate,
    )


def _dense_layers(raw: dict, names: ExpertFields, num_layers: int) -> tuple[int, ...]:
    """List the layers without experts: the first ones, or those that `mlp_only_layers` names and
    those that the step leaves out."""
    if names.dense_first is not None:
        count = raw.get(names.dense_first)
        if not is_integer(count) or count < 0:
            refuse(names.dense_first, count, "wanted a count of layers")
        return tuple(range(min(count, num_layers)))
    dense = raw.get("mlp_only_layers") or []
    step = raw.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(is_integer(index) for index in dense):
        refuse("mlp_only_layers", dense, "wanted a list of layer numbers")
    if not is_integer(step) or step < 1:
        refuse("decoder_sparse_step", step, "wanted a positive integer")
    return tuple(index for index in range(num_layers) if index in dense or (index + 1) % step)


def _dense_by_step(raw: dict, num_layers: int) -> tuple[int, ...]:
    """List the layers without experts: those that `moe_layers` does not name, or without it those
    that the step leaves out."""
    step = read_integer(raw, "interleave_moe_layer_step")
    sparse = raw.get("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list) or not all(is_integer(index) for index in sparse):
        refuse("moe_layers", sparse, "wanted a list of layer numbers")
    return tuple(index for index in range(num_layers) if index not in sparse)
