"""The chips that attention kernels know: how their names begin, and what the plans of TPU kernels
need to know of each.

A new TPU is two lines here, a column of `kvqjax.pallas_kernels.support.TABLE`, and a line in
`kvqjax.hardware.devices`, which plans memory. A new GPU is a line here and one there.
"""

from typing import NamedTuple

import jax

from kvqjax._errors import UserError
from kvqjax.pallas_kernels.work import HALVES_AHEAD, HALVES_IN_TURN, SHORT_IN_TURN, Work

LANES = 128  # numbers side by side in a TPU's register
TILE = 1024  # tokens of a tile, which every TPU kernel takes

TARGETS = ("cpu", "v5e", "v5p", "v6e", "v7x", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100")
# How the chips' names begin (`device_kind`) -> target. Where one name begins another, the longer
# one stands first. Chips with other names get the plain path, which runs everywhere.
KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "v7x",
    "Tesla T4": "sm75",
    "NVIDIA A100": "sm80",
    "NVIDIA A10": "sm86",
    "NVIDIA L4": "sm89",
    "NVIDIA GeForce RTX 40": "sm89",
    "NVIDIA B200": "sm100",
    "NVIDIA H100": "sm90",
    "NVIDIA H200": "sm90",
}


class Tpu(NamedTuple):
    """Properties of a TPU that plans need.

    The first three are properties of the chip. The others were chosen by compiling kernels for it
    (`benchmarks/tpu_bundles.py`), and were not confirmed on a chip.

    Attributes:
        vector_bfloat16: Whether its vector units compute with bfloat16. If not, kernels use
            float32.
        matrix_lanes: Lanes that its matrix unit multiplies at once.
        narrow_products: Whether the matrix unit takes 8-bit codes beside bfloat16 queries at full
            speed.
        usual_work: How a tile is worked off where `support.TABLE` says nothing and 128 tokens share
            a key scale.
        exact_tile_bytes: Bytes of a tile of exact keys and values together. Larger tiles take fewer
            bundles a token, which counts where instructions are the bound and not memory. Smaller
            tiles leave less of a row's last tile empty.
        scale_columns: 128-token columns of scales that are ordered at once. More of them spill
            registers.
        pairs_3_bits: Whether signposts of 3 bits are gathered two at a time, because comparing
            codes spills registers."""

    vector_bfloat16: bool
    matrix_lanes: int
    narrow_products: bool
    usual_work: Work
    exact_tile_bytes: int
    scale_columns: int
    pairs_3_bits: bool = False


TPUS = {
    "v5e": Tpu(False, 128, False, SHORT_IN_TURN, 2**22, 1),
    "v5p": Tpu(False, 128, False, SHORT_IN_TURN, 2**23, 1),
    "v6e": Tpu(True, 256, False, HALVES_AHEAD, 2**22, 2),
    "v7x": Tpu(True, 256, True, HALVES_IN_TURN, 2**23, 4, pairs_3_bits=True),
}


def family(target: str) -> str:
    """Say what kind of chip a target is: "cpu", "gpu" or "tpu". Raises UserError for none of
    TARGETS."""
    if target not in TARGETS:
        raise UserError(f"target={target!r}; known: {', '.join(TARGETS)}")
    return "cpu" if target == "cpu" else "gpu" if target.startswith("sm") else "tpu"


def target_of(array) -> str:
    """Return the target of the chip that an array lies on; "cpu" for abstract arrays and tracers,
    which lie nowhere."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return "cpu"
    kind = next(iter(array.devices())).device_kind
    return next((target for name, target in KINDS.items() if kind.startswith(name)), "cpu")
