"""Train the small CNN of the demo on scikit-learn's digits and write digits.onnx beside this file.

The trained network is part of the repository; this program only documents how it was made. It needs
torch, onnx, onnxscript and scikit-learn: ``python examples/train_digits.py``. Takes less than a
minute on one core.
"""

# PyTorch and the libraries over it are not in the environment of `make lint`.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn


class Residual(nn.Module):
    """Two convolutions with batch normalisation, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class DigitsNet(nn.Module):
    """A residual CNN for 8 x 8 grey images with a squeeze-and-excite gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU())
        self.block = Residual(32)
        self.pool = nn.MaxPool2d(2)
        self.wide = nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
        self.gate = nn.Sequential(nn.Conv2d(48, 12, 1), nn.ReLU(), nn.Conv2d(12, 48, 1))
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.pool(self.block(self.stem(x))))
        x = x * torch.sigmoid(self.gate(x.mean(dim=(2, 3), keepdim=True)))
        return torch.softmax(self.head(x.mean(dim=(2, 3))), dim=1)


def main() -> None:
    """Train for a fixed number of epochs from a fixed seed, print the test accuracy, export."""
    torch.manual_seed(0)
    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30 * 22)
    x, y = torch.from_numpy(train_x), torch.from_numpy(train_y)
    for _ in range(30):
        for batch in torch.randperm(len(x)).split(64):
            shift = torch.randint(-1, 2, (2,)).tolist()
            logits = model(torch.roll(x[batch], shift, (2, 3)))
            loss = nn.functional.nll_loss(torch.log(logits + 1e-9), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        found = model(torch.from_numpy(test_x)).argmax(1).numpy()
    print(f"test accuracy {np.mean(found == test_y):.4f} on {len(test_y)} images")
    program = torch.onnx.export(
        model,
        (torch.from_numpy(test_x[:2]),),
        input_names=["image"],
        output_names=["probability"],
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
        opset_version=18,
        dynamo=True,
        optimize=False,  # keeps the BatchNormalization nodes, which the demo folds by itself
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]  # the exporter stores source lines and paths
        node.doc_string = ""
    for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        del value.metadata_props[:]
    del proto.graph.metadata_props[:]
    del proto.metadata_props[:]
    onnx.save(proto, Path(__file__).with_name("digits.onnx"))


if __name__ == "__main__":
    main()
