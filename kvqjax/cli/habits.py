"""What is said about a command line that cannot be read: what to type here instead of the options
and commands that users of other programs type."""

import re
import shlex
from collections.abc import Collection
from typing import Any

from kvqjax._errors import UserError, suggest

# Option of llama.cpp, vLLM or transformers -> an example of what to write. Looked up only where a
# command lacks it.
OPTIONS = {
    "--cache-type-k": "--cache kivi:bits=4",
    "--ctx-size": "--capacity 4096",
    "--kv-cache-dtype": "--cache kivi:bits=4",
    "--load-in-4bit": "--weights int4",
    "--max-tokens": "--max-new-tokens 64",
    "--model-path": "--model demo",
    "--n-predict": "--max-new-tokens 64",
    "--repeat-penalty": "--repetition-penalty 1.1",
    "--temp": "--temperature 0.8",
    "--torch-dtype": "--dtype bfloat16",
}
COMMANDS = {
    "run": "generate",
    "ppl": "eval ppl",
    "perplexity": "eval ppl",
    "harness": "eval harness",
}


# Option of a function -> of a command, where that has another name.
SHELL = {"pool_bytes": "--pool", "eos_ids": "--end"}


def shell_option(name: str, value: Any) -> str:
    """Write an option as the shell has it, with a value; None stands for any value. For
    `UserError.said`."""
    option = SHELL.get(name) or "--" + name.replace("_", "-")
    return option if value is None or value is True else f"{option} {shlex.quote(str(value))}"


def shell_line(error: Exception) -> str:
    """Say what is wrong in one line, with the shell's names for options."""
    text = error.said(shell_option) if isinstance(error, UserError) else str(error)
    return " ".join(text.split())


def option_hint(name: str, options: Collection[str]) -> str | None:
    """What to write for an option that is not among a command's `options`; None where nothing comes
    near."""
    written = "--" + name.lstrip("-").replace("_", "-").lower()
    if written in options:
        return f"write {written}"
    example = OPTIONS.get(written, "")
    return f"write {example}" if example.split(" ")[0] in options else None


def command_hint(name: str, commands: Collection[str]) -> str:
    """The end of the message about a command that there is not."""
    lower = name.lower()
    if lower in commands:
        return f"; write kvqjax {lower}"
    if lower in COMMANDS:
        return f"; write kvqjax {COMMANDS[lower]}"
    if len(name.split()) > 1:
        return f"; for text to be continued write kvqjax generate {name[:40]!r}"
    return suggest(name, commands)


def usage_line(error: Any) -> str | None:
    """The line about a command or option that there is not; None for any other error. Typer brings
    its own click, whose usage errors have no public base class; they all can format themselves."""
    describe = getattr(error, "format_message", None)
    if describe is None:
        return None
    context = getattr(error, "ctx", None)
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands and "No such command" in describe():
        name = re.search(r"No such command '(.*)'\.", describe(), re.DOTALL)
        command = name[1] if name else ""
        return f"No such command {command[:40]!r}{command_hint(command, commands)}"
    if hasattr(error, "option_name") and context is not None:
        options = [name for option in context.command.params for name in option.opts]
        hint = option_hint(error.option_name, options)
        return f"No such option: {error.option_name}; {hint}" if hint else describe()
    if "unexpected extra argument" in describe():
        return f"{describe()}; options begin with --, and a text of several words stands in quotation marks"
    return describe()
