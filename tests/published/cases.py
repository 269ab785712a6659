"""Published modules, each with a loader of its own package or of tensors in the form that it takes.

Sizes are small, dropout is off, and what the packages call defaults is kept otherwise.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.published.trial import Case

Built = tuple[Any, Any]


def _loader(samples: dict[str, Any] | list[Any], batch_size: int = 8, **options: Any) -> DataLoader:
    """Samples of a list, or of the tensors of a dictionary, in their order."""
    if isinstance(samples, dict):
        samples = [dict(zip(samples, one, strict=True)) for one in zip(*samples.values(), strict=True)]
    return DataLoader(samples, batch_size, **options)  # type: ignore[arg-type]


class _HandedOver(Exception):
    """Leaves a package's `fit` where it begins to train."""


def _handed_over(fit: Callable[..., Any], *arguments: Any, **options: Any) -> Built:
    """The module and the data that a package's own `fit` hands to its Trainer."""

    def take(self: Any, model: Any, train_dataloaders: Any = None, *_: Any, datamodule: Any = None, **__: Any) -> None:
        raise _HandedOver(model, datamodule if train_dataloaders is None else train_dataloaders)

    with mock.patch.object(pl.Trainer, "fit", take):
        try:
            fit(*arguments, **options)
        except _HandedOver as handed_over:
            module, data = handed_over.args
            return module, data
    raise RuntimeError("no Trainer was asked to fit")


# --- gluonts --------------------------------------------------------------------------------------------------------


def _gluonts(module: Any, horizon: int, batch_size: int = 8) -> Built:
    shapes = module.inputs.shapes if hasattr(module, "inputs") else {}
    samples = {
        name: torch.zeros(64, *shape[1:], dtype=torch.long) if "cat" in name else 1 + torch.rand(64, *shape[1:])
        for name, shape in shapes.items()
    }
    samples |= {"future_target": 1 + torch.rand(64, horizon), "future_observed_values": torch.ones(64, horizon)}
    return module, _loader(samples, batch_size)


def gluonts_deepar() -> Built:
    from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule

    options = {"freq": "D", "prediction_length": 6, "context_length": 12, "lags_seq": [1, 2, 7], "dropout_rate": 0.0}
    return _gluonts(DeepARLightningModule(model_kwargs=options), 6)


def gluonts_patch_tst() -> Built:
    from gluonts.torch.model.patch_tst.lightning_module import PatchTSTLightningModule

    sizes = {"prediction_length": 8, "context_length": 32, "patch_len": 8, "stride": 4, "padding_patch": "end"}
    sizes |= {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "num_encoder_layers": 3, "num_feat_dynamic_real": 0}
    options = {**sizes, "dropout": 0.0, "activation": "relu", "norm_first": False, "scaling": "mean"}
    return _gluonts(PatchTSTLightningModule(model_kwargs=options), 8)


# --- chemprop -------------------------------------------------------------------------------------------------------

SMILES = [
    "CCO",
    "c1ccccc1",
    "CC(=O)O",
    "CCN(CC)CC",
    "c1ccncc1",
    "CC(C)O",
    "CCCC",
    "OCC(O)CO",
    "CC#N",
    "CNC",
    "C1CCCCC1",
]


def chemprop_mpnn() -> Built:
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(SMILES[i % len(SMILES)], [float(i % 7)]) for i in range(256)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=64, shuffle=False)
    return models.MPNN(nn.BondMessagePassing(d_h=64), nn.MeanAggregation(), nn.RegressionFFN(input_dim=64)), loader


def _split_molecules(batch: Any, sizes: list[int]) -> list[Any]:
    """What a user of chemprop writes as `split_batch`."""
    from chemprop.data.collate import BatchMolGraph, TrainingBatch

    ends, parts = list(np.cumsum(sizes)), []
    for begin, end in zip([0, *ends], ends, strict=False):
        graph, atoms = batch.bmg, (batch.bmg.batch >= begin) & (batch.bmg.batch < end)
        bonds, first = atoms[graph.edge_index[0]], int(atoms.nonzero()[0])
        kept, number = torch.empty_like(bonds, dtype=torch.long), int(bonds.sum())
        kept[bonds] = torch.arange(number)
        part = BatchMolGraph.__new__(BatchMolGraph)
        part.V, part.E, part.batch = graph.V[atoms], graph.E[bonds], graph.batch[atoms] - begin
        part.edge_index, part.rev_edge_index = graph.edge_index[:, bonds] - first, kept[graph.rev_edge_index[bonds]]
        part._BatchMolGraph__size = end - begin
        fields = (one if one is None else one[begin:end] for one in batch[1:])
        parts.append(TrainingBatch(part, *fields))
    return parts


def chemprop_mpnn_with_split_batch() -> Built:
    module, loader = chemprop_mpnn()
    module.split_batch = _split_molecules
    return module, loader


# --- ts3l -----------------------------------------------------------------------------------------------------------


def _ts3l_options() -> dict[str, Any]:
    from ts3l.utils.backbone_utils import MLPBackboneConfig
    from ts3l.utils.embedding_utils import IdentityEmbeddingConfig

    return {
        "task": "classification",
        "loss_fn": "CrossEntropyLoss",
        "metric": "accuracy_score",
        "metric_hparams": {},
        "dropout_rate": 0.0,
        "output_dim": 2,
        "embedding_config": IdentityEmbeddingConfig(input_dim=16),
        "backbone_config": MLPBackboneConfig(input_dim=16, output_dim=64, hidden_dims=64, n_hiddens=3),
    }


def ts3l_scarf() -> Built:
    from ts3l.pl_modules import SCARFLightning
    from ts3l.utils.scarf_utils import SCARFConfig

    x = torch.randn(64, 16)
    loader = _loader(list(zip(x, x[torch.randperm(64)], strict=True)))
    return SCARFLightning(SCARFConfig(**_ts3l_options())), loader


# --- neuralforecast -------------------------------------------------------------------------------------------------


def _neuralforecast(model: Any, batch_size: int = 8) -> Built:
    import pandas as pd
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    days = pd.date_range("2020-01-01", periods=60)
    series = [pd.DataFrame({"unique_id": i, "ds": days, "y": np.random.rand(60) + i % 5}) for i in range(32)]  # noqa: NPY002
    dataset, *_ = TimeSeriesDataset.from_df(pd.concat(series))
    return model, TimeSeriesDataModule(dataset, batch_size=batch_size, shuffle_train=False)


def neuralforecast_nhits() -> Built:
    from neuralforecast.models import NHITS

    return _neuralforecast(NHITS(h=4, input_size=16, max_steps=10, mlp_units=[[64, 64]] * 3, windows_batch_size=64))


# --- darts ----------------------------------------------------------------------------------------------------------


def _darts(name: str, **options: Any) -> Built:
    from darts import TimeSeries, models

    series = TimeSeries.from_values(np.sin(np.arange(320, dtype=np.float32) / 5)[:, None])
    options = {"input_chunk_length": 24, "output_chunk_length": 4, "batch_size": 16, "n_epochs": 1, **options}
    return _handed_over(getattr(models, name)(**options, pl_trainer_kwargs={"accelerator": "cpu"}).fit, series)


def darts_transformer() -> Built:
    sizes = {"d_model": 32, "nhead": 4, "num_encoder_layers": 3, "num_decoder_layers": 2, "dim_feedforward": 128}
    return _darts("TransformerModel", **sizes, dropout=0.0)


def darts_nbeats() -> Built:
    return _darts("NBEATSModel", num_stacks=4, num_blocks=1, num_layers=3, layer_widths=64, batch_size=64)


# --- deeptab --------------------------------------------------------------------------------------------------------


def _deeptab(model: Any) -> Built:
    import pandas as pd

    x = pd.DataFrame({f"x{i}": np.random.rand(128) for i in range(6)} | {"kind": list("abcd") * 32})  # noqa: NPY002
    y = x["x0"] * 2 + x["x1"]
    return _handed_over(model.fit, x, y.to_numpy(), batch_size=16, max_epochs=1)


def deeptab_ft_transformer() -> Built:
    from deeptab.configs import FTTransformerConfig
    from deeptab.models import FTTransformerRegressor

    off = {"attn_dropout": 0.0, "ff_dropout": 0.0, "head_dropout": 0.0}
    return _deeptab(FTTransformerRegressor(FTTransformerConfig(d_model=32, n_layers=3, n_heads=4, **off)))


# --- scvi-tools -----------------------------------------------------------------------------------------------------


def scvi_vae() -> Built:
    import anndata
    from scvi.model import SCVI

    cells = anndata.AnnData(np.random.poisson(2.0, (160, 100)).astype(np.float32))  # noqa: NPY002
    SCVI.setup_anndata(cells)
    return _handed_over(SCVI(cells, n_hidden=64).train, max_epochs=1, batch_size=16, accelerator="cpu")


def scvi_total_vi() -> Built:
    import anndata
    from scvi.model import TOTALVI

    cells = anndata.AnnData(np.random.poisson(2.0, (160, 100)).astype(np.float32))  # noqa: NPY002
    cells.obsm["protein"] = np.random.poisson(5.0, (160, 8)).astype(np.float32)  # noqa: NPY002
    cells.obs["batch"] = ["a", "b"] * 80
    TOTALVI.setup_anndata(cells, protein_expression_obsm_key="protein", batch_key="batch")
    model = TOTALVI(cells, n_latent=8, empirical_protein_background_prior=False)
    return _handed_over(model.train, max_epochs=1, batch_size=16, accelerator="cpu")


# --- rectools -------------------------------------------------------------------------------------------------------


def rectools_sasrec() -> Built:
    import pandas as pd
    from rectools.dataset import Dataset
    from rectools.models import SASRecModel

    seen = [(user, (user * 7 + i * 3) % 50) for user in range(64) for i in range(3 + user % 9)]
    days = pd.date_range("2020-01-01", periods=len(seen))
    events = pd.DataFrame(seen, columns=["user_id", "item_id"]).assign(weight=1.0, datetime=days)
    sizes = {"n_blocks": 3, "n_heads": 2, "n_factors": 64, "session_max_len": 16, "dropout_rate": 0.0}
    return _handed_over(SASRecModel(**sizes, batch_size=16, epochs=1).fit, Dataset.construct(events))


# --- pytorch-forecasting --------------------------------------------------------------------------------------------


def _forecasting(kind: str, **options: Any) -> Built:
    import pandas as pd
    import pytorch_forecasting as forecasting

    frames = [pd.DataFrame({"t": range(40), "g": str(i), "y": np.random.rand(40) + i}) for i in range(8)]  # noqa: NPY002
    values = pd.concat(frames, ignore_index=True)
    data = forecasting.TimeSeriesDataSet(
        values, time_idx="t", target="y", group_ids=["g"], max_encoder_length=12, max_prediction_length=4,
        time_varying_unknown_reals=["y"],
    )  # fmt: skip
    loader = data.to_dataloader(train=False, batch_size=16, num_workers=0)
    return getattr(forecasting, kind).from_dataset(data, dropout=0.0, **options), loader


def forecasting_tft() -> Built:
    return _forecasting("TemporalFusionTransformer", hidden_size=16, attention_head_size=2, hidden_continuous_size=8)


# --- pytorch-lifestream ---------------------------------------------------------------------------------------------


def lifestream_coles() -> Built:
    from ptls.data_load.datasets import MemoryMapDataset
    from ptls.frames.coles import ColesDataset, CoLESModule
    from ptls.frames.coles.split_strategy import SampleSlices
    from ptls.nn import RnnSeqEncoder, TrxEncoder

    people = [
        {"event_time": torch.arange(n), "kind": torch.randint(1, 9, (n,)), "amount": torch.rand(n)}
        for n in range(20, 84)
    ]
    data = ColesDataset(MemoryMapDataset(people), SampleSlices(split_count=3, cnt_min=5, cnt_max=15))
    events = TrxEncoder(embeddings={"kind": {"in": 10, "out": 8}}, numeric_values={"amount": "identity"})
    module = CoLESModule(
        RnnSeqEncoder(events, hidden_size=64),
        optimizer_partial=partial(torch.optim.Adam, lr=1e-3),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    )
    return module, DataLoader(data, batch_size=16, collate_fn=data.collate_fn)


# --- torchphysics ---------------------------------------------------------------------------------------------------


def physics_solver() -> Built:
    import torchphysics as tp

    space, values = tp.spaces.R1("x"), tp.spaces.R1("u")
    model = tp.models.FCN(space, values, hidden=(64, 64, 64))
    points = tp.samplers.GridSampler(tp.domains.Interval(space, 0, 1), n_points=64).make_static()
    condition = tp.conditions.PINNCondition(model, points, lambda u, x: tp.utils.grad(u, x) - u)
    return tp.solver.Solver([condition]), None


# --- graphs ---------------------------------------------------------------------------------------------------------


def graph_gym() -> Built:
    from torch_geometric.data import Data
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import create_model
    from torch_geometric.loader import DataLoader as GraphLoader

    set_cfg(cfg)
    cfg.accelerator, cfg.dataset.task, cfg.dataset.task_type = "cpu", "graph", "regression"
    cfg.share.dim_in, cfg.share.dim_out, cfg.gnn.dropout, cfg.gnn.layers_mp = 16, 1, 0.0, 3
    cfg.gnn.dim_inner, cfg.gnn.batchnorm, cfg.gnn.head, cfg.model.loss_fun = 64, False, "graph", "mse"
    graphs = []
    for index in range(256):
        nodes = 4 + index % 5
        edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        graphs.append(Data(x=torch.rand(nodes, 16), edge_index=edges, y=torch.rand(1)))
    return create_model(), GraphLoader(graphs, batch_size=64)


# What is right for these modules, and what its message must say.
NO_BLOCKS = {"ActivationCheckpointing": "refused: has no repeated blocks"}
DECAY = {"Optimizer8bit": "refused: use AdamW or weight_decay=0"}
NORMS = {"MicroBatching": "refused: BatchNorm layers"}
NOTHING_FITS = {"MemFit": "refused: Nothing fits"}  # weights and states are most of the peak
VALUES = {"MemoryPrediction": "no prediction: depends on values of tensors"}
BOTH = ("MicroBatching", "MemFit")
MANUAL = dict.fromkeys(BOTH, "refused: manual optimization")
SPLIT = dict.fromkeys(BOTH, "refused: `split_batch(batch, sizes)`")
CHOICE = dict.fromkeys(BOTH, "refused: a random choice among them")
COUNT = dict.fromkeys(BOTH, "refused: Define `split_batch(batch, sizes)` and `num_samples(batch)`")
COUNT |= {"MemoryPrediction": "no prediction: can't be traced"}

CASES = (
    Case("gluonts", "DeepARLightningModule", gluonts_deepar, NO_BLOCKS | DECAY),
    Case("gluonts", "PatchTSTLightningModule", gluonts_patch_tst, DECAY | NOTHING_FITS),
    Case("chemprop", "MPNN", chemprop_mpnn, SPLIT, precision="32-true"),
    Case("chemprop", "MPNN with split_batch", chemprop_mpnn_with_split_batch, precision="32-true", tolerance=1e-3),
    Case("ts3l", "SCARFLightning", ts3l_scarf, NORMS | NO_BLOCKS),
    Case("neuralforecast", "NHITS", neuralforecast_nhits, CHOICE | VALUES),
    Case("darts", "TransformerModel", darts_transformer),
    Case("darts", "NBEATSModel", darts_nbeats),
    Case("deeptab", "FTTransformerRegressor", deeptab_ft_transformer, DECAY),
    Case("scvi-tools", "SCVI", scvi_vae, NORMS | NOTHING_FITS | NO_BLOCKS | DECAY, is_random=True),
    Case(
        *("scvi-tools", "TOTALVI", scvi_total_vi, MANUAL | DECAY | {"ActivationCheckpointing": "accepted"}),
        precision="32-true",
        is_random=True,
    ),
    Case("rectools", "SASRecModel", rectools_sasrec, NOTHING_FITS),
    # Biases of keys have no gradient but rounding, which Adam makes steps of.
    Case("pytorch-forecasting", "TemporalFusionTransformer", forecasting_tft, NO_BLOCKS, tolerance=1e-5),
    Case("pytorch-lifestream", "CoLESModule", lifestream_coles, NO_BLOCKS | COUNT, precision="32-true"),
    Case("torchphysics", "Solver", physics_solver, NO_BLOCKS),
    Case("torch-geometric", "GraphGymModule", graph_gym, NO_BLOCKS | DECAY, precision="32-true", tolerance=1e-3),
)
