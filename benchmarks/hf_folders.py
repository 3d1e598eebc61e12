"""A model of ours as a Hugging Face folder: `config_to_hf` and `save_params` of
tests/hf_folders.py.

The library writes no such folders, so their writer lies where most of its users are.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FILE = Path(__file__).parents[1] / "tests" / "hf_folders.py"

_spec = spec_from_file_location("hf_folders", FILE)
assert _spec is not None
assert _spec.loader is not None
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
config_to_hf, save_params = _module.config_to_hf, _module.save_params
