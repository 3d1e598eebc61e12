"""HIGGS against the authors' released quantiser (golden vectors), its grids on fresh samples, and
its invariants."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned

from kvqjax.codecs import BlockCentred, bits_per_value, higgs_gpu, higgs_tpu
from kvqjax.codecs.hadamard import hadamard, has_hadamard, splits, transform, transform_matrix
from kvqjax.codecs.higgs import Higgs, higgs_codec
from kvqjax.codecs.higgs_grid import by_blocks, by_table, group_size, nearest, shipped_grid

DATA = Path(__file__).parents[1] / "data"
# (p, n): Gaussian MSE per dimension of the authors' grids, and Lloyd and Max's table for one
# dimension.
GAUSSIAN_MSE = {
    (1, 4): 0.11752,
    (1, 8): 0.03455,
    (1, 16): 0.00950,
    (2, 16): 0.1080,
    (2, 64): 0.0295,
    (2, 256): 0.00778,
    (4, 256): 0.0965,
    (6, 4096): 0.0912,
}
CASES = [
    "d1024_p2_n16",
    "d1024_p4_n256",
    "d256_p2_n64",
    "d128_p2_n256",
    "d512_g128_p2_n16",
    "d96_g128_p2_n64",
]


def golden():
    with np.load(DATA / "golden_aqua_higgs.npz") as data:
        return dict(data)


def signed(seed, tokens, width):
    """Gaussian residuals with one 30-fold channel, an offset channel and a large token."""
    x = np.random.default_rng(seed).normal(size=(tokens, width)).astype(np.float32)
    x[:, 3 % width] *= 30
    x[:, 7 % width] += 5
    x[0] *= 100
    return x


def relative_mse(codec, x):
    out = np.asarray(jax.jit(lambda x: codec.decode({}, codec.encode({}, x)))(jnp.asarray(x)))
    return ((out - x) ** 2).sum() / (x**2).sum()


@pytest.mark.parametrize("case", thinned(CASES, 3))
def test_matches_the_released_quantiser(case):
    data = golden()
    base, dim, count = case.rsplit("_", 2)
    x, points = data[f"{base}_x"], data[f"grid_{dim}_{count}"]
    group = int(base.split("_g")[1]) if "_g" in base else x.shape[1]
    bits = int(np.log2(len(points))) // points.shape[1]
    codec = higgs_codec(Higgs(bits=bits, group=group, dtype="float32"), x.shape[1], points)
    tile = jax.jit(codec.encode)({}, jnp.asarray(x))
    np.testing.assert_allclose(tile["scale"].T, data[f"{base}_scales"], rtol=2e-6)
    plain = [row for row in range(len(x)) if row not in (3, 4)]  # zeros and a constant: exact ties
    wanted = data[f"{case}_idx"].reshape(len(x), -1)
    np.testing.assert_array_equal(np.asarray(tile["codes"])[plain], wanted[plain])
    out, exact = np.asarray(codec.decode({}, tile)), data[f"{case}_deq_exact"]
    bound = 2e-5 * np.linalg.norm(x, axis=1) / np.sqrt(group)
    assert (np.abs(out - exact) <= bound[:, None])[plain].all()
    assert not out[3].any()
    assert (
        abs(((out[4] - x[4]) ** 2).sum() - ((exact[4] - x[4]) ** 2).sum())
        <= 1e-4 * (x[4] ** 2).sum()
    )


@pytest.mark.parametrize(("dim", "count"), thinned(list(GAUSSIAN_MSE), 4))
def test_shipped_grids_reach_the_published_gaussian_error(dim, count):
    samples = jax.random.normal(
        jax.random.key(dim * count), (2**18 if count < 4096 else 2**15, dim)
    )
    grid = jnp.asarray(shipped_grid(int(np.log2(count)) // dim, dim))
    index = jax.jit(nearest)(grid, samples)
    error = float(((samples - grid[index]) ** 2).mean())
    # 1 % for the grid; three standard errors for the samples (vectors' errors vary by about (2 /
    # p)^0.5 of their mean).
    assert error <= GAUSSIAN_MSE[dim, count] * (1.01 + 3 * (2 / dim / len(samples)) ** 0.5)
    assert error >= GAUSSIAN_MSE[dim, count] * 0.97


@pytest.mark.parametrize("form", [by_blocks, by_table])
def test_nearest_is_the_first_of_the_nearest_points(form):
    """Sixteenths, so that every product and sum is exact and ties are ties, however XLA rounds and
    orders them."""
    grid = np.round(np.random.default_rng(0).normal(size=(64, 3)) * 16).astype(np.float32) / 16
    grid[40] = grid[7]
    y = np.concatenate(
        [
            np.round(np.random.default_rng(1).normal(size=(500, 3)) * 16).astype(np.float32) / 16,
            grid,
        ]
    )
    distance = ((y[:, None] - grid[None]) ** 2).sum(-1)
    assert (np.sort(distance, 1)[:, 0] == np.sort(distance, 1)[:, 1]).sum() >= 2, "there are ties"
    np.testing.assert_array_equal(form(jnp.asarray(grid), jnp.asarray(y)), distance.argmin(1))


@pytest.mark.parametrize("order", [1, 12, 28, 768, 1024])
def test_hadamard_matrices(order):
    matrix = hadamard(order).astype(np.float32)
    np.testing.assert_array_equal(np.abs(matrix), 1)
    np.testing.assert_array_equal(matrix @ matrix.T, order * np.eye(order, dtype=np.float32))


@pytest.mark.parametrize(
    ("order", "squares"), [(1, 1), (1024, 1024), (28, 28), (192, 576), (320, 1600), (720, 32400)]
)
def test_the_transform_and_its_inverse(order, squares):
    """192 = 3 * 64 and 320 = 5 * 64 have matrices of other integers than +-1, 28 = 7 * 4 has
    Paley's."""
    matrix = transform_matrix(order).astype(np.float32)
    np.testing.assert_array_equal(matrix @ matrix.T, squares * np.eye(order, dtype=np.float32))
    x = signed(0, 3, order)
    bound = 4e-6 * np.abs(x).sum(1).max()
    np.testing.assert_allclose(transform(jnp.asarray(x)), x @ matrix.T, atol=bound)
    np.testing.assert_allclose(
        transform(transform(jnp.asarray(x)), inverse=True) / squares, x, atol=bound
    )


@pytest.mark.parametrize(
    ("order", "head_dim", "heads"),
    [(192, 64, 3), (640, 128, 5), (1024, 128, 8), (448, 64, None), (96, 96, None)],
)
def test_transforms_that_are_one_between_heads_after_one_within(order, head_dim, heads):
    """Seven heads have none, since 448 takes Paley's matrix of 28; a head of 96 is three of 32
    itself."""
    assert splits(order, head_dim) is (heads is not None)
    if heads:
        both = np.kron(transform_matrix(heads), transform_matrix(head_dim))
        np.testing.assert_array_equal(both, transform_matrix(order))


def test_powers_of_two_follow_sylvesters_order():
    rows = np.arange(64)
    parity = np.array([[bin(i & j).count("1") % 2 for j in rows] for i in rows])
    np.testing.assert_array_equal(hadamard(64), 1 - 2 * parity)


def test_orders_without_a_known_matrix_are_refused():
    assert not any(has_hadamard(order) for order in (0, 3, 6, 10, 100))
    with pytest.raises(ValueError, match="group=100"):
        Higgs(group=100)
    with pytest.raises(ValueError, match="no grid of 5 bits"):
        Higgs(bits=5)


@pytest.mark.parametrize(
    ("width", "group", "bits"),
    thinned(
        [
            (128, 128, 2),
            (256, 256, 3),
            (512, 512, 4),
            (1024, 1024, 2),
            (2048, 1024, 2),
            (96, 96, 3),
            (1536, 768, 2),
            (80, 80, 4),
        ],
        2,
    ),
)
def test_bits_and_error_at_every_width(width, group, bits):
    codec = Higgs(bits=bits).build(width)
    assert group_size(width) == group
    assert bits_per_value(codec) == pytest.approx(bits + 16 / group)
    # Outliers spread over the group, so the residual is nearly Gaussian; a 30-fold channel leaves
    # it within 30 %.
    assert relative_mse(codec, signed(1, 256, width)) < 1.3 * GAUSSIAN_MSE[2, 4**bits]


@pytest.mark.parametrize(("width", "padded"), [(100, 128), (33, 64), (24, 24)])
def test_widths_without_a_hadamard_matrix_are_padded(width, padded):
    codec = Higgs().build(width)
    assert codec.fields["codes"].width == padded // 2
    x = np.random.default_rng(2).normal(size=(64, width)).astype(np.float32)
    assert relative_mse(codec, x) < 0.13


@pytest.mark.parametrize(
    ("bits", "dim", "width"), thinned([(2, 6, 128), (2, 1, 64), (3, 2, 64), (2, 4, 128)], 2)
)
def test_codes_are_packed_to_their_true_bits(bits, dim, width):
    codec = Higgs(bits=bits, dim=dim).build(width)
    x = signed(3, 1024, width)
    tile = jax.jit(codec.encode)({}, jnp.asarray(x))
    field = codec.fields["codes"]
    assert field.bits == bits * dim
    assert field.width == -(-width // dim)
    stored = field.packing.allocate((1, 1), 1024)
    write = jax.jit(field.packing.write)
    for token in range(0, 1024, 32):
        place = jnp.int32(0), jnp.int32(0)
        stored = write(stored, place, jnp.int32(token), tile["codes"][token : token + 32])
    np.testing.assert_array_equal(field.packing.read(stored, 0, 0, 1024)[0], tile["codes"])
    assert sum(a.nbytes for a in stored) == bits * dim * field.width * 1024 // 8
    out = np.asarray(codec.decode({}, tile))
    assert ((out - x) ** 2).sum() < 1.3 * GAUSSIAN_MSE[dim, 2 ** (bits * dim)] * (x**2).sum()


def test_scaling_the_input_scales_the_output():
    codec, x = Higgs(bits=3, seed=5).build(128), jnp.asarray(signed(4, 64, 128))
    encode = jax.jit(codec.encode)
    one, four = encode({}, x), encode({}, 4 * x)
    np.testing.assert_array_equal(one["codes"], four["codes"])
    np.testing.assert_array_equal(4 * codec.decode({}, one), codec.decode({}, four))


def test_tokens_are_coded_alone():
    codec, x = Higgs(bits=2).build(256), signed(5, 64, 256)
    order = np.random.default_rng(6).permutation(64)
    encode = jax.jit(codec.encode)
    tile, moved = encode({}, jnp.asarray(x)), encode({}, jnp.asarray(x[order]))
    np.testing.assert_array_equal(np.asarray(tile["codes"])[order], moved["codes"])
    scales = jnp.stack(jnp.split(tile["scale"], 2, axis=1))
    stacked = {"codes": tile["codes"].reshape(2, 32, -1), "scale": scales}
    np.testing.assert_array_equal(
        codec.decode({}, stacked).reshape(64, 256), codec.decode({}, tile)
    )


def test_zero_groups_decode_to_zero_and_infinities_stay_in_their_group():
    x = signed(7, 4, 256)
    x[1], x[2, 5] = 0, np.inf
    codec = Higgs(group=128).build(256)
    out = np.asarray(codec.decode({}, codec.encode({}, jnp.asarray(x))))
    assert not out[1].any()
    assert not np.isfinite(out[2, :128]).any()
    assert np.isfinite(out[2, 128:]).all()
    assert np.isfinite(out[3]).all()


def test_random_signs_rescue_structured_inputs():
    x = np.broadcast_to(np.linspace(1, 2, 16, dtype=np.float32)[:, None], (16, 256))
    assert relative_mse(Higgs().build(256), x) > 0.5  # a constant vector becomes one-hot
    assert relative_mse(Higgs(seed=0).build(256), x) < 0.13


def test_codes_are_computed_against_the_stored_scale():
    x = signed(8, 256, 128)
    codec = Higgs(bits=4).build(128)
    tile = jax.jit(codec.encode)({}, jnp.asarray(x))
    stored, exact = np.asarray(tile["scale"], np.float32).T, np.linalg.norm(x, axis=1)[:, None]
    grid = shipped_grid(4, 2)

    def codes(scale):
        y = (x @ hadamard(128).T / scale).reshape(256, 64, 1, 2)
        return ((y - grid) ** 2).sum(-1).argmin(-1)

    assert (codes(stored) != np.asarray(tile["codes"])).mean() < 1e-3
    assert (codes(exact) != np.asarray(tile["codes"])).mean() > 5e-3


@pytest.mark.parametrize("form", [higgs_tpu, higgs_gpu], ids=["tpu", "gpu"])
@pytest.mark.parametrize(
    ("bits", "dim", "group", "groups"),
    thinned(
        [
            (2, 2, 1024, 1),
            (2, 2, 512, 2),
            (3, 2, 64, 4),
            (4, 2, 1024, 1),
            (4, 1, 1024, 1),
            (3, 2, 96, 2),
            (2, 2, 768, 1),
            (3, 1, 28, 1),
        ],
        2,
    ),
)
def test_forms_of_chips_round_nothing_but_sums(form, bits, dim, group, groups):
    """Parts of groups, groups side by side, single groups; three parts, and a matrix that is not
    symmetric (28)."""
    points = shipped_grid(bits, dim)
    codes = np.random.default_rng(0).integers(0, len(points), (3, groups * group // dim))
    y = points[codes].reshape(3, groups, group).astype(np.float64)
    wanted = y @ transform_matrix(group)
    x = jax.jit(functools.partial(form.inverse, higgs_tpu.plan(points, group, groups)))(
        jnp.asarray(codes, jnp.uint32)
    )
    size = np.abs(y) @ np.abs(transform_matrix(group).astype(float))
    bound = (2 * group + 8) * 2.0**-24 * size
    if form is higgs_gpu:
        bound = bound + 2.0**-11 * np.abs(wanted)  # written as float16
    assert (np.abs(np.asarray(x).reshape(wanted.shape) - wanted) <= bound).all()


@pytest.mark.parametrize(("bits", "dim", "group"), [(2, 2, 128), (4, 1, 64), (3, 2, 96)])
def test_heads_as_gpus_transform_them_round_nothing_but_the_result(bits, dim, group):
    points = shipped_grid(bits, dim)
    codes = np.random.default_rng(0).integers(0, len(points), (3, 2, group // dim))
    y = points[codes].reshape(3, 2, group).astype(np.float64)
    wanted = y @ transform_matrix(group)
    x = np.asarray(
        jax.jit(functools.partial(higgs_gpu.within_heads, points, group))(
            jnp.asarray(codes, jnp.uint32)
        )
    )
    bound = (2 * group + 8) * 2.0**-24 * np.abs(y).sum(-1, keepdims=True) + 2.0**-11 * np.abs(
        wanted
    )
    assert (np.abs(x - wanted) <= bound).all()


@pytest.mark.parametrize(
    ("width", "options"),
    thinned([(96, {}), (100, {"seed": 3}), (256, {"group": 64}), (130, {"dim": 6})], 2),
    ids=str,
)
def test_sums_before_the_transform_are_sums_of_what_is_decoded(width, options):
    spec = Higgs(bits=2, **options)
    codec, (wide, read, finish) = spec.build(width), spec.summed_form(width)
    tile = jax.tree.map(
        lambda x: jnp.asarray(x)[None], jax.jit(codec.encode)({}, jnp.asarray(signed(1, 64, width)))
    )
    weights = np.random.default_rng(2).random((5, 64)).astype(np.float32)
    points = np.asarray(jax.jit(read)(tile))[0]
    assert points.shape == (64, wide)
    decoded = np.asarray(codec.decode({}, tile))[0]
    bound = 64 * 2.0**-22 * (weights @ np.abs(decoded)).max()
    np.testing.assert_allclose(
        jax.jit(finish)({}, weights @ points), weights @ decoded, rtol=0, atol=bound
    )


@pytest.mark.parametrize(
    ("spec", "heads"),
    thinned(
        [
            (Higgs(), 4),
            (Higgs(group=64), 4),
            (Higgs(dim=4), 4),
            (Higgs(), 3),
            (Higgs(bits=3, group=160), 10),
            (BlockCentred(inner=Higgs(), block=32), 3),
        ],
        3,
    ),
    ids=[
        "two of 2",
        "groups of two heads",
        "of 4 numbers",
        "three heads",
        "twice five heads",
        "around a block's mean",
    ],
)
def test_heads_mixed_after_the_reading_are_what_is_decoded(spec, heads):
    dim = 32
    codec, (mix, read) = spec.build(heads * dim), spec.mixed_form(heads, dim)
    vectors = jnp.asarray(signed(1, 64, heads * dim))
    tile = jax.tree.map(lambda x: jnp.asarray(x)[None], jax.jit(codec.encode)({}, vectors))
    found = np.asarray(jax.jit(read)(tile))[0].reshape(64, heads, dim)
    decoded = np.asarray(codec.decode({}, tile))[0]
    bound = 2.0**-16 * np.abs(decoded).max(-1, keepdims=True)
    assert (np.abs(np.einsum("hk,nkd->nhd", mix, found).reshape(64, -1) - decoded) <= bound).all()


@pytest.mark.parametrize("options", [{"seed": 3}, {"group": 16}, {"rotated": True}], ids=str)
def test_heads_that_the_transform_cannot_leave_for_later(options):
    assert Higgs(**options).mixed_form(4, 32) is None
    assert BlockCentred(inner=Higgs(**options)).mixed_form(4, 32) is None


def test_grids_that_the_form_for_tpus_cannot_hold_are_gathered():
    assert higgs_tpu.plan(shipped_grid(2, 6), 1024, 1) is None, "4096 points"
    assert higgs_tpu.plan(shipped_grid(2, 2), 1, 1) is None, "a group within a vector"
    assert (
        higgs_tpu.plan(np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32), 128, 1)
        is None
    ), "float32"


@pytest.mark.parametrize(("dim", "gathers"), [(2, False), (6, True)])
def test_decoding_gathers_on_tpus_only_where_it_must(dim, gathers):
    codec = Higgs(bits=2, dim=dim).build(128)
    tile = jax.eval_shape(codec.encode, {}, jax.ShapeDtypeStruct((32, 128), jnp.float32))
    traced = jax.jit(lambda tile: codec.decode({}, tile)).trace(tile)
    assert ("gather" in traced.lower(lowering_platforms=("tpu",)).as_text()) is gathers
