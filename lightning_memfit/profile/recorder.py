"""`EventRecorder`: a ledger that writes down every allocation and free, with the module and block that made it."""

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.memory.flops import flop_formula
from lightning_memfit.memory.host import is_on_host, keep_on_host, sparse_parts
from lightning_memfit.memory.ledger import (
    StorageLedger,
    held_tensors,
    python_kernel,
    state_tensors,
    tensors_among,
)
from lightning_memfit.memory.parameters import groups_of
from lightning_memfit.profile.collectives import buffers, communicates, composed_of, scratch_bytes
from lightning_memfit.profile.cuda_scratch import scratch
from lightning_memfit.profile.dispatch import CUDA_RESULTS
from lightning_memfit.profile.events import CATEGORIES, OUTSIDE, SCRATCH_SITE, EventList
from lightning_memfit.profile.fake import must_be_strided
from lightning_memfit.profile.fake_mode import Uncompiled
from lightning_memfit.profile.kernels import Kernel, KernelMemory, laid_out
from lightning_memfit.profile.replaced import replaced
from lightning_memfit.profile.work import (
    UNALIGNED,
    OperatorWork,
    PhaseWork,
    dtype_of,
    is_aligned,
    moving_kind,
    multiplying_kind,
)

_ZEROS = {id(getattr(torch.ops.aten, name).default) for name in ("zeros", "new_zeros", "zeros_like")}
_IN_PLACE = {
    id(torch.ops.aten.scatter.src): torch.ops.aten.scatter_.src,
    id(torch.ops.aten.scatter_add.default): torch.ops.aten.scatter_add_.default,
    id(torch.ops.aten.index_add.default): torch.ops.aten.index_add_.default,
}
"""Operators by which autograd's formulas fill zeros under dispatch modes, and those that they use without.

By identity, as torch's hash of an operator is written in Python."""

_HALF = (torch.float16, torch.bfloat16)

_INDEX = {category: index for index, category in enumerate(CATEGORIES)}


_NOT_OF_MODULE = (Category.ACTIVATION, Category.TEMPORARY, Category.BUFFER)
"""Categories of what a strategy makes, before the first batch or later, until it is known to be for communication."""


class Mark(NamedTuple):
    """A moment of a recording."""

    num_events: int
    num_storages: int
    kept_bytes: int
    """What is alive, without gradients."""


_LEAST_PAGED = 100_000
"""Elements from which on bitsandbytes pages a state."""


class EventRecorder(Uncompiled, StorageLedger):
    """Record events while the mode is active.

    Args:
        blocks: Repeated blocks in order; events in their forward and backward carry their number.
        cuda: Compute capability of the CUDA device that is emulated, if one is: results count as its kernels allocate
            them (`dispatch.CUDA_RESULTS`), what those take meanwhile counts (`cuda_scratch`), and zero-dimensional
            optimizer states don't where they stay on the host (torch's optimizers on CUDA keep `step` there, unless
            they are capturable or fused).
        python_kernels: Look inside CPU kernels that are written in Python, and count the scratch memory of others.
        wrappers: Classes of tensors that are made of others, such as DTensors: their operators are seen as those of the
            tensors inside. With any, collectives are followed, too.

    Attributes:
        kernels: What operators' kernels take beyond their results; None where that isn't counted.
    """

    def __init__(
        self,
        blocks: tuple[torch.nn.Module, ...] = (),
        cuda: tuple[int, int] | None = None,
        python_kernels: bool = False,
        wrappers: Collection[type] = (),
    ) -> None:
        super().__init__(python_kernels=python_kernels)
        self._wrappers = frozenset(wrappers)
        self._module: torch.nn.Module | None = None
        self._owner_names: dict[str, int] = {}
        self.optimizers: list[str] = []
        self.optimizer_groups: list[tuple[str, dict[str, Any]]] = []
        self.kernels = KernelMemory() if python_kernels else None
        self._zeros: int | None = None
        self.calls_itself = False
        """Whether the root module was called, as `self(...)` does."""
        self.gathered_bytes = 0
        """Largest tensor joined from tensors of several blocks, which grows with their number."""
        self._events: list[int] = []
        self._event_blocks: list[int] = []
        self._between: list[int] = []
        self._sizes: list[int] = []
        self._categories: list[int] = []
        self._sites: list[int] = []
        self._storage_blocks: list[int] = []
        self._allocations: list[int] = []
        self._owners: dict[int, int] = {}
        self._site_index: dict[str, int] = {}
        self._phases: list[tuple[int, str]] = []
        self._number: dict[int, int] = {}
        self._block = OUTSIDE
        self._pending_block: int | None = None
        self._module_path: list[str] = []
        self._blocks = {id(block): number for number, block in enumerate(blocks)}
        self._cuda = cuda
        self._host: list[tuple[Tier, Category, int, int | None]] = []
        self._on_host: dict[int, int | None] = {}
        self._work: defaultdict[tuple[int, int], list[OperatorWork]] = defaultdict(list)
        self._in_host_memory = False

    # --- phases, modules and blocks ---------------------------------------------------------------------------------

    def phase(self, name: str) -> None:
        """Begin a phase, outside of every block: no gradient tells where backward ends if a first block needs none."""
        self._block = OUTSIDE
        if not self._phases or self._phases[-1][1] != name:
            self._phases.append((len(self._events), name))

    @override
    def track(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Enter a tensor; if it was made under the mode (in `configure_model`), it is renamed."""
        super().track(tensor, category, name)
        number = self._number_of(tensor)
        if name and number is not None:
            self._sites[number] = self._site_index.setdefault(name, len(self._site_index))

    @override
    def track_module(self, module: torch.nn.Module) -> None:
        """Enter the module's tensors and follow its submodules' calls."""
        super().track_module(module)
        owner = _owning_blocks(module, self._blocks)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            for held in held_tensors(tensor):
                self._assign(held, owner.get(name, OUTSIDE))
        self._module, self._owner_names = module, owner
        for name, child in module.named_modules():
            self._follow(name, child)

    def track_divided(self) -> None:
        """Enter the parameters that a strategy has divided once more: FSDP2 moves uneven parts in the first forward."""
        for name, parameter in self._module.named_parameters() if self._module is not None and self._wrappers else ():
            if type(parameter) in self._wrappers:
                self.track(parameter, Category.PARAMETER, name)
                for held in held_tensors(parameter):
                    self._assign(held, self._owner_names.get(name, OUTSIDE))

    @override
    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Enter the optimizer's states and note its class."""
        self.optimizers.append(type(optimizer).__name__)
        self.optimizer_groups += [one for one in groups_of(optimizer) if one not in self.optimizer_groups]
        super().track_optimizer(optimizer)

    def _follow(self, name: str, module: torch.nn.Module) -> None:
        block = self._blocks.get(id(module))
        path = name or type(module).__name__
        given: set[int] = set()  # what a block hands on as it was given says nothing about when its backward begins

        def enter(_: Any, arguments: Any, keywords: Any) -> None:
            self._module_path.append(path)
            self.calls_itself |= not name
            if block is not None:
                self._block = block
                given.clear()
                for tensor in _requiring_grad((arguments, keywords)):
                    given.add(id(tensor))
                    tensor.register_hook(lambda gradient: self._leave_block(block))

        def leave(_: Any, arguments: Any, output: Any) -> None:
            self._module_path.pop()
            if block is not None:
                self._block = OUTSIDE
                for tensor in _requiring_grad(output):
                    if id(tensor) not in given:
                        tensor.register_hook(lambda gradient: self._enter_block(block))

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        # A block's backward begins before FSDP2 gathers it, and the block before it ahead, in hooks of its own.
        self._handles.append(module.register_forward_hook(leave, prepend=bool(self._wrappers), always_call=True))

    def _enter_block(self, block: int) -> None:
        self._block = block

    def _leave_block(self, block: int) -> None:
        if self._block == block:
            self._block = OUTSIDE

    # --- moments of the run -----------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The moment at hand."""
        kept_bytes = self.live_bytes - self.live_by_category[Category.GRADIENT]
        return Mark(len(self._events), len(self._sizes), kept_bytes)

    def made_between(self, start: Mark, stop: Mark, without: Collection[Category]) -> Counter[tuple[int, int]]:
        """Count the storages that were made between two moments by category and size."""
        made = slice(start.num_storages, stop.num_storages)
        left_out = {_INDEX[category] for category in without}
        pairs = zip(self._categories[made], self._sizes[made], strict=True)
        return Counter(pair for pair in pairs if pair[0] not in left_out)

    def kept_site(self, start: Mark, without: Collection[Category]) -> str:
        """Where most of the memory was made that is alive now and was not at a moment; empty if there is none."""
        left_out = {_INDEX[category] for category in without}
        kept: Counter[int] = Counter()
        for number in self._number.values():
            if number >= start.num_storages and self._categories[number] not in left_out:
                kept[self._sites[number]] += self._sizes[number]
        return list(self._site_index)[kept.most_common(1)[0][0]] if kept else ""

    # --- host memory ------------------------------------------------------------------------------------------------

    @contextmanager
    def in_host_memory(self) -> Iterator[None]:
        """Leave out what is made meanwhile; `track_module` enters parameters and buffers when the module is moved."""
        self._in_host_memory = True
        try:
            yield
        finally:
            self._in_host_memory = False

    @override
    def move_to_host(self, tensor: torch.Tensor, category: Category, serves: torch.Tensor | None) -> None:
        """Count a storage as host memory, from its allocation on."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._on_host:
            return
        self._leave_out(tensor)
        self._on_host[storage._cdata] = owner = self._owner_of(serves)
        self._host.append((Tier.HOST, category, storage.nbytes(), owner))
        super().move_to_host(tensor, category, serves)

    def note_pinned(self, size_bytes: int, category: Category, serves: torch.Tensor) -> None:
        """Count one buffer in pinned host memory, which a run on the CPU does not have."""
        if self._cuda is not None:
            owner = self._owner_of(serves)
            self._host.extend((*entry, owner) for entry in MemoryBreakdown.pinned(category, [size_bytes]))

    def _owner_of(self, tensor: torch.Tensor | None) -> int | None:
        """Number of the storage on the device that host memory serves, if need be through other host memory."""
        if tensor is None:
            return None
        key = tensor.untyped_storage()._cdata
        if key in self._on_host:
            return self._on_host[key]
        if key not in self._entries:
            self.track(tensor, Category.PARAMETER)
        return self._number_of(tensor)

    def host_memory(self, num_blocks: int) -> MemoryBreakdown:
        """Host memory that the run keeps."""
        middle = len(self._blocks) // 2
        left_out = num_blocks - len(self._blocks)
        entries: dict[tuple[Tier, Category], int] = {}
        for tier, category, size_bytes, owner in self._host:
            block = OUTSIDE if owner is None else self._storage_blocks[owner]
            times = 1 + (left_out if block == middle else 0)
            entries[tier, category] = entries.get((tier, category), 0) + times * size_bytes
        return MemoryBreakdown(entries)

    # --- what the ledger reports ------------------------------------------------------------------------------------

    @override
    def _see(self, func: Any, args: Any, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            must_be_strided(tensor)
        self._begin_entering(args)
        super()._see(func, args, tensor)
        self._pending_block = None

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; a `_foreach_` result belongs to the block of the tensor at its own place in the list."""
        if func is torch.ops.prim.device.default:  # two of three calls, with nothing to count
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if self._wrappers:
            if not self._wrappers.isdisjoint(types):
                return NotImplemented  # comes again as operators on the tensors inside
            if communicates(func):
                return self._communicate(func, args, kwargs or {})
        kernel = python_kernel(func) if self._python_kernels else None
        if kernel is not None:
            with self:
                return kernel(*args, **(kwargs or {}))
        in_place = _IN_PLACE.get(id(func)) if self.kernels is not None else None
        if in_place is not None and self._fills_fresh_zeros(args[0]):
            in_place(*args, **(kwargs or {}))
            result = args[0]
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        self._zeros = result.untyped_storage()._cdata if id(func) in _ZEROS else None
        if isinstance(result, torch.Tensor) and result.device.type == "meta":
            return result  # a shape, for which no kernel ran
        taken = None if self.kernels is None else self.kernels.of(func, args, kwargs or {}, result)
        if taken is not None and (taken.dtypes or taken.orders):
            result = _as_made(result, taken.dtypes, taken.orders)
        as_cuda = CUDA_RESULTS.get(id(func)) if self._cuda is not None else None
        if as_cuda is not None and args[0].dtype in _HALF:
            result = _as_made(result, as_cuda.dtypes(result))
        self._count(func, args, kwargs or {}, result)
        if isinstance(result, torch.Tensor):
            self._see(func, args, result)
            if args and isinstance(args[0], (list, tuple)) and self._spans_blocks(args[0]):
                self.gathered_bytes = max(self.gathered_bytes, result.nbytes)
        elif isinstance(result, (list, tuple)):
            lists = args[0] if args and isinstance(args[0], (list, tuple)) and len(args[0]) == len(result) else None
            for place in range(len(result)) if as_cuda is None else as_cuda.order:
                made_of = (lists[place],) if lists is not None and isinstance(result[place], torch.Tensor) else args
                for tensor in tensors_among((result[place],)):
                    self._see(func, made_of, tensor)
        if taken is not None:
            self._record_kernel(args, result, taken)
        elif self._cuda is not None and (on_cuda := scratch(func, args, result, self._cuda)) is not None:
            site, sizes = on_cuda
            self._record_kernel(args, result, Kernel(sizes), site)
        return result

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a collective, or what FSDP2 does before and after one."""
        composed = composed_of(func) if self._python_kernels else None
        if composed is not None:
            with self:
                result = composed(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            for tensor in tensors_among((result,)):
                self._see(func, args, tensor)
        scratch = scratch_bytes(func, args, result) if self._python_kernels else None
        if scratch is not None:
            self._record_scratch(scratch)
        for tensor in buffers(func, args, kwargs, result):
            entry = self._entry_of(tensor)
            if entry is not None and entry.category in _NOT_OF_MODULE:
                self._relabel(entry, Category.COMMUNICATION)
        return result

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """See storages that Python code resizes past the dispatcher, as FSDP2 frees and makes gathered weights."""
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = resize(storage, size_bytes)
            entry = self._entries.get(storage._cdata)
            if entry is not None and entry.size_bytes != self._rounded(storage.nbytes()):
                self._resize(entry, self._rounded(storage.nbytes()))
            return result

        with replaced(torch.UntypedStorage, "resize_", followed):
            yield

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operator and its work. Views do none, and what makes empty memory or takes lists moves nothing."""
        if func.is_view:
            return
        key, name = (len(self._phases), self._block), func._schema.name
        count = flop_formula(func._overloadpacket)
        if count is not None:
            flops = count(*args, **kwargs, out_val=result)
            kind, num_bytes = f"{multiplying_kind(name)} {dtype_of(args)}", _bytes_of(args) + _bytes_of((result,))
            if kind.startswith("product") and not is_aligned(tensors_among((args, result))):
                kind = f"{kind} {UNALIGNED}"
        elif moving_kind(name) == "indexing" and "backward" not in name:
            kind, flops, num_bytes = "indexing", 0, 2 * _bytes_of((result,))  # a table isn't read whole
        elif "empty" in name or (isinstance(result, (list, tuple)) and args and isinstance(args[0], (list, tuple))):
            kind, flops, num_bytes = moving_kind(name), 0, 0
        else:
            kind, flops, num_bytes = moving_kind(name), 0, _bytes_of(args) + _bytes_of((result,))
        self._work[key].append(OperatorWork(kind, flops, num_bytes, 1))

    def _fills_fresh_zeros(self, tensor: torch.Tensor) -> bool:
        """Whether one of autograd's own formulas writes into the zeros that it has just made.

        Under dispatch modes these formulas (of `gather`, `topk`, `max`) make a copy instead (`areAnyTensorSubclassLike`
        in torch's `FunctionsManual.cpp`), which a plain run doesn't.
        """
        if self._zeros is None or self._zeros != tensor.untyped_storage()._cdata or torch.is_grad_enabled():
            return False
        frame = sys._getframe(2)  # past wrappers of torch around this mode
        while frame.f_back is not None and frame.f_code.co_name in ("_fn", "inner"):
            frame = frame.f_back
        return frame.f_code.co_name == "_engine_run_backward"

    def _record_kernel(self, args: Any, result: Any, kernel: Kernel, site: str = SCRATCH_SITE) -> None:
        """Write down what an operator's kernel took beyond its results."""
        self._begin_entering(args)
        for tensor, extra in zip(tensors_among((result,)), kernel.extra, strict=False):
            self._enter_extra(tensor, extra)
        for size_bytes in kernel.peaks:
            self._record_scratch(size_bytes, site)
        self._pending_block = None

    def _enter_extra(self, tensor: torch.Tensor, extra_bytes: int) -> None:
        """Enter what a real result's storage has beyond its elements and the fake one has not; it lives as long."""
        storage = tensor.untyped_storage()
        missing = extra_bytes - max(0, storage.nbytes() - tensor.nbytes)
        key = -1 - storage._cdata
        if missing > 0 and storage._cdata in self._entries and key not in self._entries:
            category = self._entries[storage._cdata].category
            self._enter_key(key, storage, missing, category, "rest of a kernel's result")

    def _record_scratch(self, size_bytes: int, site: str = SCRATCH_SITE) -> None:
        """Write scratch memory down, even none: at another size there may be some, and traces must stay aligned."""
        identity = self._next_identity
        self._next_identity += 1
        self.on_allocate(identity, size_bytes, Category.TEMPORARY, site)
        self.on_free(identity, size_bytes, Category.TEMPORARY)

    def _spans_blocks(self, tensors: Any) -> bool:
        """Whether tensors that one operator joins come from several blocks."""
        blocks = {self._block_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
        return len(blocks - {OUTSIDE}) > 1

    def _entry_of(self, tensor: torch.Tensor) -> Any:
        """The ledger's entry of a tensor, of a sparse tensor's values, or of the tensor in a DTensor; None if none."""
        if self._wrappers and type(tensor) in self._wrappers:
            return next(filter(None, map(self._entry_of, held_tensors(tensor))), None)
        return self._entries.get(sparse_parts(tensor)[-1].untyped_storage()._cdata)

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None if it isn't entered."""
        entry = self._entry_of(tensor)
        return None if entry is None else self._number[entry.identity]

    def _block_of(self, tensor: torch.Tensor) -> int:
        """The block that a tensor's storage belongs to."""
        entry = self._entry_of(tensor)
        return OUTSIDE if entry is None else self._storage_blocks[self._number[entry.identity]]

    def _begin_entering(self, args: Any) -> None:
        """Have what is entered outside of every block and without gradients belong to the block of an argument."""
        if self._block == OUTSIDE and args:
            is_block_s = isinstance(args[0], torch.Tensor) and not torch.is_grad_enabled()
            self._pending_block = self._block_of(args[0]) if is_block_s else OUTSIDE

    @override
    def _enter(self, storage: torch.UntypedStorage, category: Category, name: str) -> None:
        """Enter a storage, unless techniques make it after the last step to undo themselves."""
        if not self._in_host_memory and (not self._phases or self._phases[-1][1] != "end"):
            super()._enter(storage, category, name)

    @override
    def on_allocate(self, identity: int, size_bytes: int, category: Category, name: str) -> None:
        """Write an allocation down."""
        number = len(self._sizes)
        self._number[identity] = number
        block = self._block if self._pending_block is None else self._pending_block
        path = self._module_path[-1] if self._module_path else ""
        site = self._site_index.setdefault(f"{path} | {name}" if path else name, len(self._site_index))
        self._sizes.append(size_bytes)
        self._categories.append(_INDEX[category])
        self._sites.append(site)
        self._storage_blocks.append(block)
        if self._pending_block is not None and block != OUTSIDE:
            self._between.append(len(self._events))
        self._allocations.append(len(self._events))
        self._events.append(number + 1)
        self._event_blocks.append(block)

    @override
    def on_free(self, identity: int, size_bytes: int, category: Category) -> None:
        """Write a free down; outside every block it belongs to the block of its storage."""
        number = self._number.pop(identity)
        self._events.append(-(number + 1))
        self._event_blocks.append(self._storage_blocks[number] if self._block == OUTSIDE else self._block)

    @override
    def on_resize(self, identity: int, size_bytes: int) -> None:
        """A resized storage counts as freed and allocated anew."""
        number = self._number[identity]
        self._events.append(-(number + 1))
        self._event_blocks.append(self._storage_blocks[number])
        name = list(self._site_index)[self._sites[number]]
        self._pending_block = self._storage_blocks[number]
        self.on_allocate(identity, size_bytes, CATEGORIES[self._categories[number]], name)
        self._pending_block = None

    @override
    def _classify(self, func: Any, args: Any) -> Category:
        """What is made before the first batch stays for the run, such as a callback's average of the weights."""
        return super()._classify(func, args) if self._phases else Category.BUFFER

    @override
    def on_relabel(self, identity: int, category: Category) -> None:
        """Keep the last label of a storage."""
        self._categories[self._number[identity]] = _INDEX[category]

    @override
    def _label_gradient(self, parameter: torch.Tensor) -> None:
        super()._label_gradient(parameter)
        if parameter.grad is not None:
            self._name_after(parameter, parameter.grad)

    def _name_after(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Give a gradient or a state the site of its parameter, which says more than the operator that made it."""
        owner, number = self._number_of(parameter), self._number_of(tensor)
        if owner is not None and number is not None:
            self._sites[number] = self._sites[owner]

    @override
    def _label_states(self, optimizer: torch.optim.Optimizer) -> None:
        on_device = _with_steps_on_device(optimizer)
        for parameter, state in state_tensors(optimizer):
            block = self._block_of(parameter)
            for value in held_tensors(state):
                if is_on_host(parameter) or self._is_paged(optimizer, parameter, value):
                    keep_on_host(value, Category.OPTIMIZER_STATE, parameter)
                    self.move_to_host(value, Category.OPTIMIZER_STATE, parameter)
                    continue
                self.track(value, Category.OPTIMIZER_STATE)
                self._assign(value, block)
                self._name_after(parameter, value)
                if self._cuda is not None and value.dim() == 0 and id(parameter) not in on_device:
                    self._leave_out(value)

    def _is_paged(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: torch.Tensor) -> bool:
        """Whether a state goes to the host under pressure (`Optimizer8bit.get_state_buffer` of bitsandbytes)."""
        pages = self._cuda is not None and getattr(optimizer, "is_paged", False)
        return bool(pages) and state.shape == parameter.shape and state.numel() >= _LEAST_PAGED

    def _assign(self, tensor: torch.Tensor, block: int) -> None:
        """Move a storage, with its allocation, to the block it serves; one that serves several belongs to none."""
        number = self._number_of(tensor)
        if number is None:  # of another device, or an empty shard
            return
        block = block if self._owners.setdefault(number, block) == block else OUTSIDE
        self._storage_blocks[number] = block
        self._event_blocks[self._allocations[number]] = block

    def _leave_out(self, tensor: torch.Tensor) -> None:
        """Have a tensor's storage take nothing, from its allocation on."""
        number = self._number_of(tensor)
        if number is not None:
            self._sizes[number] = 0

    def flops(self) -> tuple[dict[str, int], dict[str, int]]:
        """FLOPs by phase of the last micro-batch, of the whole module and of its middle block.

        Recomputation under activation checkpointing happens in backward and counts there.
        """
        whole, block = self.work()
        return _flops_of(whole), _flops_of(block)

    def work(self) -> tuple[dict[str, tuple[OperatorWork, ...]], dict[str, tuple[OperatorWork, ...]]]:
        """Operators by phase of the last micro-batch, views left out: of the whole module and of its middle block."""
        whole, block = dict[str, tuple[OperatorWork, ...]](), dict[str, tuple[OperatorWork, ...]]()
        last = {name: ordinal for ordinal, (_, name) in enumerate(self._phases, start=1)}
        for name, ordinal in last.items():
            whole[name] = tuple(row for (at, _), found in self._work.items() if at == ordinal for row in found)
            block[name] = tuple(self._work.get((ordinal, len(self._blocks) // 2), ()))
        return whole, block

    def remarks(self) -> list[str]:
        """What the events don't cover, in clauses."""
        return [] if self.kernels is None else self.kernels.remarks()

    def result(self) -> EventList:
        """Everything recorded so far."""
        return EventList(
            events=np.array(self._events, dtype=np.int64),
            event_blocks=np.array(self._event_blocks, dtype=np.int64),
            sizes=np.array(self._sizes, dtype=np.int64),
            categories=np.array(self._categories, dtype=np.int64),
            sites=np.array(self._sites, dtype=np.int64),
            site_names=tuple(self._site_index),
            phases=tuple(self._phases),
            between=np.array(self._between, dtype=np.int64),
        )


def _with_steps_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Identities of the parameters whose count of steps is a tensor on their device."""
    groups = (group for group in optimizer.param_groups if group.get("capturable") or group.get("fused"))
    return {id(parameter) for group in groups for parameter in group["params"]}


def _as_made(result: Any, dtypes: Sequence[str], orders: Sequence[tuple[int, ...]] = ()) -> Any:
    """Fake results as a kernel makes them, such as statistics of norms of mixed types, which are float32.

    Whether a view of a result or a copy comes next depends on how it lies in memory.
    """
    results = result if isinstance(result, tuple) else (result,)
    made = list(results)
    for place, tensor in enumerate(results):
        if isinstance(tensor, FakeTensor):
            dtype = getattr(torch, dtypes[place]) if len(dtypes) == len(results) else tensor.dtype
            order = orders[place] if len(orders) == len(results) else ()
            strides = laid_out(tensor, order) if order else tensor.stride()
            if (dtype, strides) != (tensor.dtype, tensor.stride()):
                with _disable_current_modes(), tensor.fake_mode:
                    made[place] = torch.empty_strided(tensor.size(), strides, dtype=dtype, device="cpu")
    return tuple(made) if isinstance(result, tuple) else made[0]


def _flops_of(work: PhaseWork) -> dict[str, int]:
    """FLOPs by phase, of those that have some."""
    return {phase: found for phase, rows in work.items() if (found := sum(int(row.flops) for row in rows))}


def _bytes_of(values: Any) -> int:
    """Bytes of the tensors among values and in lists among them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_among(values))


def _requiring_grad(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.requires_grad)


def _owning_blocks(module: torch.nn.Module, blocks: dict[int, int]) -> dict[str, int]:
    """Block number by name, for every parameter and buffer inside a block."""
    owner: dict[str, int] = {}
    for prefix, child in module.named_modules():
        number = blocks.get(id(child))
        if number is not None:
            for name, _ in (*child.named_parameters(), *child.named_buffers()):
                owner[f"{prefix}.{name}"] = number
    return owner
