import numpy as np
import pytest

from lightning_memfit.data.batched import EffectiveBatchSampler, ResumableLoader
from lightning_memfit.data.text import PackedBlocks


def make_loader(num_blocks=23, batch_size=2, accumulation=2, num_replicas=1, rank=0, num_workers=0):
    return loader_of(np.arange(num_blocks * 2), 2, 7, batch_size, accumulation, num_replicas, rank, num_workers)


def loader_of(tokens, sequence_length=2, seed=7, batch_size=2, accumulation=2, num_replicas=1, rank=0, num_workers=0):
    blocks = PackedBlocks(tokens.astype(np.uint16), sequence_length)
    sampler = EffectiveBatchSampler(blocks, batch_size, accumulation, num_replicas, rank, seed)
    return ResumableLoader(blocks, sampler, num_workers=num_workers)


def first_tokens(batches):
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def test_only_whole_effective_batches():
    loader = make_loader()
    assert len(loader) == len(list(loader)) == 10  # 23 blocks: five effective batches of 4


def test_epochs_differ_and_repeat():
    loader = make_loader()
    first = first_tokens(loader)
    loader.sampler.set_epoch(1)
    assert first_tokens(loader) != first
    loader.sampler.set_epoch(0)
    assert first_tokens(loader) == first


def test_processes_share_an_epoch_without_overlap():
    parts = [
        {token for batch in first_tokens(make_loader(num_replicas=2, rank=rank)) for token in batch} for rank in (0, 1)
    ]
    assert not parts[0] & parts[1]
    assert len(parts[0]) == len(parts[1]) == 8


@pytest.mark.parametrize("num_workers", [0, 1])
def test_continues_in_the_middle_of_an_epoch(num_workers):
    loader = make_loader(num_workers=num_workers)
    loader.sampler.set_epoch(3)
    iterator = iter(loader)
    before = [next(iterator) for _ in range(4)]
    state = loader.state_dict()
    assert state == {"epoch": 3, "batches": 4, "samples": 8, "data": {"seed": 7, "samples": 23}}
    rest = first_tokens(iterator)

    resumed = make_loader(num_workers=num_workers)
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(3)
    assert first_tokens(resumed) == rest
    assert first_tokens(before) + rest == first_tokens(resumed)  # the next pass is whole again


def test_a_state_of_an_earlier_epoch_starts_the_next_one_whole():
    loader = make_loader()
    list(loader)
    loader.load_state_dict(loader.state_dict())
    loader.sampler.set_epoch(1)
    assert len(list(loader)) == 10


TOKENS = np.arange(4000)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 8}, "`seed` was 7 and is 8"),
        ({"sequence_length": 4}, "there were 2,000 samples and are 1,000"),
        ({"tokens": np.delete(TOKENS, 1111)}, "there were 2,000 samples and are 1,999"),
    ],
)
def test_other_data_begin_the_epoch_anew(change, told):
    loader = loader_of(tokens=TOKENS)
    for _ in zip(range(3), loader, strict=False):
        pass
    other = loader_of(**{"tokens": TOKENS} | change)
    with pytest.warns(UserWarning, match=rf"those of the checkpoint \({told}\)\. Its position in epoch 0, after 6 "):
        other.load_state_dict(loader.state_dict())
    assert len(list(other)) == len(other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", [{"batch_size": 4}, {"accumulation": 1}, {"num_replicas": 2}, {"num_workers": 1}])
def test_the_same_data_go_on_however_they_are_called_and_dealt_out(change):
    loader = loader_of(tokens=TOKENS)
    for _ in zip(range(4), loader, strict=False):
        pass
    other = loader_of(**{"tokens": TOKENS} | change)
    other.load_state_dict(loader.state_dict())
    iterator = iter(other)
    next(iterator)
    assert other.sampler.begun_with == 8


def test_too_little_text_for_one_step():
    with pytest.raises(ValueError, match="less than one effective batch of 32"):
        make_loader(batch_size=8, accumulation=4)


def test_the_tokenizer_is_not_read_for_its_size_before_the_data(monkeypatch):
    """An estimate asks whether tokens fit the model, and has neither data nor a hub to fetch a tokenizer from."""
    from lightning_memfit.data import StandardLibraryChats, batched

    monkeypatch.setattr(batched, "load_tokenizer", lambda _: pytest.fail("the tokenizer was read"))
    data = StandardLibraryChats("someone/some-model", max_files=30)
    assert data.vocab_size is None
    assert data.example_batch(100)["input_ids"].shape == (8, 512)
