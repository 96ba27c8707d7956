"""Partition time by size of the graph, for families of graphs, both strategies, and torch.fx.

Every block of a ladder is Relu -> {Sin, Tanh} -> Add -> Sigmoid with Sin refused. Run:
``python benchmarks/partition.py --sizes 1000,10000,100000``. Times are CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import subgraph as sg
from subgraph import passes
from subgraph.graph.graph import Graph, Node, Value
from subgraph.partition.op_names import OperatorNames
from subgraph.partition.property import SelectorProperty
from subgraph.partition.proposal import propose
from subgraph.partition.search import search
from subgraph.partition.search.backend import SearchBackend
from subgraph.partition.search.workspace import Workspace
from subgraph.partition.selector_driver import SelectorDriver

# For each node its operator and the numbers of its producers ([]: the graph's input).
Plan = list[tuple[str, list[int]]]
REFUSED = "Sin"


class NotSin(sg.SubgraphSelector):
    """Takes all operators except Sin; written as a user would."""

    def select(self, node: Node) -> bool:
        """Take all but Sin."""
        return node.op_type != REFUSED

    def select_input(self, node: Node, input_node: Node) -> bool:
        """Take all but Sin."""
        return input_node.op_type != REFUSED

    def select_output(self, node: Node, output_node: Node) -> bool:
        """Take all but Sin."""
        return output_node.op_type != REFUSED


def chain(count: int) -> Plan:
    """Return a chain in which every tenth node is refused."""
    return [(REFUSED if k % 10 == 9 else "Relu", [k - 1] if k else []) for k in range(count)]


def ladder(count: int, *, last: bool = False) -> Plan:
    """Return residual blocks with one refused node each, listed before or after its sibling."""
    plan: Plan = []
    pair = ("Tanh", REFUSED) if last else (REFUSED, "Tanh")
    for _ in range(count // 5):
        k = len(plan)
        plan += [("Relu", [k - 1] if k else []), (pair[0], [k]), (pair[1], [k])]
        plan += [("Add", [k + 1, k + 2]), ("Sigmoid", [k + 3])]
    return plan


def diamonds(count: int, width: int = 100) -> Plan:
    """Return wide diamonds, one branch of each refused, somewhere in the middle."""
    rng = random.Random(0)
    plan: Plan = []
    for _ in range(max(count // (width + 2), 1)):
        k = len(plan)
        refused = rng.randrange(width)
        plan.append(("Relu", [k - 1] if k else []))
        plan += [(REFUSED if j == refused else "Tanh", [k]) for j in range(width)]
        plan.append(("Sum", list(range(k + 1, k + width + 1))))
    return plan


def random_graph(count: int, reach: int = 30, refused: float = 0.2) -> Plan:
    """Return a random graph: one to three inputs from the last ``reach`` nodes."""
    rng = random.Random(0)
    plan: Plan = []
    for k in range(count):
        sources = (
            {rng.randrange(max(0, k - reach), k) for _ in range(rng.choice((1, 1, 2, 3)))}
            if k
            else set[int]()
        )
        plan.append((REFUSED if rng.random() < refused else "Sum", sorted(sources)))
    return plan


FAMILIES: dict[str, Callable[[int], Plan]] = {
    "chain": chain,
    "ladder": ladder,
    "ladder, refused last": lambda count: ladder(count, last=True),
    "diamonds of 100": diamonds,
    "diamonds of 1000": lambda count: diamonds(count, 1000),
    "random": random_graph,
    "random, half refused": lambda count: random_graph(count, refused=0.5),
}


def build(plan: Plan) -> Graph:
    """Return the graph of a plan: vectors of four numbers."""
    kind = sg.TensorType("float32", (4,))
    x = Value("x", kind)
    made: list[Node] = []
    used = bytearray(len(plan))
    for number, (op_type, sources) in enumerate(plan):
        for source in sources:
            used[source] = 1
        inputs = [made[source].outputs[0] for source in sources] or [x]
        node = Node(op_type, inputs, name=f"n{number}", version=13)
        node.outputs[0].type = kind
        node.outputs[0].name = f"v{number}"
        made.append(node)
    ends = [node.outputs[0] for number, node in enumerate(made) if not used[number]]
    return Graph([x], ends, "plan", nodes=made)


class Reachability:
    """Sums up the time of the search backends, without the selectors' answers.

    Attributes:
        seconds: The sum, without the overhead of reading the clock.
    """

    seconds = 0.0
    _reading = 0.0

    def __enter__(self) -> Self:
        """Time the backends that are made in the ``with`` block."""
        nothing = self._timed(lambda: 0)
        for _ in range(10_000):
            nothing()
        self._reading = self.seconds / 10_000
        self.seconds = 0.0
        self._make_backend = search.make_backend
        search.make_backend = self._timed_backend
        return self

    def _timed_backend(self, *args: Any, **options: Any) -> SearchBackend:
        backend = self._make_backend(*args, **options)
        backend.run = self._timed(backend.run)
        return backend

    def __exit__(self, *_: object) -> None:
        """Stop timing."""
        search.make_backend = self._make_backend

    def _timed(self, original: Callable[[], int]) -> Callable[[], int]:
        def timed() -> int:
            start = time.process_time()
            result = original()
            self.seconds += time.process_time() - start - self._reading
            return result

        return timed


def measure(plan: Plan, strategy: str, *, split: bool = True) -> dict[str, Any]:
    """Return a row of the table: seconds of the pass, of its search and of the search backend.

    Args:
        plan: The graph.
        strategy: "selector" or "hetero".
        split: Whether to measure the search separately, which takes a second partition.
    """
    graph = build(plan)
    owner = SelectorProperty(NotSin, "region")
    graph.attrs["subgraph_property"] = owner
    gc.collect()
    start = time.process_time()
    cut = passes.apply_pass(graph, "PartitionGraph", strategy=strategy)
    whole = time.process_time() - start
    row: dict[str, Any] = {
        "nodes": len(plan),
        "strategy": strategy,
        "seconds": round(whole, 3),
        "us_per_node": round(whole / len(plan) * 1e6, 2),
        "regions": sum(node.subgraph is not None for node in cut.nodes),
    }
    del cut
    if split:
        gc.collect()
        gc.disable()
        start = time.process_time()
        work = Workspace.of(graph)
        with Reachability() as reach:
            propose(SelectorDriver(work, owner, OperatorNames(graph)), [], strategy)
        row["search"] = round(time.process_time() - start, 3)
        row["reachability"] = round(reach.seconds, 3)
        gc.enable()
    return row


def torch_fx(plan: Plan) -> float:
    """Return the seconds of propose_partitions of torch.fx's CapabilityBasedPartitioner."""
    # Imported dynamically, because torch is no dependency.
    torch: Any = importlib.import_module("torch")
    passes = "torch.fx.passes"
    partitioner: Any = importlib.import_module(f"{passes}.infra.partitioner")
    support: Any = importlib.import_module(f"{passes}.operator_support")

    class Support(support.OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: Any) -> bool:
            return node.op == "call_function" and node.target is not torch.sin

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made: list[Any] = []
    for op_type, sources in plan:
        target: Any = {REFUSED: torch.sin, "Add": torch.add}.get(op_type, torch.relu)
        made.append(graph.call_function(target, tuple(made[s] for s in sources) or (x,)))
    graph.output(made[-1])
    module = torch.fx.GraphModule({}, graph)
    start = time.process_time()
    partitioner.CapabilityBasedPartitioner(module, Support(), True).propose_partitions()
    return time.process_time() - start


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    names = [name for name in FAMILIES if args.family is None or args.family in name]
    for size in args.sizes:
        for name in names:
            for strategy in ("selector", "hetero"):
                yield {"family": name, **measure(FAMILIES[name](size), strategy)}
    if args.torch and importlib.util.find_spec("torch") is None:
        print("torch.fx is left out: torch is not installed (pip install torch)", file=sys.stderr)
        return
    for size in args.torch:
        seconds = torch_fx(ladder(size))
        yield {
            "family": "ladder",
            "nodes": size,
            "strategy": "torch.fx",
            "seconds": round(seconds, 3),
            "us_per_node": round(seconds / size * 1e6, 2),
        }


def main() -> None:
    """Measure and print."""

    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=sizes, default=[1_000, 10_000, 100_000])
    parser.add_argument("--family", help="only families whose name has this in it")
    parser.add_argument("--torch", type=sizes, default=[500, 1_000], help="sizes for torch.fx")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    titles = ("family", "nodes", "strategy", "seconds", "us_per_node", "search", "reachability")
    if not args.json:
        print(f"{titles[0]:22}" + "".join(f"{title:>13}" for title in titles[1:]))
    for row in rows(args):
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            cells = "".join(f"{row.get(title, ''):>13}" for title in titles[1:])
            print(f"{row['family']:22}{cells}", flush=True)


if __name__ == "__main__":
    main()
