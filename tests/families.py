"""Tiny models of families whose scores, norms or layers are not Llama's."""

from kvqjax.model.config import ExpertConfig, RopeConfig

# Layers see 96 tokens (Llama 4: chunks of 40), and all.
LOCAL, FAR = RopeConfig(), RopeConfig(theta=1e6, kind="linear", factor=8.0)
GEMMA = {
    "sliding_window": (96, None),
    "scale": 0.4,
    "logit_softcap": 3.0,
    "norm_offset": 1.0,
    "post_norms": True,
    "activation": "gelu_tanh",
    "embedding_scale": 32**0.5,
    "tied_embeddings": True,
}
EXPERTS = ExpertConfig(count=4, per_token=2, width=24, biases=True, swiglu_limit=1.0)
FAMILIES = {
    "gemma2": GEMMA | {"softcap": 1.5},
    "gemma3": GEMMA | {"qk_norm": True, "rope": (LOCAL, FAR)},
    "gpt-oss": {
        "sliding_window": (96, None),
        "rope": RopeConfig(
            kind="yarn", factor=4.0, original_max_position=32, truncate=False, attention_factor=1.14
        ),
        "qkv_bias": True,
        "output_bias": True,
        "score_sinks": True,
        "experts": EXPERTS,
    },
    "llama4": {
        "sliding_window": (40, None),
        "chunked": (True, False),
        "rope": (RopeConfig(), RopeConfig(kind="none")),
        "qk_norm": (True, False),
        "qk_gain": False,
        "query_growth": 0.5,
        "growth_length": 16,
        "experts": ExpertConfig(
            count=4,
            per_token=1,
            width=24,
            shared_width=24,
            normalised=False,
            sigmoid=True,
            shared_gate=False,
        ),
    },
}
