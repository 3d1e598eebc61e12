"""`kvqjax chat`: a conversation in the terminal, whose cache stays from turn to turn."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvqjax._errors import UserError
from kvqjax._files import decode_text
from kvqjax._folders import user_folder
from kvqjax._tables import size
from kvqjax.cli.common import (
    Artifacts,
    Dtype,
    Kernels,
    ModelName,
    OneCache,
    PromptChunk,
    RopeLength,
    TextOnly,
    Weights,
    calibrated,
    methods_of,
    number,
    open_model,
    token_number,
)
from kvqjax.cli.generate_options import read_generate_options, with_generate_options
from kvqjax.cli.habits import shell_line
from kvqjax.cli.output import announce
from kvqjax.generation.loop import fetched
from kvqjax.generation.session import Answer, Session
from kvqjax.model.loading import Model

HELP = """\
/system TEXT  set the system message; without a text: show it
/new          begin anew, with the same system message
/save NAME    write the conversation and its cache as the folder NAME
/load NAME    go on with a conversation that was saved
/bytes        tokens and bytes of the cache, bits a number, and the last answer's speed
/help         this list
/quit         end; so does Ctrl-D

Ctrl-C stops an answer, which then counts as far as it was made. A line that ends with a backslash goes on with the next
one. //text sends a text that begins with a slash."""


PROMPT, CONTINUED = "> ", "… "
KEPT = 1000  # lines of history that are written


# --- What a user types, line by line


def _editor() -> Any:
    """The module that edits lines, or None where Python was built without it (Windows)."""
    try:
        import readline
    except ImportError:
        return None
    return readline


class Lines(Iterator[str]):
    """Texts that a user types, one at a time. A line that ends with a backslash goes on with the
    next.

    In a terminal lines can be edited, and those of earlier runs are there (kvqjax/history in the
    user's cache folder, readable by the user alone). Ctrl-C leaves the line that is being typed;
    Ctrl-D ends. From a pipe every line is a text; the last one needs no line end."""

    def __init__(self, source: Any):
        """source: a text file as sys.stdin is one, or None where there is none. No type of `typing`
        or `io` fits all that may stand there: files, buffers, and what replaces sys.stdin."""
        self.terminal = source is not None and source.isatty()
        self._source = source
        self._editor = _editor() if self.terminal else None

    def __enter__(self) -> "Lines":
        if self._editor is not None:
            with contextlib.suppress(OSError, UserError):
                self._editor.read_history_file(user_folder("history"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._editor is not None:
            with contextlib.suppress(OSError, UserError):
                file = user_folder("history")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
                self._editor.set_history_length(KEPT)
                self._editor.write_history_file(file)

    def __next__(self) -> str:
        lines: list[str] = []
        while True:
            try:
                line = self._line(CONTINUED if lines else PROMPT)
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                print(file=sys.stderr)
                lines = []
                continue
            if line is None:
                if lines:
                    return "\n".join(lines)
                raise StopIteration
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        """One line without its end; None where there are no more."""
        if self._source is None:
            return None
        if self.terminal:
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None
        raw = self._source.buffer.readline()
        return decode_text(raw, "standard input").removesuffix("\n") if raw else None


# --- The conversation


class _Chat:
    """A conversation and what its commands do. `begin` makes a new session with a system
    message."""

    def __init__(
        self,
        model: Model,
        begin: Callable[[str | None], Session],
        system: str | None,
        as_json: bool = False,
    ):
        self._model, self._begin, self._as_json = model, begin, as_json
        self._session = begin(system)
        self._commands: dict[str, Callable[[str], None]] = {
            "system": self._system, "new": self._new, "save": self._save, "load": self._load, "bytes": self._bytes,
            "help": lambda _: announce(HELP),
        }  # fmt: skip

    def turn(self, text: str) -> bool:
        """Do a command or answer a text; whether the conversation goes on."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            if name in ("quit", "exit", "bye"):
                return False
            if name not in self._commands:
                raise UserError(
                    f"no command /{name}; /help lists them, and //{name[:20]} sends it as a text"
                )
            self._commands[name](argument.strip())
        elif text.strip():
            self._answer(
                self._session.send(text.removeprefix("/") if text.startswith("//") else text)
            )
        return True

    def _answer(self, answer: Answer) -> None:
        """Print an answer as it is made. Ctrl-C ends it, and what was printed is part of the
        conversation."""
        pieces, ended, before = [], True, self._session.last
        try:
            for piece in answer:
                pieces.append(piece)
                if not self._as_json:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            ended = False
        finally:
            answer.close()
        last = self._session.last
        # An answer that was stopped before it began makes no turn.
        about = {
            "text": "".join(pieces),
            **({} if last is None or last is before else last._asdict()),
        }
        print(json.dumps(about) if self._as_json else "", flush=True)
        if last is not None and last is not before and last.dropped_tokens:
            announce(f"[{last.dropped_tokens} tokens of earlier turns have left the cache]")
        if not ended:
            announce("[stopped]")

    def _system(self, text: str) -> None:
        if text:
            self._session.system = text
        announce(f"system: {self._session.system or 'none'}")

    def _new(self, _: str) -> None:
        self._session = self._begin(self._session.system)
        announce("a new conversation")

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save NAME: the name of a new folder")
        self._session.save(name)
        announce(f"saved as {name}")

    def _load(self, name: str) -> None:
        if not name:
            raise UserError("/load NAME: the folder of a conversation that was saved")
        self._session = Session.load(self._model, name)
        announce(f"{name}: {self._session.method}, {len(self._session.history)} messages")
        for message in self._session.history[-2:]:
            announce(f"{message['role']}: {message['content']}")

    def _bytes(self, _: str) -> None:
        last, session = self._session.last, self._session
        if last is None:
            announce(f"{session!r}: no answer yet")
            return
        cache = session.cache
        tokens = 0 if cache is None else int(fetched(cache.lengths)[0][0])
        room = 0 if cache is None else cache.layout.capacity
        announce(
            f"{session.method}: {tokens} of {room} tokens, {size(last.cache_bytes)}, {last.bits:.4g} bits a number"
        )
        announce(
            f"last answer: {last.prompt_tokens} tokens fed, first token after {last.seconds_to_first_token:.2f} s, "
            f"{last.tokens} made at {last.tokens_per_second:.1f} a second"
        )


def _guarded(talk: _Chat, lines: Iterator[str]) -> None:
    """Take line after line. What is wrong with one is said, and the conversation goes on."""
    for text in lines:
        try:
            if not talk.turn(text):
                return
        except UserError as error:
            announce(f"error: {shell_line(error)}")
        except KeyboardInterrupt:
            announce("[stopped]")


@with_generate_options
def chat(
    model: ModelName = "demo",
    cache: OneCache = "exact",
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
    artifact: Artifacts = [],  # noqa: B006
    load: Annotated[
        Path | None, typer.Option(help="go on with a conversation that was saved")
    ] = None,
    max_new_tokens: Annotated[
        int, number("--max-new-tokens", "-n", help="tokens of an answer, at most")
    ] = 512,
    capacity: Annotated[
        int | None,
        token_number(help="most tokens of the conversation, also as 32k; default: grows as needed"),
    ] = None,
    context_shift: Annotated[
        bool,
        typer.Option(
            "--context-shift",
            help="go on beyond the capacity: the oldest turns leave the cache, the system message "
            "stays",
        ),
    ] = False,
    chunk: PromptChunk = None,
    kernels: Kernels = "auto",
    dtype: Dtype = None,
    weights: Weights = None,
    text_only: TextOnly = False,
    rope_length: RopeLength = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print every answer as a line of JSON, with its figures")
    ] = False,
    **options: Any,
) -> None:
    """Talk with a model; its compressed cache stays from turn to turn.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends. Text piped in is a turn a
    line."""
    session_options = read_generate_options(options)
    method = methods_of([cache])[0]
    loaded = calibrated(
        open_model(model, dtype, weights, method, "", text_only, rope_length), [method], artifact
    )[0][0]
    session_options |= {
        "capacity": capacity,
        "max_new_tokens": max_new_tokens,
        "chunk": chunk,
        "kernels": kernels,
        "context_shift": context_shift,
    }
    talk = _Chat(
        loaded,
        lambda text: Session(loaded, method, system=text, **session_options),
        system,
        as_json,
    )
    if load is not None:
        talk.turn(f"/load {load}")
    with Lines(sys.stdin) as lines:
        if lines.terminal:
            announce(f"{model}, cache {method}; /help lists the commands, Ctrl-D ends")
        _guarded(talk, lines)
