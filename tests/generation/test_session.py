"""A conversation's cache is kept from turn to turn: what is fed again, forked, saved, broken off,
refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation import driver, session
from kvqjax.model import locate

METHOD = "kivi:bits=2,window=32"
# Characters are the recall model's tokens: a question ends with "?", an answer with ",". <s> begins
# a conversation.
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }},"
    "{% elif m.role == 'user' %}{{ m.content }}?{% else %}{{ m.content }},{% endif %}{% endfor %}"
)
TURNS = ("ab12,cd34,ef56", "gh78,ab", "xy" * 9)


def loaded(folder, template: str) -> kvq.Model:
    """The recall model with a chat template."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(locate("recall") / name)
    (folder / "chat_template.jinja").write_text(template)
    return kvq.load(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("chat"), TEMPLATE)


def talk(one: kvq.Session, turns=TURNS, **options) -> list[str]:
    return ["".join(one.send(turn, **options)) for turn in turns]


def begun(model, **options) -> kvq.Session:
    return kvq.Session(
        model, METHOD, **{"max_new_tokens": 12, "eos_ids": (), "capacity": 256} | options
    )


@pytest.mark.nightly
def test_three_turns_are_one_generation(model):
    """Fed token by token, a conversation is what `generate` makes of all its ids so far; every id
    is fed once."""
    session, ids = begun(model, chunk=1), []
    for turn in TURNS:
        text = session._text([*session.history, {"role": "user", "content": turn}])
        ids = model.encode(text, add_special_tokens=False)
        answer = "".join(session.send(turn))
        out = kvq.generate(
            model, [ids], METHOD, chunk=1, max_new_tokens=12, eos_ids=(), capacity=256
        )
        assert (answer, len(answer)) == (out.text[0], 12)
        assert session.cache.lengths.tolist() == out.cache.lengths.tolist()
        assert session.last.tokens == 12
    # Some of what was kept is encoded.
    assert session.last.kept_tokens == len(ids) - session.last.prompt_tokens > 32
    assert session.last.prompt_tokens == len(TURNS[2]) + len(",?")
    assert [m["role"] for m in session.history] == ["user", "assistant"] * 3
    assert int(session.cache.runs[0].flushed[0][0]) > 0


def test_an_answer_s_own_ids_are_kept_though_the_tokenizer_would_write_others(model, monkeypatch):
    """The answer is spelled by ids that its text would not be encoded to: nothing of it is fed
    again."""
    session = begun(model)
    "".join(session.send(TURNS[0]))
    out = session._parts[-1]
    session._parts[-1] = out._replace(ids=[token ^ 1 for token in out.ids])
    session._ids = session._ids[: -len(out.ids)] + session._parts[-1].ids
    "".join(session.send(TURNS[1]))
    assert session.last.prompt_tokens == len(TURNS[1]) + len(",?")


def test_what_a_template_leaves_out_is_cut_and_fed_anew(model):
    """The system message changes after the first turn: the cache goes back to where the
    conversations differ."""
    session = begun(model, system="abc")
    talk(session, TURNS[:2])
    session.system = "abd"
    answer = "".join(session.send(TURNS[2]))
    other = begun(model, system="abd", chunk=256)
    other._history = session.history[:4]
    fed = "".join(other.send(TURNS[2]))
    assert session.last.kept_tokens <= 3  # <s> a b
    assert session.cache.lengths.tolist() == other.cache.lengths.tolist()
    assert len(answer) == len(fed) == 12


def test_a_stop_string_is_no_part_of_the_conversation(model):
    free = talk(begun(model), TURNS[:1])[0]
    stop = free[4:6]
    session = begun(model, stop=stop)
    assert "".join(session.send(TURNS[0])) == free[: free.index(stop)]
    assert session.last.finish_reason == "stop"
    "".join(session.send(TURNS[1]))
    text = model.tokenizer.decode(session._ids)
    assert text.startswith(f"<s>{TURNS[0]}?{free[: free.index(stop)]},{TURNS[1]}?")


def test_a_fork_goes_its_own_way(model):
    session = begun(model)
    talk(session, TURNS[:1])
    other = session.fork()
    wanted = talk(session.fork(), TURNS[1:])
    talk(session, ["zz99", "q"])
    assert talk(other, TURNS[1:]) == wanted
    assert [m["content"] for m in session.history[2::2]] == ["zz99", "q"]
    assert [m["content"] for m in other.history[2::2]] == list(TURNS[1:])


def test_a_saved_conversation_goes_on(model, tmp_path):
    session = begun(
        model, system="ab", temperature=0.7, seed=3, presence_penalty=0.5, logit_bias={5: 1.5}
    )
    talk(session, TURNS[:2])
    (tmp_path / "talk.new").mkdir()  # the user's own
    session.save(tmp_path / "talk")
    (tmp_path / "talk.new").rmdir()
    with pytest.raises(kvq.UserError, match="talk exists already"):
        session.save(tmp_path / "talk")
    other = kvq.Session.load(model, tmp_path / "talk")
    assert (other.system, other.history, other.method) == (
        session.system,
        session.history,
        session.method,
    )
    assert other._settings.options == session._settings.options
    assert "".join(other.send(TURNS[2])) == "".join(session.send(TURNS[2]))
    assert other.last[:3] == session.last[:3]
    new = begun(model)
    new.save(tmp_path / "new")
    assert kvq.Session.load(model, tmp_path / "new").cache is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "talk"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.pop("parts"), "no usable 'parts'"),
        (lambda text: text.update(kind="cache"), "holds a cache, not a session"),
        (lambda text: text.update(ids=[1]), "the cache holds .* tokens, description.json names 1"),
        (lambda text: text.update(history=["x"]), "is damaged: no message"),
        (
            lambda text: text["options"].update(heat=1),
            "is damaged: unknown option of Session 'heat'",
        ),
        (lambda text: text.update(parts=[[1]]), "is damaged"),
    ],
)
def test_a_damaged_folder_is_one_line(model, tmp_path, change, message, saved):
    shutil.copytree(saved, tmp_path / "talk")
    text = json.loads((tmp_path / "talk" / "description.json").read_text())
    change(text)
    (tmp_path / "talk" / "description.json").write_text(json.dumps(text))
    with pytest.raises(kvq.UserError, match=message) as caught:
        kvq.Session.load(model, tmp_path / "talk")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    session = begun(model)
    talk(session, TURNS[:1])
    session.save(tmp_path_factory.mktemp("saved") / "talk")
    return (
        tmp_path_factory.getbasetemp()
        / next(tmp_path_factory.getbasetemp().glob("saved*"))
        / "talk"
    )


def test_an_answer_that_is_broken_off_counts_as_far_as_it_was_made(model):
    whole = talk(begun(model), TURNS[:1])[0]
    session = begun(model)
    answer = session.send(TURNS[0])
    part = next(answer) + next(answer)
    answer.close()
    assert whole.startswith(part)
    assert session.history[-1] == {"role": "assistant", "content": part}
    assert (session.last.finish_reason, next(answer, None)) == ("closed", None)
    for _ in session.send(TURNS[1]):
        break  # left, not closed: the next turn ends it
    assert len(session.history[-1]["content"]) == 1
    # Without the mark after the answer.
    ids = model.encode(session._text(session.history), add_special_tokens=False)[:-1]
    assert session.cache.lengths.tolist() == [len(ids)]
    assert len(talk(session, TURNS[2:])[0]) == 12


@pytest.mark.parametrize("lose", [False, True])
def test_an_interrupt_leaves_the_session_usable(model, monkeypatch, lose):
    """Between two looks at the text, or where the cache was already given away."""
    session = begun(model)
    answer = session.send(TURNS[0])
    part = next(answer) + next(answer)

    def interrupted(*arguments):
        if lose:
            steps(*arguments)
        raise KeyboardInterrupt

    steps = driver.bound_steps
    monkeypatch.setattr(driver, "bound_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    monkeypatch.undo()
    assert session.history[-1]["content"] == part
    assert (session.cache is None) == lose
    assert len("".join(session.send(TURNS[1]))) == 12
    ids = model.encode(session._text(session.history[:-1]), add_special_tokens=False)
    assert session.cache.lengths.tolist() == [len(ids) + 12]


def test_what_does_not_fit_leaves_the_session_as_it_was(model):
    session = begun(model, capacity=64)
    talk(session, TURNS[:1])
    before, history = np.array(session.cache.lengths), session.history
    with pytest.raises(
        kvq.UserError, match=r"a prompt of 78 tokens and 12 new ones .* capacity of 64"
    ):
        session.send("ab" * 24)
    assert (session.cache.lengths.tolist(), session.history) == (before.tolist(), history)
    assert len("".join(session.send("ab"))) == 12
    stale = session.send("cd")
    "".join(session.send("ef", max_new_tokens=2))
    with pytest.raises(kvq.UserError, match="the conversation went on"):
        next(stale)
    assert session.history[-2]["content"] == "ef"


def check_record(session, folder) -> list[int]:
    """The ids that a saved session names are those whose keys and values its exact cache holds: in
    the first layer they depend on the ids and places alone."""
    session.save(folder)
    ids = json.loads((folder / "description.json").read_text())["ids"]
    model, capacity = session.model, session.cache.layout.capacity
    fresh = kvq.init_cache(model, "exact", 1, capacity)
    tokens = np.zeros((1, capacity), np.int32)
    tokens[0, : len(ids)] = ids
    counts = jnp.asarray([len(ids)], jnp.int32)
    _, fresh = jax.jit(kvq.forward)(model, jnp.asarray(tokens), counts, fresh)
    for held, wanted in zip(kvq.dense(session.cache, 0), kvq.dense(fresh, 0), strict=True):
        held, wanted = np.asarray(held)[0], np.asarray(wanted)[0]
        np.testing.assert_allclose(held[: len(ids)], wanted[: len(ids)], atol=1e-4)
    return ids


def test_a_conversation_goes_on_beyond_its_capacity(model, tmp_path):
    """Between turns, and in the middle of answers: the system message stays, and the record of the
    row's ids stays true."""
    options = {
        "eos_ids": (),
        "capacity": 192,
        "context_shift": True,
        "system": "xy12",
        "max_new_tokens": 12,
    }
    session, dropped = kvq.Session(model, "exact", **options), []
    for number, new in enumerate((40, 40, 40, 40, 150, 40)):
        answer = "".join(session.send(f"ab{number}1,cd{number}2", max_new_tokens=new))
        assert (len(answer), session.last.finish_reason) == (new, "length")
        dropped.append(session.last.dropped_tokens)
        if number < 3:
            continue
        ids = check_record(session, tmp_path / str(number))
        text = model.tokenizer.decode(ids)
        assert text.startswith("<s>xy12,")
        assert text.endswith(answer[-20:])
        assert len(ids) <= 192
    assert dropped[:3] == [0, 0, 0]
    assert min(dropped[3:5]) > 0
    assert len(session.history) == 12
    other = kvq.Session.load(model, tmp_path / "5")
    assert "".join(other.send("ab")) == "".join(session.send("ab"))
    # Read anew, the conversation is longer than its row: whole turns are left out.
    other.system = "zw34"
    assert len("".join(other.send("cd"))) == 12
    ids = check_record(other, tmp_path / "other")
    assert model.tokenizer.decode(ids).startswith(("<s>zw34,ab41", "<s>zw34,ab51"))
    with pytest.raises(
        kvq.UserError, match=r"a prompt of 20\d tokens and 1 new .* capacity of 192"
    ):
        session.send("ab" * 100)
    assert len("".join(session.send("ab" * 80, max_new_tokens=5))) == 5


def test_a_cache_that_cannot_shift_is_refused_when_the_session_is_made(model):
    for method, line in (
        (METHOD, "context_shift: kivi.* stores codes of keys after RoPE"),
        ("exact:keep=streaming:64", "context_shift: .*evicted"),
    ):
        with pytest.raises(kvq.UserError, match=line):
            kvq.Session(model, method, context_shift=True)


@pytest.mark.nightly
def test_what_a_template_leaves_out_leaves_the_cache(tmp_path):
    """The template writes earlier answers without their first 70 characters, as those of models
    that think do. What follows the place is not read again."""
    earlier = "{% else %}{{ m.content[70:] }},"
    template = TEMPLATE.replace("{% else %}{{ m.content }},", earlier)
    thinks = loaded(tmp_path, template)
    drawn = {"temperature": 1.5, "seed": 1, "eos_ids": (), "max_new_tokens": 100}
    session = kvq.Session(thinks, "exact", capacity=512, **drawn)
    length = 0
    for number, turn in enumerate(TURNS):
        "".join(session.send(turn))
        ids = check_record(session, tmp_path / str(number))
        if number:
            # All of the row is kept but what left, in whole units of 32.
            assert session.last.dropped_tokens in (32, 64)
            assert session.last.kept_tokens == length - session.last.dropped_tokens
            assert session.last.prompt_tokens == len(turn) + len(",?")
        length = len(ids)


def test_a_failure_drops_the_turn_alone(model, monkeypatch):
    session = begun(model)
    talk(session, TURNS[:1])
    wanted, history = session.fork(), session.history

    def broken(cache):
        raise kvq.UserError("row 0: a key or value of token 3 is NaN or infinite")

    monkeypatch.setattr(driver, "require_finite", broken)
    with pytest.raises(kvq.UserError, match="NaN"):
        "".join(session.send(TURNS[1]))
    monkeypatch.undo()
    assert session.history == history
    assert len("".join(session.send(TURNS[1]))) == len("".join(wanted.send(TURNS[1]))) == 12


def test_the_cache_grows_by_doubling(model, monkeypatch):
    monkeypatch.setattr(session, "LEAST_CAPACITY", 32)
    one, capacities = begun(model, capacity=None), []
    for turn in ("ab", "cd34", "x" * 40, "ef"):
        "".join(one.send(turn))
        capacities.append(one.cache.layout.capacity)
    assert capacities == [32, 64, 128, 128]


@pytest.mark.nightly
def test_turns_without_a_template_are_plain_text():
    """Said once, when the session begins."""
    with pytest.warns(UserWarning, match="no chat template: turns are plain text"):
        session = kvq.Session(
            kvq.load("demo"), METHOD, system="Once upon a time.", max_new_tokens=6
        )
    answer = "".join(session.send("The old house"))
    assert session._text(session.history) == f"Once upon a time.\nThe old house{answer}"
    "".join(session.send([{"role": "user", "content": "It was"}], max_new_tokens=3))
    assert session.last.tokens == 3
    assert session.last.kept_tokens > 0
    ids = [token for part in session._parts for token in part.ids]
    assert session.model.tokenizer.decode(ids, skip_special_tokens=True) == session._text(
        session.history
    )
    assert ids[0] == 0  # <s>, once
    assert ids.count(0) == 1


def test_bad_input(model):
    with pytest.raises(kvq.UserError, match="needs a tokenizer"):
        kvq.Session(tiny())
    with pytest.raises(
        kvq.UserError, match="unknown option of Session 'temprature'; did you mean 'temperature'"
    ):
        kvq.Session(model, temprature=1.0)
    session = begun(model)
    for message in ([], [{"role": "user"}], "", {"content": "a"}):
        with pytest.raises(kvq.UserError, match="no message"):
            session.send(message)
    with pytest.raises(kvq.UserError, match="max_new_tokens=0"):
        session.send("a", max_new_tokens=0)
