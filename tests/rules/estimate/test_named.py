import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers

from lightning_memfit.estimate.architectures import ARCHITECTURES, NamedRun, find_architecture, traceable_optimizers
from lightning_memfit.estimate.named import architecture_of, profile_named
from lightning_memfit.estimate.named_model import build_model, make_batch, optimizer_factory, trace_named
from lightning_memfit.memory import Category
from lightning_memfit.profile.cache import ProfileCache

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_parameters_are_those_of_the_model_card(architecture):
    model = build_model(architecture, None)
    assert sum(parameter.numel() for parameter in model.parameters()) == architecture.num_parameters
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["bert-base", "t5-small", "vit-base", "llama-3.2-1b"])
def test_every_kind_of_batch_trains(name):
    architecture = find_architecture(name)
    smaller = {"num_hidden_layers": 1, "num_layers": 1}
    config = {**architecture.config, **{k: v for k, v in smaller.items() if k in architecture.config}}
    length = None if architecture.sequence_length is None else 32
    profile = trace_named(NamedRun(name, 2, length), replace(architecture, config=config))
    assert profile.name == name
    assert profile.events.breakdown_at(len(profile.events) // 2).get(Category.PARAMETER) > 0


def test_a_folder_or_file_with_a_configuration(folder):
    profile = profile_named(NamedRun(str(folder), 2))
    assert profile.sequence_length == 128
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    assert profile.num_parameters == sum(p.numel() for p in real.parameters())
    assert architecture_of(str(folder / "config.json")).model_class == "LlamaForCausalLM"


def test_unusable_configurations_are_refused(folder):
    (folder / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaModel"]}))
    with pytest.raises(ValueError, match=r"LlamaModel"):
        architecture_of(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no readable"):
        architecture_of(str(folder))


def test_names_are_forgiving_and_mistakes_are_named():
    assert architecture_of("openai-community/GPT2-XL").name == "gpt2-xl"
    with pytest.raises(ValueError, match="Closest: gpt2-xl"):
        architecture_of("gpt2-xxl")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"optimizer": "adamv"}, "optimizer='adamv'"),
    ],
)
def test_settings_are_checked(options, named):
    with pytest.raises(ValueError, match=named):
        NamedRun("gpt2", **options)


def test_sequence_length_is_checked():
    with pytest.raises(ValueError, match="longer than the 1024 positions of gpt2"):
        profile_named(NamedRun("gpt2", sequence_length=2048))
    with pytest.raises(ValueError, match="takes images"):
        profile_named(NamedRun("vit-base", sequence_length=10))


@pytest.mark.parametrize("name", traceable_optimizers())
def test_every_optimizer_can_be_built(name):
    assert isinstance(optimizer_factory(name)(torch.nn.Linear(2, 2)), torch.optim.Optimizer)


def test_batches_have_no_padding():
    architecture = find_architecture("gpt2")
    batch = make_batch(architecture, transformers.GPT2Config(), 2, 16)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
    assert batch["input_ids"].min() >= 3


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


@pytest.mark.nightly
def test_lightning_is_never_imported_and_torch_only_once(folder, tmp_path):
    code = f"""
import sys
from lightning_memfit.estimate.architectures import NamedRun
from lightning_memfit.estimate.named import profile_named
from lightning_memfit.estimate.report import build_report
from lightning_memfit.estimate.target import named_target
from lightning_memfit.profile.cache import ProfileCache
profile = profile_named(NamedRun({str(folder)!r}, 2), ProfileCache())
report = build_report(profile, named_target("RTX 3060"))
print(report.estimate.total_bytes, "torch" in sys.modules, "lightning" in sys.modules, "rich" in sys.modules)
"""
    first = run_python(code, MEMFIT_CACHE=str(tmp_path / "cache"))
    of_transformers = run_python("import sys, transformers; transformers.GPT2LMHeadModel; print('rich' in sys.modules)")
    assert first.stdout.split()[1:] == ["True", "False", of_transformers.stdout.strip()], first.stderr
    second = run_python(code, MEMFIT_CACHE=str(tmp_path / "cache"))
    assert second.stdout.split()[1:] == ["False", "False", "False"], second.stderr
    assert first.stdout.split()[0] == second.stdout.split()[0]


def test_arithmetic_needs_no_torch():
    modules = [
        *(f"device.{name}" for name in ("catalogue", "runtime", "allocator")),
        *(f"profile.{name}" for name in ("record", "events", "cache")),
        *(f"estimate.{name}" for name in (
            "architectures", "estimate", "named", "report", "target", "timeline",
        )),
        "optim.optimizers",
    ]  # fmt: skip
    code = (
        f"import sys\nfor name in {modules}: __import__('lightning_memfit.' + name)\nsys.exit('torch' in sys.modules)"
    )
    assert run_python(code).returncode == 0


@pytest.mark.nightly
def test_cache_is_keyed_by_the_run_and_the_configuration(folder, tmp_path):
    cache = ProfileCache(tmp_path / "cache")
    run = NamedRun(str(folder), 2)
    first = profile_named(run, cache)
    assert profile_named(run, cache).seconds == first.seconds
    assert profile_named(replace(run, precision="bf16-true"), cache).precision == "bf16-true"
    (folder / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 3}))
    assert profile_named(run, cache).num_parameters > first.num_parameters
