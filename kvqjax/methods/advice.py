"""The warning, given once, about a method that loses precision on a model."""

from kvqjax.codecs import Uniform
from kvqjax.codecs.higgs import Higgs
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.model.config import KVShape

__all__ = ["bias_advice"]

FEW_BITS = 4  # uniform codes per token of so many bits lose a bundled model with Qwen2's bias (benchmarks/gate.py)


def _shares_scales(spec: LayerSpec) -> bool:
    """Say whether channels of keys after RoPE share a scale, and nothing is taken off them first."""
    key = getattr(spec, "key", None)
    few = isinstance(key, Uniform) and key.along == "channels" and key.bits <= FEW_BITS
    plain = getattr(spec, "centre", "none") == "none"
    return (few or isinstance(key, Higgs)) and plain and getattr(spec, "rope", "pre") == "post"


def bias_advice(method: Method, config: KVShape) -> str:
    """Give one line where the model's key bias will cost most of the precision of this method's keys, else ""."""
    if not config.qkv_bias or not any(map(_shares_scales, method.layers(config))):
        return ""
    return (
        f"{method} will lose precision on this model: its keys have a bias, so a few channels are large, and this "
        "method gives them one scale with small channels; add centre=mean and calibrate, or choose a method that "
        "stores keys before RoPE, such as higgs"
    )
