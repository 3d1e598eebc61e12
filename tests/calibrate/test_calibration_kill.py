"""A calibration that is killed with signal 9 continues when it is started again, and ends with the
same bytes."""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import kvqjax as kvq

SEQUENCES, LENGTH = 3, 64
METHOD = "kvquant:bits=2"


def started(out) -> subprocess.Popen:
    words = [
        "calibrate",
        "-m",
        "recall",
        "-c",
        METHOD,
        "--data",
        str(out.parent / "text"),
        "--out",
        str(out),
    ]
    words += ["--sequences", str(SEQUENCES), "--length", str(LENGTH)]
    # The same number of virtual devices as here: sums then split over threads alike.
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(jax.device_count())}
    return subprocess.Popen(
        [sys.executable, "-m", "kvqjax", *words], env=environment, cwd=out.parent
    )


@pytest.mark.nightly
def test_killed_and_started_again_gives_the_same_artifact(tmp_path):
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abcd0123,"), SEQUENCES * LENGTH + 9))
    (tmp_path / "text").write_text(text)
    out, state = tmp_path / "artifact", tmp_path / "artifact.state.npz"
    process = started(out)
    while not state.exists():
        assert process.poll() is None, "ended before it kept any progress"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    with np.load(state) as kept:
        done = [
            kept[name]
            for name in kept.files
            if kept[name].dtype == np.int64 and kept[name].shape == ()
        ]
    assert 1 <= int(done[0]) < 2 * SEQUENCES
    model = kvq.load("recall")
    options = {"count": SEQUENCES, "length": LENGTH}
    steps = []
    resumed = kvq.calibrate.run(
        model, kvq.parse(METHOD), text, state=state, advance=lambda n, _: steps.append(n), **options
    )
    assert steps[0] == int(done[0]) + 1, "it began anew"
    fresh = kvq.calibrate.run(model, kvq.parse(METHOD), text, **options)
    ours, wanted = (jax.tree.leaves(artifact.constants) for artifact in (resumed, fresh))
    assert [np.asarray(a).tobytes() for a in ours] == [np.asarray(a).tobytes() for a in wanted]
