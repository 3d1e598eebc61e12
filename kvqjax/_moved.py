"""Old names of modules, kept for one version: importing one gives the module under its new name and a warning."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType

__all__ = ["MOVED", "install"]

MOVED = {
    "attention": "ops.attention",
    "finite": "ops.finite",
    "xla": "ops.xla",
    "layout": "ops.layout",
    "head_major": "ops.head_major",
    "config": "model.config",
    "rope": "model.rope",
    "decoder": "model.decoder",
    "experts": "model.experts",
    "rows": "model.rows",
    "weight_codes": "model.weight_codes",
    "weight_names": "model.weight_names",
    "weights": "model.weights",
    "stored": "model.stored",
    "checkpoint": "model.checkpoint",
    "hf_config": "model.hf_config",
    "hf_fields": "model.hf_fields",
    "hf_rope": "model.hf_rope",
    "hf_experts": "model.hf_experts",
    "hf_windows": "model.hf_windows",
    "hf_sampling": "model.hf_sampling",
    "catalogue": "model.catalogue",
    "accounting": "cache.accounting",
    "artifacts": "cache.artifacts",
    "segments": "cache.segments",
    "chunk_paths": "cache.chunk_paths",
    "reach": "cache.reach",
    "sharding": "parallel.sharding",
    "hosts": "parallel.hosts",
    "persist": "step.persist",
    "layer_step": "step.layer_step",
    "layers": "step.layers",
    "prompt": "step.prompt",
    "doors": "step.doors",
    "eager": "step.eager",
    "sampling": "generation.sampling",
    "speculation": "generation.speculation",
    "beam": "generation.beam",
    "prompt_ids": "generation.prompt_ids",
    "chips": "hardware.chips",
    "planner": "hardware.planner",
    "aot": "hardware.aot",
    "errors": "_errors",
    "options": "_options",
    "lock": "_lock",
    "timing": "_timing",
    "folders": "_folders",
    "version": "_version",
}


# Old module -> where some of its names went, beside the module's new place.
SPLIT = {
    "decoder": ("model.weight_trees",),
    "forward": ("step.new_cache", "step.prefill"),
    "layer_step": ("ops.xla",),
    "segments": ("cache.view",),
    "sharding": ("parallel.mesh_size", "parallel.rules"),
}


def _complete(module: ModuleType, old: str) -> None:
    """Give `module` the names that its old form had too."""
    for name in SPLIT.get(old, ()):
        other = importlib.import_module(f"kvqjax.{name}")
        for key in set(other.__all__) - vars(module).keys():
            setattr(module, key, getattr(other, key))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `kvqjax.<old>`, before any file is looked for."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, old = fullname.partition(".")
        known = package == "kvqjax" and old in MOVED
        return importlib.machinery.ModuleSpec(fullname, self) if known else None

    def create_module(self, spec):
        new = f"kvqjax.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(
            f"{spec.name} is now {new}; the old name goes with the next version", DeprecationWarning, stacklevel=2
        )
        module = importlib.import_module(new)
        self.kept = module.__spec__, module.__loader__
        return module

    def exec_module(self, module):
        old = module.__spec__.name.partition(".")[2]
        module.__spec__, module.__loader__ = self.kept  # the import machinery wrote the old name's over them
        _complete(module, old)


def install() -> None:
    """Make the old names importable. `kvqjax.forward` is a function too, which an import under that name would hide, so
    its module is put where the import finds it at once."""
    sys.meta_path.insert(0, _Finder())
    sys.modules["kvqjax.forward"] = forward = importlib.import_module("kvqjax.step.forward")
    _complete(forward, "forward")
