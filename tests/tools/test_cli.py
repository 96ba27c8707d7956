"""The command line as a user meets it: results, tables, JSON, exit codes, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import numpy_dtype
from subgraph.operators.protobuf import tensor_to_proto
from subgraph.tools import bench
from subgraph.tools.cli import main
from subgraph.tools.cli_inputs import input_arrays, ports, read_array

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits.onnx"
SELECTOR = ROOT / "examples" / "custom_selector.py"


def run_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    assert main([*map(str, argv), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_run_on_a_file_writes_what_the_api_gives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    image = np.random.default_rng(3).random((2, 1, 8, 8), dtype=np.float32)
    np.save(tmp_path / "image.npy", image)
    source = f"image={tmp_path / 'image.npy'}"
    answer = run_json(capsys, "run", DIGITS, "--input", source, "--output", tmp_path / "out")
    (row,) = answer["results"]
    assert row["type"] == "float32[2, 10]"
    expected = sg.compile_model(sg.load(DIGITS), "AUTO")(image=image)["probability"]
    np.testing.assert_array_equal(np.load(row["file"]), expected)


def test_run_takes_a_tensor_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = np.zeros((3, 1, 8, 8), np.float32)
    (tmp_path / "image.pb").write_bytes(tensor_to_proto(image).SerializeToString())
    answer = run_json(capsys, "run", DIGITS, "--input", f"image={tmp_path / 'image.pb'}")
    assert answer["results"][0]["type"] == "float32[3, 10]"


@pytest.mark.parametrize(
    "names", [("a/b", "a_b", "A_b"), ("ü" * 300, "ü" * 300 + "/", "..")], ids=["like", "long"]
)
def test_outputs_of_like_names_are_files_of_their_own(
    names: tuple[str, str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = sg.input("x", (2,), "float32")
    made = [ops.Relu(x), ops.Neg(x), ops.Abs(x)]
    for value, name in zip(made, names, strict=True):
        value.name = name
    sg.save(sg.Graph([x], made), tmp_path / "m.onnx")
    answer = run_json(capsys, "run", tmp_path / "m.onnx", "--output", tmp_path / "out")
    files = [row["file"] for row in answer["results"]]
    assert len({file.casefold() for file in files}) == 3
    a, b, c = (np.load(file) for file in files)
    np.testing.assert_array_equal(a - np.maximum(-b, 0), 0)
    np.testing.assert_array_equal(c, np.abs(b))


def test_json_has_no_numbers_that_json_has_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = sg.input("x", (2,), "float32")
    y = ops.Add(x, np.array([np.nan, np.inf], np.float32))
    sg.save(sg.Graph([x], [y]), tmp_path / "m.onnx")
    assert main(["run", str(tmp_path / "m.onnx"), "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert answer["results"][0]["mean"] == "NaN"


def test_run_makes_random_inputs_of_the_size_asked(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "run", DIGITS, "--dim", "batch=5", "--repeat", "3")
    assert answer["results"][0]["type"] == "float32[5, 10]"
    assert answer["runs"] == 3
    assert answer["first_ms"] > answer["median_ms"] > 0


def test_partition_shows_subgraphs_and_reasons(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dot, out = tmp_path / "cut.dot", tmp_path / "cut.onnx"
    answer = run_json(
        capsys,
        *("partition", DIGITS, "--selector", "small_kernels", "--import", SELECTOR),
        *("--min-size", "2", "--dot", dot, "-o", out, "--reasons", "99"),
    )
    assert len(answer["subgraphs"]) == answer["number_of_subgraphs"] > 0
    assert {"subgraph", "nodes", "inputs", "operators"} <= answer["subgraphs"][0].keys()
    assert any("kernel is (5, 5)" in row["why"] for row in answer["outside"])
    assert dot.read_text().startswith("digraph {")
    proto = onnx.load_model(str(out))
    onnx.checker.check_model(proto)
    assert {f.domain for f in proto.functions} == {"subgraph"}


def test_explain_names_the_users_reason(capsys: pytest.CaptureFixture[str]) -> None:
    name = sg.load(DIGITS).nodes[0].name
    argv = ["explain", str(DIGITS), name, "--selector", "small_kernels", "--import", str(SELECTOR)]
    assert main(argv) == 0
    assert "kernel is (5, 5)" in capsys.readouterr().out
    answer = run_json(capsys, *argv)
    assert (answer["node"], answer["subgraph"]) == (name, None)
    assert any("kernel is (5, 5)" in reason for reason in answer["reasons"])


def test_nothing_is_shown_of_a_cut_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["partition", str(DIGITS), "-o", str(tmp_path / "missing" / "cut.onnx")]
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert "cannot write" in shown.err
    assert not shown.out


def test_a_file_that_does_not_fit_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for array in (np.zeros((1, 1, 8, 8)), np.zeros((1, 8, 8), np.float32)):
        np.save(tmp_path / "a.npy", array)
        assert main(["run", str(DIGITS), "--input", f"image={tmp_path / 'a.npy'}"]) == 1
        error = capsys.readouterr().err
        assert "a.npy: input 'image' is float32[batch, 1, 8, 8], the file has float" in error


def test_results_that_are_sequences_or_strings_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x, words = sg.input("x", (3,)), sg.input("words", (2,), "string")
    first = ops.Slice(x, np.array([0]), np.array([2]))
    outputs = [ops.SequenceConstruct(x, first, name="parts"), ops.Identity(words, name="same")]
    sg.save(sg.Graph([x, words], outputs), tmp_path / "net.onnx")
    answer = run_json(capsys, "run", tmp_path / "net.onnx", "--output", tmp_path / "out")
    assert [Path(row["file"]).name for row in answer["results"]] == [
        f"{outputs[0].name}.*.npy",
        f"{outputs[1].name}.npy",
    ]
    shapes = [np.load(path).shape for path in sorted(tmp_path.glob("out/parts*.npy"))]
    assert shapes == [(3,), (2,)]
    assert np.load(tmp_path / "out" / f"{outputs[1].name}.npy").tolist() == ["text", "text"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_results_that_numpy_has_no_dtype_for_are_inputs_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str
) -> None:
    x = sg.input("x", (3,), dtype)
    sg.save(sg.Graph([x], [ops.Identity(x)]), tmp_path / "net.onnx")
    (row,) = run_json(capsys, "run", tmp_path / "net.onnx", "--output", tmp_path / "a")["results"]
    again = run_json(
        capsys,
        *("run", tmp_path / "net.onnx", "--input", f"x={row['file']}"),
        *("--output", tmp_path / "b"),
    )
    first, second = read_array(Path(row["file"])), read_array(Path(again["results"][0]["file"]))
    assert first.dtype == second.dtype == numpy_dtype(dtype)
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
def test_results_of_numbers_are_summed_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str
) -> None:
    ones = sg.parameter("ones", np.ones(3).astype(numpy_dtype(dtype)))
    sg.save(sg.Graph([], [ops.Identity(ones)]), tmp_path / "net.onnx")
    (row,) = run_json(capsys, "run", tmp_path / "net.onnx")["results"]
    assert row["type"] == f"{dtype}[3]"
    assert [row.get(key) for key in ("min", "mean", "max")] == [None if dtype == "bool" else 1] * 3


def test_a_result_that_no_file_holds_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = sg.input("x", (1, 2))
    node = sg.Node(
        "ZipMap", [x], domain="ai.onnx.ml", version=1, attrs={"classlabels_int64s": (0, 1)}
    )
    sg.save(sg.Graph([x], node.outputs), tmp_path / "net.onnx")
    assert main(["run", str(tmp_path / "net.onnx"), "--output", str(tmp_path / "out")]) == 1
    assert "has a dict, which no .npy file holds" in capsys.readouterr().err


def test_info_counts_nodes_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "info", DIGITS)
    assert answer["nodes"] == len(sg.load(DIGITS).nodes)
    assert answer["share_CPU"] == 1
    assert {"operator": "Conv", "nodes": 6, "CPU": "6/6"}.items() <= next(
        row for row in answer["operators"] if row["operator"] == "Conv"
    ).items()


def test_devices_and_their_properties(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "devices", "--properties")
    assert {"CPU", "REFERENCE"} <= {row["device"] for row in answer["devices"]}
    rows = {(row["device"], row["property"]): row for row in answer["properties"]}
    threads = rows["CPU", "INFERENCE_NUM_THREADS"]
    assert threads["value"] == 0
    assert threads["allowed"].startswith("0..")
    assert "threads" in threads["about"]
    assert rows["CPU", "FULL_DEVICE_NAME"]["allowed"] == "read only"
    assert rows["HETERO", "PLACEMENT"]["allowed"] == "PRIORITY, COST, STAGES"


def test_columns_of_words_and_numbers_stand_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--properties"]) == 0
    rows = [
        line.split("│") for line in capsys.readouterr().out.splitlines() if "NUM_THREADS" in line
    ]
    assert rows
    assert all(row[3].startswith(" 0 ") for row in rows)


def test_a_device_that_cannot_start_is_listed_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotThere(sg.Device):
        def start(self) -> None:
            raise OSError("no such board")

    core = sg.Core()
    core.register_device("BOARD", NotThere)
    monkeypatch.setattr(sg, "default_core", lambda: core)
    answer = run_json(capsys, "devices")
    assert [r for r in answer["failed"] if r["device"] == "BOARD"] == [
        {"device": "BOARD", "why not": "device BOARD cannot start: no such board"}
    ]
    assert all(row["device"] != "BOARD" for row in answer["devices"])


def test_query_lists_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "query", DIGITS, "--device", "CPU")
    assert answer["taken"] == answer["nodes"] == len(answer["rows"])


def test_reshape_writes_a_model_for_other_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = sg.input("x", (1, 2, 3), "float32")
    flat = ops.Reshape(x, sg.parameter("shape", np.array([1, 6], np.int64)))
    sg.save(sg.Graph([x], [flat]), tmp_path / "net.onnx")
    target = tmp_path / "any.onnx"
    run_json(capsys, "reshape", tmp_path / "net.onnx", "--batch", "N", "-o", target)
    array = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    (found,) = sg.compile_model(str(target))(array).values()
    np.testing.assert_array_equal(found, array.reshape(4, 6))
    assert main(["reshape", str(target), "--shape", "M=5", "-o", str(target)]) == 1
    assert "'M' is neither an input" in capsys.readouterr().err
    for wrong in ("--batch=-1", "--shape=x=-1,2,3"):
        assert main(["reshape", str(target), wrong, "-o", str(target)]) == 1
        assert "dimension -1 of shape" in capsys.readouterr().err
    answer = run_json(capsys, "reshape", target, "--shape", "x=5,2,3", "-o", tmp_path / "5.onnx")
    assert [row["now"] for row in answer["rows"]] == ["float32[5, 2, 3]", "float32[5, 6]"]


def test_compile_then_run_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "digits.sgb"
    run_json(capsys, "compile", DIGITS, "--device", "CPU", "-o", path)
    again = run_json(capsys, "run", path, "--device", "CPU", "--dim", "batch=2")
    direct = run_json(capsys, "run", DIGITS, "--device", "CPU", "--dim", "batch=2")
    assert again["results"] == direct["results"]


@pytest.mark.parametrize("command", ["run", "partition", "info", "devices", "query"])
def test_tables_for_people(capsys: pytest.CaptureFixture[str], command: str) -> None:
    argv = [command] if command == "devices" else [command, str(DIGITS)]
    assert main(argv) == 0
    assert "─" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "nowhere.onnx"], "nowhere.onnx"),
        (["run", str(SELECTOR)], "custom_selector.py"),
        (["run", str(DIGITS), "--input", "imag=random"], "did you mean 'image'"),
        (["run", str(DIGITS), "--device", "GPU7"], "GPU7"),
        (["run", str(DIGITS), "--device", "CPU", "--config", "THREDS=1"], "THREDS"),
        (["explain", str(DIGITS), "no_such_node"], "no_such_node"),
        (["partition", str(DIGITS), "--selector", "no_such"], "no_such"),
        (["partition", str(DIGITS), "--ops", "Conv,Relo"], "did you mean 'Relu'"),
        (["partition", str(DIGITS), "--ops", "Adam"], "'ai.onnx.preview.training::Adam'"),
        (["run", str(DIGITS), "--input", "image="], "needs a .npy or .pb file, or random"),
        (["reshape", str(DIGITS), "-o", "x.onnx", "--batch", ""], "dimension '' is neither"),
        (["reshape", str(DIGITS), "-o", "x.onnx", "--batch", "1.5"], "dimension '1.5' is neither"),
        (["reshape", str(DIGITS), "-o", "x.onnx", "--batch", "9" * 19], "is neither"),
    ],
)
def test_an_error_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("subgraph: error: ")
    assert said in error
    assert "Traceback" not in error


def test_wrong_usage_is_status_2_and_version_is_0() -> None:
    for argv, status in (
        (["nonsense"], 2),
        (["run"], 2),
        (["run", str(DIGITS), "--input", "image"], 2),
        (["--version"], 0),
        (["--help"], 0),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "subgraph", *argv], capture_output=True, text=True
        )
        assert done.returncode == status, done


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["run", "--repeat", "0"], "a whole number of at least 1"),
        (["run", "--seed", "-1"], "a whole number of at least 0"),
        (["run", "--import", ""], "a file or folder"),
        (["run", "--import", "."], "a Python file, got the folder"),
        (["run", "--output", " "], "a file or folder"),
        (["profile", "--top", "x"], "a whole number of at least 1"),
        (["profile", "--devices", "CPU,"], "names separated by commas"),
        (["profile", "-o", ""], "a file or folder"),
        (["bench", "--threads", "0"], "a whole number from 1 to 1024"),
        (["bench", "--threads", "9999"], "a whole number from 1 to 1024"),
        (["bench", "--vs", ","], "names separated by commas"),
        *(
            (["bench", "--seconds", text], "a number above 0")
            for text in ("0", "nan", "inf", "1e400")
        ),
        (["bench", "--seconds=-1"], "a number above 0"),
        (["accuracy", "--samples", "-1"], "a whole number of at least 1"),
        (["accuracy", "--seed=-1"], "a whole number of at least 0"),
        (["partition", "--reasons", "-1"], "a whole number of at least 0"),
        (["partition", "--min-size", "0"], "a whole number of at least 1"),
        (["partition", "--max-subgraphs", "-1"], "a whole number of at least 0"),
        (["partition", "--ops", ""], "names separated by commas"),
        (["partition", "--ops", "Relu,"], "names separated by commas"),
        (["partition", "-o", ""], "a file or folder"),
        (["warmup", ""], "a file or folder"),
    ],
)
def test_arguments_of_a_wrong_form(
    capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
) -> None:
    """Some were tracebacks of NumPy or argparse; an empty --ops took all operators."""
    with pytest.raises(SystemExit) as caught:
        main([argv[0], str(DIGITS), *argv[1:]])
    assert caught.value.code == 2
    assert f"expected {expected}" in capsys.readouterr().err


def test_a_dimension_without_a_name_is_named_by_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = sg.input("x", ("n", None, None), "float32")
    path = tmp_path / "unnamed.onnx"
    sg.save(sg.Graph([x], [ops.Relu(x, name="y")]), path)
    sizes = ["--dim", "n=2", "--dim", "x.1=3", "--dim", "x.2=5"]
    answer = run_json(capsys, "run", path, *sizes)
    assert answer["results"][0]["type"] == "float32[2, 3, 5]"
    assert main(["run", str(path), "--dim", "x.0=2"]) == 1
    assert "no symbolic dimension 'x.0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dim", "said"),
    [
        ("batch=-3", "must be a whole number"),
        ("batch=x", "must be a whole number"),
        ("Batch=2", "did you mean 'batch'"),
    ],
)
def test_a_wrong_dimension_is_named(
    capsys: pytest.CaptureFixture[str], dim: str, said: str
) -> None:
    assert main(["run", str(DIGITS), "--dim", dim]) == 1
    error = capsys.readouterr().err
    assert f"--dim {dim}: " in error
    assert said in error


def shell(command: str) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m subgraph {command}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("json", ["", "--json"])
def test_output_that_cannot_be_written(json: str) -> None:
    done = shell(f"info examples/digits.onnx {json} >/dev/full")
    assert (done.returncode, done.stderr) == (1, "subgraph: error: No space left on device\n")


@pytest.mark.parametrize("end", ["| head -c 1; exit ${PIPESTATUS[0]}", ">&-"])
@pytest.mark.parametrize("json", ["", "--json"])
def test_output_that_nobody_reads(json: str, end: str) -> None:
    done = shell(f"partition examples/digits.onnx --ops Conv {json} {end}")
    assert (done.returncode, done.stderr) == (0, "")


def test_output_without_unicode(tmp_path: Path) -> None:
    graph = sg.load(DIGITS)
    graph.nodes[-1].name = "größe"
    sg.save(graph, tmp_path / "m.onnx")
    command = f"explain {tmp_path / 'm.onnx'} $'gr\\xc3\\xb6\\xc3\\x9fe' --ops Conv"
    done = shell(command)
    assert (done.returncode, done.stderr) == (0, "")
    line = f"PYTHONIOENCODING=ascii {sys.executable} -m subgraph {command}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in done.stdout


def test_interrupted_and_out_of_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(error: BaseException) -> int:
        def load(path: Path) -> sg.Graph:
            raise error

        monkeypatch.setattr(sg, "load", load)
        return main(["info", str(DIGITS)])

    assert raising(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "subgraph: interrupted\n"
    assert raising(MemoryError("3 TiB")) == 1
    assert capsys.readouterr().err == "subgraph: error: out of memory: 3 TiB\n"


def test_unwritable_output_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(["run", str(DIGITS), "--output", str(blocker / "sub")]) == 1
    assert "error" in capsys.readouterr().err


def test_random_inputs_fit_every_dtype() -> None:
    inputs = [
        sg.input("a", ("N", 3), "float32"),
        sg.input("b", (2,), "int64"),
        sg.input("c", (), "bool"),
        sg.input("d", (2, 2), "bfloat16"),
        sg.input("e", (1,), "string"),
    ]
    arrays = input_arrays(ports(sg.Graph(inputs)), {}, {"N": "4"}, 0)
    assert [arrays[k].shape for k in "abcde"] == [(4, 3), (2,), (), (2, 2), (1,)]
    assert [arrays[k].dtype.name for k in "abcde"] == [
        *("float32", "int64", "bool", "bfloat16", "object")
    ]


def test_profile_shows_steps_and_writes_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    answer = run_json(capsys, "profile", DIGITS, "--repeat", "2", "--trace", trace)
    assert any("conv" in row["kernel"] for row in answer["steps"])
    assert answer["total_ms"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}


def test_warmup_compiles_what_a_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    x = sg.input("x", (4, 8))
    sg.save(sg.Graph([x], [ops.Relu(x)]), tmp_path / "small.onnx")
    command = [sys.executable, "-m", "subgraph", "warmup", str(tmp_path / "small.onnx"), "--json"]
    first, again = (
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    assert first["compiled"] > 0
    assert again["compiled"] == 0


def test_warmup_takes_a_precision(capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "warmup", DIGITS, "--precision", "bfloat16")
    # A model that rounds finds its kernels on disk.
    answer = run_json(capsys, "warmup", DIGITS, "--precision", "bfloat16")
    assert answer["compiled"] == 0


def test_bench_measures_ourselves_and_a_peer(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "bench", DIGITS, "--vs", "onnxruntime", "--seconds", "0.1")
    assert [row["runner"] for row in answer["rows"]] == ["subgraph", "onnxruntime"]
    assert answer["rows"][0]["difference"] < 1e-4


def test_bench_takes_inputs_that_no_npz_file_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x, words = sg.input("x", (3,), "bfloat16"), sg.input("words", (2,), "string")
    sg.save(sg.Graph([x, words], [ops.Identity(x), ops.Identity(words)]), tmp_path / "net.onnx")
    (row,) = run_json(capsys, "bench", tmp_path / "net.onnx", "--seconds", "0.01")["rows"]
    assert row["difference"] == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "dtype", "difference"),
    [
        ([1.0, 2.0], [1.0, 4.0], "bfloat16", 0.5),
        ([1.0, 2.0], [1.0, 4.0], "float8_e5m2", 0.5),
        ([1, 2], [1, 4], "int4", 0.5),
        ([1.0, np.nan], [1.0, 4.0], "float32", np.inf),
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], "float32", 0),
        ([], [], "float32", 0),
    ],
)
def test_bench_compares_results_of_each_dtype(
    ours: list[float], theirs: list[float], dtype: str, difference: float
) -> None:
    found, truth = (np.array(a).astype(numpy_dtype(dtype)) for a in (ours, theirs))
    assert bench.largest_difference([found], [truth]) == difference


def test_an_input_file_that_is_no_array(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"nothing")
    with pytest.raises(sg.ModelError, match=r"x\.npy"):
        read_array(path)


def test_measured_times_place_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    answer = run_json(capsys, "profile", DIGITS, "--devices", "CPU,REFERENCE", "-o", path)
    assert {"CPU us", "REFERENCE us"} <= set(answer["rows"][0])
    runs = {name: answer[f"ms of a run, {name}"] for name in ("CPU", "REFERENCE")}
    assert answer["alone"] == min(runs, key=runs.__getitem__)
    assert {row["device"] for row in answer["rows"]} == {answer["alone"]}
    assert all(row["why"] for row in answer["rows"])
    assert answer["transfer us"] >= 0
    assert answer["transfer GB/s"] > 0
    config = ["--config", "PLACEMENT=COST", "--config", f"PROFILE={path}"]
    answer = run_json(capsys, "query", DIGITS, "--device", "HETERO:CPU,REFERENCE", *config)
    assert answer["taken"] == answer["nodes"]


def test_regions_are_timed_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "profile", DIGITS, "--devices", "CPU")
    assert answer["rows"]
    assert {row["device"] for row in answer["rows"]} == {"CPU"}
    assert all(row["CPU us"] > 0 for row in answer["rows"])
    assert "alone" not in answer


def test_an_imported_file_registers_where_the_commands_look(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import subgraph as sg\n"
        "from subgraph.devices.plugins.reference import ReferenceDevice\n\n"
        'sg.default_core().register_device("MINE", ReferenceDevice)\n'
    )
    try:
        answer = run_json(capsys, "run", DIGITS, "--device", "MINE", "--import", script)
    finally:
        sg.default_core().unregister_device("MINE")
    assert answer["results"][0]["name"] == "probability"


def test_names_of_a_file_control_no_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = sg.input("x", (2,))
    graph = sg.Graph([x], [ops.Relu(x, name="a\x1b[2Jb\u202e")])
    sg.save(graph, tmp_path / "m.onnx")
    assert main(["query", str(tmp_path / "m.onnx"), "--device", "REFERENCE"]) == 0
    assert main(["explain", str(tmp_path / "m.onnx"), "a\x1b[2Jb\u202e"]) == 0
    assert main(["explain", str(tmp_path / "m.onnx"), "c\x1b"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count(r"a\x1b[2Jb\u202e") >= 2
    assert not {"\x1b", "\u202e"} & {*shown.out, *shown.err}
