"""The command line as a user meets it: every mistake is one sentence with the remedy, and nothing is half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import TINY, make_images

from odcluster import cli, options, verbs
from odcluster.config import GROUPS, Config
from odcluster.errors import DataError

OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, "epochs": 2}.items()]


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def refused(capsys, code: int, *words: str) -> str:
    """The one sentence a mistake is answered with."""
    got, _, errors = run(capsys, *words)
    assert got == code, errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1, errors
    assert errors.startswith("odcluster: ")
    return errors


def waiting(**given: str) -> list[str]:
    """What a process that has begun a verb says of how threads wait, and whether torch was there before."""
    script = (
        "import os, sys; from odcluster import cli\n"
        "cli.VERBS['info'] = lambda words: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "cli.main(['info'])"
    )
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", script], env=plain | given, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_waiting_threads_sleep_unless_the_user_says_otherwise():
    assert waiting() == ["1000", "False"], "it must be set before torch is imported"
    assert waiting(GOMP_SPINCOUNT="7") == ["7", "False"]
    assert waiting(OMP_WAIT_POLICY="active") == ["None", "False"]


def test_the_library_of_threads_hears_of_it():
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-m", "odcluster", "info"]
    shown = subprocess.run(command, env=plain | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("torch's threads are not libgomp's here")
    assert "GOMP_SPINCOUNT = '1000'" in shown


def test_train_then_resume_says_it_is_done(capsys, image_folder, tmp_path):
    code, _, errors = run(capsys, "train", str(image_folder), "--out", str(tmp_path / "run"), *OPTIONS)
    assert code == 0, errors
    assert "97 images (folder)" in errors
    assert "clusters.csv" in errors
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["clusters"] == 6
    code, _, errors = run(capsys, "resume", str(tmp_path / "run"))
    assert code == 0
    assert "resuming" in errors


def test_more_images_and_more_epochs_on_resume(capsys, image_folder, tmp_path):
    folder, more = str(tmp_path / "run"), str(make_images(tmp_path / "more", 20, seed=5))
    assert run(capsys, "train", str(image_folder), "--out", folder, *OPTIONS)[0] == 0
    assert run(capsys, "resume", folder, "--remap")[0] == 0  # nothing has changed
    code, _, errors = run(capsys, "resume", folder, "--add", more)
    assert code == 0, errors
    assert "97 images: 20 added (" in errors
    assert "1 more  (" in errors
    assert "already" in refused(capsys, 2, "resume", folder, "--add", more, "--epochs", "2")
    code, _, errors = run(capsys, "resume", folder, "--epochs", "2")
    assert code == 0, errors
    assert "2 more  (as asked for" in errors


def test_options_that_are_not_given_are_chosen_printed_and_stored(capsys, image_folder, tmp_path):
    run(capsys, "train", str(image_folder), "--out", str(tmp_path / "run"), "--epochs", "2", "--workers", "0")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    flat = {**config, **{k: v for group in GROUPS for k, v in config[group].items()}}
    for name in ("clusters", "image_size", "batch_size", "workers", "precision", "epochs", "backbone", "crop_size"):
        assert flat[name] not in (None, "auto"), name
    assert (config["clusters"], config["image_size"], config["backbone"]) == (10, 20, "smallconv")
    log = (tmp_path / "run" / "train.log").read_text()
    assert "the square root of 97" in log


@pytest.mark.parametrize("method", ["odc", "deepcluster"])
def test_a_dry_run_says_what_the_run_then_does_and_writes_nothing(method, capsys, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", str(image_folder), "--method", method, "--epochs", "2", "--workers", "0"]
    code, _, foretold = run(capsys, *words, "--dry-run")
    assert code == 0, foretold
    assert list(tmp_path.iterdir()) == []
    *choices, to_do, size, place = foretold.splitlines()
    assert place.endswith(f"the run would be runs/{image_folder.name}")
    _, _, errors = run(capsys, *words)
    assert errors.startswith("\n".join(choices))
    (done,) = list((tmp_path / "runs").iterdir())
    assert done.name == image_folder.name
    (newest,) = sorted((done / "checkpoints").iterdir())[-1:]
    assert f" {int(newest.name.removeprefix('step-'))} steps of " in to_do
    written = sum(file.stat().st_size for file in newest.glob("*.safetensors")) / 1e6
    assert float(size.split("about ")[1].split(" MB")[0]) == pytest.approx(written, rel=0.1)


def test_a_dry_run_refuses_what_a_run_would(capsys, image_folder, tmp_path):
    assert "no file or folder" in refused(capsys, 3, "train", str(tmp_path / "nowhere"), "--dry-run")
    assert "48 or fewer" in refused(capsys, 2, "train", str(image_folder), "--clusters", "90", "--dry-run")


def test_an_existing_run_is_not_overwritten(capsys, image_folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    said = refused(capsys, 2, "train", str(image_folder), "--out", str(tmp_path / "run"))
    assert "not empty" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("code", "words", "says"),
    [
        (2, ["trian"], "did you mean 'train'"),
        (3, ["train", "{tmp}/nowhere"], "no file or folder named"),
        (3, ["train", "{tmp}/empty"], "has no images"),
        (2, ["train", "{images}", "--backbone", "resnet5"], "resnet50"),
        (2, ["train", "{images}", "--recipe", "odc_tiny"], "odc_small"),
        (2, ["train", "{images}", "--clusters", "60"], "--clusters"),
        (2, ["train", "{images}", "--clusters", "0"], "1 or more"),
        (2, ["train", "{images}", "--minutes", "2", "--epochs", "3"], "either"),
        (2, ["train", "{images}", "--device", "cuda:7"], "odcluster info"),
        (3, ["train", "{images}", "--backbone", "resnet18", "--weights", "{tmp}/notes.txt"], "notes.txt"),
        (3, ["train", "{images}", "--backbone", "resnet18", "--weights", "{tmp}/none.pth"], "none.pth"),
        (3, ["train", "{tmp}/few"], ""),
        (3, ["resume", "{tmp}/nowhere"], "no run directory"),
        (3, ["resume", "{tmp}/empty"], "not a run directory"),
    ],
)
def test_mistakes_get_one_sentence_and_write_nothing(code, words, says, capsys, image_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("these are not weights")
    if "{tmp}/few" in words:
        make_images(tmp_path / "few", 1)
        code, says = 2, "image"
    before = sorted(tmp_path.rglob("*"))
    filled = [word.format(tmp=tmp_path, images=image_folder) for word in words]
    out = ["--out", str(tmp_path / "run")] if words[0] == "train" else []
    assert says in refused(capsys, code, *filled, *out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_among_the_images_is_refused(capsys, tmp_path, monkeypatch):
    folder = make_images(tmp_path / "photos", 60)
    monkeypatch.chdir(folder)
    assert "among the images" in refused(capsys, 2, "train", ".")
    assert "among the images" in refused(capsys, 2, "train", str(folder), "--out", str(folder / "deep" / "run"))
    assert len(list(folder.iterdir())) == 60


def test_transformers_are_given_sizes_they_take(capsys, image_folder, tmp_path):
    options = [o for o in OPTIONS if not o.startswith(("--backbone", "--image-size", "--crop-size"))]
    words = ["--backbone", "vit_tiny_patch16_224", "--max-steps", "2", "--out", str(tmp_path / "run")]
    code, _, errors = run(capsys, "train", str(image_folder), *words, *options)
    assert code == 0, errors
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["image_size"] == config["augmentation"]["crop_size"] == 16
    words = ["--backbone", "vit_tiny_patch16_224", "--image-size", "32", "--crop-size", "24"]
    assert "--crop-size 32" in refused(capsys, 2, "train", str(image_folder), *words, "--out", str(tmp_path / "other"))


def test_an_interrupted_demo_can_be_resumed(capsys, tmp_path):
    words = ["--epochs", "2", "--max-steps", "4", "--out", str(tmp_path / "run")]
    code, _, errors = run(capsys, "demo", *words)
    assert code == 0, errors
    assert errors.count("->") == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == "digits"
    assert run(capsys, "resume", str(tmp_path / "run"))[0] == 0


def test_too_many_bad_images_can_be_allowed_on_resume(capsys, tmp_path):
    folder = make_images(tmp_path / "images", 80)
    for i in (3, 50):
        (folder / f"image{i:04d}.png").write_bytes(b"")
    words = ["train", str(folder), "--out", str(tmp_path / "run"), *OPTIONS]
    code, _, errors = run(capsys, *words)
    assert code == 3
    assert "--max-refused" in errors
    assert run(capsys, "resume", str(tmp_path / "run"), "--max-refused", "0.1")[0] == 0


def test_an_unknown_option_suggests_the_nearest(capsys, image_folder):
    code, _, errors = run(capsys, "train", str(image_folder), "--cluters", "3")
    assert code == 2
    assert "--clusters" in errors


def test_debug_shows_where_an_error_came_from(tmp_path):
    with pytest.raises(DataError, match="nowhere"):  # Python then shows the traceback
        cli.main(["--debug", "train", str(tmp_path / "nowhere")])


def test_help_shows_the_main_options_first_and_all_on_demand(capsys):
    code, brief, _ = run(capsys, "train", "--help")
    assert code == 0
    main = ["--method", "--recipe", "--backbone", "--weights", "--clusters", "--epochs", "--max-steps", "--batch-size"]
    main += ["--image-size", "--lr", "--seed", "--workers", "--device", "--dim", "--minutes", "--out"]
    assert all(option in brief for option in main)
    assert "--memory-momentum" not in brief
    _, everything, _ = run(capsys, "train", "--help-all")
    assert all(option in everything for option in [*main, "--memory-momentum", "--crop-scale", "--checkpoint-minutes"])
    _, paper, _ = run(capsys, "train", "--recipe", "odc_alexnet_imagenet", "--help")
    assert "0.04" in paper


def test_every_option_has_an_explanation():
    docs = options.field_docs()
    of_verbs = (verbs.Evaluation, verbs.Assigning, verbs.Embedding, verbs.Exporting, verbs.Reproduction)
    for cls in (Config, *GROUPS.values(), *of_verbs):
        for name in (n for n in cls.__dataclass_fields__ if n not in GROUPS):
            assert docs[cls.__name__][name].strip(), name


@pytest.mark.parametrize("verb", ["train", "resume", "evaluate", "assign", "embed", "export", "explore", "report"])
def test_every_verb_has_help(capsys, verb):
    code, printed, _ = run(capsys, verb, "--help")
    assert code == 0
    assert f"odcluster {verb}" in printed


def test_help_does_not_import_torch():
    code = "import sys; from odcluster import cli\ntry: cli.main(['train','--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'timm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_info_lists_versions_devices_and_recipes(capsys):
    code, printed, _ = run(capsys, "info")
    assert code == 0
    for word in ("torch", "timm", "cpu", "odc_small", "odc_resnet50_imagenet"):
        assert word in printed


@pytest.mark.parametrize("method", ["deepcluster", "rotation", "jigsaw", "colorization"])
def test_every_method_trains_with_its_own_recipe_and_is_a_starting_point(method, capsys, image_folder, tmp_path):
    out = tmp_path / method
    code, _, errors = run(capsys, "train", str(image_folder), "--method", method, "--out", str(out), *OPTIONS)
    assert code == 0, errors
    assert json.loads((out / "config.json").read_text())["recipe"] == f"{method}_small"
    assert (out / "clusters.csv").exists() == (method == "deepcluster")
    words = ["--weights", str(out), "--out", str(tmp_path / "tuned"), "--freeze-stages=1", "--layer-decay=0.5"]
    code, _, errors = run(capsys, "train", str(image_folder), *words, *OPTIONS)
    assert code == 0, errors
    assert "matched" in errors
    assert "nearest neighbours are those it had" in errors
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["recipe"] == "finetune_odc"


def test_minutes_choose_the_epochs_and_fix_them(capsys, image_folder, tmp_path):
    words = [o for o in OPTIONS if "epochs" not in o]
    code, _, errors = run(
        capsys, "train", str(image_folder), "--out", str(tmp_path / "run"), *words, "--minutes", "0.02"
    )
    assert code == 0, errors
    assert "fit into 0.02 minutes" in errors
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["minutes"] is None
    assert config["epochs"] >= 1
    assert config["max_steps"] >= 1


def test_max_steps_end_the_run(capsys, image_folder, tmp_path):
    run(capsys, "train", str(image_folder), "--out", str(tmp_path / "run"), *OPTIONS, "--max-steps", "8")
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == "step-00000008"


def test_names_that_could_do_harm_are_shown_and_stored_safely(capsys, tmp_path):
    folder = make_images(tmp_path / "images", 60)
    nasty = ["=cmd|'calc'!A1.png", "a\nb.png", "\x1b[31mred.png", "<script>.png", 'quote".png', "sp ace.png"]
    for i, name in enumerate(nasty):
        (folder / f"image{i:04d}.png").rename(folder / name)
    os.rename(folder / "image0030.png", os.fsencode(folder) + b"/\xff\xfe.png")
    (folder / nasty[2]).write_bytes(b"")  # will be named in a warning
    options = [*OPTIONS, "--clusters=4", "--max-refused=0.1"]
    code, _, errors = run(capsys, "train", str(folder), "--out", str(tmp_path / "run"), *options)
    assert code == 0, errors
    assert "\x1b[31m" not in errors
    text = (tmp_path / "run" / "clusters.csv").read_bytes()
    assert b"\n=cmd" not in text
    from odcluster.explore.export import read_clusters_csv

    names = read_clusters_csv(tmp_path / "run" / "clusters.csv").names
    assert set(nasty) <= set(names)
    assert os.fsdecode(b"\xff\xfe.png") in names


@pytest.mark.parametrize("kind", ["npy", "npz", "list", "class tree"])
def test_every_kind_of_data_trains(kind, capsys, image_folder, tmp_path):
    files = sorted(image_folder.iterdir())
    if kind in ("npy", "npz"):
        from PIL import Image

        images = np.stack([np.asarray(Image.open(file)) for file in files])
        data = tmp_path / f"images.{kind}"
        np.save(data, images) if kind == "npy" else np.savez(data, images=images, labels=np.arange(97) % 5)
    elif kind == "list":
        data = tmp_path / "list.txt"
        data.write_text("".join(f"{file}\n" for file in files))
    else:
        data = tmp_path / "tree"
        for i, file in enumerate(files):
            (data / f"class{i % 5}").mkdir(parents=True, exist_ok=True)
            os.link(file, data / f"class{i % 5}" / file.name)
    out = tmp_path / "run"
    code, _, errors = run(capsys, "train", str(data), "--out", str(out), *OPTIONS)
    assert code == 0, errors
    assert ("NMI" in errors) == (kind in ("npz", "class tree"))
    assert run(capsys, "resume", str(out))[0] == 0
    assert Path(out / "clusters.csv").read_text().count("\n") == 98


def test_records_do_not_say_where_things_lie(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    assert cli.without_folder(f"{tmp_path}/images/") == "images"
    assert cli.without_folder(f"--data={tmp_path}/images") == "--data=images"
    assert cli.without_folder("--split") == "--split"
    assert cli.without_folder("train/val") == "train/val"
