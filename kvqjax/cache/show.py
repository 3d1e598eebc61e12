"""What a cache looks like when it is printed: one line of facts, then a line for every run of layers."""

import jax

from kvqjax.ops.packing.words import array_bytes

__all__ = ["arrays_text", "run_text", "states_text"]


def _array(leaf) -> str:
    """`uint32[2,1,96,64]`; whatever is no array by its type's name."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def arrays_text(tree) -> str:
    """Number of arrays in a pytree and their bytes."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size") and hasattr(leaf, "dtype")]
    return f"{array_bytes(leaves):,} bytes in {len(leaves)} arrays"


def run_text(first: int, count: int, reader: str, parts: dict) -> str:
    """Print what reads a run's body and its arrays by name, `layers 0-2, read by blocks: body.k.codes uint32[..], ...`,
    without those that hold nothing."""
    layers = f"layers {first}-{first + count - 1}" if count > 1 else f"layer {first}"
    texts = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(parts)[0]:
        if getattr(leaf, "size", 1):
            name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            texts.append(f"{name} {_array(leaf)}")
    return f"{layers}, read by {reader}: {', '.join(texts)}"


def states_text(layers: int, states: tuple[dict, ...]) -> str:
    """Print how many recurrent layers there are and what one stack of them remembers, `3 recurrent layers: ...`."""
    text = ", ".join(f"{name} {_array(leaf)}" for name, leaf in states[0].items())
    return f"{layers} recurrent layer{'s' * (layers > 1)}: {text}"
