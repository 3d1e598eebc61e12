"""What a cache looks like when it is printed: one line of facts, then a line for every run of layers."""

import jax

from kvqjax.ops.packing.words import array_bytes

__all__ = ["arrays_text", "run_text", "states_text"]


def _array(leaf) -> str:
    """Print dtype and shape, `uint32[2,1,96,64]`. Of what is no array, print the name of its type."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def arrays_text(tree) -> str:
    """Print how many arrays a pytree has, and their bytes."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size") and hasattr(leaf, "dtype")]
    return f"{array_bytes(leaves):,} bytes in {len(leaves)} arrays"


def run_text(first: int, count: int, reader: str, parts: dict) -> str:
    """Print one run: `layers 0-2, read by blocks: body.k.codes uint32[..], ...`.

    Args:
        first: The number of the run's first layer.
        count: How many layers the run has.
        reader: What reads its body.
        parts: The run's arrays. Arrays without numbers are left out.

    Returns:
        The line."""
    layers = f"layers {first}-{first + count - 1}" if count > 1 else f"layer {first}"
    texts = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(parts)[0]:
        if getattr(leaf, "size", 1):
            name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            texts.append(f"{name} {_array(leaf)}")
    return f"{layers}, read by {reader}: {', '.join(texts)}"


def states_text(layers: int, states: tuple[dict, ...]) -> str:
    """Print how many recurrent layers there are, and the first stack's arrays by name: `3 recurrent layers: ...`."""
    text = ", ".join(f"{name} {_array(leaf)}" for name, leaf in states[0].items())
    return f"{layers} recurrent layer{'s' * (layers > 1)}: {text}"
