"""A decode step on sixteen v5e chips, compiled ahead of time: two sums a layer and one merge (a
maximum and a sum) where a row's tokens are dealt out, and the cache in place.

Skipped where libtpu is not installed.
"""

import dataclasses
import re

import pytest

import kvqjax as kvq
from kvqjax.hardware.aot import lower_decode
from kvqjax.model.loading import config_of
from kvqjax.parallel.mesh_size import MeshSize

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "mesh", [MeshSize(model=16), MeshSize(seq=2, model=8)], ids=["heads-shared", "tokens"]
)
def test_a_layer_sums_twice_and_merges_once(mesh):
    """Two layers are one loop, whose body is counted; one device's part of the cache is 21 MB."""
    few = dataclasses.replace(config_of("llama-3.1-8b"), num_layers=2)
    try:
        program = lower_decode(few, kvq.parse("kivi:bits=2,group=128"), 32768, 8, "v5e", mesh)
    except kvq.UserError as error:
        pytest.skip(str(error))
    compiled = program.compile()
    memory = compiled.memory_analysis()
    lines = re.findall(r".* all-reduce(?:-start)?\(.*", compiled.as_text())
    assert len([line for line in lines if "shard_map/while/body" in line]) == 4
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e6
    assert memory.temp_size_in_bytes < 6e6
