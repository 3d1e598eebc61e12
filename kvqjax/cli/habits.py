"""What is said about a command line that cannot be read: what to type here instead of the options and commands that
users of other programs type."""

import re
import shlex
from collections.abc import Collection
from typing import Any

from kvqjax._errors import UserError, suggest

__all__ = ["command_hint", "option_hint", "shell_line", "shell_option", "usage_line"]

SAMPLING = "--temperature above 0 draws tokens, and 0 takes the likeliest"
CACHE = "--cache names the cache: --cache kivi:bits=4; its keys and values apart: --cache 'k=kivi:bits=4;v=exact'"
FILES = "-f FILE takes a file as one prompt, --prompts FILE a prompt a line"
LENGTH = "--max-new-tokens counts the new tokens, --capacity all that a row may hold"
DEVICES = "JAX_PLATFORMS=cpu (or cuda, tpu) before the command chooses the device, --mesh several of them"
WEIGHTS = "--weights int8 or int4 quantises the weights, --cache the cache"
CHAT = "kvqjax chat is a conversation; generate --chat puts one prompt through the chat template"

# Option of llama.cpp, ollama, vLLM, SGLang or transformers -> what to write. Looked up only where a command lacks it.
OPTIONS = {
    **dict.fromkeys(("--temp", "--do-sample", "--greedy"), SAMPLING),
    **dict.fromkeys(
        ("--n-predict", "--predict", "--max-tokens", "--n-tokens", "--num-predict"), "write --max-new-tokens"
    ),
    **dict.fromkeys(("--max-length", "--max-model-len", "--ctx-size", "--n-ctx", "--context-length"), LENGTH),
    **dict.fromkeys(("--cache-type-k", "--cache-type-v", "--kv-cache-dtype", "--cache-implementation"), CACHE),
    **dict.fromkeys(("--method", "--kv-bits", "--bits", "--policy", "--kv-cache"), CACHE),
    **dict.fromkeys(("--repeat-penalty", "--frequency-penalty", "--presence-penalty"), "write --repetition-penalty"),
    **dict.fromkeys(("--load-in-4bit", "--load-in-8bit", "--quantization", "--quantize"), WEIGHTS),
    **dict.fromkeys(("--torch-dtype", "--precision"), "write --dtype"),
    **dict.fromkeys(("--model-id", "--model-name", "--model-path", "--checkpoint"), "write --model"),
    **dict.fromkeys(("--device", "--device-map", "--gpu", "--cpu", "--n-gpu-layers", "--gpu-layers"), DEVICES),
    **dict.fromkeys(("--tensor-parallel-size", "--tp", "--tp-size"), "write --mesh model=N"),
    **dict.fromkeys(("--interactive", "--conversation", "--interactive-first", "--system-prompt"), CHAT),
    **dict.fromkeys(("--reverse-prompt", "--stop-strings", "--stop-sequence"), "write --stop"),
    **dict.fromkeys(("--text", "--input"), "write --prompt"),
    **dict.fromkeys(("--input-file", "--in-file", "--binary-file"), FILES),
    **dict.fromkeys(
        ("--num-beams", "--beams"), "beam search is in Python: kvqjax.beam_search(model, prompts, beams=N)"
    ),
    **dict.fromkeys(("--draft-max", "--model-draft"), "speculation is in Python: kvqjax.speculate(model, prompts)"),
    **dict.fromkeys(("--num-return-sequences",), "repeat --prompt: every row draws for itself"),
    **dict.fromkeys(("--trust-remote-code",), "leave it out: code from a checkpoint is never run"),
    **dict.fromkeys(("--verbose", "--debug"), "leave it out; --json prints all figures"),
    **dict.fromkeys(("--output", "--output-dir"), "write --out, or send standard output into a file"),
    **dict.fromkeys(("--num-samples", "--n-samples"), "eval harness has --limit, calibrate --sequences"),
}

COMMANDS = {
    **dict.fromkeys(("run", "complete", "completion", "infer", "inference", "prompt"), "kvqjax generate"),
    **dict.fromkeys(("perplexity", "ppl"), "kvqjax eval ppl"),
    **dict.fromkeys(("retrieval", "drift", "harness", "compare"), "kvqjax eval {}"),
    **dict.fromkeys(("evaluate", "lm-eval", "lm_eval"), "kvqjax eval"),
    **dict.fromkeys(("fit", "quantize", "convert"), "kvqjax calibrate"),
    **dict.fromkeys(("benchmark", "speed"), "kvqjax bench"),
    **dict.fromkeys(("list", "ls", "caches"), "kvqjax methods"),
    **dict.fromkeys(("show", "info"), "kvqjax inspect FOLDER"),
    **dict.fromkeys(("memory", "estimate"), "kvqjax plan"),
    **dict.fromkeys(("check", "env", "selftest"), "kvqjax doctor"),
    **dict.fromkeys(("talk", "conversation"), "kvqjax chat"),
    "version": "kvqjax --version",
    "help": "kvqjax --help",
}


# Option of a function -> of a command, where that has another name.
SHELL = {"pool_bytes": "--pool", "eos_ids": "--end"}


def shell_option(name: str, value: Any) -> str:
    """Write an option as the shell has it, with a value; None stands for any value. For `UserError.said`."""
    option = SHELL.get(name) or "--" + name.replace("_", "-")
    return option if value is None or value is True else f"{option} {shlex.quote(str(value))}"


def shell_line(error: Exception) -> str:
    """Say what is wrong in one line, with the shell's names for options."""
    text = error.said(shell_option) if isinstance(error, UserError) else str(error)
    return " ".join(text.split())


def option_hint(name: str, options: Collection[str]) -> str | None:
    """What to write for an option that is not among a command's `options`; None where nothing comes near."""
    written = "--" + name.lstrip("-").replace("_", "-").lower()
    if written in options:
        return f"write {written}"
    return OPTIONS.get(written)


def command_hint(name: str, commands: Collection[str]) -> str:
    """The end of the message about a command that there is not."""
    lower = name.lower()
    if lower in commands:
        return f"; write kvqjax {lower}"
    if lower in COMMANDS:
        return f"; write {COMMANDS[lower].format(lower)}"
    if len(name.split()) > 1:
        return f"; for text to be continued write kvqjax generate {name[:40]!r}"
    return suggest(name, commands)


def usage_line(error: Any) -> str | None:
    """The line about a command or option that there is not; None for any other error. Typer brings its own click, whose
    usage errors have no public base class; they all can format themselves."""
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
