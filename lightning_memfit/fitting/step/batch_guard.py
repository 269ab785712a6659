"""`BatchGuard`: a batch that `training_step` changes can be run again as the loader delivered it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_memfit.fitting.recovery.host_states import HostCopy
from lightning_memfit.fitting.step.split import tensors_of, versions, with_own_containers


@dataclass
class KeptBatch:
    """What a batch was before its step.

    Attributes:
        batch: The same tensors in containers that the step does not see.
        versions: Version counters of its tensors.
        copies: Values of its tensors, if they were copied.
    """

    batch: Any
    versions: list[int]
    copies: list[tuple[Tensor, HostCopy]] | None


class BatchGuard:
    """Keeps batches so that their step can be repeated.

    Containers are copied in every step, which is cheap. Tensors are copied to host memory in the first step, and from
    then on only if that step has changed one in place.
    """

    def __init__(self) -> None:
        self._copies = True

    def keep(self, batch: Any) -> KeptBatch:
        """Keep a batch before its step."""
        copies = [(t, HostCopy(t)) for t in tensors_of(batch)] if self._copies else None
        return KeptBatch(with_own_containers(batch), versions(batch), copies)

    def learn(self, kept: KeptBatch) -> None:
        """Note after a step whether it has changed a tensor of its batch."""
        if self._copies:
            self._copies = versions(kept.batch) != kept.versions

    def restored(self, kept: KeptBatch) -> Any:
        """Return the batch as it was, in containers of its own.

        Raises:
            RuntimeError: If a step has changed a tensor for the first time, and there is no copy of it.
        """
        if versions(kept.batch) != kept.versions:
            if kept.copies is None:
                raise RuntimeError(
                    "`training_step` has changed its batch in place for the first time, and memory ran out in it: the "
                    "batch can't be repeated as it was. Change a copy of the batch in `training_step`, or set a "
                    "smaller `micro_batch_size`."
                )
            for tensor, copy in kept.copies:
                copy.restore(tensor)
            kept.versions = versions(kept.batch)
        return with_own_containers(kept.batch)
