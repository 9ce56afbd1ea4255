"""From uint8 pictures to the model's input, on the training device."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


class Normalise:
    """Maps values 0..255 to (value / 255 - mean) / std.

    Args:
        mean: One a channel, of values in 0..1; the average of them serves a single channel.
        std: Likewise.
        in_chans: Channels of the model.
        device: Where the pictures arrive.
        dtype: What the model computes in.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        in_chans: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        if in_chans != len(mean):
            mean, std = [sum(mean) / len(mean)] * in_chans, [sum(std) / len(std)] * in_chans
        offset = torch.tensor(mean, dtype=torch.float32, device=device).view(1, -1, 1, 1)
        spread = torch.tensor(std, dtype=torch.float32, device=device).view(1, -1, 1, 1)
        self._scale, self._shift = 1.0 / (255.0 * spread), -offset / spread
        self._device, self._dtype = device, dtype

    def __call__(
        self, images: UInt8[Tensor, "b c h w"], out: Float[Tensor, "b c h w"] | None = None
    ) -> Float[Tensor, "b c h w"]:
        """Move the pictures to the device and normalise them in float32, then cast.

        Args:
            images: Values 0..255.
            out: float32 memory on the device that is used again for every batch; on a CPU the
                system takes longer to give new memory than the arithmetic takes.

        Returns:
            The model's input; `out` itself where that is given and the model computes in float32.
        """
        if out is None:
            moved = images.to(self._device, non_blocking=True).to(torch.float32)
            return torch.addcmul(self._shift, moved, self._scale).to(self._dtype)
        out.copy_(images, non_blocking=True)
        return torch.addcmul(self._shift, out, self._scale, out=out).to(self._dtype)
