"""What a user types first: policies as text at every door, explicit signatures, and one line for
each mistake."""

import inspect

import jax
import numpy as np
import pytest
from cases import with_nightly
from tiny import tiny

import kvqjax as kvq
from kvqjax.eval import drift, perplexity
from kvqjax.eval.stamp import bytes_of
from kvqjax.hardware.planner import plan_memory
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for

POLICY = "kivi:bits=2,window=32"
METHOD = kvq.kivi(bits=2, window=32)
LOOPS = (kvq.generate, kvq.stream, kvq.speculate, kvq.beam_search)
NEW = {"max_new_tokens": 4}


def ids(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50, count).astype(np.int32)


# Every public function that wants a method, as a function of the method alone.
DOORS = {
    "init_cache": lambda method: kvq.init_cache(tiny(), method, 2, 64).layout,
    "generate": lambda method: kvq.generate(tiny(), [[1, 2, 3]], method, **NEW).tokens,
    "stream": lambda method: [
        made.tokens for made in kvq.stream(tiny(), [[1, 2, 3]], method, **NEW)
    ],
    "speculate": lambda method: kvq.speculate(tiny(), [[1, 2, 3]], method, **NEW),
    "drafter": lambda method: kvq.speculate(
        tiny(), [[1, 2]], method, drafter=tiny(), drafter_method=method, **NEW
    ),
    "beam_search": lambda method: kvq.beam_search(tiny(), [[1, 2, 3]], method, **NEW).tokens,
    "to_dict": kvq.to_dict,
    "policy": lambda method: str(kvq.policy(method, {"0": method})),
    "shard": lambda method: kvq.shard(tiny(), method, model=2).rules,
    "rules_for": lambda method: rules_for(tiny().config, method, MeshSize(model=2)),
    "plan_memory": lambda method: plan_memory(tiny().config, method, 64, 2),
    "bytes_of": lambda method: bytes_of(tiny(), method, 64),
    "perplexity": lambda method: perplexity(
        tiny(), ids(64), method, window=16, tokens=32, chunk=16
    ),
    "drift": lambda method: drift(tiny(), ids(64), method, window=16, tokens=16, chunk=16),
}


@pytest.mark.parametrize(
    "door",
    with_nightly(DOORS, DOORS.keys() - {"generate", "stream", "drafter", "perplexity"}),
)
def test_a_policy_is_taken_wherever_a_method_is(door):
    assert DOORS[door](POLICY) == DOORS[door](METHOD)


def test_calibration_takes_a_policy():
    """From its text the same constants as from the method's value: xquant's need no text and no
    time."""
    policy = "xquant:bits=4,group=32,latent=true"
    one, other = (kvq.calibrate.run(tiny(), method) for method in (policy, kvq.parse(policy)))
    assert one.method == other.method == kvq.xquant(bits=4, group=32, latent=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, one.constants, other.constants))


def test_a_json_tree_is_a_method_too():
    tree = {"method": "kivi", "bits": 2, "window": 32}
    assert kvq.init_cache(tiny(), tree, 1, 8).layout.method == METHOD
    assert kvq.parse(METHOD) is METHOD


def test_every_method_is_exported_and_says_what_it_takes():
    assert {name: getattr(kvq, name) for name in kvq.METHODS} == kvq.METHODS
    assert set(kvq.METHODS) <= set(kvq.__all__)
    for make in kvq.METHODS.values():
        parameters = inspect.signature(make).parameters.values()
        assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
        assert all(p.default is not p.empty and p.annotation is not p.empty for p in parameters)
        with pytest.raises(kvq.UserError, match="did you mean 'sinks'"):
            make(sink=1)


@pytest.mark.parametrize("function", LOOPS)
def test_signatures_are_explicit(function):
    """Completion and help() know every option, its type and its default."""
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:3] == ["model", "prompts", "method"]
    assert not {p.kind for p in parameters.values()} & {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    options = list(parameters.values())[2:]
    assert all(p.default is not p.empty and p.annotation is not p.empty for p in options)
    assert {"max_new_tokens", "eos_ids"} <= set(parameters)


def test_generate_and_stream_take_the_same():
    one, other = (inspect.signature(function).parameters for function in (kvq.generate, kvq.stream))
    assert one == other
    assert {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed"} <= set(
        one
    )


def test_every_option_is_handed_on(monkeypatch):
    """`generate` is what `stream` gives in the end, with the same options."""
    from kvqjax.generation import decoding

    def begun(model, prompts, method, **options):
        seen.update(options, model=model, prompts=prompts, method=method)
        raise kvq.UserError("begun")

    seen = {}
    monkeypatch.setattr(decoding, "stream", begun)
    given = {name: object() for name in inspect.signature(kvq.generate).parameters}
    with pytest.raises(kvq.UserError, match="begun"):
        inspect.unwrap(kvq.generate)(**given)  # below the check of types
    assert seen == given
