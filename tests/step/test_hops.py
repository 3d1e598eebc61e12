"""How many files a reader opens to follow one decode step: those that tracing it passes through."""

import sys

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny

import kvqjax as kvq


def files_of(spec: str) -> set[str]:
    """The library's files of which a function is called while a step is traced; planning was done
    before."""
    model = tiny()
    cache = kvq.init_cache(model, spec, 2, 1024)
    arguments = model, jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), cache

    def trace():
        return jax.eval_shape(lambda *x: kvq.forward(*x), *arguments)

    trace()
    found = set()

    def note(frame, event, _):
        module, file = frame.f_globals.get("__name__", ""), frame.f_globals.get("__file__")
        if (
            event == "call"
            and module.split(".")[0] == "kvqjax"
            and frame.f_code.co_filename == file
        ):
            found.add(module)

    old = sys.getprofile()
    sys.setprofile(note)
    try:
        trace()
    finally:
        sys.setprofile(old)
    return found


# These numbers may only fall.
@pytest.mark.parametrize(("spec", "most"), [("exact", 21), ("kivi:bits=2,window=32", 24)])
def test_a_decode_step_passes_through_few_files(spec, most):
    found = files_of(spec)
    assert {"kvqjax.step.forward", "kvqjax.cache.attention", "kvqjax.cache.append"} <= found
    assert len(found) <= most, "\n".join(sorted(found))
