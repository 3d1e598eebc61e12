"""The GPU kernels' bodies, simulated on the CPU, against decoding everything and attending exactly.

Bound: as for the TPU kernel (`kernel_cases.near`).
"""

import dataclasses

import exact_bodies
import jax
import jax.numpy as jnp
import klt_bodies
import numpy as np
import pytest
from gpu_simulator import install
from kernel_cases import (
    LLAMA31_8B,
    Case,
    agree,
    check_second_row_sees_nothing,
    make_body,
    near,
    oracle,
)
from kernel_forms import case_of, inputs, name, rope, within

from kvqjax import parse
from kvqjax.cache import CacheLayout
from kvqjax.cache.readers import kernel as kernel_reader
from kvqjax.cache.runs import page_for
from kvqjax.kernel_checks import trial as trial_module
from kvqjax.kernel_checks.check import check
from kvqjax.kernel_checks.compare import Speed
from kvqjax.pallas_kernels import dispatch, reference, support
from kvqjax.pallas_kernels.chips import TILE
from kvqjax.pallas_kernels.exact import ExactBody
from kvqjax.pallas_kernels.forms import KernelForm, form_of
from kvqjax.pallas_kernels.gpu import call as gpu_call
from kvqjax.pallas_kernels.gpu import coefficients as gpu_coefficients
from kvqjax.pallas_kernels.gpu import exact as gpu_exact
from kvqjax.pallas_kernels.gpu import kernel as gpu_kernel
from kvqjax.pallas_kernels.gpu import keys as gpu_keys
from kvqjax.pallas_kernels.gpu import klt as gpu_klt
from kvqjax.pallas_kernels.gpu import lookup as gpu_lookup
from kvqjax.pallas_kernels.gpu import packed as gpu
from kvqjax.pallas_kernels.gpu import parts as gpu_parts
from kvqjax.pallas_kernels.gpu import rope as gpu_rope
from kvqjax.pallas_kernels.gpu import unpack as gpu_unpack
from kvqjax.pallas_kernels.gpu import values as gpu_values

BODIES = (
    gpu_coefficients,
    gpu_exact,
    gpu_kernel,
    gpu_keys,
    gpu_klt,
    gpu_lookup,
    gpu_parts,
    gpu_rope,
    gpu_unpack,
    gpu_values,
)
# Two query tokens and two splits; a tile in two quads; two tiles in a block of single bits.
GROUPS = {"key_group": 128, "value_group": 128, "kv_heads": 1, "head_dim": 128, "group": 4}
FOUR = Case(key_bits=4, value_bits=4, length=2, slots=512, **GROUPS)
TWO = Case(key_bits=2, value_bits=2, slots=1024, **GROUPS)
THREE = Case(key_bits=3, value_bits=3, slots=1024, **GROUPS)
SHORT = {"key_group": 32, "value_group": 32}  # two groups of keys and of values in one product
TWO_SHORT = dataclasses.replace(TWO, **SHORT)
FOUR_SHORT = dataclasses.replace(FOUR, kv_heads=2, head_dim=64, **SHORT)
TWO_NARROW = dataclasses.replace(TWO, kv_heads=2, head_dim=64, value_group=64)
# OScaR: a factor for all heads of a token. OSCAR: a scale and a minimum for each head of a token.
# TurboQuant: a scale alone. KVarN: a factor for each head of a token, and for each channel of a
# group's values.
FOUR_SCALED = dataclasses.replace(FOUR_SHORT, key_factors=1)
FOUR_BY_TOKEN = dataclasses.replace(
    FOUR, kv_heads=2, head_dim=64, value_group=64, key_group=0, key_channels=64
)
THREE_POINTS = dataclasses.replace(THREE, key_group=0, key_channels=128, datatype="nuq")
TWO_BALANCED = dataclasses.replace(TWO_NARROW, key_factors=2, value_factors=True)
CASES = [
    (FOUR, {}, 2),
    (FOUR_SCALED, {}, 2),
    (dataclasses.replace(TWO_SHORT, kv_heads=2, key_factors=1), {}, 1),
    (dataclasses.replace(FOUR, key_factors=1), {}, 2),
    (FOUR_BY_TOKEN, {}, 2),
    (dataclasses.replace(TWO, kv_heads=2, key_group=0, key_channels=128), {}, 1),
    (THREE_POINTS, {}, 2),
    (TWO_BALANCED, {}, 2),
    (dataclasses.replace(FOUR, key_factors=1, value_factors=True), {}, 1),
    (dataclasses.replace(TWO, key_group=0, key_channels=128, datatype="nuq"), {}, 1),
    (dataclasses.replace(FOUR, key_group=0, key_channels=128, datatype="nuq"), {}, 1),
    (TWO, {}, 1),
    (THREE, {}, 1),
    (TWO_SHORT, {}, 1),
    (FOUR_SHORT, {}, 2),
    (TWO_NARROW, {}, 1),
    (dataclasses.replace(FOUR, head_dim=256, value_group=256), {}, 2),
    (case_of(2, kv_heads=1, rope=rope(500_000.0, 128, 1.2)), {"first": 300_003, "apart": 1}, 2),
    (case_of(4, kv_heads=1, slots=512), {}, 1),
    (case_of(2, datatype="nuq", slots=512), {"first": 100_001}, 1),
    (case_of(3, datatype="nuq", kv_heads=1), {}, 2),
    (case_of(4, datatype="nuq", kv_heads=1, slots=512, length=2), {"apart": 3}, 1),
]
BY_DAY = (
    FOUR_SCALED,
    FOUR_BY_TOKEN,
    THREE_POINTS,
    TWO_BALANCED,
    case_of(4, datatype="nuq", kv_heads=1, slots=512, length=2),
)


@pytest.fixture
def simulated(monkeypatch):
    install(monkeypatch, gpu_call, *BODIES)


@pytest.mark.parametrize(
    ("case", "place", "splits"),
    [
        pytest.param(*run, id=name(run[0]), marks=() if run[0] in BY_DAY else pytest.mark.nightly)
        for run in CASES
    ],
)
def test_kernel_equals_the_oracle(simulated, case, place, splits):
    q, body, key, value, start, stop = inputs(case, **place)
    want = oracle(q, key, value, start, stop)
    with jax.disable_jit():
        got = gpu.packed_attention(q, body, 1, start, stop, case.spec, splits=splits)
    near(got, want, key, value, q, within(**place))


@pytest.mark.parametrize(
    ("bits", "length", "splits"),
    [
        (2.0, 1, 2),  # levels of 6, 4, 3, 2 and 1 bits, and coefficients without any
        pytest.param(3.0, 2, 1, marks=pytest.mark.nightly),  # 8 bits too
    ],
)
def test_coefficients_kernel_equals_the_oracle(simulated, bits, length, splits):
    spec, q, body, key, value, start, stop = klt_bodies.make(bits, length)
    want = oracle(q, key, value, start, stop)
    with jax.disable_jit():
        got = gpu_klt.packed_attention(q, body, 1, start, stop, spec, splits=splits)
    near(got, want, key, value, q)


@pytest.mark.parametrize(
    ("tiles", "pairs", "splits"),
    [
        (
            256,
            8,
            43,
        ),  # 6 tiles each in one round; 50 programs a pair would be 400, four more than have a place
        (64, 64, 6),  # 11 tiles; with 7 programs a pair 52 would wait for a second round
        (64, 396, 1),
        (1, 8, 1),
        (3, 5000, 1),
    ],
)
def test_programs_that_share_a_row_fill_whole_rounds(tiles, pairs, splits):
    assert gpu_call.default_splits(tiles, pairs, 3) == splits


@pytest.mark.parametrize(
    ("head_dim", "slots", "splits", "beside"),
    [
        (128, 512, 2, True),
        pytest.param(128, 512, 3, False, marks=pytest.mark.nightly),
        pytest.param(64, 768, 2, False, marks=pytest.mark.nightly),  # tiles of 256 tokens
        pytest.param(256, 256, 1, True, marks=pytest.mark.nightly),  # tiles of 64
    ],
)
def test_exact_kernel_equals_the_oracle(simulated, head_dim, slots, splits, beside):
    spec, q, body, key, value, start, stop = exact_bodies.make(head_dim, slots, length=2)
    stop = stop.at[1].set(0)  # row 1 sees nothing of the body
    recent, want = (None,), oracle(q, key, value, start, stop)
    if beside:
        recent = exact_bodies.recent_of(spec, length=2)
        want = exact_bodies.oracle_with(recent, q, key, value, start, stop)
    with jax.disable_jit():
        got = gpu_exact.packed_attention(q, body, 1, start, stop, spec, recent[0], splits=splits)
    near(got, want, key, value, q)
    if not beside:
        check_second_row_sees_nothing(got)


def threads(layout, array):
    """What every warp and lane holds of an array in a tiled layout: [warps that differ, lanes,
    registers]."""
    for tile in layout.tiling.tiles:
        lead, body = array.shape[: -len(tile)], array.shape[-len(tile) :]
        split = array.reshape(
            *lead, *(n for size, t in zip(body, tile, strict=True) for n in (size // t, t))
        )
        axes = range(len(lead), split.ndim)
        array = split.transpose(*range(len(lead)), *axes[::2], *axes[1::2])
    apart = [axis for axis in (*layout.warp_dims, *layout.lane_dims) if isinstance(axis, int)]
    array = np.moveaxis(array, apart, range(len(apart)))
    return array.reshape(array.shape[0], 32, -1)


def test_two_warps_hold_what_the_other_two_hold():
    """`twice` only renames registers: the first two warps hold rows 0 to 31 as WGMMA spreads them
    over all four, and the last two hold the same."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    place = np.arange(32 * 16).reshape(32, 16)
    once, both = gpu_unpack.TWICE.to_mgpu(), plgpu.Layout.WGMMA.to_mgpu()
    assert once.warp_dims[0] == plgpu.Replicated(2)
    assert (once.lane_dims, once.vector_dim) == (both.lane_dims, both.vector_dim)
    held = threads(once, place)
    np.testing.assert_array_equal(
        np.concatenate([held, held]), threads(both, np.concatenate([place, place]))
    )


def test_refuses_what_it_does_not_read():
    q, body, _, _, start, stop = inputs(FOUR)
    case = dataclasses.replace(FOUR, key_bits=8, value_bits=8)
    with pytest.raises(ValueError, match="2, 3 or 4 for both"):
        gpu.packed_attention(q, make_body(case)[0], 1, start, stop, case.spec)
    case = dataclasses.replace(FOUR, key_group=32)
    with pytest.raises(ValueError, match="this kernel has others"):
        gpu.packed_attention(q, make_body(case)[0], 1, start, stop, case.spec)
    case = dataclasses.replace(FOUR, **SHORT, key_factors=1, value_factors=True)
    with pytest.raises(ValueError, match="factors of"):
        gpu.packed_attention(q, make_body(case)[0], 1, start, stop, case.spec)
    case = case_of(4, datatype="nuq", kv_heads=1, slots=512, key_slots=2, length=2)
    q, body, _, _, start, stop = inputs(case)
    with pytest.raises(ValueError, match="outliers"):
        gpu.packed_attention(q, body, 1, start, stop, case.spec)


def test_coefficients_kernel_refuses_what_it_does_not_read():
    spec, q, body, _, _, start, stop = klt_bodies.make(2.0)
    odd = dataclasses.replace(spec, key_levels=((2, 12),))
    with pytest.raises(ValueError, match="multiples of 8 coefficients"):
        gpu_klt.packed_attention(q, body, 0, start, stop, odd)
    stretches = body._replace(positions=jnp.zeros(8, jnp.int32))
    with pytest.raises(ValueError, match="stretches of 128 tokens"):
        gpu_klt.packed_attention(q, stretches, 0, start, stop, spec)


def test_exact_kernel_refuses_what_it_does_not_read():
    spec, q, body, _, _, start, stop = exact_bodies.make(128, 512)
    for odd in ({"dtype": "float32"}, {"head_dim": 96}):
        with pytest.raises(ValueError, match="in bfloat16"):
            gpu_exact.packed_attention(q, body, 1, start, stop, dataclasses.replace(spec, **odd))
    short = ExactBody(*(x[:, :, :320] for x in body))
    with pytest.raises(ValueError, match="multiple of 128"):
        gpu_exact.packed_attention(q, short, 1, start, stop, spec)


def test_three_programs_of_exact_bodies_fit_a_multiprocessor():
    specs = [exact_bodies.make(dim, 512)[0] for dim in gpu_exact.EXACT_HEAD_DIMS]
    assert [gpu_exact.resident(gpu_exact.Plan(spec, 8, 1)) for spec in specs] == [3, 3, 3]
    assert [gpu_exact.resident(gpu_exact.Plan(spec, 32, 1)) for spec in specs] == [2, 2, 2]


def test_two_programs_of_coefficients_fit_a_multiprocessor_up_to_two_and_a_half_bits():
    bits = (2.0, 2.25, 2.375, 2.5, 3.0)
    specs = [klt_bodies.packed_of(number).spec for number in bits]
    assert [gpu_klt.resident(spec, 8) for spec in specs] == [2, 2, 2, 2, 1]


def test_dispatch_waits_for_results_and_guards_by_platform(monkeypatch):
    """A kernel that has not run is not taken; one that has is, behind a guard that gives a CPU the
    reference. Lowering for CUDA needs no GPU, plugin or ptxas, and checks layouts, swizzles and the
    shapes of products."""
    case = dataclasses.replace(TWO, target="sm90")
    form = KernelForm("kivi", 2, 2)
    monkeypatch.setitem(support.TABLE[form], "sm90", support.Entry("compiled", 8))
    assert dispatch.path(case.spec, 8, case.slots) == "reference"
    monkeypatch.undo()
    assert dispatch.path(case.spec, 8, case.slots) == "gpu"
    assert dispatch.path(case.spec, 65, case.slots) == "reference"
    q, body, key, value, start, stop = inputs(case)

    def plain(*args):
        return reference.packed_attention(*args, case.spec)

    call = jax.jit(lambda *args: dispatch.packed_attention(*args, case.spec, lambda: plain(*args)))
    arguments = q, body, jnp.int32(1), start, stop
    agree(call(*arguments), oracle(q, key, value, start, stop), key, value, q)
    assert "mosaic_gpu" in call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_the_table_names_every_form():
    forms = [case_of(bits, datatype=form) for form in ("uniform", "nuq") for bits in (2, 3, 4)]
    forms = {form_of(case.spec) for case in (TWO, THREE, FOUR, *forms)}
    assert len(forms) == 9
    forms |= {form_of(case.spec) for case, _, _ in CASES}
    # Those that ran on an H100 (docs/speed.md).
    run = {KernelForm("kivi", 2, 2), KernelForm("kivi", 4, 4), KernelForm("kvquant", 3, 3)}
    assert {support.lookup(form, "sm90").level for form in forms - run} == {"compiled"}
    assert {support.lookup(form, "sm90").level for form in run} == {
        support.verified("NVIDIA H100 80GB HBM3")
    }


def test_turboquant_has_a_kernel_on_gpus_alone():
    """TPUs read it by XLA, from pages as short as without a kernel."""

    def packed_of(text: str):
        return parse(text).layer.build(LLAMA31_8B).fast.packed

    spec = packed_of("turboquant:bits=2").spec
    assert form_of(spec) == KernelForm("turboquant", 2, 2)
    assert not spec.plain
    paths = {
        target: dispatch.path(dataclasses.replace(spec, target=target), 4, 4096, trusted=True)
        for target in ("cpu", "v6e", "sm90")
    }
    assert paths == {"cpu": "reference", "v6e": "reference", "sm90": "gpu"}
    for text in ("turboquant:form=vllm", "higgs:rope=post,group=head,rotate=signs"):
        assert packed_of(text) is None
    shared = {"shape": LLAMA31_8B, "capacity": 2048, "dtype": "bfloat16", "target": "v6e"}
    pages = [
        page_for(CacheLayout(method=parse(text), **shared))
        for text in ("turboquant:bits=2", "kivi:bits=2")
    ]
    assert pages[0] < pages[1] == TILE


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(TWO_SHORT, target="sm90"),
        dataclasses.replace(TWO_BALANCED, target="sm90"),
        dataclasses.replace(THREE_POINTS, target="sm90"),
        case_of(4, datatype="nuq", target="sm90"),
    ],
    ids=name,
)
def test_lowers_for_cuda(case):
    """Layouts, swizzles and the shapes of products are checked on the way."""
    q, body, _, _, start, stop = inputs(case)
    call = jax.jit(lambda *args: gpu.packed_attention(*args, case.spec))
    lowered = call.trace(q, body, jnp.int32(1), start, stop).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("kernel", [gpu_klt, gpu_exact], ids=["klt", "exact"])
def test_lowers_for_cuda_whatever_is_stored(kernel):
    inputs = klt_bodies.make(2.0) if kernel is gpu_klt else exact_bodies.make(128, 512)
    spec, q, body, _, _, start, stop = inputs
    call = jax.jit(lambda *args: kernel.packed_attention(*args, spec))
    lowered = call.trace(q, body, 1, start, stop).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("exact", gpu_exact),
        ("klt:bits=2,heads=own", gpu_klt),
        ("omniscale:bits=2", gpu),
        ("oscar:bits=2,rotate=hadamard", gpu),
        ("turboquant:bits=2", gpu),
        ("turboquant:bits=4", gpu),
        ("kvarn:bits=2", gpu),
    ],
)
def test_a_chips_check_finds_a_kernel_right(simulated, monkeypatch, text, module):
    """The cache's own encoder fills the body, and its own attention reads it."""
    shape = dataclasses.replace(LLAMA31_8B, num_heads=4, num_kv_heads=1)
    layout = CacheLayout(
        shape=shape,
        method=parse(text),
        capacity=2048,
        dtype="bfloat16",
        target="sm90",
        form="heads",
    )
    specs = []

    def kernel(q, body, layer, start, stop, spec, without_kernel, trusted, **also):
        specs.append(spec)
        with jax.disable_jit():
            return module.packed_attention(q, body, layer, start, stop, spec, **also)

    def by_kernel(trial):
        def attend(q):
            with monkeypatch.context() as patched:
                patched.setattr(kernel_reader, "packed_attention", kernel)
                return trial_module._attend(trial, q)

        return attend

    candidate = trial_module.candidates(layout)[0]
    verdict = check(
        candidate, "sm90", "heads", kernel=by_kernel, timed=lambda *_: Speed(1.0, 2.0), sizes=(700,)
    )
    assert verdict.outcome == "faster", verdict
    assert verdict.error > 0
    assert specs
    if module is gpu_klt:
        assert verdict.error < 0.005
        levels = {spec.levels_text for spec in specs}
        assert levels == {"8x6 8x4 24x3 32x2 40x1 and 24x3 80x2 24x1"}
