"""A step device that is late with everything, on the CPU: it shows who touches memory too early."""

import torch
from torch import Tensor


class LateMark:
    """Done after it was looked at `looks` times, or waited for."""

    def __init__(self, device: "LateDevice", looks: int) -> None:
        self._device = device
        self._looks = looks

    def done(self) -> bool:
        if self._looks > 0:
            self._looks -= 1
            return False
        self._device.catch_up()
        return True

    def wait(self) -> None:
        self._looks = 0
        self._device.catch_up()


class LateDevice:
    """Uploads are checked when the device gets to them: who changed the memory meanwhile is listed in `wrong`.
    Downloads bring -1 until then."""

    asynchronous = True

    def __init__(self, looks: int = 2) -> None:
        self.wrong: list[str] = []
        self.num_uploads = 0
        self._looks = looks
        self._uploads: list[tuple[Tensor, Tensor]] = []
        self._downloads: list[tuple[Tensor, Tensor]] = []

    def host(self, size: int) -> Tensor:
        return torch.full((size,), -1, dtype=torch.int64)

    def upload(self, host: Tensor) -> Tensor:
        self.num_uploads += 1
        self._uploads.append((host, host.clone()))
        return host.clone()

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.full_like(tensor, -1)
        self._downloads.append((tensor.clone(), host))
        return host

    def mark(self) -> LateMark:
        return LateMark(self, self._looks)

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Do all that was asked for."""
        for host, sent in self._uploads:
            if not torch.equal(host, sent):
                self.wrong.append("memory changed before it was copied")
        for tensor, host in self._downloads:
            host.copy_(tensor)
        self._uploads, self._downloads = [], []
