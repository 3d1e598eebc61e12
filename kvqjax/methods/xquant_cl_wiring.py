"""XQuant-CL (arXiv 2508.10395, sections 3.2, 3.3.2): cache each layer's input as its difference from the layers below.

    base layer b:   Xhat_b = Q(X_b)                                      (more bits, full width)
    MHA, i > b:     D_i = Q(X_i - Xhat_{i-1})            Xhat_i = Xhat_{i-1} + D_i
    GQA, i > b:     Z_i = Q((X_i - Xhat_{i-1}) U_i)      Xhat_i = Xhat_{i-1} + Z_i U_i^T,   [W_k|W_v]_i = U_i S_i B_i^T
    every layer:    [K|V]_i = Xhat_i [W_k|W_v]_i, then bias, QK-norm and RoPE

The loop is closed: the difference is taken from what the decoder will have, so layer i's error is that of its own
quantiser alone. For GQA, the part of X_i that U_i does not span stays stale in Xhat_i; [K|V]_i does not see it and is
exact when Q is the identity.

Constants of one layer for GQA: {"x": {"down": U_i [E, R]}}, R = min(E, 2*KD); with residual deltas U is that of
diag(gain) [W_k|W_v]. Made from the weights alone by kvqjax.calibrate.xquant. MHA needs none.
"""

import dataclasses

from kvqjax._errors import UserError
from kvqjax.codecs.uniform import check_group
from kvqjax.methods.cross_layer import ACCUMULATORS, SPACES, Difference, cross_layer
from kvqjax.methods.keys_values import KeysAndValues
from kvqjax.methods.rematerialise import input_width, prefers_latents, quantiser
from kvqjax.methods.spec import LayerSpec, Method, first_layers, method_factory
from kvqjax.methods.wiring import Clock, Wiring
from kvqjax.methods.xquant_wiring import LayerInput
from kvqjax.model.config import KVShape
from kvqjax.ops.packing.words import PLANE

__all__ = ["CrossLayer", "xquant_cl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossLayer:
    """One layer of XQuant-CL: the base layer (`start`) or a difference. `axis` says whether a scale belongs to a token
    or to a channel of `group` tokens."""

    start: bool
    bits: int
    axis: str = "token"
    accumulator: str = "bfloat16"
    space: str = "norm"
    group: int = 128
    window: int = 0
    latent: bool | None = None
    scales: str = "bfloat16"

    def __post_init__(self):
        for name, known in (("axis", ("token", "channel")), ("accumulator", ACCUMULATORS), ("space", SPACES)):
            if getattr(self, name) not in known:
                raise UserError(f"{name}={getattr(self, name)!r}; known: {', '.join(known)}")

    def admit(self, other: LayerSpec) -> LayerSpec:
        """Take a layer of keys and values among these, in their window and unit. The accumulator passes it by, so the
        layer above stores its difference from the layer below."""
        if not isinstance(other, KeysAndValues):
            return other
        return dataclasses.replace(other, window=self.window, unit=self.group, clocks=())

    def uses_latents(self, config: KVShape) -> bool:
        return not self.start and (prefers_latents(config) if self.latent is None else self.latent)

    def build(self, config: KVShape) -> Wiring:
        latent = self.uses_latents(config)
        along = "tokens" if self.axis == "channel" and not self.start else "channels"
        if config.window is not None:
            # A layer that skips what it no longer sees would leave a gap in the accumulator of the layers above.
            raise UserError(f"xquant_cl needs full attention in every layer; its window is {config.window}")
        full = input_width(config)
        if self.accumulator.isdigit():
            check_group(self.group, full, least=PLANE)
        width = min(full, 2 * config.kv_width) if latent else full
        codec = quantiser(self.bits, along, self.group, self.scales, width).build(width)
        return cross_layer(
            config,
            codec._replace(needs={"down": (full, width)}) if latent else codec,
            Clock(("x",), self.window, self.group),
            Difference(self.start, latent, self.accumulator, self.space, self.group),
        )


@method_factory
def xquant_cl(
    *,
    bits: int = 2,
    base: int = 2,
    protected: int = 3,
    high_bits: int = 4,
    axis: str = "token",
    accumulator: str | None = None,
    space: str = "norm",
    group: int = 128,
    window: int = 0,
    sinks: int = 0,
    latent: bool | None = None,
    scales: str = "bfloat16",
) -> Method:
    """XQuant-CL (arXiv 2508.10395, sections 3.2, 3.3.2 and 4.3): a layer stores by how much its input differs from the
    sum of what the layers below have stored. Layer `base` begins the sum; layers below it are stored as in `xquant`.

    - `bits` of a code, 1 to 6 or 8, 16 for the identity; the first `protected` layers have `high_bits` (section 4.3:
      the third layer is the base).
    - `group`, `window`, `sinks`, `latent` and `scales` as in `xquant`.
    - The paper leaves open, and these options decide: `axis` of the differences' scales ("token" or "channel"), what
      the `accumulator` is stored as between layers ("bfloat16"; "float32" by default for the identity; or a number of
      bits), and whether differences are taken after the norm or of the residual stream (`space`: "norm", "residual").

    With the defaults, Llama-3.1-8B stores 2.57 bits per key or value channel. Raises UserError for values that are not
    listed here.
    """
    store = accumulator or ("float32" if bits == 16 else "bfloat16")
    shared = {"group": group, "window": window, "latent": latent, "scales": scales}
    width = lambda i: high_bits if i < protected else bits  # noqa: E731
    loop = {"axis": axis, "accumulator": store, "space": space, **shared}
    plain = [(i, LayerInput(bits=width(i), **shared)) for i in first_layers(base)]
    start = [(base, CrossLayer(start=True, bits=width(base), **loop))]
    more = [(i, CrossLayer(start=False, bits=high_bits, **loop)) for i in first_layers(protected)[base + 1 :]]
    layer = CrossLayer(start=False, bits=bits, **loop)
    return Method(name="xquant_cl", layer=layer, sinks=sinks, overrides=tuple(plain + start + more))
