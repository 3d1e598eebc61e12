"""Old names of modules, and of what moved out of modules that stay, kept for one version: either gives what was meant,
and a warning."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable
from types import ModuleType

__all__ = ["MOVED", "complete", "install"]

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
    "rows": "model.experts",
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
    "cache.admission": "cache.state",
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
    "eager": "step.doors",
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
    "layer_step": ("ops.xla", "step.doors"),
    "layout": ("ops.allocation", "ops.xla"),
    "segments": ("cache.recoding", "cache.view", "ops.attention"),
    "sharding": ("parallel.mesh_size", "parallel.rules"),
    "weights": ("model.fingerprint",),
}

# Modules that stay -> where some of their names went, and which were renamed on the way.
NAMES = {
    "cache": ("cache.run_layout", "cache.runs", "cache.encoding"),
    "cache.append": ("cache.encoding", "cache.state"),
    "cache.eviction": ("cache.keeping",),
    "cache.segments": ("cache.recoding",),
    "cache.runs": ("cache.run_layout",),
    "cache.state": ("cache.run_layout", "cache.runs", "cache.cache_layout"),
    "cache.view": ("ops.attention",),
    "codecs.higgs": ("codecs.higgs_grid",),
    "codecs.nuq": ("codecs.nuq_range",),
    "generation": ("generation.decoding", "generation.loop"),
    "hardware.planner": ("hardware.prompts",),
    "methods.aqua_wiring": ("methods.aqua_layer",),
    "methods.direct": ("methods.direct_forms",),
    "methods.spec": ("methods.keys_values",),
    "methods.wiring": ("codecs.kernel_form", "methods.keys_values", "methods.maps", "methods.summing"),
    "methods.xquant_cl_wiring": ("methods.cross_layer",),
    "methods.xquant_wiring": ("methods.rematerialise",),
    "model": ("model.loading",),
    "model.weights": ("model.fingerprint",),
    "ops.layout": ("ops.allocation",),
    "verdicts.choose": ("verdicts.check",),
}
RENAMED = {"plan": "runs_of", "RunPlan": "RunLayout", "pick": "at_layer"}


def _found_elsewhere(old: str, name: str):
    """What `name` of module `old`, which has it no more, is now."""
    new = RENAMED.get(name, name)
    for place in NAMES[old]:
        module = importlib.import_module(f"kvqjax.{place}")
        if new in module.__all__:
            warnings.warn(f"kvqjax.{old}.{name} is now kvqjax.{place}.{new}", DeprecationWarning, stacklevel=2)
            return getattr(module, new)
    raise AttributeError(f"module 'kvqjax.{old}' has no attribute {name!r}")


def _complete(module: ModuleType, old: str) -> None:
    """Give `module` the names that its old form had too."""
    for name in SPLIT.get(old, ()):
        other = importlib.import_module(f"kvqjax.{name}")
        for key in set(other.__all__) - vars(module).keys():
            setattr(module, key, getattr(other, key))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `kvqjax.<old>`, before any file is looked for."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition(".")
        if package != "kvqjax" or name not in (*MOVED, *NAMES):
            return None
        if name in MOVED:
            return importlib.machinery.ModuleSpec(fullname, self)
        # A module that stays: the other finders know it, and it is given `__getattr__` before it runs.
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_with_old_names, spec.loader.exec_module, name)
        return spec

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


def _with_old_names(execute: Callable[[ModuleType], None], name: str, module: ModuleType) -> None:
    """Run module `name` by `execute`, and answer for the names that it has no more."""
    vars(module)["__getattr__"] = functools.partial(_found_elsewhere, name)
    execute(module)


class _Forward(ModuleType):
    """Stands for the old module `kvqjax.forward` until its new form is loaded."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        complete()
        return getattr(sys.modules[self.__name__], name)


def complete() -> None:
    """Put the module `kvqjax.forward` where an import finds it at once: `kvqjax.forward` is a function too, which an
    import under that name would hide."""
    sys.modules["kvqjax.forward"] = forward = importlib.import_module("kvqjax.step.forward")
    _complete(forward, "forward")


def install() -> None:
    """Make the old names importable. Loads nothing."""
    sys.meta_path.insert(0, _Finder())
    sys.modules["kvqjax.forward"] = _Forward("kvqjax.forward")
