"""Private names of Lightning, DeepSpeed and transformers that strategies rely on."""

import inspect

import pytest


def test_transformers():
    from transformers import PreTrainedModel, modeling_utils
    from transformers.initialization import guard_torch_init_functions

    assert list(inspect.signature(PreTrainedModel.initialize_weights).parameters) == ["self"]
    module, is_own_code = list(inspect.signature(PreTrainedModel._initialize_weights).parameters)[1:]
    assert (module, is_own_code) in (("module", "is_remote_code"), ("module", "is_custom_code"))
    assert not inspect.signature(guard_torch_init_functions).parameters
    with modeling_utils.set_zero3_state():
        assert modeling_utils._is_ds_init_called is True
    assert modeling_utils._is_ds_init_called is False


def test_deepspeed():
    pytest.importorskip("deepspeed")
    from deepspeed.ops import __compatible_ops__
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"
    assert "deepspeed_shm_comm" in __compatible_ops__
    engine = inspect.getsource(DeepSpeedEngine)  # its methods hide their signatures behind a decorator
    assert "def backward(self, loss, retain_graph=False, scale_wrt_gas=True)" in engine
    assert "_restore_from_bit16_weights()" in engine
    assert "return self._config.load_universal_checkpoint" in engine
    assert callable(DeepSpeedZeRoOffload)


def test_lightning():
    from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

    overridden = {
        "_init_config_if_needed": ["self"],
        "_setup_model_and_optimizer": ["self", "model", "optimizer", "lr_scheduler"],
        "_initialize_deepspeed_train": ["self", "model"],
        "_initialize_deepspeed_inference": ["self", "model"],
    }
    called = {
        "_init_deepspeed_distributed": ["self"],
        "_load_config": ["self", "config"],
        "_restore_zero_state": ["self", "ckpt", "strict"],
    }
    for name, parameters in (overridden | called).items():
        assert list(inspect.signature(getattr(DeepSpeedStrategy, name)).parameters) == parameters
    assert DeepSpeedStrategy(stage=3)._config_initialized is False
    assert ModelParallelStrategy(data_parallel_size=2)._data_parallel_size == 2
