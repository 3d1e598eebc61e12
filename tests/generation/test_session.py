"""A conversation's cache is kept from turn to turn: what is fed again, forked, saved, broken off, refused."""

import json
import shutil

import numpy as np
import pytest
from tiny import tiny

import kvqjax as kvq
from kvqjax.generation import driver, session
from kvqjax.model.loading import locate

METHOD = "kivi:bits=2,window=32"
# Characters are the recall model's tokens: a question ends with "?", an answer with ",". <s> begins a conversation.
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }},"
    "{% elif m.role == 'user' %}{{ m.content }}?{% else %}{{ m.content }},{% endif %}{% endfor %}"
)
TURNS = ("ab12,cd34,ef56", "gh78,ab", "xy" * 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The recall model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(locate("recall") / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return kvq.load(folder)


def talk(one: kvq.Session, turns=TURNS, **options) -> list[str]:
    return ["".join(one.send(turn, **options)) for turn in turns]


def begun(model, **options) -> kvq.Session:
    return kvq.Session(model, METHOD, **{"max_new_tokens": 12, "eos_ids": (), "capacity": 256} | options)


def test_three_turns_are_one_generation(model):
    """Fed token by token, a conversation is what `generate` makes of all its ids so far; every id is fed once."""
    one, ids = begun(model, chunk=1), []
    for turn in TURNS:
        text = one._text([*one.history, {"role": "user", "content": turn}])
        ids = model.encode(text, add_special_tokens=False)
        answer = "".join(one.send(turn))
        made = kvq.generate(model, [ids], METHOD, chunk=1, max_new_tokens=12, eos_ids=(), capacity=256)
        assert (answer, len(answer)) == (made.text[0], 12)
        assert one.cache.lengths.tolist() == made.cache.lengths.tolist()
        assert one.last.tokens == 12
    assert one.last.kept_tokens == len(ids) - one.last.prompt_tokens > 32  # some of what was kept is encoded
    assert one.last.prompt_tokens == len(TURNS[2]) + len(",?")
    assert [m["role"] for m in one.history] == ["user", "assistant"] * 3
    assert int(one.cache.runs[0].flushed[0][0]) > 0


def test_an_answer_s_own_ids_are_kept_though_the_tokenizer_would_write_others(model, monkeypatch):
    """The answer is spelled by ids that its text would not be encoded to: nothing of it is fed again."""
    one = begun(model)
    "".join(one.send(TURNS[0]))
    made = one._parts[-1]
    one._parts[-1] = made._replace(ids=[token ^ 1 for token in made.ids])
    one._ids = one._ids[: -len(made.ids)] + one._parts[-1].ids
    "".join(one.send(TURNS[1]))
    assert one.last.prompt_tokens == len(TURNS[1]) + len(",?")


def test_what_a_template_leaves_out_is_cut_and_fed_anew(model):
    """The system message changes after the first turn: the cache goes back to where the conversations differ."""
    one = begun(model, system="abc")
    talk(one, TURNS[:2])
    one.system = "abd"
    answer = "".join(one.send(TURNS[2]))
    other = begun(model, system="abd", chunk=256)
    other._history = one.history[:4]
    fed = "".join(other.send(TURNS[2]))
    assert one.last.kept_tokens <= 3  # <s> a b
    assert one.cache.lengths.tolist() == other.cache.lengths.tolist()
    assert len(answer) == len(fed) == 12


def test_a_stop_string_is_no_part_of_the_conversation(model):
    free = talk(begun(model), TURNS[:1])[0]
    stop = free[4:6]
    one = begun(model, stop=stop)
    assert "".join(one.send(TURNS[0])) == free[: free.index(stop)]
    assert one.last.finish_reason == "stop"
    "".join(one.send(TURNS[1]))
    held = model.tokenizer.decode(one._ids)
    assert held.startswith(f"<s>{TURNS[0]}?{free[: free.index(stop)]},{TURNS[1]}?")


def test_a_fork_goes_its_own_way(model):
    one = begun(model)
    talk(one, TURNS[:1])
    other = one.fork()
    wanted = talk(one.fork(), TURNS[1:])
    talk(one, ["zz99", "q"])
    assert talk(other, TURNS[1:]) == wanted
    assert [m["content"] for m in one.history[2::2]] == ["zz99", "q"]
    assert [m["content"] for m in other.history[2::2]] == list(TURNS[1:])


def test_a_saved_conversation_goes_on(model, tmp_path):
    one = begun(model, system="ab", temperature=0.7, seed=3)
    talk(one, TURNS[:2])
    one.save(tmp_path / "talk")
    with pytest.raises(kvq.UserError, match="talk exists already"):
        one.save(tmp_path / "talk")
    other = kvq.Session.load(model, tmp_path / "talk")
    assert (other.system, other.history, other.method) == (one.system, one.history, one.method)
    assert "".join(other.send(TURNS[2])) == "".join(one.send(TURNS[2]))
    assert other.last[:3] == one.last[:3]
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
        (lambda text: text["options"].update(heat=1), "is damaged: unknown option of Session 'heat'"),
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
    one = begun(model)
    talk(one, TURNS[:1])
    one.save(tmp_path_factory.mktemp("saved") / "talk")
    return tmp_path_factory.getbasetemp() / next(tmp_path_factory.getbasetemp().glob("saved*")) / "talk"


def test_an_answer_that_is_broken_off_counts_as_far_as_it_was_made(model):
    whole = talk(begun(model), TURNS[:1])[0]
    one = begun(model)
    answer = one.send(TURNS[0])
    part = next(answer) + next(answer)
    answer.close()
    assert whole.startswith(part)
    assert one.history[-1] == {"role": "assistant", "content": part}
    assert (one.last.finish_reason, next(answer, None)) == ("closed", None)
    for _ in one.send(TURNS[1]):
        break  # left, not closed: the next turn ends it
    assert len(one.history[-1]["content"]) == 1
    ids = model.encode(one._text(one.history), add_special_tokens=False)[:-1]  # without the mark after the answer
    assert one.cache.lengths.tolist() == [len(ids)]
    assert len(talk(one, TURNS[2:])[0]) == 12


@pytest.mark.parametrize("lose", [False, True])
def test_an_interrupt_leaves_the_session_usable(model, monkeypatch, lose):
    """Between two looks at the text, or where the cache was already given away."""
    one = begun(model)
    answer = one.send(TURNS[0])
    part = next(answer) + next(answer)

    def interrupted(*arguments):
        if lose:
            steps(*arguments)
        raise KeyboardInterrupt

    steps = driver.decode_steps
    monkeypatch.setattr(driver, "decode_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    monkeypatch.undo()
    assert one.history[-1]["content"] == part
    assert (one.cache is None) == lose
    assert len("".join(one.send(TURNS[1]))) == 12
    ids = model.encode(one._text(one.history[:-1]), add_special_tokens=False)
    assert one.cache.lengths.tolist() == [len(ids) + 12]


def test_what_does_not_fit_leaves_the_session_as_it_was(model):
    one = begun(model, capacity=64)
    talk(one, TURNS[:1])
    before, history = np.array(one.cache.lengths), one.history
    with pytest.raises(kvq.UserError, match=r"conversation of 78 tokens and 12 new ones .* capacity of 64"):
        one.send("ab" * 24)
    assert (one.cache.lengths.tolist(), one.history) == (before.tolist(), history)
    assert len("".join(one.send("ab"))) == 12
    stale = one.send("cd")
    "".join(one.send("ef", max_new_tokens=2))
    with pytest.raises(kvq.UserError, match="the conversation went on"):
        next(stale)
    assert one.history[-2]["content"] == "ef"


def test_a_failure_drops_the_turn_alone(model, monkeypatch):
    one = begun(model)
    talk(one, TURNS[:1])
    wanted, history = one.fork(), one.history

    def broken(cache):
        raise kvq.UserError("row 0: a key or value of token 3 is NaN or infinite")

    monkeypatch.setattr(driver, "require_finite", broken)
    with pytest.raises(kvq.UserError, match="NaN"):
        "".join(one.send(TURNS[1]))
    monkeypatch.undo()
    assert one.history == history
    assert len("".join(one.send(TURNS[1]))) == len("".join(wanted.send(TURNS[1]))) == 12


def test_the_cache_grows_by_doubling(model, monkeypatch):
    monkeypatch.setattr(session, "LEAST_CAPACITY", 32)
    one, capacities = begun(model, capacity=None), []
    for turn in ("ab", "cd34", "x" * 40, "ef"):
        "".join(one.send(turn))
        capacities.append(one.cache.layout.capacity)
    assert capacities == [32, 64, 128, 128]


def test_turns_without_a_template_are_plain_text():
    """Said once, when the session begins."""
    with pytest.warns(UserWarning, match="no chat template: turns are plain text"):
        one = kvq.Session(kvq.load("demo"), METHOD, system="Once upon a time.", max_new_tokens=6)
    answer = "".join(one.send("The old house"))
    assert one._text(one.history) == f"Once upon a time.\nThe old house{answer}"
    "".join(one.send([{"role": "user", "content": "It was"}], max_new_tokens=3))
    assert one.last.tokens == 3
    assert one.last.kept_tokens > 0
    ids = [token for part in one._parts for token in part.ids]
    assert one.model.tokenizer.decode(ids, skip_special_tokens=True) == one._text(one.history)
    assert ids[0] == 0  # <s>, once
    assert ids.count(0) == 1


def test_bad_input(model):
    with pytest.raises(kvq.UserError, match="needs a tokenizer"):
        kvq.Session(tiny())
    with pytest.raises(kvq.UserError, match="unknown option of Session 'temprature'; did you mean 'temperature'"):
        kvq.Session(model, temprature=1.0)
    one = begun(model)
    for message in ([], [{"role": "user"}], "", {"content": "a"}):
        with pytest.raises(kvq.UserError, match="no message"):
            one.send(message)
    with pytest.raises(kvq.UserError, match="max_new_tokens=0"):
        one.send("a", max_new_tokens=0)
