"""Graph classification: a GIN of PyTorch Geometric on molecules of the TU data sets.

    memfit fit --config examples/graph.yaml
    memfit fit --config examples/graph.yaml --config examples/graph_quick.yaml  # two steps on one CPU, no network

An ordinary LightningModule: the techniques are callbacks of the recipe. Needs torch_geometric.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional as F
from torch_geometric.datasets import FakeDataset, TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_add_pool


class GraphClassifier(pl.LightningModule):
    """Classify whole graphs; logs `train_loss`, in nats per graph.

    Args:
        num_features: Features of a node.
        num_classes: Number of classes.
        hidden_channels: Width.
        num_layers: Rounds of message passing.
        learning_rate: Constant learning rate of Adam.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int = 2,
        hidden_channels: int = 128,
        num_layers: int = 5,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = GIN(num_features, hidden_channels, num_layers)
        self.head = torch.nn.Linear(hidden_channels, num_classes)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        nodes = self.network(batch.x, batch.edge_index)
        logits = self.head(global_add_pool(nodes, batch.batch, batch.num_graphs))
        loss = F.cross_entropy(logits, batch.y)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams["learning_rate"])


class Graphs(pl.LightningDataModule):
    """Graphs of a TU data set.

    Args:
        name: Name of the data set. Null: 16 random graphs with 8 features of a node, to try a run.
        folder: Where it is kept.
        batch_size: Graphs of an optimizer step.
    """

    def __init__(self, name: str | None = "PROTEINS", folder: str = "graphs", batch_size: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        name = self.hparams["name"]
        if name is None:
            graphs: Any = FakeDataset(16, avg_num_nodes=30, num_channels=8, num_classes=2, task="graph")
        else:
            graphs = TUDataset(self.hparams["folder"], name)
        return DataLoader(graphs, self.hparams["batch_size"], shuffle=True)
