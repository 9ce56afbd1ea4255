"""Memory in which readers hand micro-batches to the rank: mapped before the fork, without a name.

Nothing is copied at the hand-over and nothing can be left behind in /dev/shm: the kernel takes the
memory back with the last process. A slot holds what is asked for and what comes back.
"""

import mmap
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitscale.data.examples import Filled
from vitscale.data.requests import Requests

# Arrays begin at multiples of this: a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a micro-batch.

    Args:
        micro_batch: Examples.
        in_chans: Channels of an example.
        img_size: Its side, px.
    """

    micro_batch: int
    in_chans: int
    img_size: int


class Slot:
    """Place for one micro-batch.

    Args:
        shape: Its sizes.
        is_shared: Whether processes forked later are to see it.
    """

    def __init__(self, shape: BatchShape, is_shared: bool) -> None:
        count = shape.micro_batch
        images = (count, shape.in_chans, shape.img_size, shape.img_size)
        layout: list[tuple[str, tuple[int, ...], type]] = [("images", images, np.uint8)]
        kinds = {"quarantined": np.bool_, "substitutes": np.bool_}
        names = [field.name for part in (Filled, Requests) for field in fields(part)]
        layout += [(name, (count,), kinds.get(name, np.int64)) for name in names[1:]]
        sizes = [_padded(int(np.prod(size)) * np.dtype(kind).itemsize) for _, size, kind in layout]
        total = sum(sizes)
        memory: mmap.mmap | bytearray = mmap.mmap(-1, total) if is_shared else bytearray(total)
        arrays: dict[str, Any] = {}
        start = 0
        for (name, size, kind), num_bytes in zip(layout, sizes, strict=True):
            flat: NDArray[Any] = np.frombuffer(memory, kind, int(np.prod(size)), start)
            arrays[name], start = flat.reshape(size), start + num_bytes
        self.filled = Filled(**{field.name: arrays[field.name] for field in fields(Filled)})
        self.requests = Requests(**{field.name: arrays[field.name] for field in fields(Requests)})

    def ask(self, requests: Requests) -> None:
        """Write down what is wanted.

        Args:
            requests: Of this slot's number of examples.
        """
        for field in fields(Requests):
            getattr(self.requests, field.name)[:] = getattr(requests, field.name)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
