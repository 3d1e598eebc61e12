"""A decode step on eight H100s, compiled ahead of time: per-layer arrays and bodies without loops
under shard_map, two sums a layer and one merge (a maximum and a sum) where a row's tokens are dealt
out.

Skipped where the CUDA plugin or ptxas is missing.
"""

import dataclasses
import re
import shutil

import pytest

import kvqjax as kvq
from kvqjax.hardware.aot import lower_decode
from kvqjax.model.loading import config_of
from kvqjax.parallel.sharding import MeshSize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("ptxas") is None,
        reason="ptxas is not on the path: it is part of CUDA's toolkit",
    ),
]


def compiled(spec: str, mesh: MeshSize, layers: int):
    """(operations that sum or take a maximum over devices, memory in bytes) of a program of so many
    layers."""
    config = config_of("llama-3.1-8b")
    few = dataclasses.replace(config, num_layers=layers, sliding_window=config.windows[:layers])
    try:
        program = lower_decode(few, kvq.parse(spec), 32768, 8, "h100", mesh)
    except kvq.UserError as error:
        pytest.skip(str(error))
    made = program.compile()
    return len(re.findall(r" all-reduce(?:-start)?\(", made.as_text())), made.memory_analysis()


@pytest.mark.parametrize(
    ("spec", "mesh", "each"),
    [
        ("kivi:bits=2,group=128", MeshSize(model=8), 2),
        ("kivi:bits=2,group=128", MeshSize(seq=4, model=2), 4),
        ("higgs:bits=2", MeshSize(seq=4, model=2), 4),
    ],
    ids=["heads", "tokens", "tokens-decoded"],
)
def test_a_layer_sums_twice_and_merges_once(spec, mesh, each):
    (one, _), (two, memory) = compiled(spec, mesh, 1), compiled(spec, mesh, 2)
    assert two - one == each
    # The cache stays in place.
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e6
    assert memory.temp_size_in_bytes < 0.3e9
