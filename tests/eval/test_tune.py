"""Tuning: codecs as data say what their own caches say; the search; measurements that survive a
stop; budgets."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import thinned, with_nightly
from tiny import tiny, tokens

import kvqjax as kvq
from kvqjax.calibrate import xquant
from kvqjax.eval.scores import replay
from kvqjax.eval.stamp import ledger_of
from kvqjax.eval.tune import Settings, tune_windows
from kvqjax.eval.tune.candidates import Learnt, layer_bytes, named, sorted_out
from kvqjax.eval.tune.choices import Choice
from kvqjax.eval.tune.measure import Meter, divergence
from kvqjax.eval.tune.report import commands, write_report
from kvqjax.eval.tune.run import best_of, best_policy, for_all_layers
from kvqjax.eval.tune.search import Budget, Table, limit_of, read_budget
from kvqjax.eval.tune.trials import OWN, Chain, Trial, choice_of
from kvqjax.eval.windows import encoded_from
from kvqjax.step.new_cache import check_constants

ROOT = Path(__file__).parents[2]
LENGTH, CHUNK = 128, 32
LIST = "kivi:bits=2,window=0,kivi:bits=4,window=32,higgs:bits=2,buffer=32,higgs:bits=4,buffer=32,uniform:bits=2"
SETTINGS = Settings(context=1024, batch=3)


@pytest.fixture(scope="module")
def model() -> kvq.Model:
    """Random weights that are sharp enough for caches to differ."""
    whole = tiny()
    return whole.replace(params=jax.tree.map(lambda x: 2 * x, whole.params))


@pytest.fixture(scope="module")
def windows() -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.asarray(tokens(5, LENGTH, seed), np.int32) for seed in (1, 2))


def methods_with_constants(model):
    """Candidates of every kind: without constants, with means, for keys and values together."""
    methods = [
        *named(LIST, model.config),
        *map(kvq.parse, ("uniform:bits=3,centre=mean", "xquant:bits=4,latent=true")),
    ]
    found = sorted_out(methods, model.config)
    fixed = {}
    for number, method in enumerate(found.parts):
        if "centre" in str(method):
            fixed[number] = {"k": {"mean": jnp.full((2, model.config.kv_width), 0.1)}}
        if "xquant" in str(method):
            (runs,) = xquant.constants(model.params, model.config, method)
            fixed[number] = jax.tree.map(jnp.asarray, runs)
    return found, fixed


POLICIES = (
    [[0, 0], [0, 0]],
    [[1, 1], [1, 1]],
    [[2, 2], [4, 4]],
    [[3, 1], [2, 5]],
    [[6, 2], [7, 7]],
    [[7, 7], [1, 6]],
)


@pytest.fixture(scope="module")
def trial(model):
    found, fixed = methods_with_constants(model)
    assert len(found.parts) == 8
    assert found.joint.tolist() == [False] * 7 + [True]
    return Trial(model, found, Learnt(fixed, ()))


@pytest.mark.parametrize("policy", with_nightly(POLICIES, POLICIES[3:4]), ids=str)
def test_codecs_as_data_give_what_the_policy_gives_in_its_own_cache(trial, windows, policy):
    """Windows of two lengths, keys and values of other methods, calibrated constants, an assembled
    artifact."""
    policy, batch = np.asarray(policy), jnp.asarray(windows[0][:2])
    _, ready, method = trial.subject(policy)
    artifact = trial.artifact(policy)
    own = trial.model if artifact is None else trial.model.with_artifact(artifact)
    mixture = trial.method(policy)
    check_constants(own, mixture)
    assert kvq.parse(kvq.to_dict(mixture)) == mixture
    np.testing.assert_allclose(
        replay(ready(), batch, method, CHUNK),
        replay(own, batch, mixture, CHUNK),
        atol=2e-4,
        rtol=1e-4,
    )


def test_layers_and_candidates_cost_no_compilation(trial, windows):
    """At most one program, which the test above has compiled if it ran."""
    batch = jnp.asarray(windows[0][:2])
    known = replay._cache_size()
    plain, *found = [
        replay(trial.subject(np.asarray(p))[1](), batch, trial.choice, CHUNK) for p in POLICIES
    ]
    assert replay._cache_size() - known <= 1
    assert min(float(abs(x - plain).max()) for x in found) > 1e-2


def tuned(model, windows, out, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return tune_windows(model, named(LIST, model.config), 5.0, *windows, settings=settings, out=out)


@pytest.fixture(scope="module")
def searched(model, windows, tmp_path_factory):
    """The folder of a run that was not stopped, what it found, and how many programs it
    compiled."""
    out, known = tmp_path_factory.mktemp("whole"), divergence._cache_size()
    return out, tuned(model, windows, out), divergence._cache_size() - known


def test_one_program_measures_all_policies_and_one_the_result(searched):
    """Windows that are no whole batches are filled up."""
    _, found, programs = searched
    assert found.about["measurements"] > 40
    assert programs == 2


def test_a_policy_within_its_budget_better_than_any_single_one(model, searched, tmp_path):
    _, found, _ = searched
    own, *others = found.rows
    assert own["kind"] == "tuned"
    assert own["bits_stored"] == ledger_of(model, found.method, 1024).bits_stored <= 5.0
    singles = [row for row in others if row["kind"] == "single"]
    assert len(singles) == 6
    assert own["kld"] < min(row["kld"] for row in singles if row["bits_stored"] <= 5.0)
    write_report(
        found.method,
        found.artifact,
        found.rows,
        found.about | {"model": "tiny", "data": {"name": "words"}},
        tmp_path,
    )
    assert kvq.parse(tmp_path / "policy.json") == found.method
    assert (tmp_path / "front.png").stat().st_size > 1000
    page = (tmp_path / "report.md").read_text()
    assert str(found.method) in page
    assert all(line in page for line in commands(found.method, found.artifact, tmp_path, "tiny"))


def test_a_stopped_run_measures_nothing_twice(model, windows, searched, tmp_path, monkeypatch):
    """Killed in the middle, its last line cut off, it goes on to the same result, figure by
    figure."""
    whole, first, _ = searched
    stopped = tmp_path
    made, plain = [], Meter._measure

    def count(self, *arguments):
        made.append(1)
        if len(made) == 20:
            raise KeyboardInterrupt
        plain(self, *arguments)

    monkeypatch.setattr(Meter, "_measure", count)
    with pytest.raises(KeyboardInterrupt):
        tuned(model, windows, stopped)
    file = stopped / "searched.jsonl"
    file.write_text(file.read_text() + '{"of": "0.1')
    again = tuned(model, windows, stopped)
    assert again == first
    lines = [
        path.read_text().splitlines()
        for folder in (whole, stopped)
        for path in sorted(folder.glob("*.jsonl"))
    ]
    assert lines[:2] == lines[2:]
    assert len(made) == 1 + sum(len(part) - 1 for part in lines[:2])
    held_out = stopped / "held-out.jsonl"
    held_out.write_text(held_out.read_text()[:9])  # killed as it began the file
    assert tuned(model, windows, stopped) == first
    with pytest.raises(kvq.UserError, match="measurements of another model, text or settings"):
        tuned(model, windows, stopped, context=2048)


def found_on(model, found, windows):
    """Losses of single parts, and the policy that a search ends with."""
    trial, budget, silent = (
        Trial(model, found, Learnt({}, ())),
        read_budget(5.0),
        lambda label: lambda done: None,
    )
    table = Table(layer_bytes(model, found, 1024), np.zeros((1, 2, 1)), found.joint)
    meter = Meter(model, windows, chunk=CHUNK, batch=2, scored_from=0, path=None, owner="")
    limit, table = (
        limit_of(budget, table, model.config, 1024),
        table._replace(loss=trial.losses(meter, silent)),
    )
    return table.loss, best_policy(trial, budget, table, limit, meter, silent).method


@pytest.mark.nightly
def test_a_search_on_a_mesh_finds_the_same_policy(model, windows):
    """On 8 devices: rows and the body's tokens are dealt, whatever heads a candidate mixes; three
    windows over two rows at a time."""
    found = sorted_out(
        named("kivi:bits=2,window=0,higgs:bits=4,buffer=32", model.config), model.config
    )
    spread = kvq.shard(model, choice_of(found), data=2, model=4)
    assert encoded_from(spread, choice_of(found), LENGTH) == encoded_from(
        model, choice_of(found), LENGTH
    )
    (loss, policy), (dealt, other) = (found_on(m, found, windows[0][:3]) for m in (model, spread))
    assert len(policy.layers(model.config)) == 2
    assert policy.overrides  # a mixture
    assert other == policy
    np.testing.assert_allclose(dealt, loss, rtol=0.05, atol=1e-6)


def test_pairs_keep_windows_of_their_own(model):
    """Candidates whose keys and values are two methods share no window with those of other
    methods."""
    pairs = [
        kvq.parse(f"k=higgs:bits=2,buffer={unit};v=kivi:bits=2,window=0").layer for unit in (32, 64)
    ]
    wiring = Choice(specs=tuple(pairs)).build(model.config.kv_shape)
    assert {clock.unit for clock in wiring.storage.clocks} == {32, 64}
    assert len(wiring.storage.sources) == 4


CHAINS = ("aqua:bits=2,buffer=32,first_bits=2", "xquant_cl:bits=2,base=0,protected=0,group=32")


def chain_of(model, text):
    """A chain with constants of the right shapes, and methods that it admits as exceptions."""
    found = sorted_out(
        named(f"kivi:bits=4,window=0,higgs:bits=3,buffer=32,{text}", model.config), model.config
    )
    layout, random = kvq.init_cache(model, found.others[0], 1, 64).layout, np.random.default_rng(0)
    wanted = [run.wiring.constants(run.count, "float32") for run in kvq.cache.runs_of(layout)]
    constants = jax.tree.map(
        lambda x: jnp.asarray(0.1 * random.normal(size=x.shape), x.dtype), tuple(wanted)
    )
    ready = model.replace(constants=constants)
    return Trial(model, found, Learnt({}, (ready,))), Chain(model, found, found.others[0], ready)


@pytest.mark.parametrize("text", thinned(CHAINS, 2))
def test_exceptions_in_a_chain_as_data_give_what_the_policy_gives(model, windows, text):
    """The layer above an exception encodes what the exception leaves it."""
    _, chain = chain_of(model, text)
    names = [part.name.partition(":")[0] for part in chain.parts]
    assert names == ["exact", text.partition(":")[0], "kivi", "higgs"]
    chosen, batch = np.asarray([[2, 2], [OWN, OWN]]), jnp.asarray(windows[0][:2])
    _, ready, method = chain.subject(chosen)
    mixture, artifact = chain.method(chosen), chain.artifact(chosen)
    assert str(mixture).endswith(";0=kivi:bits=4,window=0")
    own = model if artifact is None else model.with_artifact(artifact)
    check_constants(own, mixture)
    np.testing.assert_allclose(
        replay(ready(), batch, method, CHUNK),
        replay(own, batch, mixture, CHUNK),
        atol=2e-4,
        rtol=1e-4,
    )


def test_a_search_puts_exceptions_into_a_chain(model, windows, monkeypatch):
    """With figures that are made up: the chain's second layer does harm, where HIGGS does least of
    what fits."""
    trial, chain = chain_of(model, CHAINS[0])
    harm, silent = {"0": 0.0, "1": 1.0, "2": 0.3, "3": 0.1}, lambda label: lambda done: None

    def one(self, subject, number, tokens, reference):
        self.known[subject[0]] = {
            number: [harm[subject[0].split()[-1]] + 0.01 * row for row in range(self.rows)]
        }

    monkeypatch.setattr(Meter, "_measure", one)
    monkeypatch.setattr("kvqjax.eval.tune.measure.replay", lambda *_: None)
    meter = Meter(model, windows[0], chunk=CHUNK, batch=5, scored_from=0, path=None, owner="")
    size = chain.bytes(1024)
    for part in range(4):
        whole_size = ledger_of(model, chain.method(np.full((2, 2), part)), 1024).bytes
        assert size[:, part, part].sum() == pytest.approx(whole_size, abs=32)

    def find(limit):
        return for_all_layers(trial, 0, Budget("bytes", limit), limit, meter, 1024, silent)

    (option,) = find(size[:, 3, 3].sum())
    assert chain.subject(np.asarray([[OWN, OWN], [3, 3]]))[0] in meter.known
    assert (
        option.method.layers(model.config)[1]
        == chain.method(np.full((2, 2), 3)).layers(model.config)[1]
    )
    assert find(0.9 * size.min((1, 2)).sum()) == []
    assert best_of([option], Budget("kld", 0.5), meter, model, 1024)[0] == option.method


def test_bytes_are_the_ledgers(model):
    found = sorted_out(named(LIST, model.config), model.config)
    table = Table(layer_bytes(model, found, 1024), np.zeros((2, 2, 6)), found.joint)
    for policy in ([[1, 1], [1, 1]], [[1, 2], [3, 5]], [[4, 4], [2, 0]]):
        policy = np.asarray(policy)
        assert table.size(policy) == pytest.approx(
            ledger_of(model, found.method(policy), 1024).bytes, abs=32
        )


@pytest.mark.nightly
def test_a_divergence_may_be_the_budget(model, windows, searched, tmp_path):
    out, first, _ = searched
    singles, kept = first.rows[1:], shutil.copytree(out, tmp_path / "kept")
    bound = sorted(row["kld"] for row in singles if row["kind"] == "single")[2]
    found = tune_windows(
        model, named(LIST, model.config), f"kld={bound}", *windows, settings=SETTINGS, out=kept
    )
    cheapest = min(
        row["bytes"] for row in singles if row["kind"] == "single" and row["kld"] <= bound
    )
    assert found.rows[0]["bytes"] <= cheapest
    assert found.rows[0]["kld"] < 2 * bound  # held on the text that was searched, not on this one


def test_lists_of_methods(model):
    config = model.config
    assert list(map(str, named("kivi:bits=2,group=64,higgs:bits=3", config))) == [
        "kivi:bits=2,group=64",
        "higgs:bits=3",
    ]
    assert {str(m) for m in named("higgs:buffer=32", config)} >= {
        f"higgs:bits={b},buffer=32" for b in (2, 3, 4)
    }
    free = named("data-free", config)
    assert {m.name.partition(":")[0] for m in free} >= {"kivi", "uniform", "higgs"}
    wanted = [
        plan.wiring.wanted()
        for m in free
        for plan in kvq.cache.runs_of(kvq.init_cache(model, m, 1, 64).layout)
    ]
    assert not any(wanted)
