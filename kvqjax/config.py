"""One frozen description for every supported decoder: Llama, Mistral, Qwen2/2.5 and Qwen3 differ only by fields."""

import dataclasses

__all__ = ["ModelConfig", "RopeConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is "default", "linear", "llama3" or "yarn"; fields a kind does not use stay at 0.

    Frequencies follow the Hugging Face formulas; `attention_factor` multiplies cos and sin (yarn only).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static, hashable model description. Axis letters: V vocabulary, E width, L layers, H/K query/KV heads, D head
    dim.

    `windows[l]` is layer l's sliding window in tokens, or None for full attention. The last two are set inside
    `shard_map` only (kvqjax/sharding.py): the mesh axes over which query heads, MLP and vocabulary are split, and those
    of them over which queries are gathered before they attend, so that `num_heads` counts the gathered ones.
    """

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    max_position: int = 2048
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    architecture: str = "LlamaForCausalLM"
    split: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")

    @property
    def query_width(self) -> int:
        """H * D."""
        return self.num_heads * self.head_dim

    @property
    def known_key_bias(self) -> bool:
        """Whether keys before RoPE are x W + b, so that b can be taken off them: no norm comes after it."""
        return self.qkv_bias and not self.qk_norm

    @property
    def kv_width(self) -> int:
        """K * D, the width of one token's keys (or values) over all KV heads."""
        return self.num_kv_heads * self.head_dim
