"""Recognise out-of-memory errors, and release the tensors that such an error holds."""

import errno
import gc
import re
import traceback

import torch

from lightning_memfit.memory.error_chain import error_chain

# Messages of libraries when memory runs out but the error's class doesn't say so; for RuntimeErrors only.
_MESSAGES = re.compile(
    "|".join(
        (
            r"(?:CUDA|HIP|XPU|MPS backend|NPU) out of memory",  # the caching allocators
            r"(?:CUDA|HIP|NVRTC)(?: driver| runtime)? error: out of memory",  # outside them: cudaMalloc, Inductor
            r"(?:cuda|hip)ErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY",
            r"Triton Error \[\w+\]: out of memory",
            r"(?:CUBLAS|CUSOLVER|CUSPARSE|CUFFT|CUDNN|MIOPEN)_(?:STATUS_)?ALLOC_FAILED",
            r"(?:HIPBLAS|HIPSOLVER|HIPSPARSE|HIPFFT)_(?:STATUS_)?ALLOC_FAILED",
            r"CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED",
            # A library that can't allocate its handle says so. Where the cause is another one, the context is broken
            # and the repeated step ends with that error.
            r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_NOT_INITIALIZED|HIPBLAS_STATUS_NOT_INITIALIZED",
            r"unable to find an engine to execute this computation",  # no kernel whose workspace fits
            r"rocblas_status_memory_error|miopenStatusAllocFailed",
            r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:calloc|malloc)",  # NCCL
            r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY|PI_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY",  # XPU, SYCL
            r"Error out of memory at line",  # bitsandbytes' native code
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"DefaultMPSAllocator: .*memory|Invalid buffer size: .* (?:MPS|Metal)",
            r"std::bad_alloc",
        )
    )
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that memory ran out.

    These are `torch.OutOfMemoryError`, `MemoryError`, an `OSError` with `ENOMEM`, and `RuntimeError` with a
    message of the allocators of CUDA, HIP, XPU, MPS and the CPU, of cuBLAS, cuDNN and their ROCm counterparts, NCCL,
    Triton or bitsandbytes.
    cuBLAS and cuDNN report `NOT_INITIALIZED` or find no engine when their handle or workspace can't be allocated; these
    count, as a repeated step ends with the same error if that was not the cause.
    `CUDNN_STATUS_NOT_SUPPORTED` is not one of them: non-contiguous inputs raise it as well.
    """
    return any(_says_out_of_memory(one) for one in error_chain(error))


def release(error: BaseException) -> None:
    """Release every tensor that the frames of an error's traceback hold, and return cached memory.

    An error keeps its traceback, which keeps the frames, which keep their local variables: the activations that filled
    the memory. Call it after leaving the `except` block; frames that still run keep theirs.
    """
    for one in error_chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None
