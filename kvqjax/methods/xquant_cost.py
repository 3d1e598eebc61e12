"""What rematerialisation costs (arXiv 2508.10395, section 3.4), a multiply-accumulate counted as two operations.

Per layer and cached token, KD = kv_width <= E:  X: 4 E KD;  latents: 4 KD^2;  a difference at full width: 4 E KD + 2 E;
a difference in latents: 8 E KD (up-projection and [W_k|W_v]).  The paper's formulas are these with KD = d/g.
"""

from kvqjax.config import ModelConfig
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.methods.xquant import LayerInput
from kvqjax.methods.xquant_cl import CrossLayer

__all__ = ["flops_per_token", "layer_flops"]


def layer_flops(spec: LayerSpec, config: ModelConfig) -> int:
    """Operations that one layer spends on one cached token per read; 0 for specs that cache keys and values."""
    full = 4 * config.width * config.kv_width
    square = 4 * min(config.width, config.kv_width) * config.kv_width
    if isinstance(spec, LayerInput):
        return square if spec.uses_latents(config) else full
    if isinstance(spec, CrossLayer):
        if spec.start:
            return full
        return 2 * full if spec.uses_latents(config) else full + 2 * config.width
    return 0


def flops_per_token(method: Method, config: ModelConfig) -> int:
    """Operations per generated token and cached token, all layers: times the context length, the price of one step."""
    return sum(layer_flops(spec, config) for spec in method.layers(config))
