"""What a message says instead of what was written is right: every kind of hint is done as it
says."""

import re
import shlex

import jax.numpy as jnp
import pytest
from cases import thinned, with_nightly
from commands import run
from tiny import tiny

import kvqjax as kvq
from kvqjax._options import HABITS
from kvqjax.cli.habits import COMMANDS, OPTIONS
from kvqjax.data import read
from kvqjax.data.corpora import HABITS as CORPORA_HABITS
from kvqjax.data.corpora import NAMES
from kvqjax.hardware.devices import find_device
from kvqjax.methods.grammar import _HABITS as POLICY_HABITS
from kvqjax.serving.protocol import read_completion

SHORT = {"max_new_tokens": 2}
DEEP = tiny(num_layers=4)  # KIVI* keeps the first three layers exact


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def call(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def refused(function, *arguments, **options) -> str:
    """What is said of a wrong call."""
    with pytest.raises(kvq.UserError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def near(message: str) -> str | None:
    """The name that a message offers."""
    offered = re.search(r"did you mean '([^']*)'", message)
    return None if offered is None else offered[1]


@pytest.mark.parametrize(
    ("function", "wrong", "value"),
    [
        (kvq.generate, "max_tokens", 2),
        pytest.param(kvq.generate, "temprature", 0.5, marks=pytest.mark.nightly),
        pytest.param(kvq.generate, "repeat_penalty", 1.1, marks=pytest.mark.nightly),
        pytest.param(kvq.generate, "stop_ids", [1], marks=pytest.mark.nightly),
        (kvq.stream, "eos_id", [1]),
        pytest.param(kvq.beam_search, "beam", 2, marks=pytest.mark.nightly),
        (kvq.speculate, "drafts", 2),
    ],
)
def test_the_nearest_option_is_taken(model, function, wrong, value):
    hinted = near(refused(function, model, [[1]], **{wrong: value}))
    assert hinted is not None
    function(model, [[1]], **({"max_new_tokens": 2} | {hinted: value}))


@pytest.mark.parametrize("wrong", ["min_new_token", "max_token", "truncate_prompt_tokens"])
def test_no_option_that_means_the_opposite_is_offered(model, wrong):
    hinted = near(refused(kvq.generate, model, [[1]], **{wrong: 1})) or ""
    assert not {"min", "max"} <= set(f"{wrong}_{hinted}".split("_"))


# Another library's option -> a call as its hint says.
RIGHT = {
    "do_sample": lambda model: kvq.generate(model, [[1]], temperature=0.5, **SHORT),
    "eos_token_id": lambda model: kvq.generate(model, [[1]], eos_ids=[2], **SHORT),
    "generation_config": lambda model: kvq.generate(
        model, [[1]], **model.sampling_defaults(), **SHORT
    ),
    "load_in_4bit": lambda _: kvq.load("recall", weights="int4"),
    "max_cache_len": lambda model: kvq.init_cache(model, "exact", 1, capacity=64),
    "max_length": lambda model: kvq.generate(model, [[1]], max_new_tokens=2, capacity=64),
    "min_new_tokens": lambda model: kvq.generate(model, [[1]], min_tokens=1, **SHORT),
    "num_beams": lambda model: kvq.beam_search(model, [[1]], beams=2, **SHORT),
    "num_return_sequences": lambda model: kvq.generate(model, [[1]] * 2, temperature=0.5, **SHORT),
    "pad_token_id": lambda model: kvq.generate(model, [[1], [2, 3]], **SHORT),
    "past_key_values": lambda model: kvq.generate(
        model, [[2]], cache=kvq.generate(model, [[1]], capacity=64, **SHORT).cache, **SHORT
    ),
    "torch_dtype": lambda _: kvq.load("recall", dtype="float32"),
}


@pytest.mark.parametrize("name", thinned(HABITS, 2))
def test_what_is_said_to_users_of_other_libraries_works(model, name):
    function = {
        "load_in_4bit": kvq.load,
        "torch_dtype": kvq.load,
        "max_cache_len": kvq.init_cache,
    }.get(name, kvq.generate)
    arguments = {kvq.load: ("recall",), kvq.init_cache: (model, "exact", 1)}.get(
        function, (model, [[1]])
    )
    assert HABITS[name] in refused(function, *arguments, **{name: 1})
    assert RIGHT[name](model) is not None


@pytest.mark.parametrize(
    "text", [*POLICY_HABITS, "KIVI", "KIVI*", "xquant-cl", "kivi4", "kivi:4", "kivi:2bit", "4"]
)
def test_a_policy_that_is_offered_is_one(text):
    message = refused(kvq.parse, text)
    hinted = re.search(r"(?:write|nearest here is) ([\w:=,]+)", message)
    assert hinted is not None
    kvq.init_cache(DEEP, hinted[1], 1, 64)


@pytest.mark.parametrize(
    "text", ["kivi_9bit", "kivi:9bit", "exact_4bit", "exact:4bit", "commvq-7bit", "99"]
)
def test_a_policy_that_there_is_not_is_not_offered(text):
    assert "; write" not in refused(kvq.parse, text)


@pytest.mark.parametrize(
    "policy",
    [
        "kivi",
        "kivi:value_group=64",
        "kivi_star",
        "uniform:bits=4,group=64",
        "kivi;0=exact",
        "xquant",
        "xquant:group=64",
    ],
)
@pytest.mark.parametrize("width", with_nightly([40, 48, 96, 100], [48, 100]))
def test_a_group_that_is_offered_fits(policy, width):
    """At a width of 40 KIVI's values can have groups of 8 channels, and its keys no groups of 8
    tokens."""
    model = tiny(num_layers=4, num_heads=1, num_kv_heads=1, head_dim=width, width=width)
    if fits(model, policy):
        return
    message = refused(kvq.init_cache, model, policy, 1, 64)
    hinted = re.search(r"; (\w+)=(\d+) does$", message)
    if hinted is None:
        assert "does not divide" in message
        return
    default, *exceptions = policy.split(";")
    name, _, options = default.partition(":")
    kept = [item for item in options.split(",") if item and not item.startswith(f"{hinted[1]}=")]
    default = f"{name}:{','.join([*kept, f'{hinted[1]}={hinted[2]}'])}"
    kvq.init_cache(model, ";".join([default, *exceptions]), 1, 64)


def fits(model, policy) -> bool:
    """Say whether a model takes a policy."""
    try:
        kvq.init_cache(model, policy, 1, 64)
    except kvq.UserError:
        return False
    return True


def test_kivi_is_told_a_group_of_its_values():
    model = tiny(num_heads=1, num_kv_heads=1, head_dim=40, width=40)
    assert refused(kvq.init_cache, model, "kivi", 1, 64).endswith("; value_group=8 does")


@pytest.mark.parametrize(
    "hint", ["rotate=pairs", "rotate=hadamard,rope=post", "value_rotate=hadamard"]
)
def test_rotations_that_are_offered_beside_rope_fit(model, hint):
    assert "rotate=pairs does, rope=post" in refused(kvq.parse, "kvquant:rotate=hadamard")
    kvq.parse(f"kvquant:{hint}").layers(model.config)


@pytest.mark.parametrize("wrong", ["h10", "v5x", "rtx-409", "a10o"])
def test_a_chip_that_is_offered_is_known(wrong):
    hinted = near(refused(find_device, wrong))
    assert hinted is None or find_device(hinted)
    assert find_device("v5e-16").count == 16
    assert find_device("8xh100").count == 8


def test_data_that_are_offered_are_known():
    assert set(CORPORA_HABITS.values()) <= set(NAMES)
    for wrong in [*CORPORA_HABITS, "sinthetic", "wikitext22"]:
        if "/" not in wrong:
            assert near(refused(read, wrong)) in NAMES


def test_rooms_and_lengths_are_made_as_said(model):
    """resize, beyond_trained and the plain kernels."""
    cache = kvq.generate(model, [[1]], capacity=4, **SHORT).cache
    assert "kvqjax.resize makes room" in refused(kvq.generate, model, [[2]], cache=cache, **SHORT)
    kvq.generate(model, [[2]], cache=kvq.resize(cache, 64), **SHORT)
    trained = tiny(max_position=3)
    assert "beyond_trained=True" in refused(kvq.generate, trained, [[1, 2]], **SHORT)
    kvq.generate(trained, [[1, 2]], beyond_trained=True, **SHORT)
    assert "kernels='auto' takes the plain path" in refused(
        kvq.init_cache, model, "kivi", 1, 64, kernels="pallas"
    )
    kvq.init_cache(model, "kivi", 1, 64, kernels="auto")
    artifact = kvq.calibrate.run(model, "xquant:latent=true")
    counts = jnp.ones((1,), jnp.int32)
    cache = kvq.init_cache(model, "xquant:latent=true", 1, 64)
    assert "constants=artifact.constants" in refused(kvq.layers, cache, counts, constants=artifact)
    kvq.layers(cache, counts, constants=artifact.constants)


def test_fields_that_are_offered_are_fields():
    def body(field, value):
        return f'{{"prompt": "a", "{field}": {value}}}'.encode()

    for wrong, value in (
        ("repeat_penalty", 1.1),
        ("temprature", 1),
        ("max_new_tokens", 3),
        ("stop_ids", "[1]"),
    ):
        hinted = near(refused(read_completion, body(wrong, value), "name"))
        assert hinted is not None
        read_completion(body(hinted, value), "name")
    for wrong in ("min_new_tokens", "truncate_prompt_tokens"):
        assert near(refused(read_completion, body(wrong, 3), "name")) in (None, "min_tokens")


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_said_to_users_of_other_commands_is_taken(call, monkeypatch, option):
    def reached(*_, **__):
        raise kvq.UserError("reached")

    monkeypatch.setattr("kvqjax.cli.run.generate_text", reached)
    words = ["generate", "-m", "recall", "-p", "ab12"]
    assert f"{option}; write {OPTIONS[option]}" in call(*words, option, "1")[2]
    assert "error: reached" in call(*words, *shlex.split(OPTIONS[option]))[2]


def test_an_option_is_offered_where_it_exists(call):
    assert "write" not in call("plan", "--temp", "1")[2]
    assert "write --model demo" in call("plan", "--model-path", "demo")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_are_offered_exist(call, command):
    assert f"write kvqjax {COMMANDS[command]}" in call(command)[2]
    assert call(*COMMANDS[command].split(), "--help")[0] == 0
