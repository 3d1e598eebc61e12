"""What rematerialisation costs (arXiv 2508.10395, section 3.4), a multiply-accumulate counted as two operations.

Per layer and cached token, KD = kv_width <= E:  X: 4 E KD;  latents: 4 KD^2;  a difference at full width: 4 E KD + 2 E;
a difference in latents: 8 E KD (up-projection and [W_k|W_v]).  The paper's formulas are these with KD = d/g.
"""

from kvqjax.config import ModelConfig
from kvqjax.methods.spec import LayerSpec, Method
from kvqjax.methods.xquant import LayerInput
from kvqjax.methods.xquant_cl import CrossLayer

__all__ = ["flops_per_token", "layer_flops", "longest_memory_bound", "weight_bytes"]

Number = int | float


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


def weight_bytes(config: ModelConfig, latent: bool) -> int:
    """16-bit weights that one layer reads per step, as equations 3 and 4 count them: the projections and the MLP, with
    W_k and W_v as U (same size) and S B^T where latents are cached."""
    c = config
    matrices = 2 * c.width * c.query_width + 2 * c.width * c.kv_width + 3 * c.width * c.mlp_width
    return 2 * (matrices + (2 * c.kv_width**2 if latent else 0))


def longest_memory_bound(flops: Number, cache_bytes: Number, weights: Number, ridge: Number) -> float:
    """Cached tokens up to which rematerialisation hides behind memory traffic: `flops` and `cache_bytes` per token and
    layer, `weights` bytes per layer, `ridge` the device's operations per byte (equations 3 and 4 solved for l)."""
    spare = flops - ridge * cache_bytes
    return float("inf") if spare <= 0 else ridge * weights / spare
