"""Adapters trained beside a pretrained model, exported merged and alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from cli.main import main
from lightning_memfit.data.tokenization import byte_tokenizer

SAVING = "lightning.pytorch.callbacks.ModelCheckpoint"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=258, bos_token_id=256)
    GPT2LMHeadModel(config).save_pretrained(root / "base")
    byte_tokenizer().save_pretrained(root / "base")
    options = {
        "model.pretrained": root / "base",
        "model.config": "null",
        "data.max_files": 30,
        "data.sequence_length": 32,
        "data.batch_size": 2,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 3,
        "trainer.limit_val_batches": 0,
        "trainer.val_check_interval": "null",
        "trainer.callbacks": f"[{{class_path: {SAVING}, init_args: {{every_n_train_steps: 3}}}}]",
        "trainer.logger.init_args.save_dir": root / "run",
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    assert main(["fit", "--config", "quickstart", *given, "--with", "qlora"]) == 0
    [root_checkpoint] = (root / "run").rglob("*.ckpt")
    return root, root_checkpoint


def logits(model):
    return model(torch.arange(20)[None]).logits


def test_merged_folder_and_adapters_alone_compute_the_same(place):
    from peft import PeftModel

    root, checkpoint = place
    assert checkpoint.stat().st_size < (root / "base" / "model.safetensors").stat().st_size * 4
    assert main(["export", "--ckpt_path", str(checkpoint), "--folder", str(root / "merged")]) == 0
    alone = ["export", "--ckpt_path", str(checkpoint), "--folder", str(root / "alone"), "--adapters_only"]
    assert main(alone) == 0
    base = AutoModelForCausalLM.from_pretrained(root / "base").eval()
    before = logits(base)
    merged = AutoModelForCausalLM.from_pretrained(root / "merged").eval()
    adapted = PeftModel.from_pretrained(base, root / "alone").eval()
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits(merged), before)
    assert main(alone) == 2
