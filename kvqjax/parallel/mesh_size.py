"""The number of devices along each direction of a mesh."""

import dataclasses

from kvqjax._arguments import check_fields, whole_number
from kvqjax._errors import UserError

MOST_DEVICES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSize:
    """Devices along each direction: rows, blocks of the sequence, and heads with MLP and
    vocabulary."""

    data: int = 1
    seq: int = 1
    model: int = 1

    def __post_init__(self):
        check_fields(self)
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise UserError(f"mesh {name}={size}; at least 1 device is wanted")
            if size > MOST_DEVICES:
                raise UserError(f"mesh {name}={size}; at most {MOST_DEVICES} devices are possible")

    @classmethod
    def parse(cls, text: str) -> "MeshSize":
        """Read "data=2,model=4". Directions that are not named have 1 device."""
        sizes: dict[str, int] = {}
        for item in filter(None, text.split(",")):
            name, _, count = item.partition("=")
            size = whole_number(count)
            if name not in ("data", "seq", "model") or name in sizes or size is None:
                raise UserError(f"mesh {text!r}: {item!r} is not one of data=N, seq=N, model=N")
            sizes[name] = size
        return cls(**sizes)

    @property
    def devices(self) -> int:
        return self.data * self.seq * self.model
