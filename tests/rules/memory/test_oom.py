import errno
import gc
import weakref

import pytest
import torch

from lightning_memfit.memory.error_chain import error_chain
from lightning_memfit.memory.oom import is_out_of_memory, release

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 12.00 GiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 1.02 GB)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("NCCL Error 1: unhandled cuda error. Cuda failure 2 'out of memory'"),
    RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("Error out of memory at line 380 in file /csrc/pythonInterface.cpp"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    MemoryError(),
    MemoryError("Caught MemoryError in DataLoader worker process 0."),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHERS = [
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA out of memory is what this text talks about"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
    IndexError("list index out of range"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_every_form_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_nothing_else_is(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_real_allocation_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)


def test_chains_are_followed_and_suppressed_contexts_are_not() -> None:
    def raise_from(suppress: bool) -> BaseException:
        try:
            try:
                raise MemoryError
            except MemoryError as error:
                if suppress:
                    raise ValueError("no connection") from None
                raise ValueError("layer 3 failed") from error
        except ValueError as error:
            return error

    assert is_out_of_memory(raise_from(suppress=False))
    assert not is_out_of_memory(raise_from(suppress=True))


def test_circular_chains_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert list(error_chain(first)) == [first, second]


def test_release_frees_what_the_traceback_held() -> None:
    references = []

    def fill() -> None:
        activations = torch.zeros(10)
        references.append(weakref.ref(activations))
        raise MemoryError

    try:
        fill()
    except MemoryError as error:
        failure = error
    gc.collect()
    assert references[0]() is not None
    release(failure)
    assert references[0]() is None
