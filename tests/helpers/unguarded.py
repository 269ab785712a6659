"""Our ZeRO strategy with one guard taken off each: what Lightning's own does."""

from contextlib import contextmanager

from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_memfit.strategies import ZeroStrategy


class DividesTwice(ZeroStrategy):
    """Both Lightning and DeepSpeed divide the loss by `accumulate_grad_batches`."""

    def backward(self, closure_loss, optimizer, *args, **kwargs):
        return super().backward(closure_loss, optimizer, *args, **kwargs, scale_wrt_gas=True)


class InitializesEmptyTensors(ZeroStrategy):
    """transformers doesn't know that parameters are partitioned when it initializes them."""

    @contextmanager
    def model_sharded_context(self):
        with DeepSpeedStrategy.model_sharded_context(self):
            yield
