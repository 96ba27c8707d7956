"""Models of PyTorch against PyTorch itself: `from_torch` and the backend of ``torch.compile``."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.errors import ModelError
from subgraph.frontends import pytorch

Case = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of PyTorch, and its arguments


@pytest.fixture
def torch() -> Iterator[Any]:
    """PyTorch, with nothing compiled, and equal random numbers for each test."""
    found: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("onnxscript", reason="the exporter of PyTorch is not installed")
    found.compiler.reset()
    found.manual_seed(0)
    yield found
    found.compiler.reset()


def flat(results: Any) -> list[Any]:
    """Return the tensors of a result: a tensor, or tuples, lists and dicts of results."""
    if isinstance(results, dict):
        results = list(results.values())
    if isinstance(results, (tuple, list)):
        return [tensor for item in results for tensor in flat(item)]
    return [results]


def check(torch: Any, compiled: Any, function: Callable[..., Any], *args: Any) -> None:
    """Compare a call of the compiled function with one of the function itself."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # PyTorch itself must not run it
        found, wanted = flat(compiled(*args)), flat(function(*args))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def small_network(torch: Any) -> Any:
    nn = torch.nn
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )
    made[1].running_mean.normal_()
    made[1].running_var.uniform_(0.5, 2)
    return made.eval()


def embedding(torch: Any) -> Case:
    nn = torch.nn
    layers = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
    return layers.eval(), (torch.tensor([[1, 10, 3]]),)


def attention(torch: Any) -> Case:
    query, key, value = torch.randn(3, 2, 4, 7, 8)
    return torch.nn.functional.scaled_dot_product_attention, (query, key, value)


def encoder(torch: Any) -> Case:
    """Layers that PyTorch traces as one operator each, which ONNX has not."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    hidden = torch.tensor([[False, False, True], [False, False, False]])
    return lambda x: layers(x, src_key_padding_mask=hidden), (torch.randn(2, 3, 8),)


CASES: dict[str, Callable[[Any], Case]] = {
    "sum": lambda t: (lambda a, b: a + 2 * b, (t.randn(3, 5), t.randn(3, 5))),
    "several results": lambda t: (lambda a: (a + 1, [a * 2], {"c": a - 3}), (t.randn(3, 5),)),
    "one result twice": lambda t: (lambda a: (a.exp(),) * 2, (t.randn(3),)),
    "product of transposed": lambda t: (lambda a, b: a.T @ b, (t.randn(3, 5), t.randn(3, 4))),
    "strides": lambda t: (lambda a: a.softmax(-1), (t.randn(3, 5).T,)),
    "reversed slices": lambda t: (lambda a: a.flip(0)[::2], (t.randn(9, 5)[::3],)),
    "negative axis": lambda t: (lambda a: a.sum(-2).cumsum(0), (t.randn(3, 5),)),
    "comparison": lambda t: (lambda a: (a > 0, a.argmax(1)), (t.randn(3, 5),)),
    "scalar": lambda t: (lambda a, s: a * s, (t.randn(3, 5), t.tensor(2.5))),
    "number": lambda t: (lambda a, n: a * n, (t.randn(3, 5), 3)),
    "empty": lambda t: (lambda a: a * 2, (t.empty(0, 4),)),
    "integers": lambda t: (lambda a: a // 3 + a % 5, (t.arange(-9, 9),)),
    "float64": lambda t: (lambda a: a.exp(), (t.randn(3, 5).double(),)),
    "bfloat16": lambda t: (lambda a: a + 1, (t.randn(3, 5).bfloat16(),)),
    "half": lambda t: (lambda a: a * 2, (t.randn(3, 5).half(),)),
    "float8": lambda t: (lambda a: a.float() + 1, (t.ones(3).to(t.float8_e4m3fn),)),
    "negated on reading": lambda t: (lambda a: a + 1, (t._neg_view(t.ones(3)),)),
    "attention": attention,
    "encoder": encoder,
    "embedding": embedding,
    "network": lambda t: (small_network(t), (t.randn(2, 3, 8, 8),)),
    "constants alone": lambda t: (lambda a: (t.tensor(3.0), t.arange(5), a), (t.randn(3),)),
    "input as result": lambda t: (lambda a: (a, a + 1), (t.randn(3, 5),)),
    "gradient not asked for": lambda t: (lambda a: a + 1, (t.randn(3, 5, requires_grad=True),)),
}


@pytest.mark.parametrize("name", CASES)
def test_function(torch: Any, name: str) -> None:
    function, args = CASES[name](torch)
    check(torch, torch.compile(function, backend=sg.torch_backend), function, *args)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_modules(torch: Any, kind: str) -> None:
    """PyTorch passes them to a backend only if it is told to."""
    module = getattr(torch.nn, kind)(4, 5, batch_first=True).eval()
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return sg.torch_backend(module, inputs)

    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(module, backend=backend)
        for _ in range(2):
            check(torch, compiled, module, torch.randn(2, 3, 4))
    assert len(graphs) == 1


def test_sizes_that_differ_between_calls(torch: Any) -> None:
    module = small_network(torch)

    def function(images: Any) -> Any:
        return module(images).reshape(images.shape[0] * 2, -1) + images.shape[0]

    compiled = torch.compile(function, backend=sg.torch_backend)
    for batch in (2, 5, 7, 1):
        check(torch, compiled, function, torch.randn(batch, 3, 8, 8))


def change_in_place(torch: Any, module: Any) -> None:
    module[0].weight.mul_(-2)
    module[1].running_mean.add_(1)


def assign_data(torch: Any, module: Any) -> None:
    module[0].weight.data = torch.randn(8, 3, 3, 3)


def load_state(torch: Any, module: Any) -> None:
    module.load_state_dict({name: held * 0.5 for name, held in module.state_dict().items()})


def replace_parameter(torch: Any, module: Any) -> None:
    module[4].bias = torch.nn.Parameter(torch.randn(4))


def use_memory_again(torch: Any, module: Any) -> None:
    address = module[0].weight.data_ptr()
    for _ in range(20):
        module[0].weight.data = torch.zeros(1)
        module[0].weight.data = torch.randn(8, 3, 3, 3)
        if module[0].weight.data_ptr() == address:  # as is usual
            break


@pytest.mark.parametrize(
    "change", [change_in_place, assign_data, load_state, replace_parameter, use_memory_again]
)
def test_weights_that_change(torch: Any, change: Callable[[Any, Any], None]) -> None:
    module, images = small_network(torch), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(module, backend=sg.torch_backend)
    check(torch, compiled, module, images)
    with torch.no_grad():
        change(torch, module)
    check(torch, compiled, module, images)


def test_calls_from_threads_see_whole_changes(torch: Any) -> None:
    """Two weights that are always changed together differ in no result."""
    module = torch.nn.Module()
    module.register_buffer("one", torch.zeros(1000))
    module.register_buffer("two", torch.zeros(1000))
    module.forward = lambda x: (x + module.one) - module.two
    compiled = torch.compile(module, backend=sg.torch_backend)
    x, failures = torch.ones(1000), list[str]()
    changing = threading.Lock()

    def call() -> None:
        for _ in range(100):
            with torch.no_grad():
                with changing:  # a tensor that is being written is not defined for its readers
                    module.one.add_(1)
                    module.two.add_(1)
                    found = compiled(x)
                if not torch.equal(found, x):
                    failures.append(f"{found}")

    with torch.no_grad():
        compiled(x)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_changes_in_place(torch: Any) -> None:
    """A cache among the arguments, and a counter that the module owns."""

    class Cached(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))
            self.factor = torch.nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Any, cache: Any) -> Any:
            self.calls.add_(1)
            cache[:, 1:2] = x * self.factor
            return cache.sum(1) + self.calls[0]

    module, wanted = Cached(), Cached()
    compiled = torch.compile(module, backend=sg.torch_backend)
    mine, other = torch.zeros(3, 4), torch.zeros(3, 4)
    for _ in range(3):
        x = torch.randn(3, 1)
        check(torch, lambda x: compiled(x, mine), lambda x: wanted(x, other), x)
        assert torch.equal(mine, other)
        assert torch.equal(module.calls, wanted.calls)


def test_constants_written_in_place(torch: Any) -> None:
    def function(a: Any) -> Any:
        a.view(-1)[0] = 7
        return a.sum()

    compiled = torch.compile(function, backend=sg.torch_backend)
    check(torch, lambda: compiled(torch.ones(3, 3)), lambda: function(torch.ones(3, 3)))


def views(torch: Any, a: Any) -> Any:
    return a[1:3], a.T, a.view(-1), a.add_(1)


def views_of_a_result(torch: Any, a: Any) -> Any:
    b = a * 2
    return b[0], b.T, a + 1


def views_of_a_changed_result(torch: Any, a: Any) -> Any:
    b = (a * 2).add_(3)
    return b, torch.relu_(b), b[1]


@pytest.mark.parametrize("function", [views, views_of_a_result, views_of_a_changed_result])
def test_results_that_share_memory(torch: Any, function: Callable[..., Any]) -> None:
    """A change of one of them shows in the others, and in the input."""
    compiled = torch.compile(function, backend=sg.torch_backend)

    def changed(call: Callable[..., Any], *, of: int) -> Any:
        a = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        results = call(torch, a)
        results[of].fill_(100)
        return a, results

    for of in range(3):
        check(torch, lambda of=of: changed(compiled, of=of), lambda of=of: changed(function, of=of))


def test_only_views(torch: Any) -> None:
    compiled, x = torch.compile(lambda a: (a.T, a[0]), backend=sg.torch_backend), torch.ones(3, 3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled(x)[0].fill_(2)
    assert torch.equal(x, torch.full((3, 3), 2.0))


def test_sizes_as_results(torch: Any) -> None:
    def function(a: Any) -> Any:
        return a + 1, a.shape[0], a.shape[0] * 2 + 1

    compiled = torch.compile(function, backend=sg.torch_backend, dynamic=True)
    for size in (2, 3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            found = compiled(torch.ones(size))
        assert found[1:] == (size, size * 2 + 1)
        assert torch.equal(found[0], torch.full((size,), 2.0))


def test_changed_input_that_overlaps_with_another(torch: Any) -> None:
    def function(a: Any, b: Any) -> Any:
        a.add_(1)
        return b * 2

    compiled = torch.compile(function, backend=sg.torch_backend)

    def halves() -> Any:
        both = torch.zeros(6)
        return both[:3], both[3:]

    check(torch, lambda: compiled(*halves()), lambda: function(*halves()))
    one = torch.zeros(6)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="changes in place shares memory"):
        found = compiled(one[:4], one[2:])
    assert found.tolist() == [2, 2, 0, 0]
    assert one.tolist() == [1, 1, 1, 1, 0, 0]


def test_errors_are_those_of_pytorch(torch: Any) -> None:
    compiled = torch.compile(lambda a, k: a[k], backend=sg.torch_backend)
    for _ in range(2):  # the first call of all, and one of a compiled graph
        with pytest.warns(RuntimeWarning), pytest.raises(IndexError, match="out of bounds"):
            compiled(torch.ones(3), torch.tensor([0, 5]))
        compiled = torch.compile(lambda a, k: a[k], backend=sg.torch_backend)
        check(torch, compiled, lambda a, k: a[k], torch.ones(3), torch.tensor([0, 2]))


def test_mode(torch: Any) -> None:
    compiled = torch.compile(lambda a: a + 1, backend=sg.torch_backend, mode="reduce-overhead")
    check(torch, compiled, lambda a: a + 1, torch.ones(3))


def differentiated(torch: Any) -> Case:
    return small_network(torch), (torch.randn(2, 3, 8, 8),)


def training(torch: Any) -> Case:
    return small_network(torch).train().requires_grad_(False), (torch.randn(2, 3, 8, 8),)


def random(torch: Any) -> Case:
    return lambda a: a + 1e-3 * torch.rand(99), (torch.ones(99),)


def complex_input(torch: Any) -> Case:
    return lambda a: a * 2, (torch.ones(3, dtype=torch.complex64),)


def complex_result(torch: Any) -> Case:
    return lambda a: torch.complex(a, a), (torch.ones(3),)


def not_in_onnx(torch: Any) -> Case:
    return lambda a: torch.linalg.eigvalsh(a), (torch.eye(3),)


REASONS: dict[Callable[[Any], Case], str] = {
    differentiated: "it is differentiated",
    training: "differs from PyTorch's",
    random: r"random numbers \(RandomUniform",
    complex_input: "an input is complex",
    complex_result: "a result is torch.float32",
    not_in_onnx: "linalg_eigh|eigvalsh",
}


@pytest.mark.parametrize("make", REASONS)
def test_pytorch_runs_the_rest(torch: Any, make: Callable[[Any], Case]) -> None:
    function, args = make(torch)
    compiled = torch.compile(function, backend=sg.torch_backend)
    torch.manual_seed(1)
    with pytest.warns(RuntimeWarning, match=REASONS[make]):
        found = compiled(*args)
    torch.manual_seed(1)
    torch.testing.assert_close(found, function(*args))


def around_an_eigenvector(torch: Any) -> Callable[..., Any]:
    weight = torch.randn(4, 4)

    def function(x: Any, n: int) -> Any:
        y = torch.relu(x @ weight) + n
        values, vectors = torch.linalg.eigh(y @ y.T + torch.eye(len(x)))
        z = vectors.abs() @ y
        return z.softmax(1) + values.sum(), y[:, :2], n + 1

    return function


def with_an_operator_of_a_user(torch: Any) -> Callable[..., Any]:
    name, schema = "subgraph_test::doubled", "(Tensor x, SymInt n) -> Tensor"
    if not hasattr(torch.ops.subgraph_test, "doubled"):
        make = torch.library.custom_op
        made = make(name, lambda x, n: x * 2 * n, mutates_args=(), schema=schema)
        made.register_fake(lambda x, n: torch.empty_like(x))

    def function(x: Any, n: int) -> Any:
        doubled = torch.ops.subgraph_test.doubled
        return doubled(doubled(x.relu(), n) + 1, 3).sigmoid()

    return function


def with_a_change_in_place(torch: Any) -> Callable[..., Any]:
    def function(x: Any, n: int) -> Any:
        x.add_(1)
        values = torch.linalg.eigvalsh(x @ x.T)
        x.mul_(2)
        return values * n

    return function


def between_two_sorts(torch: Any) -> Callable[..., Any]:
    def function(x: Any, n: int) -> Any:
        order = torch.sort((x > 0).int(), stable=True)[1]
        return torch.gather(x, 1, order).roll(n, 1).abs().sort(dim=0)[0]

    return function


PARTS: dict[Callable[[Any], Callable[..., Any]], str] = {
    around_an_eigenvector: r"runs 3 of \d+ operators: .*_linalg_eigh",
    with_an_operator_of_a_user: r"runs 2 of 5 operators: .*subgraph_test.doubled",
    with_a_change_in_place: r"runs 1 of 6 operators: .*_linalg_eigh",
}


@pytest.mark.parametrize("make", [*PARTS, between_two_sorts])
def test_parts_between_operators_without_a_form_in_onnx(
    torch: Any, make: Callable[[Any], Callable[..., Any]]
) -> None:
    function = make(torch)
    compiled = torch.compile(function, backend=sg.torch_backend)
    messages: list[str] = []
    for rows, n in ((3, 2), (3, 3), (5, 4), (6, 5), (6, 6)):
        mine, wanted = (torch.randn(rows, 4, generator=torch.manual_seed(n)) for _ in range(2))
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            results, expected = flat(compiled(mine, n)), flat(function(wanted, n))
        for found, other in zip([*results, mine], [*expected, wanted], strict=True):
            torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-4)
        messages += [f"{warning.message}" for warning in caught]
    assert not caught  # after the last change of a size nothing is compiled
    assert not [message for message in messages if "differs from PyTorch" in message]
    assert make not in PARTS or any(re.search(PARTS[make], message) for message in messages)


NUMBERS: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "arithmetic": lambda t, a, n, k: (a * n // k, a - n % k, a + float(n)),
    "position": lambda t, a, n, k: a * (t.arange(a.shape[1]) + n),
    "window": lambda t, a, n, k: (a[:, -(n % 3 + 1) :], a.tril(n)),
    "shape": lambda t, a, n, k: t.full((n, k), n) + a[0, 0],
    "result": lambda t, a, n, k: (a + 1, n + k),
    "size, too": lambda t, a, n, k: (t.ones(n) * a[:, :1], a[:, :2] * k),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_differ_between_calls(torch: Any, name: str) -> None:
    if torch.__version__ < "2.8":
        pytest.skip("PyTorch exports dynamic numbers since 2.8")

    def function(a: Any, n: int, k: int) -> Any:
        return NUMBERS[name](torch, a, n, k)

    compiled = torch.compile(function, backend=sg.torch_backend)
    for n, k in ((3, 4), (5, 7), (6, 2), (0, 9), (1, 5), (5, 5), (11, 3)):
        check(torch, compiled, function, torch.randn(2, 6), n, k)


def test_number_that_the_export_fixes(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.7 takes the number of the first call for a constant."""
    compiled = torch.compile(lambda a, n: a * n, backend=sg.torch_backend)
    check(torch, compiled, lambda a, n: a * n, torch.ones(2), 3)
    export = torch.export.export

    def fixing(module: Any, args: Any, *rest: Any, dynamic_shapes: Any, **options: Any) -> Any:
        fixed = tuple(None if isinstance(arg, int) else {} for arg in args)
        return export(module, args, *rest, dynamic_shapes=fixed, **options)

    monkeypatch.setattr(torch.export, "export", fixing)
    with pytest.warns(RuntimeWarning, match="the number .* differs between calls: pass a tensor"):
        assert compiled(torch.ones(2), 5).tolist() == [5, 5]
    assert compiled(torch.ones(2), 6).tolist() == [6, 6]


def test_pytorch_runs_what_is_not_on_the_processor(torch: Any) -> None:
    compiled = torch.compile(lambda a: a + 1, backend=sg.torch_backend)
    with pytest.warns(RuntimeWarning, match="on meta"):
        assert compiled(torch.ones(2, device="meta")).device.type == "meta"


def test_autocast(torch: Any) -> None:
    x = torch.randn(4, 4)
    inside = torch.autocast("cpu")(lambda a: a @ a)
    check(torch, torch.compile(inside, backend=sg.torch_backend), inside, x)
    around = torch.compile(lambda a: a @ a, backend=sg.torch_backend)
    with torch.autocast("cpu"), pytest.warns(RuntimeWarning, match="autocast is on"):
        assert around(x).dtype == torch.bfloat16


class Convolutions(sg.SubgraphProperty):
    """Takes convolutions with the normalization and the activation after them."""

    sizes: list[int]

    def __init__(self) -> None:
        self.sizes = []

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Conv", "BatchNormalization", "Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int = 0) -> sg.Node:
        self.sizes.append(len(subgraph.nodes))
        return sg.subgraph_node(subgraph)


def test_options(torch: Any) -> None:
    module, images, mine = small_network(torch), torch.randn(2, 3, 8, 8), Convolutions()
    options = {"device": "CPU", "config": {"INFERENCE_NUM_THREADS": 1}, "property": mine}
    check(torch, torch.compile(module, backend=sg.torch_backend, options=options), module, images)
    assert mine.sizes == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "CPU"}, "no option 'devices'.*device"),
        ({"device": "NOWHERE"}, "NOWHERE"),
        ({"config": {"THREADS": 1}}, "THREADS"),
    ],
)
def test_wrong_options_are_errors(torch: Any, options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(lambda a: a + 1, backend=sg.torch_backend, options=options)
    with pytest.raises(Exception, match=f"(?s){message}"):  # of PyTorch's own type
        compiled(torch.ones(2))


def test_graph_of_a_module(torch: Any) -> None:
    module = small_network(torch)
    batch = torch.export.Dim("batch")
    graph = sg.from_torch(module, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},))
    state = module.state_dict()
    del state["1.num_batches_tracked"]
    assert set(graph.parameters) == set(state)
    model = sg.compile_model(graph, "CPU")
    images = torch.randn(5, 3, 8, 8)
    for factor in (1, 3):
        with torch.no_grad():
            for name, held in state.items():
                model.parameters[name].assign((held * factor).numpy())
            module.load_state_dict({name: held * factor for name, held in state.items()}, False)
            wanted = module(images).numpy()
        found = model(images.numpy())[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_arguments_by_name(torch: Any) -> None:
    class Scaled(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, *, scale: Any) -> Any:
            return {"scaled": x * scale}

    graph = sg.from_torch(Scaled(), (torch.ones(2),), {"scale": torch.ones(2)})
    assert [value.name for value in graph.inputs] == ["x", "scale"]


def test_encoder_layer(torch: Any) -> None:
    """PyTorch has a fused operator for the whole layer, which ONNX has not."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        wanted = layer(x).numpy()
        found = sg.compile_model(sg.from_torch(layer, (x,)), "CPU")(x.numpy())[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_module_in_training_mode_is_refused(torch: Any) -> None:
    module = small_network(torch).train()
    with pytest.raises(ModelError, match=r"Sequential changes 1\.running_mean.*eval"):
        sg.from_torch(module, (torch.randn(2, 3, 8, 8),))


def test_module_that_raises(torch: Any) -> None:
    with pytest.raises(ModelError, match="cannot export module Sequential"):
        sg.from_torch(small_network(torch), (torch.randn(2, 9),))


def test_function_is_refused(torch: Any) -> None:
    with pytest.raises(ModelError, match=r"takes a torch\.nn\.Module, got builtin_function"):
        sg.from_torch(torch.sin, (torch.ones(2),))


def test_old_pytorch(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.5.1+cpu"))
    with pytest.raises(ModelError, match=r"need PyTorch 2\.\d+ or newer, 2\.5\.1.*pip install"):
        sg.from_torch(torch.nn.ReLU(), (torch.ones(2),))


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"torch and onnxscript.*pip install"):
        sg.from_torch(None)
