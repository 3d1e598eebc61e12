"""Runs the body of a Mosaic GPU kernel on a CPU: the same Python function, eagerly, on arrays in
place of references.

What it checks beside the numbers: a copy into shared memory lands when its barrier is waited for,
not before (until then the destination holds NaN); a barrier is waited for by as many copies as it
was made for; products read only what was committed after it was written; what was read is not
written again before a commit. What it does not know: layouts of registers, swizzles, threads and
their races. It runs on every JAX; tests/kernels/test_kernels_gpu_interpreter.py uses JAX's own
interpreter, which knows these kernels from 0.12 on.
"""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

POISON = 0xFF  # every byte; a NaN in all floating-point types


class Ref:
    """A view of a buffer; `owner` keeps what happened to the whole."""

    def __init__(self, array, owner=None):
        self.array = array
        self.owner = owner or SimpleNamespace(shared=False, written=False, read=False)

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    @property
    def at(self):
        return _At(self)

    def transpose(self, order):
        return Ref(self.array.transpose(order), self.owner)

    def __getitem__(self, index):
        self.owner.read = True
        return jnp.asarray(self.at[index].array)

    def __setitem__(self, index, value):
        assert isinstance(value, jax.Array)
        target = self.at[index].array
        assert value.shape == target.shape, (value.shape, target.shape)
        assert value.dtype == target.dtype, (value.dtype, target.dtype)
        assert not self.owner.read, "overwritten before the reads were committed"
        self.owner.written = True
        target[...] = np.asarray(value)


class _At:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        array = self.ref.array[
            tuple(_plain(i, n) for i, n in zip(index, self.ref.shape, strict=False))
        ]
        return Ref(
            array.reshape(()) if not isinstance(array, np.ndarray) else array, self.ref.owner
        )


def _plain(index, size: int):
    """An index for numpy; what lies outside is refused."""
    if index is Ellipsis or isinstance(index, slice):
        return index
    if hasattr(index, "size") and hasattr(index, "start"):
        start = int(index.start)
        assert 0 <= start <= size - index.size, (start, index.size, size)
        return slice(start, start + index.size)
    assert 0 <= int(index) < size, (index, size)
    return int(index)


class Barrier:
    def __init__(self, arrivals: int):
        self.arrivals, self.pending = arrivals, []

    def wait(self):
        assert len(self.pending) == self.arrivals, (
            f"{len(self.pending)} copies, {self.arrivals} expected"
        )
        for source, target in self.pending:
            target[...] = source
        self.pending.clear()


class Machine:
    """What stands for `plgpu`, `pl` and `lax` in the kernel's module while one program runs."""

    def __init__(self):
        self.place, self.shared = {}, []

    def allocate(self, kind):
        if isinstance(kind, plgpu.Barrier):
            return Barrier(kind.num_arrivals)
        ref = Ref(np.zeros(kind.shape, kind.dtype))
        ref.array.view(np.uint8)[...] = POISON
        ref.owner.shared = True
        self.shared.append(ref.owner)
        return ref

    def copy(self, source, target, barrier):
        assert source.shape == target.shape, (source.shape, target.shape)
        assert source.dtype == target.dtype
        assert target.array.nbytes % 128 == 0, "smaller copies are not supported"
        assert not target.owner.read, "refilled before the reads were committed"
        barrier.pending.append((source.array, target.array))
        target.array.view(np.uint8)[...] = POISON

    def commit(self):
        for owner in self.shared:
            owner.read = owner.written = False

    def product(self, acc, left, right):
        for operand in (left, right):
            assert operand.dtype in (jnp.bfloat16, jnp.float16)
            assert not (isinstance(operand, Ref) and operand.owner.written), (
                "written, not committed"
            )
        left = left.array if isinstance(left, Ref) else np.asarray(left)
        assert (left.shape[0] % 64, left.shape[1] % 16) == (0, 0)
        right.owner.read = True
        acc.array[...] += left.astype(np.float32) @ right.array.astype(np.float32)

    def scoped(self, function, *kinds):
        return function(*(Ref(np.zeros(kind.shape, kind.dtype)) for kind in kinds))

    def kernel(self, body, *, out_type, scratch_types, grid, grid_names, compiler_params):
        del compiler_params

        def call(*operands):
            outs = [Ref(np.full(x.shape, np.nan, x.dtype)) for x in out_type]
            operands = [Ref(np.asarray(x)) for x in operands]
            for point in itertools.product(*map(range, grid)):
                self.place, self.shared = dict(zip(grid_names, point, strict=True)), []
                memory = [self.allocate(kind) for kind in scratch_types]
                body(*operands, *outs, *memory)
                assert not any(x.pending for x in memory if isinstance(x, Barrier)), (
                    "copies nobody waits for"
                )
            return [jnp.asarray(x.array) for x in outs]

        return call


class _Stand:
    """A module with some of its names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name):
        return getattr(self._module, name)


def permute(low, high, selector):
    """Four of the eight bytes of two words, picked by the selector's four lower nibbles."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    selector = np.asarray(selector, np.uint32)
    assert not (selector & 0x8888).any(), "the highest bit of a nibble asks for a byte's sign"
    picked = (selector >> np.uint32(4 * i) & np.uint32(7) for i in range(4))
    bytes_ = (
        ((both >> (i * 8).astype(np.uint64)) & np.uint64(255)).astype(np.uint32) for i in picked
    )
    return sum((b << np.uint32(8 * i) for i, b in enumerate(bytes_)), np.uint32(0))


def packed_numbers(change, dtype, *arrays, scalars=()) -> tuple[np.ndarray, ...]:
    """What `gpu_words.packed` does to registers, on pairs of 16-bit neighbours."""
    words = [np.ascontiguousarray(x).view(np.uint32) for x in arrays]
    return tuple(x.view(dtype) for x in change(permute, *words, *(np.uint32(x) for x in scalars)))


def packed(change, dtype, *arrays, scalars=()):
    return tuple(map(jnp.asarray, packed_numbers(change, dtype, *arrays, scalars=scalars)))


def traced_packed(change, dtype, *arrays, scalars=()):
    """The same where arrays are traced."""
    count = len(
        packed_numbers(
            change,
            dtype,
            *(np.zeros((1, 2), np.uint16) for _ in arrays),
            scalars=[0 for _ in scalars],
        )
    )
    results = (jax.ShapeDtypeStruct(arrays[0].shape, dtype),) * count

    def run(*given):
        return packed_numbers(change, dtype, *given[: len(arrays)], scalars=given[len(arrays) :])

    return jax.pure_callback(run, results, *arrays, *scalars)


def half(words, upper, layout):
    del layout
    return (words >> (16 * jnp.asarray(upper)).astype(jnp.uint32)).astype(jnp.uint16)


def twice(halves, bits, first=0):
    """Shifted in pairs, as registers are, but for what a neighbour's bits would be: ones, the most
    harm they can do."""
    shifts = (jnp.asarray(first + further, jnp.uint16) for further in (0, bits))
    return jnp.concatenate([~(~halves >> shift) for shift in shifts])


def beside(*arrays):
    return jnp.concatenate(arrays, axis=1)


def install_words(monkeypatch, *modules, packed=packed):
    """Let functions on registers run on numpy."""
    for module in modules:
        for name, stand in {
            "packed": packed,
            "half": half,
            "twice": twice,
            "beside": beside,
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand)


def install(monkeypatch, host, *bodies):
    """Let calls of the module `host` run the kernels whose bodies are in `bodies`, until
    monkeypatch is undone."""
    install_words(monkeypatch, *bodies)
    machine = Machine()
    monkeypatch.setattr(host, "plgpu", _Stand(plgpu, kernel=machine.kernel))
    stand = {
        "load": lambda ref, **_: ref[...],
        "store": lambda ref, x, **_: ref.__setitem__(..., x),
        "layout_cast": lambda x, _: x,
        "copy_gmem_to_smem": machine.copy,
        "barrier_wait": lambda barrier: barrier.wait(),
        "commit_smem": machine.commit,
        "wgmma": machine.product,
        "wgmma_wait": lambda _: None,
    }
    for module in bodies:
        stands = {
            "plgpu": _Stand(plgpu, **stand),
            "pl": _Stand(pl, run_scoped=machine.scoped),
            "lax": _Stand(lax, axis_index=lambda name: machine.place[name]),
        }
        for name in stands.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, stands[name])
