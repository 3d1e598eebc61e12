"""kvqjax: KV-cache compression for Llama, Mistral, Qwen, Gemma and gpt-oss models in JAX.

The public names are those of kvqjax/_public.py. They and JAX are loaded when the first of them is
asked for, so that `kvqjax --help` answers at once.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

# A source checkout, and an editable install of one, keep three of the package's folders beside this
# one.
_here = Path(__file__).resolve().parent
if __name__ != "kvqjax":
    # A walk over the packages beside this one ends here.
    raise ImportError(f"{__name__}: import kvqjax itself")
if not (_here / "pallas_kernels").is_dir():
    __path__.append(str(_here.parent))

from kvqjax._version import __version__ as __version__

if TYPE_CHECKING:
    from kvqjax._public import *


def __getattr__(name: str):
    # Python asks every module for names such as __path__; they load nothing.
    if name == "_public" or (name.startswith("__") and name != "__all__"):
        raise AttributeError(f"module 'kvqjax' has no attribute {name!r}")
    public = importlib.import_module("kvqjax._public")
    if name in globals():  # a package that `_public` imported: the import system puts it here
        return globals()[name]
    if name not in ("__all__", *public.__all__):
        raise AttributeError(f"module 'kvqjax' has no attribute {name!r}")
    return globals().setdefault(name, getattr(public, name))


def __dir__() -> list[str]:
    return importlib.import_module("kvqjax._public").__all__
