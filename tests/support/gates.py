"""Gates in front of a model's layers."""

from dataclasses import replace

from torch import Tensor

from cygnet.model.batch import ForwardBatch
from cygnet.model.decoder import HybridModel
from cygnet.model.description import GroupName


class RecordingGate:
    """Notes what is waited for."""

    def __init__(self) -> None:
        self.waits: list[tuple[GroupName, int] | str] = []

    def wait(self, group: GroupName, index: int) -> None:
        self.waits.append((group, index))

    def wait_all(self) -> None:
        self.waits.append("all")


class Gated:
    """Stands in for a model in the harness: each of its steps has the gate."""

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self.gate = RecordingGate()

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self._model(replace(batch, gate=self.gate))
