"""A model behind Ray Serve: replicas share its weights, and join requests that wait.

Run ``pip install "ray[serve]"``, then ``python examples/ray_serving.py``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import subgraph as sg

MODEL = Path(__file__).parent / "digits.onnx"


class Classifier:
    """One replica: it maps the file of the compiled model, whose pages all replicas share."""

    def __init__(self, path: str) -> None:
        """Import the compiled model of a file."""
        self.model = sg.import_model(path, "BATCH")

    async def __call__(self, images: Any) -> list[int]:
        """Return the digit of each image; requests that wait for the model run as one batch."""
        # The event loop must not wait for a run.
        results = await asyncio.to_thread(self.model, images)
        return [int(digit) for digit in results["probability"].argmax(axis=-1)]


def main() -> None:
    """Serve the model on two replicas, and send them requests."""
    if importlib.util.find_spec("ray") is None:
        print('Ray is not installed: pip install "ray[serve]"')
        return
    ray: Any = importlib.import_module("ray")
    serve: Any = importlib.import_module("ray.serve")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "digits.sgb"))
        sg.compile_model(str(MODEL), "BATCH:CPU(8)", {"INFERENCE_NUM_THREADS": 1}).export_model(
            path
        )
        deployment = serve.deployment(Classifier).options(num_replicas=2, max_ongoing_requests=16)
        handle = serve.run(deployment.bind(path))
        images = np.random.default_rng(0).random((32, 1, 8, 8), dtype=np.float32)
        answers = [handle.remote(images[k : k + 1]) for k in range(len(images))]
        found = [answer.result()[0] for answer in answers]
        expected = sg.compile_model(str(MODEL))(images)["probability"].argmax(axis=-1)
        print(sum(a == b for a, b in zip(found, expected, strict=True)), "of", len(found), "agree")
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
