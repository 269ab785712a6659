"""What the server imports that ranks are forked from."""

import deepspeed  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

import lightning_memfit.fitting
import lightning_memfit.models
import lightning_memfit.strategies  # noqa: F401
import tests.helpers.strategy_runs
import tests.helpers.strategy_scenarios  # noqa: F401
