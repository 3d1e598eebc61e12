"""KVQuant's bits: the paper's formula, its memory tables by the ledger, and packing without
waste."""

import jax
import jax.numpy as jnp
import pytest

import kvqjax as kvq
from kvqjax import kvquant
from kvqjax.cache import CacheLayout, allocate_cache
from kvqjax.codecs import bits_per_value
from kvqjax.codecs.nuq import Nuq
from kvqjax.model.config import ModelConfig

LENGTHS = (2**17, 2**20, 10**7)  # "128K", "1M", "10M" of the paper's tables


def account(width: int, tokens: int, layers: int = 1, **options):
    """Ledger of an abstract 16-bit cache of a model with 32 to 64 heads of 128 and no sinks, as the
    tables count."""
    heads = {"num_heads": width // 128, "num_kv_heads": width // 128, "head_dim": 128}
    config = ModelConfig(vocab_size=8, width=width, mlp_width=8, num_layers=layers, **heads)
    made = CacheLayout(
        shape=config.kv_shape, method=kvquant(sinks=0, **options), capacity=tokens, dtype="bfloat16"
    )
    return kvq.ledger(jax.eval_shape(lambda: allocate_cache(made, 1)))


def gibibytes(book, *roles: str) -> float:
    return sum(book.by_role().get(role, 0) for role in roles) / 2**30


@pytest.mark.parametrize("width", [256, 1024, 4096, 8192])
def test_slots_are_the_released_counts(width):
    assert (
        Nuq(bits=3, per="token", outliers=0.01).slot_count(width)
        == {256: 4, 1024: 12, 4096: 42, 8192: 82}[width]
    )
    assert Nuq(bits=3, per="token").slot_count(width) == 0


@pytest.mark.parametrize("width", [4096, 8192, 1024])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.005, 0.01])
def test_bits_follow_the_papers_formula(width, fraction):
    """b + (32/W)/2 + 32*o averaged over keys and values; outliers rounded up to whole slots at each
    end."""
    for bits in (2, 3, 4):
        specs = [Nuq(bits=bits, per=per, outliers=fraction) for per in ("channel", "token")]
        ours = sum(bits_per_value(spec.build(width)) for spec in specs) / 2
        formula = bits + 16 / width + 32 * fraction
        assert formula <= ours + 1e-12
        assert ours <= formula + 32 * 2 / width
        assert ours == pytest.approx(bits + 16 / width + 32 * specs[0].slot_count(width) / width)


@pytest.mark.parametrize(
    ("layers", "width", "row"),
    [(32, 4096, (64, 512, 4883)), (40, 5120, (100, 800, 7629)), (80, 8192, (320, 2560, 24414))],
)
def test_table_7(layers, width, row):
    """16-bit caches of LLaMA-7B, 13B and 65B, GiB."""
    assert tuple(round(account(width, n, layers).exact_bytes / 2**30) for n in LENGTHS) == row


@pytest.mark.parametrize(
    ("bits", "dense", "sparse"),
    [
        (4, (16.0, 128.1, 1221.9), (17.3, 138.4, 1319.6)),
        (3, (12.0, 96.1, 916.7), (13.3, 106.4, 1014.4)),
        (2, (8.0, 64.1, 611.5), (9.3, 74.4, 709.2)),
    ],
)
def test_table_8(bits, dense, sparse):
    """LLaMA-7B, GiB. With 1 % of outliers 42 whole slots per token are stored where the paper
    counts 40.96."""
    for tokens, plain, full in zip(LENGTHS, dense, sparse, strict=True):
        book = account(4096, tokens, 32, bits=bits, outliers=0.0)
        assert round(gibibytes(book, "payload", "scales", "zeros"), 1) == plain
        book = account(4096, tokens, 32, bits=bits, outliers=0.01)
        parts = gibibytes(book, "payload", "scales", "zeros"), gibibytes(book, "outliers")
        assert round(parts[0] + parts[1] * 40.96 / 42, 1) == full


def test_table_17():
    """Bits at widths 8192 to 1024: dense, 0.1 %, 0.5 % and 1 %; its sparse rows count 16 bits of
    pointer, and the nominal fraction where whole slots are stored."""
    for bits in (2, 3, 4):
        for fraction, low, high in (
            (0.0, 0.0, 0.02),
            (0.001, 0.04, 0.06),
            (0.005, 0.16, 0.19),
            (0.01, 0.32, 0.35),
        ):
            for width, more in ((8192, low), (1024, high)):
                book = account(width, 1024, bits=bits, outliers=fraction)
                slots = Nuq(bits=bits, per="token", outliers=fraction).slot_count(width)
                nominal = book.bits_method + 32 * (fraction - slots / width)
                assert round(nominal + (16 / width if fraction else 0), 2) == round(bits + more, 2)


def test_three_bits_are_packed_without_waste():
    """Value 5 = 0b101 everywhere: the two-bit plane set holds 01 in every place, the one-bit set
    1."""
    packing = Nuq(bits=3, per="token").build(32).fields["codes"].packing
    stored = packing.allocate((1, 1), 1024)
    assert sum(words.size * 32 for words in stored) == 3 * 1024 * 32
    codes, row = jnp.full((32, 32), 5, jnp.uint32), jnp.int32(0)
    stored = jax.lax.fori_loop(
        0, 32, lambda i, s: packing.write(s, (row, row), 32 * i, codes), stored
    )
    assert (stored[0] == jnp.uint32(0x55555555)).all()
    assert (stored[1] == jnp.uint32(0xFFFFFFFF)).all()
