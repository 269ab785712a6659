import torch

from lightning_memfit.data import RandomTokens


def first_batch(**arguments):
    data = RandomTokens(num_samples=8, sequence_length=5, batch_size=3, vocab_size=11, **arguments)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def test_classes_or_the_ids_themselves_as_labels():
    batch = first_batch(num_labels=2)
    assert batch["input_ids"].shape == (3, 5)
    assert batch["input_ids"].max() < 11
    assert batch["labels"].shape == (3,)
    assert set(batch["labels"].tolist()) <= {0, 1}
    batch = first_batch()
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_the_same_every_time_and_without_touching_the_runs_random_state():
    before = torch.get_rng_state()
    one, other = first_batch(), first_batch()
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert not torch.equal(one["input_ids"], first_batch(seed=1)["input_ids"])
    assert torch.equal(torch.get_rng_state(), before)
