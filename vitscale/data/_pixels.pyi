from numpy import uint8
from numpy.typing import NDArray

def header(data: bytes) -> tuple[int, int, int, int, list[tuple[int, bytes]]]: ...
def example(
    data: bytes,
    eighths: int,
    top: float,
    left: float,
    height: float,
    width: float,
    out: NDArray[uint8],
    flip: bool,
    antialias: bool,
) -> bool: ...
def resize(
    pixels: NDArray[uint8],
    top: float,
    left: float,
    height: float,
    width: float,
    out: NDArray[uint8],
    flip: bool,
    antialias: bool,
) -> None: ...
