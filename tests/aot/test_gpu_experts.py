"""A decode step of experts over eight GPUs, compiled ahead of time: what the devices send each
other, and hold.

Skipped where the CUDA plugin or ptxas is missing; see tests/aot/test_gpu.py.
"""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

LAYERS, DEVICES, CONTEXT = 2, 8, 4096
# JAX looks for a GPU where the plugin is found, unless a process says beforehand that it wants
# none.
PROGRAM = f"""
import dataclasses, json, os
os.environ["JAX_PLATFORMS"] = "cpu"
from kvqjax.hardware.aot import lower_decode
from kvqjax.methods import parse
from kvqjax.model.loading import config_of
from kvqjax.parallel.sharding import MeshSize
config = dataclasses.replace(config_of("qwen3-30b-a3b"), num_layers={LAYERS})
made = lower_decode(config, parse("exact"), {CONTEXT}, 1, "h100", MeshSize(model={DEVICES})).compile()
memory = made.memory_analysis()
lines = made.as_text().splitlines()
sent = [line for line in lines if "-start(" in line and ("all-" in line or "collective" in line)]
about = dict(sent=sent, arguments=memory.argument_size_in_bytes, temporaries=memory.temp_size_in_bytes)
x = config.experts
attention = 2 * config.width * (config.query_width + config.kv_width)
layers = {LAYERS} * (3 * x.count * x.width * config.width + attention)
about["weights"] = 2 * (layers + 2 * config.vocab_size * config.width)
print(json.dumps(about | dict(width=config.width)))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda13") is None,
        reason="no CUDA plugin: pip install jax-cuda13-plugin jax-cuda13-pjrt",
    ),
    pytest.mark.skipif(
        shutil.which("ptxas") is None, reason="no ptxas on the path: it is part of the CUDA toolkit"
    ),
]


def test_experts_over_eight_gpus():
    """A layer's sums over all devices are two, as without experts: after attention and after the
    experts. Four KV heads for eight devices: pairs of them gather queries and merge what they
    attended to. No expert's matrix moves."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    everyone = "replica_groups={{" + ",".join(map(str, range(DEVICES))) + "}}"
    pairs = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    hidden = f"bf16[1,1,{found['width']}]"
    sums = [line for line in found["sent"] if everyone in line and f"= {hidden}" in line]
    merges = [line for line in found["sent"] if pairs in line]
    rest = [line for line in found["sent"] if line not in sums + merges]
    assert len(sums) == 2 * LAYERS + 1  # and the embedding's
    assert len([line for line in merges if "all-gather-start(" in line]) == LAYERS
    assert len(merges) <= 3 * LAYERS  # queries, the largest score, and output and weight together
    # The next token: the best of each device's part of the vocabulary, and ties.
    assert len(rest) <= 2, rest
    cache = 2 * LAYERS * CONTEXT * 128 * 2 / 2
    assert found["arguments"] < 1.05 * (found["weights"] / DEVICES + cache)
    assert found["temporaries"] < 0.01 * found["weights"] / DEVICES
