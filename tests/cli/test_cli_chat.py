"""`kvqjax chat`: turns from a pipe and from a terminal, commands, answers that are stopped."""

import io
import json
import re
import shutil
import stat
import sys

import pytest
from commands import run

from kvqjax.cli import chat
from kvqjax.cli.chat import Lines
from kvqjax.model import locate

# The bundled model "recall" answers ?key with the key's value. A turn is put behind the earlier
# ones.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' or m.role == 'system' %},{% endif %}{% endfor %}"  # noqa: E501
FIRST = "ab12,cd34,?cd"


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> str:
    """The bundled model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "talker"
    shutil.copytree(locate("recall"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    return str(folder)


@pytest.fixture
def talk(capsys, monkeypatch, talker):
    def call(text: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return run(capsys, monkeypatch, "chat", "-m", talker, "-n", "2", *words)

    return call


def test_answers_stand_alone_on_standard_output(talk):
    """The prompt is not repeated, and the second turn is answered from the first one's text."""
    code, out, err = talk(f"{FIRST}\n\n?ab\n?cd", "--cache", "kivi:bits=4,window=32")
    assert (code, out, err) == (0, "34\n12\n34\n", "")


def test_options_of_a_generation_are_those_of_generate(talk):
    """A bias forces a token, and a token ends an answer."""
    assert (
        talk(FIRST, "--logit-bias", "7=100", "--ignore-eos", "--json")[1].count('"tokens": 2') == 1
    )
    plain, biased = talk(FIRST)[1], talk(FIRST, "--logit-bias", "7=100", "--ignore-eos")[1]
    assert plain != biased
    assert talk(FIRST, "--logit-bias", "7=100", "--stop-token-ids", "7")[1] == "\n"


def test_a_system_message_comes_first_and_may_be_changed(talk):
    code, out, err = talk("?cd\n/system cd56\n/new\n?cd\n/system\n", "--system", "cd34")
    assert (code, out) == (0, "34\n56\n")
    assert [line for line in err.splitlines() if line.startswith("system")] == ["system: cd56"] * 2


def test_a_conversation_is_saved_and_goes_on(talk, tmp_path):
    place = tmp_path / "kept"
    code, out, err = talk(f"{FIRST}\n/save {place}\n/save {place}\n/quit\n?ab\n")
    assert (code, out) == (0, "34\n")  # nothing is read after /quit
    assert err.splitlines() == [
        f"saved as {place}",
        f"error: {place} exists already; choose another folder",
    ]
    for command in (f"/load {place}\n?ab\n", ""):
        code, out, err = talk(command or "?ab\n", *([] if command else ["--load", str(place)]))
        assert (code, out) == (0, "12\n")
        assert err.splitlines() == [
            f"{place}: exact, 2 messages",
            f"user: {FIRST}",
            "assistant: 34",
        ]


@pytest.mark.nightly
def test_bytes_say_what_the_cache_holds(talk):
    code, out, err = talk(
        f"/bytes\n{FIRST}\n/bytes\n", "--cache", "kivi:bits=4,window=32", "--capacity", "256"
    )
    before, held, speed = err.splitlines()
    assert (code, out) == (0, "34\n")
    assert "no answer yet" in before
    assert held.startswith("kivi:bits=4,window=32: 15 of 256 tokens, ")
    assert speed.startswith("last answer: 13 tokens fed, first token after ")


def test_answers_as_json(talk):
    rows = [json.loads(line) for line in talk(f"{FIRST}\n?ab\n", "--json")[1].splitlines()]
    assert [(row["text"], row["finish_reason"], row["tokens"]) for row in rows] == [
        ("34", "length", 2),
        ("12", "length", 2),
    ]
    assert [row["kept_tokens"] for row in rows] == [0, 15]


def test_a_line_may_go_on_and_a_text_may_begin_with_a_slash(talk, monkeypatch):
    said = []
    monkeypatch.setattr("kvqjax.cli.chat._Chat.turn", lambda self, text: said.append(text) or True)
    talk("one\\\ntwo\\\n\\\nthree\n/not\\\nended\\")
    assert said == ["one\ntwo\n\nthree", "/not\nended"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/nothing else", "no command /nothing; /help lists them"),
        ("/save", "/save NAME: the name of a new folder"),
        ("/load", "/load NAME"),
        ("/load nowhere", "nowhere"),
        ("ab" * 300, "do not fit this session's capacity of 256"),
        ("\xff", "the tokenizer"),
    ],
)
def test_what_is_wrong_is_one_line_and_the_conversation_goes_on(talk, text, message):
    code, out, err = talk(f"{text}\n{FIRST}\n", "--capacity", "256")
    assert (code, out.splitlines()[-1:]) == (0, ["34"])
    if message != "the tokenizer":
        assert (err.count("\n"), err[:7]) == (1, "error: "), err
        assert message in err


def test_help_and_a_slash(talk):
    code, out, err = talk("/help\n//ab\n")
    assert code == 0
    assert "/save NAME" in err
    assert out.count("\n") == 1


def test_ctrl_c_stops_one_answer(talk, monkeypatch):
    from kvqjax.generation.session import Answer

    forward, steps = Answer.__next__, []

    def interrupted(self):
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return forward(self)

    monkeypatch.setattr(Answer, "__next__", interrupted)
    code, out, err = talk(f"{FIRST}\n4,?ab\n")
    assert (code, err) == (0, "[stopped]\n")
    assert out == "3\n12\n"  # the answer counts as far as it was made: the second turn completes it


def test_an_answer_stopped_before_it_began_has_no_figures(talk, monkeypatch):
    from kvqjax.generation.session import Answer

    forward = Answer.__next__

    def interrupted(self):
        if self._number:  # the second turn
            raise KeyboardInterrupt
        return forward(self)

    monkeypatch.setattr(Answer, "__next__", interrupted)
    code, out, err = talk(f"{FIRST}\n4,?ab\n", "--json")
    first, second = map(json.loads, out.splitlines())
    assert (code, err) == (0, "[stopped]\n")
    assert first["tokens"] > 0
    assert second == {"text": ""}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch, *texts) -> list[str]:
    """What `Lines` gives for lines typed into a terminal; an exception is a key."""
    queue = iter(texts)

    def read(prompt: str) -> str:
        value = next(queue)
        if isinstance(value, str):
            return value
        raise value

    monkeypatch.setattr("builtins.input", read)
    with Lines(Terminal()) as given:
        return list(given)


def test_keys_of_a_terminal(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chat, "_editor", lambda: None)
    assert typed(monkeypatch, "a", "half\\", KeyboardInterrupt(), "b", EOFError()) == ["a", "b"]
    capsys.readouterr()


def test_lines_are_remembered_by_the_user_alone(monkeypatch, tmp_path):
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    readline.clear_history()

    def remember(prompt: str) -> str:
        readline.add_history("said before")
        raise EOFError

    monkeypatch.setattr("builtins.input", remember)
    with Lines(Terminal()) as given:
        assert list(given) == []
    file = tmp_path / "kvqjax" / "history"
    assert "said before" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    readline.clear_history()


@pytest.mark.nightly
def test_a_conversation_goes_on_beyond_its_capacity(talk):
    """With --context-shift; without it a text that does not fit is refused."""
    turns = f"{FIRST}\n" + "?cd\n" * 20
    small = "--capacity", "96"
    code, out, err = talk(turns, *small)
    assert (code, len(out.split()) < 21, "do not fit" in err) == (0, True, True)
    code, out, err = talk(turns, *small, "--context-shift")
    assert (code, len(out.split())) == (0, 21)
    left = re.fullmatch(r"(\[\d+ tokens of earlier turns have left the cache\]\n)+", err)
    assert left is not None
    code, out, err = talk(FIRST, "--cache", "kivi:bits=2,window=32", "--context-shift")
    assert (code, out) == (2, "")
    assert "context_shift: kivi:bits=2,window=32 stores codes of keys after RoPE" in err
