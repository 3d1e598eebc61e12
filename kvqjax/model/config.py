"""Frozen descriptions: what a cache must know of a model, and what our decoder must know besides.
All families differ only by fields."""

import dataclasses
import functools
import math
from typing import Any

from kvqjax._arguments import check_fields, check_integer
from kvqjax._errors import UserError

# Fields that may differ by layer.
OF_LAYERS = (
    "rope",
    "sliding_window",
    "scale",
    "chunked",
    "qk_norm",
)
# Of ropes that depend on the length before it was stretched.
LENGTH_KINDS = (
    "llama3",
    "yarn",
    "dynamic",
    "longrope",
)
KINDS = ("none", "default", "linear", *LENGTH_KINDS)  # of ropes
PAIRS = ("halves", "front", "neighbours")  # how channels of a head make the pairs that a rope turns
ACTIVATIONS = ("silu", "gelu_tanh")  # of an MLP's gate


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is "default", "linear", "llama3", "yarn", "dynamic" or "longrope",
    or "none" for a layer that turns nothing (keys before and after it are the same); fields that a
    kind does not use stay at 0.

    Frequencies follow the Hugging Face formulas. For yarn and longrope `attention_factor`
    multiplies cos and sin of the pairs that turn.

    For dynamic and longrope the frequencies depend on how long a text becomes. A cached key is
    turned once, so one `length` holds for all of a text and is stated beforehand: the least length
    that has these frequencies. 0 stands for texts up to `original_max_position`. `short_factor`
    divides the frequency of every pair for those texts, `long_factor` for longer ones.

    `fraction` is the share of a head's channels that are turned, and `pairs` says which channels
    these are and which of them make pair i:

    - "halves": channels i and i + D/2, of which the first of both halves are turned;
    - "front": the first R = fraction * D channels are turned, and i goes with i + R/2 (GPT-NeoX,
      Phi);
    - "neighbours": of the first R channels, 2i goes with 2i + 1 (Meta's Llama, GPT-J, Cohere).

    A cache holds halves: queries and keys of another model's attention layers are put in this order
    when they come.
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
    length: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    fraction: float = 1.0
    pairs: str = "halves"

    def __post_init__(self):
        check_fields(self)
        if self.pairs not in PAIRS:
            raise UserError(f"pairs={self.pairs!r}; known: {', '.join(PAIRS)}")
        if self.kind not in KINDS:
            raise UserError(f"kind={self.kind!r}; known: {', '.join(KINDS)}")
        required = ("theta", "factor", "attention_factor")
        required += ("low_freq_factor", "high_freq_factor") * (self.kind == "llama3")
        for name in required:
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)}; wanted a number above 0")
        if self.kind in LENGTH_KINDS:
            check_integer("original_max_position", self.original_max_position)
        if self.kind == "default" and self.factor != 1:
            raise UserError(
                f"factor={self.factor} changes nothing in a rope of kind 'default'; name its kind"
            )
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction={self.fraction}; wanted a number above 0, of at most 1")

    def turned_channels(self, head_dim: int) -> int:
        """How many of a head's channels turn, an even number."""
        return round(head_dim * self.fraction) // 2 * 2

    @property
    def limit(self) -> int | None:
        """The longest text that these frequencies are for; None: any."""
        if self.kind == "dynamic":
            return max(self.length, self.original_max_position)
        return self.original_max_position if self.kind == "longrope" and not self.length else None

    def for_length(self, length: int) -> "RopeConfig":
        """This rope for texts of up to `length` tokens."""
        if self.kind not in ("dynamic", "longrope"):
            return self
        is_longer = length > self.original_max_position
        length_beyond = length if self.kind == "dynamic" else self.original_max_position + 1
        return dataclasses.replace(self, length=length_beyond if is_longer else 0)


def _reach(rope: RopeConfig, model_length: int) -> int:
    """Give the length in tokens to which a rope was stretched, in a model of `model_length`
    tokens."""
    if rope.kind not in ("linear", "yarn", "dynamic"):
        return model_length
    if rope.kind == "dynamic":
        return rope.limit or model_length
    return int((rope.original_max_position or model_length) * rope.factor)


def _without_repeats(values):
    """Replace a tuple of equal entries by the entry, so that equal shapes compare equal."""
    return values[0] if isinstance(values, tuple) and values and len(set(values)) == 1 else values


def _common(values: Any) -> Any:
    """The value that all layers have. Raises UserError where they differ."""
    if isinstance(values, tuple):
        raise UserError(f"layers differ ({values}); ask for the shape of one layer")
    return values


def check_softcap(softcap: float | None, name: str = "softcap") -> None:
    """Raise UserError for a cap of scores that is not above 0."""
    if softcap is not None and not softcap > 0:
        raise UserError(f"{name}={softcap}; wanted a number above 0, or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Layers of the gated delta rule (kvqjax/model/recurrent.py) among those of attention.

    `layers` are their numbers among all layers of the model. Each has `key_heads` heads of keys and
    queries of `key_dim` channels, and `value_heads` heads of values of `value_dim` channels. A key
    head serves `value_heads / key_heads` value heads. A causal convolution over `kernel` tokens
    comes before the rule. A layer remembers a row's text in kernel - 1 inputs of the convolution
    and one matrix [key_dim, value_dim] a value head, both in float32.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def __post_init__(self):
        check_fields(self)
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            check_integer(name, getattr(self, name))
        check_integer("kernel", self.kernel, 2)
        if self.value_heads % self.key_heads:
            raise UserError(
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}"
            )
        if not self.layers or tuple(sorted(set(self.layers))) != self.layers or self.layers[0] < 0:
            raise UserError(f"layers={self.layers}; wanted the numbers of some layers in order")

    @property
    def widths(self) -> dict[str, int]:
        """Channels that go through the convolution: queries, keys and values of all heads."""
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.value_heads * self.value_dim}

    def shared_out(self, parts: int) -> "RecurrentConfig":
        """These layers on one of `parts` devices that share out the heads."""
        return dataclasses.replace(
            self, key_heads=self.key_heads // parts, value_heads=self.value_heads // parts
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVShape:
    """Everything that a cache knows of a model. Static and hashable.

    Axis letters: L layers, H query heads, K KV heads, D head dim, E width. Layers are those of
    attention, and are numbered among themselves; `recurrent` describes those between them, whose
    state is part of the cache. `rope`, `sliding_window` (in tokens) and `scale` hold for every
    layer, or are a tuple with one entry a layer. `rope=None`: queries and keys come rotated.
    `sliding_window=None`: full attention. `scale` multiplies the scores; None means D^-1/2.
    `softcap` caps them: a score s counts as softcap * tanh(s / softcap). The window of a `chunked`
    layer is a
    chunk: a query at position p sees tokens from p // window * window on.

    The five fields from `width` to `norm_offset` matter only to methods that cache a layer's input
    and compute keys and values from it (XQuant). They are the width of that input, and what the
    model does between its projections and attention. A norm multiplies by its weight plus
    `norm_offset`.

    With a `latent` the one KV head's key is a latent with `latent` channels and a part that its
    rope turns (kvqjax/model/latents.py). The key is the value too, and is cached once: the latent
    as "v", the rest as "k".
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | tuple[RopeConfig | None, ...] | None = None
    sliding_window: int | tuple[int | None, ...] | None = None
    scale: float | tuple[float | None, ...] | None = None
    softcap: float | None = None
    chunked: bool | tuple[bool, ...] = False
    width: int | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool | tuple[bool, ...] = False
    norm_offset: float = 0.0
    recurrent: RecurrentConfig | None = None
    latent: int | None = None

    def __post_init__(self):
        check_fields(self)
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            check_integer(name, getattr(self, name))
        for name in OF_LAYERS:
            values = getattr(self, name)
            if isinstance(values, tuple) and len(values) != self.num_layers:
                raise UserError(f"{name} has {len(values)} entries for {self.num_layers} layers")
            object.__setattr__(self, name, _without_repeats(values))
        check_softcap(self.softcap)
        self._check_pairs()
        self._check_windows()
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")
        if self.recurrent is not None and self.recurrent.layers[-1] >= self.depth:
            raise UserError(
                f"layer {self.recurrent.layers[-1]} is recurrent, in a model of {self.depth} layers"
            )
        self._check_latent()

    def _check_windows(self) -> None:
        """Raise UserError for a window of no tokens, and for a chunked layer without a window."""
        per_layer = [x for x in (self.sliding_window, self.chunked) if isinstance(x, tuple)]
        # What all layers have in common is looked at once.
        count = self.num_layers if per_layer else 1
        windows, chunked = (
            x if isinstance(x, tuple) else (x,) * count for x in (self.sliding_window, self.chunked)
        )
        for window, is_chunked in zip(windows, chunked, strict=True):
            if window is not None:
                check_integer("sliding_window", window)
            elif is_chunked:
                raise UserError(
                    "a chunked layer has no sliding_window, which says how long its chunks are"
                )

    def _check_pairs(self) -> None:
        """Raise UserError where layers order their channels differently: those of a stack are put
        in order as one. Also where a rope has not one factor for each pair."""
        orders = {(rope.pairs, rope.pairs == "halves" or rope.fraction) for rope in self.ropes}
        if len(orders) > 1:
            raise UserError(f"ropes of layers pair channels differently: {sorted(orders, key=str)}")
        for rope in self.ropes:
            for name in ("short_factor", "long_factor") * (rope.kind == "longrope"):
                pairs, factors = rope.turned_channels(self.head_dim) // 2, getattr(rope, name)
                if len(factors) != pairs:
                    raise UserError(
                        f"{name} has {len(factors)} numbers; wanted {pairs}, one for each pair that turns"
                    )

    def _check_latent(self) -> None:
        """Raise UserError for a latent that one key's channels do not hold beside those that
        turn."""
        if self.latent is None:
            return
        check_integer("latent", self.latent, 2)
        rope_channels = self.head_dim - self.latent
        if self.num_kv_heads != 1 or self.latent % 2 or rope_channels < 2:
            raise UserError(
                f"latent={self.latent}; wanted an even part of one KV head of {self.head_dim} channels"
            )
        if any(
            rope.kind != "none" and rope.turned_channels(self.head_dim) != rope_channels
            for rope in self.ropes
        ):
            raise UserError(
                f"latent={self.latent}; the rope turns other channels than the {rope_channels} beside it"
            )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes of the layers that have one: one where it is that of all."""
        ropes = self.rope if isinstance(self.rope, tuple) else (self.rope,)
        return tuple(rope for rope in ropes if rope is not None)

    @property
    def pairs(self) -> str:
        """The way in which the ropes of all layers pair channels."""
        return next((rope.pairs for rope in self.ropes), "halves")

    @property
    def depth(self) -> int:
        """How many layers of both kinds the model has."""
        return self.num_layers + (0 if self.recurrent is None else len(self.recurrent.layers))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers of attention by their numbers among all layers."""
        recurrent_layers = () if self.recurrent is None else self.recurrent.layers
        return tuple(index for index in range(self.depth) if index not in recurrent_layers)

    @property
    def recurrent_before(self) -> tuple[int, ...]:
        """How many recurrent layers stand before each layer of attention, and at last how many
        there are."""
        layers = self.attention_layers
        return (
            *(layer - index for index, layer in enumerate(layers)),
            self.depth - self.num_layers,
        )

    @property
    def query_width(self) -> int:
        """H * D."""
        return self.num_heads * self.head_dim

    @property
    def known_key_bias(self) -> bool:
        """Say whether keys before RoPE are x W + b, so that b can be taken off them: no norm comes
        after it."""
        return self.qkv_bias and not self.qk_norm

    @property
    def kv_width(self) -> int:
        """K * D, the width of one token's keys (or values) over all KV heads. Raises UserError for
        a shape with a latent, so that what reads keys and values by head refuses it."""
        if self.latent is not None:
            raise UserError(
                "it reads keys and values by head; this model caches a latent that all heads share"
            )
        return self.num_kv_heads * self.head_dim

    @property
    def cached_heads(self) -> dict[str, tuple[int, int]]:
        """(heads, channels of a head) of a token's keys ("k") and values ("v") as they are
        cached."""
        if self.latent is None:
            return dict.fromkeys("kv", (self.num_kv_heads, self.head_dim))
        return {"k": (1, self.head_dim - self.latent), "v": (1, self.latent)}

    @property
    def cached_width(self) -> int:
        """The numbers of a token's keys and values in one layer: 2 * K * D, or D with a latent."""
        return sum(heads * channels for heads, channels in self.cached_heads.values())

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer."""
        return tuple(self.layer(index).window for index in range(self.num_layers))

    @property
    def window(self) -> int | None:
        """The sliding window that all layers have."""
        return _common(self.sliding_window)

    @property
    def turning(self) -> RopeConfig | None:
        """The rope that all layers have."""
        return _common(self.rope)

    @property
    def common_chunked(self) -> bool:
        """Say whether the window that all layers have is a chunk."""
        return _common(self.chunked)

    @property
    def common_scale(self) -> float | None:
        """The scale of the scores that all layers have; None: D^-1/2."""
        return _common(self.scale)

    @functools.cached_property
    def kv_shape(self) -> "KVShape":
        """This shape without what a model adds to it."""
        return KVShape(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(KVShape)}
        )

    @functools.cached_property
    def alone(self) -> "KVShape":
        """This shape as another model's attention layer knows it, without the weights and inputs of
        its projections."""
        return dataclasses.replace(
            self.kv_shape, width=None, qkv_bias=False, qk_norm=False, recurrent=None
        )

    def layer(self, index: int) -> "KVShape":
        """The shape of the layer of attention `index` alone."""
        return self._by_layer[index]

    @functools.cached_property
    def _by_layer(self) -> tuple["KVShape", ...]:
        """The shape of each layer alone. To make and check one takes 0.2 ms, so that layers which
        are alike share it, and it is made once."""
        values = [getattr(self, name) for name in OF_LAYERS]
        columns = [x if isinstance(x, tuple) else (x,) * self.num_layers for x in values]
        rows = list(zip(*columns, strict=True))
        shapes = {}
        for row in set(rows):
            fields = dict(zip(OF_LAYERS, row, strict=True))
            shapes[row] = dataclasses.replace(self.kv_shape, num_layers=1, recurrent=None, **fields)
        return tuple(shapes[row] for row in rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """A mixture of experts: a token goes through `per_token` of `count` MLPs of `width`, by softmax
    scores of a router, and through a shared MLP of `shared_width` (0: there is none).

    - `normalised`: the scores of the chosen experts are divided by their sum.
    - `dense_layers`, numbered among layers of both kinds, have one ordinary MLP.
    - `biases`: the router and the experts' three products have biases.
    - `swiglu_limit` c and `swiglu_alpha` a: a gate g and an inner number u give
      min(g, c) sigmoid(a min(g, c)) (1 + clip(u, -c, c)) (gpt-oss, arXiv 2508.10925). Without a
      limit they give silu(g) u.
    - `sigmoid`: the one expert of a token takes the token's input times the sigmoid of its score,
      and its output is not weighted (Llama 4).
    - `shared_gate`: a router of its own says how much the shared MLP counts.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    normalised: bool = True
    dense_layers: tuple[int, ...] = ()
    biases: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    sigmoid: bool = False
    shared_gate: bool = True

    def __post_init__(self):
        check_fields(self)
        if self.sigmoid and self.per_token != 1:
            raise UserError(f"{self.per_token} experts per token; inputs are scaled for one")
        if not 1 <= self.per_token <= self.count:
            raise UserError(f"{self.per_token} experts per token of {self.count}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """Describes how a layer makes heads of latents (MLA, kvqjax/model/latents.py). Queries come of
    a latent of `query_rank` numbers. Keys of `key_dim` channels a head and values of `value_dim`
    come of the latent that is cached. `norm_eps` is that of the norms of both latents."""

    query_rank: int
    key_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_fields(self)
        for name in ("query_rank", "key_dim", "value_dim"):
            check_integer(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(KVShape):
    """A KVShape with what the decoder itself needs: V vocabulary, MLP, embeddings, special tokens.
    `mlp_width` is that of the layers without experts.

    `query_growth` multiplies the query of position p by 1 + query_growth ln(1 + floor(p / N)), N
    being the rope's `original_max_position`. With a `growth_length` N the factor is 1 +
    query_growth ln(1 + floor((p + 1) / N)), and only layers whose rope is "none" have it (arXiv
    2501.19399, as Llama 4 has it).

    - `output_gate`: what attention gives is multiplied by the sigmoid of one more projection of the
      layer's input.
    - `qk_gain`: QK-norm has weights.
    - `output_bias`: the output projection has a bias.
    - `score_sinks`: every query head has a learned logit that takes its share of the softmax.
    - `post_norms`: what attention and the MLP give goes through a norm before it is added.
    - `activation` of the MLP is "silu" or "gelu_tanh".
    - `embedding_scale`, rounded to the compute dtype, multiplies rows of the embedding, and not the
      head that is tied to it.
    - `logit_softcap` caps the logits as `softcap` does scores.

    The last two fields are set inside `shard_map` only (kvqjax/parallel/sharding.py). `split` has
    the mesh axes over which query heads, MLP and vocabulary are split. `gathered` has those of them
    over which queries are gathered before they attend; `num_heads` then counts the gathered heads.
    """

    vocab_size: int
    width: int
    mlp_width: int
    rope: RopeConfig | tuple[RopeConfig | None, ...] | None = RopeConfig()
    experts: ExpertConfig | None = None
    latent_heads: LatentHeads | None = None
    query_growth: float = 0.0
    growth_length: int | None = None
    qk_gain: bool = True
    output_bias: bool = False
    output_gate: bool = False
    score_sinks: bool = False
    post_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    tied_embeddings: bool = False
    max_position: int = 2048
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    architecture: str = "LlamaForCausalLM"
    split: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        check_softcap(self.logit_softcap, "logit_softcap")
        if (self.latent is None) != (self.latent_heads is None):
            raise UserError(
                f"latent={self.latent} and latent_heads={self.latent_heads}; wanted both or neither"
            )
        if self.pairs != "halves":
            raise UserError(
                f"a rope with pairs={self.pairs!r} is for a KVShape; weights are put in order when they load"
            )
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation={self.activation!r}; known: {', '.join(ACTIVATIONS)}")

    @property
    def trained_length(self) -> int | None:
        """Tokens of the longest text that the model was trained for; None: any.

        A sliding window in every layer leaves no distance that training did not have, unless
        queries grow with their position. For the kinds linear and dynamic a config states the
        length before scaling. For yarn some configs state it before scaling and some after; the
        longer length counts."""
        windows = [window or math.inf for window in self.windows]
        if max(windows) <= self.max_position and not self.query_growth:
            return None
        return max([self.max_position, *(_reach(rope, self.max_position) for rope in self.ropes)])

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers with one ordinary MLP."""
        return tuple(range(self.depth)) if self.experts is None else self.experts.dense_layers

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        return tuple(index for index in range(self.depth) if index not in self.dense_layers)

    @property
    def attention_numbers(self) -> int:
        """How many numbers the matrices of a layer of attention have."""
        sizes = self.latent_heads
        if sizes is None:
            return 2 * self.width * (self.query_width + self.kv_width)
        rope_channels = self.head_dim - (self.latent or 0)
        heads = sizes.query_rank * (sizes.key_dim + rope_channels) + sizes.value_dim * self.width
        heads += (self.head_dim - rope_channels) * (sizes.key_dim + sizes.value_dim)
        return self.num_heads * heads + self.width * (sizes.query_rank + self.head_dim)

    @property
    def idle_numbers(self) -> int:
        """How many numbers of all experts one token does not pass through."""
        x = self.experts
        return (
            0
            if x is None
            else 3 * len(self.sparse_layers) * (x.count - x.per_token) * x.width * self.width
        )

    @property
    def mlp_numbers(self) -> float:
        """How many numbers of a layer's MLP, or of its experts and their router, one token passes
        through: the mean."""
        x, dense = self.experts, 3 * self.mlp_width * self.width
        if x is None:
            return float(dense)
        sparse = (
            x.count + 3 * (x.per_token * x.width + x.shared_width) + (x.shared_width > 0)
        ) * self.width
        return (len(self.dense_layers) * dense + len(self.sparse_layers) * sparse) / self.depth
