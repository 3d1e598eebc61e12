"""Counts of docs/howto/method.md: the files of the library that know a method, its kernel or a
model family by name. Bits that factories' docstrings state."""

import ast
import inspect
import re
from pathlib import Path

import jax
import pytest

import kvqjax as kvq
from kvqjax import METHODS
from kvqjax.cache import CacheLayout, allocate_cache
from kvqjax.methods.registry import OWN
from kvqjax.model.loading import config_of

LLAMA = config_of("llama-3.1-8b")
ROOT = Path(kvq.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "method.md"
DOORS = {"_public.py", "methods/__init__.py", "methods/registry.py"}
KERNELS = {f"pallas_kernels/{name}.py" for name in ("adapters", "dispatch", "forms", "support")}
FORM = {"pallas_kernels/forms.py", "pallas_kernels/support.py", "kernel_checks/report.py"}
FAMILY = {"model/hf_families.py"}


def _folders() -> dict[str, Path]:
    """The package's folder, and those that are mapped under it."""
    mapped = ("pallas_kernels", "calibrate", "eval")
    places = {
        name: ROOT / name if (ROOT / name).exists() else ROOT.parent / name for name in mapped
    }
    return {"": ROOT} | {f"{name}/": place for name, place in places.items()}


def _words(node: ast.AST) -> str:
    """What a node names: a variable, an attribute, an import, a function, or a text that is no
    docstring."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
            return name
        case ast.ImportFrom(module=name) if name:
            return name
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return name
        case ast.Constant(value=str(text)) if "\n" not in text:
            return text
    return ""


def files_that_name(pattern: str) -> set[str]:
    """The library's files that have, or whose code has, a name that matches `pattern`, a whole
    word."""
    found, word = set(), re.compile(rf"\b({pattern})\b")
    for lead, folder in _folders().items():
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            is_named = word.search(path.stem) or any(
                word.search(_words(node)) for node in ast.walk(ast.parse(text))
            )
            if is_named:
                found.add(lead + path.relative_to(folder).as_posix())
    return found


def test_few_files_name_a_method_a_kernel_or_a_family():
    """In the order of the page's table."""
    kernel = {
        file for file in files_that_name(r"higgs\w*|Higgs\w*") if file.startswith("pallas_kernels/")
    }
    found = [files_that_name("turboquant"), kernel, files_that_name("Qwen3MoeForCausalLM")]
    own = {
        f"pallas_kernels/{name}.py"
        for name in ("higgs", "tpu/higgs", "tpu/higgs_kernel", "tpu/higgs_lookup", "tpu/higgs_plan")
    }
    method = DOORS | FORM | {"methods/papers/turboquant.py"}
    assert found == [method, KERNELS | own, FAMILY]
    said = re.findall(r"^\| .* \| (\d+): ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert said == [str(len(files)) for files in found]


@pytest.mark.parametrize("name", OWN)
def test_a_docstring_says_bits_and_errors(name):
    """Of the defaults, as the ledger counts them."""
    about = " ".join((inspect.getdoc(METHODS[name]) or "").split())
    said = re.search(r"stores (\d+(?:\.\d+)?) bits per", about)
    assert said, about
    layout = CacheLayout(
        shape=LLAMA.kv_shape, method=kvq.parse(name), capacity=1024, dtype="bfloat16"
    )
    book = kvq.ledger(jax.eval_shape(lambda: allocate_cache(layout, 1)))
    assert float(said[1]) == pytest.approx(book.bits_method, abs=6e-4)
    assert name == "exact" or "UserError" in about
    options = set(inspect.signature(METHODS[name]).parameters) - {"keep"}
    shared = re.search(r"as in `\w+`", about) is not None
    assert shared or not {option for option in options if f"`{option}" not in about}
