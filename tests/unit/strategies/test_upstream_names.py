"""Private names of DeepSpeed and transformers that `deepspeed_internals` and `huggingface_build` rely on."""

import inspect

import pytest


def test_transformers():
    from transformers import PreTrainedModel, modeling_utils
    from transformers.integrations.deepspeed import initialize_weights_zero3

    assert list(inspect.signature(PreTrainedModel.initialize_weights).parameters) == ["self"]
    assert list(inspect.signature(initialize_weights_zero3).parameters) == ["model"]
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
