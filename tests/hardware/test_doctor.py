"""`kvqjax doctor`: what it finds wrong with an installation, with kernels and with plain paths, and
its exit code."""

import json

import jax
import jax.numpy as jnp
import pytest
from commands import run

from kvqjax.cli import doctor
from kvqjax.hardware import install
from kvqjax.hardware.install import Machine, findings
from kvqjax.kernel_checks import report
from kvqjax.kernel_checks.check import verdict_folder
from kvqjax.kernel_checks.store import Verdict
from kvqjax.kernel_checks.trial import by_kernel
from kvqjax.pallas_kernels.forms import CUDNN, KernelForm

VERSIONS = {"kvqjax": "1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}
SOUND = Machine(VERSIONS, "cpu", ("cpu",), 2**34, nvidia=False, tpu=False, driver="", x64=False)
GPU = SOUND._replace(
    packages=VERSIONS | {"jax-cuda13-plugin": "0.10.2"}, platform="gpu", devices=("NVIDIA H100 80GB HBM3",),
    nvidia=True, driver="580.65.06",
)  # fmt: skip
TPU = SOUND._replace(
    packages=VERSIONS | {"libtpu": "0.0.42"}, platform="tpu", devices=("TPU v6 lite",), tpu=True
)


@pytest.mark.parametrize("machine", [SOUND, GPU, TPU])
def test_a_sound_machine_has_no_findings(machine):
    assert findings(machine) == []


@pytest.mark.parametrize(
    ("machine", "bad", "text"),
    [
        (GPU._replace(packages=VERSIONS, platform="cpu"), True, "no CUDA plugin"),
        (
            GPU._replace(packages=VERSIONS | {"jax-cuda13-plugin": "0.10.1"}),
            True,
            "0.10.1 and jaxlib 0.10.2 differ",
        ),
        (GPU._replace(driver="550.54.15"), True, "driver 550.54.15 is too old: CUDA 13 wants 580"),
        (GPU._replace(platform="cpu"), True, "JAX runs on the CPU"),
        (TPU._replace(platform="cpu", holders=(4711,)), True, "in use by process 4711"),
        (TPU._replace(platform="cpu"), True, "JAX runs elsewhere"),
        (SOUND._replace(x64=True), False, "jax_enable_x64"),
        (
            SOUND._replace(packages=VERSIONS | {"jax": "0.10.3"}),
            False,
            "jax 0.10.3 and jaxlib 0.10.2",
        ),
        (GPU._replace(devices=("NVIDIA B200",)), False, "NVIDIA B200 is a chip no kernel"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(machine, bad, text):
    (found,) = findings(machine)
    assert found.bad is bad
    assert text in found.text
    assert "\n" not in found.text


def test_a_tpu_without_libtpu(monkeypatch):
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    (found,) = findings(TPU._replace(platform="cpu", packages=VERSIONS))
    assert (found.bad, "no libtpu" in found.text) == (True, True)


def test_plain_paths_are_sound_here_and_a_wrong_one_is_found():
    (row,) = report.plain_rows(("kivi:bits=2",))
    assert row["verdict"] == "sound"
    assert 0 < row["error"] < 1e-5

    def off(trial):
        attend = by_kernel(trial)
        return lambda q: attend(q)._replace(out=attend(q).out * 1.001)

    (row,) = report.plain_rows(("kivi:bits=2",), attention=off)
    assert (row["verdict"], row["error"]) == ("wrong", pytest.approx(1e-3, rel=0.01))


def test_what_a_chip_decodes_by_is_compared_with_float64(monkeypatch):
    """XLA's path over bodies in the form that the chip stores, in bfloat16; here a CPU stands in for
    the chip."""
    monkeypatch.setattr(report, "SHAPES", report.SMALL)
    gpu = [*report.plain_rows(("exact", "kivi:bits=4"), "sm90")]
    # The kernel of exact bodies takes the tokens beside them; without it the body is read alone.
    tpu = [*report.plain_rows(("exact",), "v6e")]
    for row, form in zip((*gpu, *tpu), ("heads", "heads", "planes"), strict=True):
        assert row["form"].endswith(f"XLA in {form}")
        assert row["verdict"] == "sound"
        assert 1e-4 < row["error"] < 0.01

    def off(trial):
        attend = by_kernel(trial)
        return lambda q: attend(q)._replace(out=attend(q).out * 1.02)

    (row,) = report.plain_rows(("kivi:bits=4",), "sm90", off)
    assert row["verdict"] == "wrong"


def test_every_chip_has_forms_to_check():
    found = {
        target: report.all_candidates(target, report.SHAPES)
        for target in ("v5e", "v7x", "sm90", "sm80", "cpu")
    }
    assert found["cpu"] == []
    assert [kernel.form for kernel in found["sm80"]] == [CUDNN]
    # Transform coding and TurboQuant have no form for TPUs.
    gpus_alone = {CUDNN, KernelForm("klt")}
    gpus_alone |= {KernelForm("turboquant", bits, bits) for bits in (2, 3, 4)}
    assert {one.form for one in found["v7x"]} > {one.form for one in found["sm90"]} - gpus_alone
    assert len({one.name for one in found["v7x"]}) == len(found["v7x"]) > 15


@pytest.fixture
def chip(tmp_path, monkeypatch):
    """A TPU whose checks end as `outcomes` says for each row of the table, "faster" where it says
    nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "target_of", lambda x: "v6e")
    monkeypatch.setattr(doctor, "this_machine", lambda: TPU)
    monkeypatch.setattr(report, "exact_milliseconds", lambda shape, target: 4.0)
    plain = {"form": "exact, XLA", "verdict": "sound", "error": 0.001}
    monkeypatch.setattr(
        report, "plain_rows", lambda methods, target: [dict(plain)] if target == "v6e" else []
    )
    outcomes, checked = {}, []

    def one(candidate, target, stored):
        checked.append(candidate.name)
        outcome = outcomes.get(str(candidate.form), "faster")
        return Verdict(
            outcome=outcome,
            error=0.003,
            kernel_ms=1.0,
            plain_ms=2.0,
            seconds=1.0,
            note=f"it {outcome}",
        )

    rows = report.kernel_rows
    monkeypatch.setattr(report, "kernel_rows", lambda *arguments: rows(*arguments, one))
    return outcomes, checked


def test_a_sound_chip_exits_with_0(chip, capsys, monkeypatch):
    _, checked = chip
    code, out, _ = run(capsys, monkeypatch, "doctor", "--json")
    report = json.loads(out)
    assert (code, report["sound"]) == (0, True)
    assert [row["form"] for row in report["rows"]] == [*checked, "exact, XLA"]
    first = report["rows"][0]
    assert first["level"] == f"verified on {jax.local_devices()[0].device_kind}"
    assert (first["verdict"], first["speed_against_plain"], first["speed_against_exact"]) == (
        "faster",
        2.0,
        4.0,
    )
    assert report["machine"]["packages"]["libtpu"] == "0.0.42"
    run(capsys, monkeypatch, "doctor")
    assert len(report["rows"]) == len(checked) + 1  # kept; XLA's path is compared every time
    run(capsys, monkeypatch, "doctor", "--reset")
    assert len(checked) == 2 * (len(report["rows"]) - 1)
    assert len(list(verdict_folder().glob("*.json"))) == len(report["rows"]) - 1


def test_a_wrong_kernel_exits_with_1_and_a_slow_one_with_0(chip, capsys, monkeypatch):
    outcomes, _ = chip
    outcomes["kivi 2 bits"] = "slower"
    code, out, _ = run(capsys, monkeypatch, "doctor")
    assert (code, "all is sound" in out) == (0, True)
    outcomes["kivi 4 bits"] = "wrong"
    code, out, _ = run(capsys, monkeypatch, "doctor", "--reset")
    assert (code, "something is wrong" in out, "it wrong" in out) == (1, True, True)


def test_on_a_cpu_it_says_what_cannot_be_checked(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(report, "FEW_PLAIN", ("exact",))
    code, out, _ = run(capsys, monkeypatch, "doctor")
    assert code == 0
    assert "not checked on a CPU: Pallas kernels" in out
    assert "all is sound" in out
    assert not (tmp_path / "kvqjax").exists()


def test_a_broken_installation_exits_with_1(capsys, monkeypatch):
    monkeypatch.setattr(report, "FEW_PLAIN", ())
    monkeypatch.setattr(
        doctor, "this_machine", lambda: GPU._replace(packages=VERSIONS, platform="cpu")
    )
    code, out, _ = run(capsys, monkeypatch, "doctor")
    assert code == 1
    assert "wrong: an NVIDIA GPU and no CUDA plugin" in out


def test_this_machine_can_be_read():
    machine = install.this_machine()
    assert machine.packages["kvqjax"]
    assert machine.devices
    assert jnp.zeros(()).devices()
