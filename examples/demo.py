"""The demo: a trained network on real images, partitioned by a custom selector, on numba kernels.

Loads the digits network, partitions it with the selector of ``custom_selector.py``, runs it on the
450 test images of scikit-learn's digits, and shows which nodes are in regions, and why the others
are not. Run: ``make demo``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import subgraph as sg

sys.path.insert(0, str(Path(__file__).parent))
import custom_selector

SHADES = " .:-=+*#%@"
PICTURE = "digits_partition.html"


def test_images() -> tuple[np.ndarray, np.ndarray]:
    """Return the 450 test images, (450, 1, 8, 8) in 0..1, and their labels."""
    digits: Any = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    parts: Any = train_test_split(
        images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    return parts[1], parts[3]


def picture(image: np.ndarray) -> list[str]:
    """Return an image as lines of characters."""
    return ["".join(SHADES[int(v * 9.99)] * 2 for v in row) for row in image[0]]


def main() -> None:
    """Run the demo."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    images, labels = test_images()
    graph = sg.load(custom_selector.MODEL)
    cut = sg.optimize_for(graph, "small_kernels", min_size=2)

    console.rule("the partition")
    table = Table("where", "nodes", "operators", "why not in a region")
    for node in cut.nodes:
        if node.subgraph is not None:
            inside = [inner.op_type for inner in node.subgraph.nodes]
            table.add_row(node.name, str(len(inside)), " ".join(inside), "")
        else:
            why = sg.explain(cut, node).reasons[0].replace(f"{Path.cwd()}{os.sep}", "")
            table.add_row("outside", "1", node.op_type, why.partition("refused: ")[2] or why)
    console.print(table)
    sg.visualize(cut).save(PICTURE)
    console.print(f"wrote {PICTURE}, a picture to search in: open it in a browser")

    console.rule("the result")
    start = time.perf_counter()
    model = sg.compile_model(cut, "CPU")
    plain = sg.compile_model(graph, "REFERENCE")
    probability = model(image=images)["probability"]
    console.print(f"compiled and ran first in {time.perf_counter() - start:.2f} s")
    found = probability.argmax(axis=1)
    right = found == labels
    for lines in zip(*(picture(images[k]) for k in range(5)), strict=True):
        console.print("   ".join(lines), markup=False)
    console.print(
        "".join(
            f"read {found[k]}, is {labels[k]}, {probability[k].max():.0%}".ljust(19)
            for k in range(5)
        )
    )
    console.print(f"accuracy {right.mean():.2%} on {len(labels)} test images")
    reference = plain(image=images)["probability"]
    console.print(
        f"largest difference from the reference {np.abs(probability - reference).max():.1e}"
    )
    times = []
    for _ in range(20):
        start = time.perf_counter()
        model(image=images)
        times.append(time.perf_counter() - start)
    console.print(f"{len(images) / np.median(times):,.0f} images a second")

    console.rule("new weights without compiling again")
    name = next(name for name in model.parameters if name.endswith("running_mean"))
    before = model.parameters[name].array
    model.parameters[name].assign(before + 5)
    broken = (model(image=images)["probability"].argmax(axis=1) == labels).mean()
    model.parameters[name].assign(before)
    again = (model(image=images)["probability"].argmax(axis=1) == labels).mean()
    console.print(f"{name} moved by 5: accuracy {broken:.2%}; put back: {again:.2%}")


if __name__ == "__main__":
    main()
