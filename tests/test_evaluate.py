"""The verb `evaluate`, as a user runs it: real images in small folders, real networks, the files it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forking import Child
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_runs import TINY

import odcluster
from odcluster import api
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation import svm, svm_tasks, tasks, workshop
from odcluster.evaluation.results import Result
from odcluster.judge import compare, evaluate
from odcluster.models.backbones import create_backbone
from odcluster.models.weights import export_backbone


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "odcluster", "evaluate", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three colours, a folder each, divided into train and test: easy, but not the same pixels twice."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 6)):
        for number, name in enumerate(("red", "green", "blue")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 90, (20, 20, 3))
                pixels[..., number] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A VOC folder with train and val, no test images, two classes, some of them difficult."""
    root = tmp_path_factory.mktemp("voc") / "VOC2007"
    sets = root / "ImageSets" / "Main"
    sets.mkdir(parents=True)
    (root / "JPEGImages").mkdir()
    random = np.random.default_rng(1)
    lines: dict[str, list[str]] = {}
    for i in range(48):
        has = {"cat": i % 2 == 0, "dog": i % 3 == 0}
        pixels = random.integers(0, 60, (24, 30, 3))
        pixels[..., 0] += 150 * has["cat"]
        pixels[..., 1] += 150 * has["dog"]
        Image.fromarray(pixels.astype(np.uint8)).save(root / "JPEGImages" / f"{i:06d}.jpg")
        part = "train" if i < 30 else "val"
        for name in (part, "trainval"):
            lines.setdefault(name, []).append(f"{i:06d}")
            for label, present in has.items():
                sign = 0 if i in (7, 37) else 1 if present else -1
                lines.setdefault(f"{label}_{name}", []).append(f"{i:06d} {sign:2d}")
    for name, text in lines.items():
        (sets / f"{name}.txt").write_text("\n".join(text) + "\n")
    return root


def test_the_command_prints_a_table_and_leaves_a_record_and_pictures(classes: Path, tmp_path: Path) -> None:
    done = command(
        "smallconv", "--untrained", "--task", "linear", "--data", str(classes), "--workers", "0", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "conv5" in done.stdout
    assert "Fast linear probe (L-BFGS on cached features)" in done.stdout
    assert "not comparable with the paper" in done.stdout
    folder = tmp_path / "evaluations" / "smallconv-untrained"
    record = json.loads((folder / "linear.json").read_text())
    assert record["variant"] == "fast"
    assert record["data"]["train_split"] == "train"
    assert record["data"]["test_split"] == "test"
    assert (record["data"]["num_train"], record["data"]["num_test"]) == (36, 18)
    assert [row["layer"] for row in record["scores"]] == ["conv1", "conv2", "conv3", "conv4", "conv5"]
    assert record["scores"][0]["metrics"]["top-1"] == 1.0
    assert record["command"].startswith("odcluster evaluate smallconv")
    assert str(classes.parent) not in json.dumps(record)
    assert set(record["versions"]) >= {"odcluster", "torch", "scikit-learn"}
    assert (folder / "linear.png").stat().st_size > 10_000
    assert "<svg" in (folder / "linear.svg").read_text()


def test_a_run_is_judged_in_its_own_folder_and_runs_stand_side_by_side(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    options = {**TINY, "epochs": 1, "clusters": 3}
    for seed in (0, 1):
        run = api.train(classes / "train", out=tmp_path / f"run{seed}", quiet=True, **{**options, "seed": seed})
        runs.append(run)
        result = evaluate(run, task="knn", data=str(classes), workers=0, quiet=True)
        assert result.weights.pretraining.startswith("method odc")
        assert result.weights.image_size == 16
        clusters = evaluate(run, task="clusters", workers=0, quiet=True)
        assert set(clusters.scores[0].metrics) == {"NMI", "ARI", "purity", "Hungarian"}
        assert (run / "evaluation" / "clusters.json").is_file()
    compare(runs, out=tmp_path / "pictures")
    printed = capsys.readouterr().out
    assert "run0" in printed
    assert "run1" in printed
    assert "NMI" in printed
    assert sorted(path.name for path in (tmp_path / "pictures").glob("*.png")) == [
        "comparison-clusters.png",
        "comparison-knn.png",
    ]
    assert not list((runs[0] / "evaluation").glob(".unfinished-*"))


def test_svm_and_lowshot_on_voc_share_their_features(voc: Path, tmp_path: Path) -> None:
    options = {"data": str(voc), "split": "train/val", "untrained": True, "out": str(tmp_path / "out"), "workers": 0}
    result = evaluate("smallconv", task="svm", quiet=True, **options)
    assert result.headline == "mAP"
    assert max(row.metrics["mAP"] for row in result.scores) > 0.95
    assert "trained on train and tested on val instead of trainval and test" in result.deviations
    counts = {entry["name"]: entry for entry in result.details["classes"]["conv1"]}
    assert counts["cat"]["num_difficult"] == 1
    assert counts["cat"]["num_test_difficult"] == 1
    stores = sorted((tmp_path / "out" / "features").glob("*/progress.json"))
    before = [path.stat().st_mtime_ns for path in stores]
    low = evaluate("smallconv", task="lowshot", quiet=True, **options)
    assert [row.rule for row in low.scores] == ["published", "honest"]
    assert set(low.scores[0].metrics) == {"mean", *(f"k={k}" for k in (1, 2, 4, 8, 16, 32, 64, 96))}
    assert len(low.details["draws"]) == 40
    assert sorted((tmp_path / "out" / "features").glob("*/progress.json")) == stores
    assert [path.stat().st_mtime_ns for path in stores] == before


def test_the_published_probe_and_semi_run_end_to_end(classes: Path, tmp_path: Path) -> None:
    options = {"data": str(classes), "untrained": True, "out": str(tmp_path / "out"), "workers": 0, "quiet": True}
    published = evaluate(
        "smallconv", task="linear", variant="published", epochs=3, layers=("conv1", "conv2"), **options
    )
    assert published.variant == "published"
    assert "3 epochs instead of 100" in published.deviations
    assert [row.layer for row in published.scores] == ["conv1", "conv2"]
    semi = evaluate("smallconv", task="semi", epochs=1, **options)
    assert set(semi.scores[0].metrics) == {"1 %", "10 %"}
    assert "1 epochs instead of 20" in semi.deviations


def test_a_multilabel_csv_is_enough_for_the_svm(voc: Path, tmp_path: Path) -> None:
    rows = ["path,cat,dog"]
    rows += [f"{voc}/JPEGImages/{i:06d}.jpg,{int(i % 2 == 0)},{int(i % 3 == 0)}" for i in range(48)]
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    result = evaluate(
        "smallconv", task="svm", data=str(tmp_path / "list.csv"), untrained=True, out=str(tmp_path / "out"), workers=0,
        layers=("conv5",), quiet=True,
    )  # fmt: skip
    assert result.data.num_classes == 2
    assert result.data.num_train + result.data.num_test == 48
    assert "not VOC 2007" in result.deviations


def test_classes_are_matched_by_name_not_by_number(classes: Path, tmp_path: Path) -> None:
    """A test folder without the first class would shift every number."""
    test = tmp_path / "test"
    test.mkdir()
    for name in ("green", "red"):
        (test / name).symlink_to(classes / "test" / name)
    for name in ("blue",):
        (test / name).mkdir()
    result = evaluate("smallconv", task="linear", data=str(classes / "train"), test=str(test), untrained=True,
                      out=str(tmp_path / "out"), workers=0, layers=("conv1",), quiet=True)  # fmt: skip
    assert result.scores[0].metrics["top-1"] == 1.0


def test_images_without_a_label_are_left_out_and_named(classes: Path, tmp_path: Path) -> None:
    lines = [f"{p}\t{p.parent.name}" for p in sorted((classes / "train").glob("*/*.png"))]
    lines += [str(p) for p in sorted((classes / "test").glob("*/*.png"))[:4]]
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    result = evaluate("smallconv", task="knn", data=str(tmp_path / "list.txt"), untrained=True,
                      out=str(tmp_path / "out"), workers=0, quiet=True)  # fmt: skip
    assert any("4 of 40 images" in note and "no label" in note for note in result.data.left_out)
    assert result.data.num_train + result.data.num_test == 36


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "linear"}, "--data"),
        ({"task": "linear", "data": "{classes}", "split": "train"}, "--split train must name two parts"),
        ({"task": "linear", "data": "{classes}/train/red"}, "have no labels"),
        ({"task": "svm", "data": "{voc}"}, "--split train/val"),
        ({"task": "linear", "data": "{classes}", "layers": ("conv9",)}, "no layer conv9"),
        ({"task": "knn", "data": "{classes}", "layers": ("conv1",)}, "--layers has no meaning"),
        ({"task": "knn", "data": "{classes}", "epochs": 3}, "--epochs is for"),
        ({"task": "svm", "data": "{classes}", "variant": "published"}, "--variant is for"),
        ({"task": "knn", "data": "{classes}", "image_size": 0}, "--image-size"),
        ({"task": "knn", "data": "{classes}", "test": "{classes}/nowhere"}, "nowhere"),
        ({"task": "knn", "data": "{classes}/train", "test": "{classes}/train"}, "for training and for testing"),
        ({"task": "knn", "data": "{classes}", "out": "{classes}/train/results"}, "among the images"),
        ({"task": "clusters"}, "--untrained"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    options: dict[str, object], words: str, classes: Path, voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    filled = {k: v.format(classes=classes, voc=voc) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        evaluate("smallconv", untrained=True, workers=0, quiet=True, **filled)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("task", ["linear", "knn", "semi"])
def test_one_class_only_is_named_before_any_work(task: str, classes: Path, tmp_path: Path) -> None:
    listed = [f"{path}\tred" for path in sorted((classes / "train" / "red").glob("*.png"))]
    (tmp_path / "list.txt").write_text("\n".join(listed) + "\n")
    with pytest.raises(DataError, match="all training images are of one class, red"):
        evaluate("smallconv", task=task, data=str(tmp_path / "list.txt"), untrained=True, out=str(tmp_path / "o"),
                 workers=0, quiet=True)  # fmt: skip
    assert not (tmp_path / "o").exists()


def test_a_class_with_too_few_images_for_the_folds_is_named_before_any_work(voc: Path, tmp_path: Path) -> None:
    rows = [f"{voc}/JPEGImages/{i:06d}.jpg,{int(i == 3)},{int(i % 3 == 0)}" for i in range(48)]
    (tmp_path / "list.csv").write_text("\n".join(["path,rare,dog", *rows]) + "\n")
    with pytest.raises(DataError, match="the class rare has"):
        evaluate("smallconv", task="svm", data=str(tmp_path / "list.csv"), untrained=True, out=str(tmp_path / "o"),
                 workers=0, quiet=True)  # fmt: skip
    assert not list((tmp_path / "o").rglob("*.npy"))


def test_weights_with_nan_are_named(classes: Path, tmp_path: Path) -> None:
    export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "weights", provenance={})
    tensors = load_file(tmp_path / "weights" / "model.safetensors")
    tensors["layers.2.0.weight"][:] = float("nan")
    save_file(tensors, tmp_path / "weights" / "model.safetensors")
    with pytest.raises(DataError, match="hold NaN"):
        evaluate(tmp_path / "weights", task="knn", data=str(classes), out=str(tmp_path / "p"), workers=0, quiet=True)
    assert not (tmp_path / "p").exists()


def test_a_weights_file_needs_the_name_of_its_network(classes: Path, tmp_path: Path) -> None:
    export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "weights", provenance={"method": "none"})
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((tmp_path / "weights" / "model.safetensors").read_bytes())
    options = {"task": "knn", "data": str(classes), "out": str(tmp_path / "o"), "workers": 0, "quiet": True}
    with pytest.raises(UserError, match="--backbone"):
        evaluate(bare, **options)
    named = evaluate(bare, backbone="smallconv", image_size=16, **options)
    assert named.weights.pretraining.startswith("weights from bare.safetensors")
    exported = evaluate(tmp_path / "weights", **options)
    assert named.weights.fingerprint == exported.weights.fingerprint
    assert named.scores == exported.scores
    with pytest.raises(UserError, match="--untrained"):
        evaluate("resnet18", **options)


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_numbers(voc: Path, tmp_path: Path) -> None:
    def judge(out: str) -> Result:
        options = {"task": "svm", "data": str(voc), "split": "train/val", "untrained": True, "workers": 0}
        return evaluate("smallconv", quiet=True, out=str(tmp_path / out), **options)

    def killed() -> None:
        write = svm._write_class

        def write_and_die(*arguments: object) -> None:
            write(*arguments)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)

        svm._write_class = write_and_die
        judge("killed")

    child = Child(killed, tmp_path / "said.txt")
    assert child.wait() == -signal.SIGKILL, child.said()
    assert list((tmp_path / "killed").glob(".unfinished-*/conv*/class_*.json"))
    assert judge("killed").scores == judge("whole").scores


def test_the_verbs_are_functions_of_the_package() -> None:
    """Also after their modules were imported, which must not take their names."""
    for _ in range(2):  # the first access imports
        assert odcluster.evaluate is evaluate
        assert callable(odcluster.demo)


# --- What once went wrong -----------------------------------------------------------------------------


def test_nothing_of_the_user_s_is_deleted_and_other_unfinished_work_stays(classes: Path, tmp_path: Path) -> None:
    mine = tmp_path / "work" / "thesis.txt"
    other = tmp_path / ".unfinished-svm-0123456789abcdef" / "conv1" / "class_000.json"
    for path in (mine, other):
        path.parent.mkdir(parents=True)
        path.write_text("precious")
    evaluate("smallconv", task="linear", data=str(classes), untrained=True, out=str(tmp_path), workers=0, quiet=True)
    assert mine.read_text() == other.read_text() == "precious"
    assert [path.name for path in tmp_path.glob(".unfinished-*")] == [".unfinished-svm-0123456789abcdef"]


def test_work_and_features_of_another_image_size_are_never_taken_up(
    voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "w", provenance={})
    options = {"task": "svm", "data": str(voc), "split": "train/val", "workers": 0, "quiet": True}
    fresh = evaluate(tmp_path / "w", out=str(tmp_path / "fresh"), image_size=24, **options)
    real = svm_tasks.svm_map

    def stopped(*arguments: object, **named: object) -> object:
        real(*arguments, **named)  # type: ignore[arg-type]
        raise Interrupted("stop")

    monkeypatch.setattr(svm_tasks, "svm_map", stopped)
    with pytest.raises(Interrupted):
        evaluate(tmp_path / "w", out=str(tmp_path / "again"), image_size=20, **options)
    monkeypatch.setattr(svm_tasks, "svm_map", real)
    assert list((tmp_path / "again").glob(".unfinished-*/conv1/class_*.json"))
    again = evaluate(tmp_path / "w", out=str(tmp_path / "again"), image_size=24, **options)
    assert again.scores == fresh.scores


def test_one_side_with_names_and_one_with_numbers_is_matched_by_what_is_written(classes: Path, tmp_path: Path) -> None:
    names = {"red": "1", "green": "2", "blue": "10"}  # sorted as text, 10 comes before 2
    for old, new in names.items():
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / new).symlink_to(classes / "train" / old)
    lines = [f"{path} {names[path.parent.name]}" for path in sorted((classes / "test").glob("*/*.png"))]
    (tmp_path / "test.txt").write_text("\n".join(lines) + "\n")
    result = evaluate(
        "smallconv", task="linear", data=str(tmp_path / "train"), test=str(tmp_path / "test.txt"), untrained=True,
        out=str(tmp_path / "out"), workers=0, layers=("conv1",), quiet=True,
    )  # fmt: skip
    assert result.data.num_classes == 3
    assert result.scores[0].metrics["top-1"] == 1.0


def test_the_same_images_under_another_name_are_not_a_test_set(classes: Path, voc: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(classes / "train")
    listed = [f"{path}\t{path.parent.name}" for path in sorted((classes / "train").glob("*/*.png"))]
    (tmp_path / "list.txt").write_text("\n".join(listed) + "\n")
    shutil.copytree(voc, tmp_path / "copy" / "VOC2007")
    for data, test, task in (
        (classes / "train", tmp_path / "link", "knn"),
        (classes / "train", tmp_path / "list.txt", "knn"),
        (voc, tmp_path / "copy", "svm"),
    ):
        with pytest.raises(DataError, match="for training and for testing"):
            evaluate("smallconv", task=task, data=str(data), test=str(test), untrained=True, workers=0, quiet=True,
                     out=str(tmp_path / "out"))  # fmt: skip


def test_fewer_layers_or_other_labels_never_overwrite_a_result(classes: Path, tmp_path: Path) -> None:
    options = {"untrained": True, "out": str(tmp_path / "out"), "workers": 0, "quiet": True, "task": "linear"}
    evaluate("smallconv", data=str(classes), **options)
    evaluate("smallconv", data=str(classes), layers=("conv5",), **options)
    images = sorted((classes / "train").glob("*/*.png"))
    for count in (2, 3):  # the same images with other labels
        text = "path,label\n" + "".join(f"{path},c{i % count}\n" for i, path in enumerate(images))
        (tmp_path / "list.csv").write_text(text)
        evaluate("smallconv", data=str(tmp_path / "list.csv"), **options)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.json")) == [
        "linear-1.json", "linear-2.json", "linear-3.json", "linear.json",
    ]  # fmt: skip


def test_an_empty_test_folder_is_named_not_replaced(classes: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(classes / "train")
    (tmp_path / "data" / "test").mkdir()
    with pytest.raises(DataError, match="has no images"):
        evaluate("smallconv", task="knn", data=str(tmp_path / "data"), untrained=True, workers=0, quiet=True,
                 out=str(tmp_path / "out"))  # fmt: skip


def test_images_missing_from_voc_are_in_the_record(voc: Path, tmp_path: Path) -> None:
    shutil.copytree(voc, tmp_path / "VOC2007")
    (tmp_path / "VOC2007" / "JPEGImages" / "000047.jpg").unlink()
    result = evaluate(
        "smallconv", task="svm", data=str(tmp_path / "VOC2007"), split="train/val", untrained=True, workers=0,
        out=str(tmp_path / "out"), layers=("conv1",), quiet=True,
    )  # fmt: skip
    assert any("000047" in note for note in result.data.left_out)
    assert result.data.num_test == 17


def test_a_fifth_of_images_with_several_classes_is_a_fifth(voc: Path, tmp_path: Path) -> None:
    rows = ["path,label"]
    for i in range(48):
        names = [
            name for name, present in (("cat", i % 2 == 0), ("dog", i % 3 == 0), ("none", i % 6 in (1, 5))) if present
        ]
        rows.append(f"{voc}/JPEGImages/{i:06d}.jpg,{';'.join(names)}")
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    result = evaluate(
        "smallconv", task="svm", data=str(tmp_path / "list.csv"), untrained=True, workers=0, layers=("conv1",),
        out=str(tmp_path / "out"), quiet=True,
    )  # fmt: skip
    assert result.data.num_test == 10
    assert any("a fifth of all images" in sentence for sentence in result.deviations)


def test_equally_large_train_and_test_arrays_are_two_sets(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {}
    for part in ("train", "test"):
        labels = np.arange(40) % 2
        pixels = random.integers(0, 80, (40, 16, 16, 3)) + 150 * labels[:, None, None, None]
        arrays |= {f"x_{part}": pixels.astype(np.uint8), f"y_{part}": labels}
    np.savez(tmp_path / "both.npz", **arrays)
    result = evaluate("smallconv", task="knn", data=str(tmp_path / "both.npz"), untrained=True, workers=0, quiet=True,
                      out=str(tmp_path / "out"))  # fmt: skip
    assert (result.data.train_split, result.data.test_split) == ("train", "test")
    assert result.data.train_fingerprint != result.data.test_fingerprint
    assert result.scores[0].metrics["k=10"] == 1.0


def test_large_label_numbers_take_no_memory(classes: Path, tmp_path: Path) -> None:
    images = sorted((classes / "train").glob("*/*.png"))
    lines = [f"{path} {10**12 + (path.parent.name == 'red')}" for path in images]
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    result = evaluate("smallconv", task="knn", data=str(tmp_path / "list.txt"), untrained=True, workers=0, quiet=True,
                      out=str(tmp_path / "out"))  # fmt: skip
    assert result.data.num_classes == 2


def test_svms_that_cannot_fit_into_memory_are_refused_before_any_work() -> None:
    with pytest.raises(DataError, match="GB of memory"):
        workshop.check_memory(10**15, "the products", "use fewer images")
    workshop.check_memory(10**6, "the products", "use fewer images")


def test_the_fast_probe_has_fewer_dimensions_of_many_images_or_classes():
    assert tasks.fast_dims(10_000, 10_000, 10) == 9_600
    assert tasks.fast_dims(45_000, 5_000, 2) == 4_000  # what memory holds
    assert tasks.fast_dims(15_000, 2_500, 100) == 2_666  # what time allows
    assert tasks.fast_dims(1_281_167, 50_000, 1000) == 256
