"""`kvq.plan`: whether a model and its cache fit a device, with how many tokens and rows, and how
fast at best."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvqjax._arguments import check_counts, typed
from kvqjax._errors import UserError
from kvqjax._options import named_options, token_count
from kvqjax._tables import Table
from kvqjax.hardware.devices import DEVICES, GIB, Named, find_device, program_share
from kvqjax.hardware.plan_rows import MOST_ROWS, Case, compiled_row, plan_row
from kvqjax.hardware.plan_tables import sections
from kvqjax.methods import Method, MethodLike
from kvqjax.methods.registry import parse_all
from kvqjax.model.config import ModelConfig
from kvqjax.model.loading import CODED_WEIGHTS, Model, compute_dtype, config_of
from kvqjax.parallel.mesh_size import MeshSize
from kvqjax.parallel.sharding import rules_for

COMPARED = ("exact", "kivi:bits=4", "kivi:bits=2", "kvquant:bits=3")  # where no cache is named
CONTEXT = 131072  # default in tokens; a model with fewer positions gets its own number


def _split(config: ModelConfig, methods: Sequence[Method], count: int) -> MeshSize:
    """Make a mesh of `count` devices: along `model` as far as possible, the others along the
    sequence."""
    refusal = UserError(f"{count} devices cannot share out this model")
    for model in range(count, 0, -1):
        if count % model != 0:
            continue
        size = MeshSize(model=model, seq=count // model)
        try:
            for method in methods:
                rules_for(config, method, size, devices=())
        except UserError as error:
            # The refusal of the last size is raised, which has all devices along the sequence.
            refusal = error
        else:
            return size
    raise refusal


def _mesh(
    mesh: str | MeshSize, named: Named | None, config: ModelConfig, methods: Sequence[Method]
) -> MeshSize:
    """Return the mesh that the caller names, or else one with as many devices as the device's name
    says."""
    count = named.count if named else 1
    if not mesh and count == 1:
        return MeshSize()
    if not mesh:
        return _split(config, methods, count)
    size = mesh if isinstance(mesh, MeshSize) else MeshSize.parse(mesh)
    if count not in (1, size.devices):
        raise UserError(
            f"the mesh has {size.devices} devices and the device's name says {count}; name one of them"
        )
    return size


def _of_model(model: Any) -> tuple[str, ModelConfig, str | None, str | None]:
    """Return name, config, codes of the weights and dtype of a model argument."""
    if isinstance(model, ModelConfig):
        name = f"a model of {model.num_layers} layers of width {model.width}"
        return name, model, None, None
    if isinstance(model, Model):
        coded = model.weights if model.weights in CODED_WEIGHTS else None
        name = Path(model.folder).name or "a model"
        return name, model.config, coded, str(model.params["norm"].dtype)
    return str(model), config_of(str(model)), None, None


@named_options
def plan(
    model: str | Path | Model | ModelConfig = "demo",
    cache: MethodLike | Sequence[MethodLike] = COMPARED,
    *,
    context: int | str | None = None,
    batch: int = 1,
    device: str | None = None,
    mesh: str | MeshSize = "",
    memory: float | int | None = None,
    memory_fraction: float | int | None = None,
    weights: str | None = None,
    dtype: Any = None,
    compile_step: bool = False,
) -> Table:
    """Plan a model and its cache on a device: bytes of everything, whether it fits, the longest
    context and the largest batch that fit, and bounds on the speed. Nothing is downloaded for known
    models, and nothing allocated.

    Bytes of weights, constants and cache are counted from shapes; the workspace of a decode step is
    an estimate. A long prompt needs a workspace of its own, unless it enters in chunks.

    Args:
        model: a bundled or known name ("llama-3.1-8b"), a folder, a config.json, a hub id, a model,
            or its config.
        cache: one policy or several, such as "kivi:bits=2"; each gives a row.
        context: tokens of each row, as a number or as "128k"; by default 131072, or the model's
            positions if fewer.
        batch: rows.
        device: a name such as "h100", "A100-80GB", "8xH100", "v5e-16"; without it only bytes are
            counted.
        mesh: devices along data, seq and model ("data=2,model=4"); by default those that the
            device's name says.
        memory: GiB of one device that the program gets, for a device that is not known or not
            empty.
        memory_fraction: share of the device's memory that JAX takes; by default what
            XLA_PYTHON_CLIENT_MEM_FRACTION says, else 0.75 on GPUs. `memory` is taken whole.
        weights: "int8" or "int4" for the layers' matrices as `kvq.load` keeps them.
        dtype: of the other weights and of exact tokens; by default bfloat16, on a T4 float16.
        compile_step: also compile the decode loop for the device, which need not be there, and set
            the compiler's bytes beside the plan's. TPUs need libtpu for it, GPUs JAX's CUDA plugin.

    Returns:
        A row for each cache. Keys that end in `_per_device` are bytes on one device, `bytes` and
        `classes` are the whole cache. `tokens_per_second` is a bound for all rows together: a step
        reads every byte once at the full bandwidth and computes at the peak. It is None for what
        does not fit. `attention_over_16_bits` was measured on an H100 (docs/speed.md): a layer's
        attention without our kernels, in times of what reading 16-bit keys and values takes. It is
        None for other chips and methods.

    Raises:
        UserError: names and numbers that are wrong, and meshes that cannot share out the model.
    """
    check_counts(batch=batch)
    name, config, coded, own_dtype = _of_model(model)
    typed("device", device, str | None)
    typed("mesh", mesh, str | MeshSize)
    named = find_device(device) if device is not None else None
    chip = named.name if named else None
    if compile_step and chip is None:
        raise UserError("compiling needs a device", "name it with {device}", device=None)
    if memory is not None:
        memory = typed("memory", memory, float)
    if memory_fraction is not None:
        memory_fraction = typed("memory_fraction", memory_fraction, float)
    if memory is not None and not memory > 0:
        raise UserError(f"memory={memory}; wanted more than 0 GiB")
    if not 1 <= batch <= MOST_ROWS:
        raise UserError(f"batch={batch}; wanted 1 to {MOST_ROWS} rows")
    methods = parse_all(cache)
    if context is None:
        tokens = min(CONTEXT, config.max_position)
    else:
        tokens = token_count(context)
    # Without `memory_fraction`, a program gets all of `memory`, but a share of a device that is
    # known by name.
    share = program_share(chip if memory is None else None, memory_fraction)
    if memory is None and chip is not None:
        memory = DEVICES[chip].memory
    # A T4 computes in no bfloat16.
    usual_dtype = "float16" if chip == "t4" else "bfloat16"
    case = Case(
        name=name,
        config=config,
        context=tokens,
        batch=batch,
        chip=chip,
        mesh=_mesh(mesh, named, config, methods),
        room=None if memory is None else share * memory * GIB,
        memory=None if memory is None else memory * GIB,
        weights=weights or coded,
        dtype=compute_dtype(dtype or own_dtype or usual_dtype).name,
    )
    if compile_step and case.dtype not in ("bfloat16", "float16"):
        raise UserError(f"compile_step plans 16-bit numbers, not {case.dtype}")
    rows = []
    for method in methods:
        row = plan_row(case, method)
        if compile_step and chip:
            row |= compiled_row(case, method, chip)
        rows.append(row)
    return Table(rows, sections(case, rows, named.note if named else ""))
