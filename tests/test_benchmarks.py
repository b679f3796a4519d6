"""The frame of the benchmarks: rows, the table on the page, and what all.py does with scripts; no measurements."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def load(name, monkeypatch):
    """A script of benchmarks/ as a module, with its folder importable as when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report(monkeypatch):
    return load("report", monkeypatch)


@pytest.fixture
def everything(report, monkeypatch):
    return load("all", monkeypatch)


def entry(report, name, rows, tmp_path):
    report.write(tmp_path / "one.json", name, rows)
    return json.loads((tmp_path / "one.json").read_text()) | {"command": f"python benchmarks/{name}.py"}


def test_what_is_written_can_be_read_back_as_rows(report, tmp_path):
    rows = [report.Row("a", 1.5, 3.0, "s", 0.5, "<= 1x", True, "why"), report.not_run("b", "no data")]
    written = entry(report, "step", rows, tmp_path)
    assert [report.Row(**fields) for fields in written["rows"]] == rows
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["torch"]


def test_a_figure_that_is_no_number_is_refused_and_the_old_file_stays(report, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write(path, "x", [report.Row("a", float("nan"), None, "s", None, "", None)])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0, "0"), (0.01234, "0.0123"), (1.034, "1.03"), (56.12, "56.1"), (1281.4, "1,281"), (-2.5, "-2.50")],
)
def test_numbers_have_three_digits(report, value, text):
    assert report.number(value) == text


def test_the_table_has_every_row_and_its_verdict(report, tmp_path):
    rows = [
        report.Row("fast", 1.0, 2.0, "s", 0.5, "<= 1x", True),
        report.Row("slow | odd", 4.0, 2.0, "s", 2.0, "<= 1x", False, "noted"),
        report.Row("unjudged", 5.0, None, "%", None, "", None, "noted"),
        report.not_run("gone", "no data"),
    ]
    lines = report.markdown([entry(report, "step", rows, tmp_path)]).splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert tuple(table[0]) == report.HEAD
    assert {len(line) for line in table} == {len(report.HEAD)}  # a bar in a name makes no further column
    command = "`python benchmarks/step.py`"
    assert table[2:] == [
        ["fast", "1.00 s", "2.00 s", "0.500x", "<= 1x", "yes", command],
        ["slow / odd [1]", "4.00 s", "2.00 s", "2.00x", "<= 1x", "no", command],
        ["unjudged [1]", "5.00 %", "", "", "", "", command],
        ["gone [2]", "not run", "", "", "", "", command],
    ]
    assert lines[-2:] == ["1. noted", "2. not run: no data"]


def test_only_what_stands_between_the_marks_is_rewritten(report, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    entries = [entry(report, "step", [report.Row("new", 1.0, None, "s", None, "", None)], tmp_path)]
    for _ in range(2):  # writing twice leaves one table
        report.put_table(page, entries)
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert text.count("| new |") == 1
    assert "old" not in text


def test_a_page_without_marks_is_left_alone(report, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{report.END} in the wrong order {report.BEGIN}\n")
    before = page.read_text()
    with pytest.raises(ValueError, match="no place for the table"):
        report.put_table(page, [])
    assert page.read_text() == before


def test_the_projects_page_has_a_place_for_the_table(report, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    report.put_table(page, [])


def test_another_checkouts_package_is_not_measured(report, tmp_path):
    report.check_checkout()
    with pytest.raises(SystemExit, match="PYTHONPATH"):
        report.check_checkout(str(tmp_path / "odcluster" / "__init__.py"))


def run_main(everything, monkeypatch, folder, *words):
    """all.py as a command, with made scripts in place of the real ones."""
    monkeypatch.setattr(everything, "HERE", folder)
    monkeypatch.setattr(sys, "argv", ["all.py", "--results", str(folder / "results.json"), *words])
    everything.main()


@pytest.fixture
def made(report, tmp_path):
    """A script that writes one row, one that fails, and a page."""
    good = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import report
report.write(sys.argv[sys.argv.index("--json") + 1], "step", [report.Row("made", 1.0, 2.0, "s", 0.5, "", None)])
"""
    (tmp_path / "step.py").write_text(good)
    (tmp_path / "kmeans.py").write_text("raise SystemExit(5)")
    (tmp_path / "page.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    return tmp_path


def entries_of(folder):
    found = json.loads((folder / "results.json").read_text())["benchmarks"]
    return {entry["name"]: entry for entry in found}


def test_results_and_page_are_written_and_the_others_kept(everything, monkeypatch, made):
    page = ["--page", str(made / "page.md")]
    with pytest.raises(SystemExit, match="failed: kmeans"):
        run_main(everything, monkeypatch, made, *page, "--only", "step", "kmeans")
    found = entries_of(made)
    assert found["step"]["rows"][0]["what"] == "made"
    assert found["kmeans"]["rows"][0]["note"] == "not run: it failed with exit code 5"
    run_main(everything, monkeypatch, made, *page, "--only", "svm")  # without --voc
    found = entries_of(made)
    assert set(found) == {"step", "kmeans", "svm"}
    assert "--voc" in found["svm"]["rows"][0]["note"]
    text = (made / "page.md").read_text()
    assert "| made |" in text
    assert "failed with exit code 5" in text


def test_what_is_left_out_says_so(everything, monkeypatch, made):
    words = ["--page", str(made / "page.md"), "--only", "step", "kmeans", "--skip", "step", "--without", "faiss"]
    run_main(everything, monkeypatch, made, *words)
    notes = {name: entry["rows"][0]["note"] for name, entry in entries_of(made).items()}
    assert notes == {"step": "not run: left out by --skip", "kmeans": "not run: left out by --without faiss"}


def test_a_quick_run_writes_nothing(everything, monkeypatch, made):
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    run_main(everything, monkeypatch, made, "--page", str(made / "page.md"), "--only", "step", "--quick")
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


def test_the_commands_name_no_folder_of_this_machine(everything):
    benchmark = everything.Benchmark("svm", ["--data", "/some/where/VOC2007", "--classes", "4"])
    assert benchmark.command() == "python benchmarks/svm.py --data VOC2007 --classes 4"


def test_the_record_of_the_svm_benchmark_becomes_a_row(everything):
    record = {"train": [100, 8], "classes": ["a", "b"], "costs": 3, "seconds": 2.0, "loop seconds": 10.0, "ratio": 5.0}
    (row,) = everything.from_svm(record | {"mAP": 50.0, "loop mAP": 50.1})["rows"]
    assert (row["ours"], row["other"], row["ratio"]) == (2.0, 10.0, 5.0)
    assert "100 x 8, 2 classes, 3 costs" in row["what"]


def test_help_names_the_options():
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(BENCHMARKS / "all.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for option in ("--only", "--skip", "--without", "--voc", "--images", "--quick"):
        assert option in done.stdout
