"""The switch `kernels=`: what each word does, where it is shown, and that checks run only where
they may. A chip is
imitated: JAX's device is a CPU, its name and target are not, and TPU kernels run in the Pallas
interpreter."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned
from commands import run

import kvqjax as kvq
from kvqjax.cache import CacheLayout, runs_of
from kvqjax.cache.layout import Ask, reader_of, takes_recent
from kvqjax.cache.readers import kernel as kernel_reader
from kvqjax.kernel_checks import check as check_module
from kvqjax.kernel_checks import choose
from kvqjax.kernel_checks.check import check, verdict_folder
from kvqjax.kernel_checks.compare import Speed
from kvqjax.kernel_checks.store import Verdict
from kvqjax.kernel_checks.trial import by_kernel, by_plain_path, candidates, full, make, queries
from kvqjax.model.config import RopeConfig
from kvqjax.pallas_kernels import dispatch
from kvqjax.pallas_kernels.forms import OFF, KernelForm, Kernels
from kvqjax.pallas_kernels.tpu import packed as tpu
from kvqjax.step import new_cache, persist

SHAPE = kvq.KVShape(num_layers=2, num_heads=4, num_kv_heads=1, head_dim=128)
METHOD, THREE = (f"kivi:bits={bits},group=128,window=0" for bits in (4, 3))
FORM = KernelForm("kivi", 4, 4)


def candidate_of(method: str = METHOD, shape=SHAPE, target: str = "v6e"):
    layout = CacheLayout(
        shape=shape, method=kvq.parse(method), capacity=2048, dtype="bfloat16", target=target
    )
    return candidates(layout)[0]


@pytest.fixture
def chip(tmp_path, monkeypatch):
    """`become(target, outcome)` makes this machine's device a chip on which every check ends so; it
    returns the list of forms that were checked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def become(target: str, outcome: str = "faster"):
        checked = []

        def fake(candidate, target, stored):
            checked.append((candidate.name, target, stored))
            return Verdict(outcome=outcome, error=0.0, seconds=0.1)

        for module in (new_cache, persist, choose):
            monkeypatch.setattr(
                module, "target_of", lambda x: "cpu" if isinstance(x, jax.core.Tracer) else target
            )
        monkeypatch.setattr(choose, "_chip_of", lambda held: f"imitated {target}")
        monkeypatch.setattr(check_module, "check", fake)
        # Tests/kernels/test_splash.py has those.
        monkeypatch.setattr(choose, "prompt_kernel", lambda layout, shape: None)
        choose._usable.cache_clear()
        return checked

    yield become
    choose._usable.cache_clear()


def chosen(**options) -> Kernels:
    return kvq.init_cache(SHAPE, METHOD, 1, 2048, **options).layout.kernels


def path_of(cache) -> str:
    packed = runs_of(cache.layout)[0].wiring.fast.packed
    return "none" if packed is None else dispatch.path(packed.spec, 4, 2048, 1, packed.trusted)


def test_auto_checks_once_and_keeps_the_verdict(chip):
    checked = chip("v6e")
    cache = kvq.init_cache(SHAPE, METHOD, 1, 2048)
    assert cache.layout.kernels == Kernels("auto", (FORM,), "checked")
    assert path_of(cache) == "tpu"
    assert f"kernels auto: Pallas for {FORM} (checked)" in repr(cache)
    assert kvq.ledger(cache).to_json()["kernels"] == f"kernels auto: Pallas for {FORM} (checked)"
    assert checked == [(f"{FORM}, 1 KV heads of 128, 4 queries each", "v6e", "planes")]
    chosen()
    choose._usable.cache_clear()  # another process
    chosen()
    assert len(checked) == 1
    assert len(list(verdict_folder().glob("*.json"))) == 1


def test_coefficients_run_where_all_their_levels_passed(chip, monkeypatch):
    """The kernels of several numbers of bits share a form, and have verdicts of their own."""
    chip("sm90")
    shape = dataclasses.replace(SHAPE, rope=RopeConfig())
    two, three = (kvq.parse(f"klt:bits={bits},heads=own") for bits in (2, 3))
    both = dataclasses.replace(two, overrides=((1, three.layer),))
    checked = []

    def judged(candidate, target, stored):
        checked.append(candidate.name)
        return Verdict(outcome="wrong" if "8x8" in candidate.name else "faster", error=0.0)

    monkeypatch.setattr(check_module, "check", judged)
    cache = kvq.init_cache(shape, two, 1, 2048)
    assert cache.layout.kernels == Kernels("auto", (KernelForm("klt"),), "checked")
    assert reader_of(Ask(runs_of(cache.layout)[0], 1)) == "kernel"
    with pytest.warns(UserWarning, match="levels 8x8 .* is not used"):
        cache = kvq.init_cache(shape, both, 1, 2048)
    assert cache.layout.kernels.forms == ()
    assert {reader_of(Ask(run, 1)) for run in runs_of(cache.layout)} == {"decoded"}
    assert len(checked) == 2


@pytest.mark.parametrize("outcome", ["slower", "wrong", "failed"])
def test_what_failed_is_not_used_and_told_once(chip, outcome):
    chip("v6e", outcome)
    with pytest.warns(UserWarning, match=r"is not used on .*kvqjax doctor"):
        cache = kvq.init_cache(SHAPE, METHOD, 1, 2048)
    assert path_of(cache) == "reference"
    assert "kernels auto: plain path" in repr(cache)
    choose._usable.cache_clear()
    assert chosen() == Kernels("auto", (), "checked")  # warnings are errors here: it was told once


def test_off_and_forced_ask_nobody(chip):
    checked = chip("v6e", "wrong")
    for word, path in (("off", "reference"), ("pallas", "tpu")):
        cache = kvq.init_cache(SHAPE, METHOD, 1, 2048, kernels=word)
        assert cache.layout.kernels.asked == word
        assert path_of(cache) == path
    assert "kernels off: plain path" in repr(kvq.init_cache(SHAPE, METHOD, 1, 2048, kernels="off"))
    assert not checked


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"kernels": "triton"}, "kernels='triton'; known: auto, off, splash, cudnn, pallas"),
        ({"kernels": "splash"}, "it runs on TPUs"),
        ({"kernels": "cudnn"}, "it runs on GPUs from compute capability 8.0 on"),
        ({"kernels": "cudnn", "target": "sm75"}, "here: 128 channels in float32, for sm75"),
        ({"kernels": "pallas"}, "no Pallas kernel reads the bodies of kivi.* on cpu"),
        ({"kernels": "pallas", "target": "sm80"}, "on sm80"),
        ({"kernels": "pallas", "target": "sm90", "form": "heads"}, "form='heads'"),
        ({"kernels": "pallas", "target": "v5e", "form": "stripes"}, "form='stripes'"),
    ],
)
def test_what_cannot_be_forced_is_one_line(options, line):
    with pytest.raises(kvq.UserError, match=line) as refused:
        kvq.init_cache(SHAPE, METHOD, 1, 2048, **options)
    assert "\n" not in str(refused.value)


def test_a_policy_with_a_layer_no_kernel_reads_cannot_be_forced():
    with pytest.raises(kvq.UserError, match="no Pallas kernel"):
        kvq.init_cache(SHAPE, f"{METHOD};0=exact", 1, 2048, kernels="pallas", target="v6e")


def test_a_hopper_takes_planes_only_for_a_kernel_that_won(chip):
    """Its plain path reads bodies head by head; the kernel, never used by the table's word, reads
    planes."""
    checked = chip("sm90")
    cache = kvq.init_cache(SHAPE, METHOD, 1, 2048)
    assert (cache.layout.form, path_of(cache)) == ("planes", "gpu")
    assert [stored for _, _, stored in checked] == ["heads"]
    assert kvq.init_cache(SHAPE, METHOD, 1, 2048, form="heads").layout.form == "heads"
    assert kvq.init_cache(SHAPE, METHOD, 1, 2048, kernels="off").layout.form == "heads"


def test_a_hopper_reads_exact_bodies_and_the_tokens_beside_them_in_one_call(chip):
    checked = chip("sm90")
    bodies = {"target": "sm90", "dtype": "bfloat16"}
    cache = kvq.init_cache(SHAPE, "exact", 1, 2048, **bodies)
    assert cache.layout.kernels.forms == (KernelForm("exact"),)
    run = runs_of(cache.layout)[0]
    assert cache.layout.form == "planes"
    assert reader_of(Ask(run, 1)) == "kernel"
    assert takes_recent(Ask(run, 1), sinks=0)
    # 4 query heads a KV head, of which the kernel takes 32 rows at a time, 8 times.
    assert reader_of(Ask(run, 32)) == "kernel"
    assert reader_of(Ask(run, 33)) != "kernel"
    assert [stored for _, _, stored in checked] == ["heads"]
    float32 = kvq.init_cache(SHAPE, "exact", 1, 2048, **bodies | {"dtype": "float32"})
    assert float32.layout.form == "heads"


def test_a_hopper_keeps_its_form_where_the_kernel_lost(chip):
    chip("sm90", "slower")
    with pytest.warns(UserWarning, match="slower than the plain path"):
        cache = kvq.init_cache(SHAPE, METHOD, 1, 2048)
    assert (cache.layout.form, path_of(cache)) == ("heads", "none")


def test_for_a_chip_that_is_not_here_the_table_counts(chip):
    checked = chip("cpu")
    cache = kvq.init_cache(SHAPE, METHOD, 1, 2048, target="v6e")
    assert path_of(cache) == "tpu"
    assert "the table's word, not checked on a chip" in repr(cache)
    found = {
        text: kvq.init_cache(SHAPE, text, 1, 2048, target="sm90", form="planes")
        for text in (METHOD, THREE)
    }
    assert path_of(found[METHOD]) == "gpu"  # found right on one
    assert path_of(found[THREE]) == "reference"  # compiled, never run
    assert not checked


def test_nothing_is_checked_while_tracing(chip):
    checked = chip("v6e")
    layouts = []

    def make_one():
        return layouts.append(kvq.init_cache(SHAPE, METHOD, 1, 2048, target="v6e").layout)

    # A held array that is no tracer, in a program that is being traced.
    held = jnp.zeros(())
    layout = CacheLayout(
        shape=SHAPE, method=kvq.parse(METHOD), capacity=2048, dtype="float32", target="v6e"
    )
    jax.eval_shape(lambda: layouts.append(choose.choose(layout, "auto", held)) or jnp.zeros(()))
    assert layouts[-1].kernels.forms == ()
    jax.eval_shape(lambda: make_one() or jnp.zeros(()))
    assert not checked
    chosen()
    jax.eval_shape(lambda: layouts.append(choose.choose(layout, "auto", held)) or jnp.zeros(()))
    assert layouts[-1].kernels.forms == (FORM,)  # known by now
    assert len(checked) == 1


def test_process_0_counts_for_all(chip, monkeypatch):
    checked = chip("v6e", "wrong")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    heard = []
    monkeypatch.setattr(choose, "_from_first", lambda own: heard.append(own) or True)
    assert choose._usable(verdict_folder(), "chip", candidate_of(), "v6e", "planes", True)
    assert (heard, checked) == ([False], [])


def test_a_loaded_cache_is_checked_on_its_new_chip(chip, tmp_path):
    chip("v6e")
    cache = kvq.init_cache(SHAPE, METHOD, 1, 2048)
    kvq.save_cache(tmp_path / "cache", cache, SHAPE)
    chip("sm90", "failed")
    with pytest.warns(UserWarning, match="is not used"):
        loaded = kvq.load_cache(tmp_path / "cache", SHAPE)
    assert (loaded.layout.target, loaded.layout.form, loaded.layout.kernels.forms) == (
        "sm90",
        "heads",
        (),
    )
    back = kvq.load_cache(tmp_path / "cache", SHAPE, kernels="pallas")
    assert (back.layout.form, back.layout.kernels.basis) == ("planes", "forced")
    np.testing.assert_array_equal(back.lengths, cache.lengths)


def interpreted(q, body, layer, start, stop, spec, general, trusted, recent=None, pages=None):
    """Dispatch with the Pallas interpreter in the place of a TPU."""
    if (
        dispatch.path(spec, q.shape[2] // spec.kv_heads, body.slots, q.shape[1], trusted)
        == "reference"
    ):
        return dispatch.packed_attention(q, body, layer, start, stop, spec, general, trusted)
    return tpu.packed_attention(q, body, layer, start, stop, spec, pages=pages, interpret=True)


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setattr(kernel_reader, "packed_attention", interpreted)
    jax.clear_caches()
    yield
    jax.clear_caches()


def faster(*_):
    return Speed(1.0, 2.0)


@pytest.mark.nightly
def test_the_interpreter_passes_as_a_chip(interpreter):
    """On pages first, then on rows of their own."""
    found = check(candidate_of(), "v6e", "planes", timed=faster, sizes=(1300, 600))
    assert found.outcome == "faster", found.note
    assert 0 < found.error < 0.005
    assert (found.kernel_ms, found.plain_ms) == (1.0, 2.0)
    slow = check(candidate_of(), "v6e", "planes", timed=lambda *_: Speed(2.0, 1.0), sizes=(300,))
    assert slow.outcome == "slower"


@pytest.mark.nightly
@pytest.mark.parametrize("stored", [pytest.param("planes", marks=pytest.mark.nightly), "heads"])
def test_timed_bodies_hold_encoded_tokens(stored):
    """Every row of the bodies that are timed is the trial's first row, and a longer one goes on
    with it."""
    trial = make(candidate_of(), 640, "sm90", OFF, stored)
    q = jnp.asarray(np.random.default_rng(0).normal(scale=0.02, size=(1, 1, 4, 128)), jnp.bfloat16)
    q, four = (jnp.broadcast_to(q, (rows, 1, 4, 128)) for rows in (3, 4))
    first = by_plain_path(trial)(four)
    out, lse = by_plain_path(full(trial, 640, 3))(q)
    np.testing.assert_allclose(
        out, jnp.broadcast_to(first.out[:1], out.shape), rtol=1e-5, atol=1e-5
    )
    longer = by_plain_path(full(trial, 2048, 3))(q)
    assert bool(jnp.all(longer.lse > lse))
    assert float(jnp.abs(longer.out).max()) > 0.1


def spoilt(change):
    """A kernel whose arguments are changed before it runs."""

    def kernel(q, body, layer, start, stop, spec, general, trusted, recent=None):
        if (
            dispatch.path(spec, q.shape[2] // spec.kv_heads, body.slots, q.shape[1], trusted)
            != "reference"
        ):
            q, body, start, stop = change(q, body, start, stop)
        return interpreted(q, body, layer, start, stop, spec, general, trusted)

    return kernel


def swapped(words):
    """Two lanes of the codes in each other's place."""
    return tuple(w.at[..., 0].set(w[..., 1]).at[..., 1].set(w[..., 0]) for w in words)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    thinned(
        [
            lambda q, body, start, stop: (q, body, start, stop + 1),  # one token too many
            lambda q, body, start, stop: (
                q,
                body,
                start,
                jnp.maximum(stop - 32, 0),
            ),  # a plane left out
            lambda q, body, start, stop: (
                q[:, :, ::-1],
                body,
                start,
                stop,
            ),  # heads in another order
            lambda q, body, start, stop: (
                q,
                body._replace(key_codes=swapped(body.key_codes)),
                start,
                stop,
            ),
            lambda q, body, start, stop: (
                q,
                body._replace(value_codes=swapped(body.value_codes)),
                start,
                stop,
            ),
        ],
        5,
    ),
)
def test_small_mistakes_are_found(monkeypatch, change):
    monkeypatch.setattr(kernel_reader, "packed_attention", spoilt(change))
    jax.clear_caches()
    found = check(candidate_of(), "v6e", "planes", timed=faster, sizes=(300,))
    jax.clear_caches()
    assert found.outcome == "wrong", found


def test_the_wrong_pages_are_found(monkeypatch):
    def kernel(*arguments, pages=None, **recent):
        return interpreted(*arguments, pages=pages if pages is None else pages[:, ::-1], **recent)

    monkeypatch.setattr(kernel_reader, "packed_attention", kernel)
    jax.clear_caches()
    found = check(candidate_of(), "v6e", "planes", timed=faster, sizes=(1300, 600))
    jax.clear_caches()
    assert found.outcome == "wrong", found


@pytest.mark.nightly
def test_the_words_reach_every_door(chip, capsys, monkeypatch):
    """generate, the layers' functions through their cache, eval, bench and the command line."""
    refused = "kernels='pallas': no Pallas kernel"
    model = kvq.load("demo")
    for call in (
        lambda: kvq.generate(model, "a", "kivi:bits=2", kernels="pallas"),
        lambda: kvq.speculate(model, "a", "kivi:bits=2", kernels="pallas"),
        lambda: kvq.beam_search(model, "a", "kivi:bits=2", kernels="pallas"),
    ):
        with pytest.raises(kvq.UserError, match=refused):
            call()
    for command in (
        "generate -p a",
        "bench",
        "eval ppl",
        "eval drift",
        "eval compare",
        "eval retrieval --length 32",
    ):
        code, _, error = run(
            capsys, monkeypatch, *command.split(), "--cache", "kivi:bits=2", "--kernels", "pallas"
        )
        assert (code, refused in error) == (2, True), (command, error)


@pytest.mark.nightly
def test_bench_says_what_ran(capsys, monkeypatch):
    options = "bench --cache kivi:bits=2 --context 64 --steps 1 --repeats 1 --kernels off --json"
    code, out, _ = run(capsys, monkeypatch, *options.split())
    assert code == 0
    rows = json.loads(out)
    assert [row["kernels"] for row in rows] == ["kernels off: plain path"] * 2


def test_layers_take_the_switch_with_their_cache(chip):
    chip("cpu")
    cache = kvq.init_cache(SHAPE, METHOD, 1, 512, kernels="off", dtype="f32")
    x = jnp.ones((1, 2, 4, 128))
    out, new = kvq.attend_layer(cache, 0, x, x[:, :, :1], x[:, :, :1], jnp.asarray([2]))
    cache = kvq.append(cache, [new, new], jnp.asarray([2]))
    assert cache.layout.kernels.asked == "off"
    assert out.shape == x.shape


def test_plain_and_kernel_trials_share_their_arrays():
    trial = make(candidate_of(), 300, "v6e", Kernels("pallas", (FORM,), "forced"))
    q = queries(trial)[0]
    (plain,) = by_plain_path(trial).args
    assert plain.cache.runs is trial.cache.runs
    held = np.asarray(trial.cache.runs[0].flushed[0])
    assert held[0] > held[1] >= held[2] > held[3] == 0
    assert by_kernel(trial)(q).out.shape == q.shape
    assert (
        dataclasses.replace(plain.cache.layout, kernels=trial.cache.layout.kernels)
        == trial.cache.layout
    )


def test_a_compiled_plan_says_whose_word_it_took(capsys, monkeypatch):
    from kvqjax.hardware import aot

    monkeypatch.setattr(aot, "compile_decode", lambda *_: aot.Compiled(1, 2, 0, 3.0))
    plan_of = (
        "plan",
        "-m",
        "llama-3.1-8b",
        "--cache",
        "kivi:bits=2",
        "--context",
        "8192",
        "--device",
        "v6e",
        "--compile",
    )
    for words, wanted in (
        (plan_of, "the table's word"),
        ((*plan_of, "--json"), "kernels auto for v6e (the table's word"),
    ):
        code, out, error = run(capsys, monkeypatch, *words)
        assert code == 0, error
        assert wanted in " ".join(out.split())


@pytest.mark.nightly
def test_the_clock_of_a_check_runs(monkeypatch):
    """On a CPU both sides are plain paths, here one of planes and one of bodies head by head."""
    monkeypatch.setattr(check_module, "TIMED", 512)
    found = check(candidate_of(), "v6e", "heads", sizes=(300,))
    assert found.outcome in ("faster", "slower")
    assert min(found.kernel_ms, found.plain_ms) > 0
