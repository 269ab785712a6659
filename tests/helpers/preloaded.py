"""What the server imports that ranks are forked from."""

import deepspeed.module_inject.auto_ep_layer
import deepspeed.ops.op_builder.all_ops  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401  a second that every engine of DeepSpeed would take for it
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

import lightning_memfit.fitting
import lightning_memfit.models
import lightning_memfit.strategies  # noqa: F401
import tests.helpers.strategy_runs
import tests.helpers.strategy_scenarios  # noqa: F401
