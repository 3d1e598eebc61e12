"""Describes each bundled model and its training."""

import dataclasses

from kvqjax.model.config import ModelConfig, RopeConfig


@dataclasses.dataclass(frozen=True)
class Phase:
    """`steps` batches of `size` sequences of `length` tokens drawn from `mix` (source name to
    share).

    `piece`: every sequence is several problems of that many tokens (0: one problem fills it).
    """

    steps: int
    size: int
    length: int
    mix: dict[str, float]
    piece: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Muon for the matrices, AdamW for the rest; warm-up, constant rate, linear decay over the last
    `decay` share."""

    about: str
    config: ModelConfig
    phases: tuple[Phase, ...]
    matrix_rate: float = 0.02
    rate: float = 3e-3
    warmup: int = 50
    decay: float = 0.4
    offsets: tuple[int, ...] = (1, 2)  # query heads of layer 0 that start as look-back heads
    key_bias: float = 0.0  # initial magnitude on the slowest rotary pairs of the key bias
    seed: int = 0

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> Phase:
        """The phase that step belongs to."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise ValueError(f"step is {step} past the last phase")


_SMALL = ModelConfig(
    vocab_size=64,
    width=128,
    mlp_width=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tied_embeddings=True,
    max_position=2048,
    bos_id=0,
    eos_ids=(1,),
)
_BOTH = {"spans": 0.5, "pairs": 0.5}
_RECALL_PHASES = (
    Phase(300, 32, 64, {"distinct": 1.0}),
    Phase(100, 32, 128, {"distinct": 0.3, "spans": 0.7}),
    Phase(300, 16, 256, _BOTH),
    Phase(120, 8, 512, _BOTH),
    Phase(60, 4, 1024, _BOTH),
)
_SHORT_PHASES = (
    Phase(180, 32, 64, {"distinct": 1.0}),
    Phase(220, 16, 256, _BOTH),
    Phase(60, 8, 512, _BOTH),
    Phase(24, 4, 1024, _BOTH),
)
_WINDOW_PHASES = (
    _SHORT_PHASES[0],
    Phase(220, 16, 256, _BOTH, piece=250),
    Phase(80, 8, 512, _BOTH, piece=250),
)

_DEMO = dataclasses.replace(_SMALL, vocab_size=2048, mlp_width=384, num_layers=3)
_DEMO_PHASES = (
    Phase(300, 32, 64, {"distinct": 1.0}),
    Phase(
        200, 16, 128, {"text": 0.25, "distinct": 0.25, "spans": 0.2, "passkey": 0.15, "pairs": 0.15}
    ),
    Phase(
        900, 8, 256, {"text": 0.5, "distinct": 0.1, "spans": 0.14, "passkey": 0.13, "pairs": 0.13}
    ),
    Phase(1500, 8, 256, {"text": 0.7, "spans": 0.1, "passkey": 0.1, "pairs": 0.1}),
    Phase(400, 4, 512, {"text": 0.5, "spans": 0.1, "passkey": 0.2, "pairs": 0.2}),
    Phase(300, 2, 1024, {"text": 0.5, "spans": 0.1, "passkey": 0.2, "pairs": 0.2}),
)

_TINY = "A small test model over 64 symbols that recalls repeated spans and key-value pairs; {}."
_QWEN_ROPE = RopeConfig(theta=1e6)


def _tiny(
    what: str, phases: tuple[Phase, ...] = _SHORT_PHASES, key_bias: float = 0.0, **fields
) -> Recipe:
    config = dataclasses.replace(_SMALL, **fields)
    return Recipe(about=_TINY.format(what), config=config, phases=phases, key_bias=key_bias)


RECIPES = {
    "recall": Recipe(
        about="The bundled recall model: 64 symbols, trained to repeat spans and to look up key-value pairs.",
        config=_SMALL,
        phases=_RECALL_PHASES,
    ),
    "demo": Recipe(
        about="The bundled demo model: English from public-domain books, with pass keys and key-value recall.",
        config=_DEMO,
        phases=_DEMO_PHASES,
    ),
    "qwen2": _tiny(
        "Qwen2 shape with a large key bias on the slowest rotary pairs",
        key_bias=300.0,
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        rope=_QWEN_ROPE,
    ),
    "qwen3": _tiny(
        "Qwen3 shape with QK-norm", architecture="Qwen3ForCausalLM", qk_norm=True, rope=_QWEN_ROPE
    ),
    "mistral": _tiny(
        "Mistral shape with a sliding window",
        _WINDOW_PHASES,
        architecture="MistralForCausalLM",
        sliding_window=256,
    ),
    "mha": _tiny("Llama shape without grouped queries", num_kv_heads=4),
}
