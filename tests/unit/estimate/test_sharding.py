from lightning_memfit.estimate.sharding import largest_block_bytes
from lightning_memfit.profile.record import ParameterInfo


def test_blocks_are_gathered_as_one():
    parameters = (
        ParameterInfo("h.0.a.weight", 10, 4),
        ParameterInfo("h.0.b.weight", 20, 4),
        ParameterInfo("h.1.a.weight", 10, 4),
        ParameterInfo("wte", 25, 4),
        ParameterInfo("head", 100, 4, shared_with="wte"),
    )
    assert largest_block_bytes(parameters) == 120
