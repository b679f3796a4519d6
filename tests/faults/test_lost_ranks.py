"""Ranks that are killed, stopped, slow or frozen; other numbers of ranks; machines of their own.

`make test` runs the two of them that matter most, `make test-faults` all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from launching import JOBS, TORCHRUN, environment, forked, hashes, launch, succeed, together
from tiny_runs import TINY

import odcluster
from odcluster.errors import Interrupted, RankLost
from odcluster.training import checkpoint

OPTIONS = {**TINY, "checkpoint_minutes": 0, "keep_checkpoints": 100}


def hurt(folder: Path, run: Path, what: str, rank: int, at: int) -> list[str]:
    """The words of a job: train, with something happening to one rank at one step."""
    return ["hurt", str(folder), str(run), json.dumps(OPTIONS), what, str(rank), str(at)]


def resume(run: Path, num_ranks: int) -> None:
    succeed(run.parent, num_ranks, "train", json.dumps([["resume", str(run), "", {}]]))


@pytest.fixture(scope="session")
def reference(image_folder, tmp_path_factory) -> Path:
    """An undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    succeed(folder, 2, *hurt(image_folder, folder / "run", "SIGKILL", 0, 10_000))
    return folder / "run"


def test_a_killed_rank_is_named_the_other_stops_and_a_resume_ends_with_the_same_bits(reference, image_folder, tmp_path):
    run = tmp_path / "run"
    first, second = together(tmp_path, 2, *hurt(image_folder, run, "SIGKILL", 0, 9))
    assert first.code == -signal.SIGKILL
    assert second.code == RankLost.exit_code
    assert "odcluster (rank 1): rank 0 (on " in second.said()
    assert "stopped answering" in second.said()
    resume(run, 2)
    assert hashes(run) == hashes(reference)


def test_a_wish_to_stop_on_one_rank_stops_all_and_saves(reference, image_folder, tmp_path):
    run = tmp_path / "run"
    for child in together(tmp_path, 2, *hurt(image_folder, run, "SIGTERM", 1, 7)):
        assert child.code == Interrupted.exit_code
        assert "stopped at step 8, everything saved" in child.said()
    assert hashes(run)["step"] == "step-00000008"
    resume(run, 2)
    assert hashes(run) == hashes(reference)


@pytest.mark.faults
def test_of_many_stops_none_hangs(image_folder, tmp_path):
    """Gloo's threads and DistributedDataParallel once waited for each other, in one of fifteen stops."""
    for number in range(40):
        job = hurt(image_folder, tmp_path / f"run{number}", "SIGTERM", 1, 2)
        assert [child.code for child in together(tmp_path, 2, *job)] == [Interrupted.exit_code] * 2


@pytest.mark.faults
def test_torchrun_starts_the_ranks_again_and_they_end_with_the_same_bits(reference, image_folder, tmp_path):
    job = hurt(image_folder, tmp_path / "run", "SIGKILL", 1, 7)
    done = launch(2, *job, options=("--max-restarts=1",))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "odcluster: rank 1 (on " in done.stderr
    assert "stopped answering" in done.stderr
    assert hashes(tmp_path / "run") == hashes(reference)


@pytest.mark.faults
def test_torchrun_without_restarts(reference, image_folder, tmp_path):
    """It asks the ranks that are left to stop when one has ended, which must not keep them from telling why."""
    killed, stopped = tmp_path / "killed", tmp_path / "stopped"
    done = launch(2, *hurt(image_folder, killed, "SIGKILL", 0, 9))
    assert done.returncode != 0
    assert "odcluster (rank 1): rank 0 (on " in done.stderr
    done = launch(2, *hurt(image_folder, stopped, "SIGTERM", 1, 7))
    assert done.stderr.count("exitcode  : 75") + done.stderr.count("(exitcode: 75)") >= 2, done.stderr[-3000:]
    assert done.stderr.count("stopped at step 8, everything saved") == 2
    for run in (killed, stopped):
        resume(run, 2)
        assert hashes(run) == hashes(reference)


@pytest.mark.faults
def test_a_slow_rank_only_slows(reference, image_folder, tmp_path):
    succeed(tmp_path, 2, *hurt(image_folder, tmp_path / "run", "slow", 1, 5))
    assert hashes(tmp_path / "run") == hashes(reference)


@pytest.mark.faults
def test_a_frozen_rank_is_named_after_the_timeout(image_folder, tmp_path):
    job = hurt(image_folder, tmp_path / "run", "SIGSTOP", 1, 7)
    with forked(tmp_path, 2, *job, ODCLUSTER_TIMEOUT="20") as (awake, frozen):
        assert awake.wait() == RankLost.exit_code
        assert frozen.poll() is None
    assert "rank 1 (on " in awake.said()
    assert "stopped answering" in awake.said()


@pytest.mark.faults
def test_all_ranks_go_back_to_the_same_checkpoint_when_one_part_is_damaged(reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    for path in checkpoint.candidates(run / "checkpoints")[:2]:
        shutil.rmtree(path)
    newest = checkpoint.candidates(run / "checkpoints")[0]
    part = newest / "memory-0001-of-0002.safetensors"
    part.write_bytes(part.read_bytes()[:-9] + b"123456789")
    resume(run, 2)
    assert "is damaged" in (run / "train.log").read_text()
    assert hashes(run) == hashes(reference)


@pytest.mark.faults
def test_two_ranks_then_one_then_four(reference, tmp_path):
    """The same samples and views: the labels of nearly all images agree (batch norm sees other parts of a batch)."""
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    keep(run, 9)
    resume(run, 1)
    keep(run, 16)
    resume(run, 4)
    names = {path.name for path in (run / "checkpoints" / "step-00000024").iterdir()}
    assert "memory-0003-of-0004.safetensors" in names
    odcluster.report(run)
    assert (run / "report.html").is_file()


@pytest.mark.faults
def test_every_method_trains_on_two_ranks(reference, image_folder, tmp_path):
    methods = {
        "rotation": {"method": "rotation"},
        "jigsaw": {"method": "jigsaw", "permutations": 10},
        "colorization": {"method": "colorization"},
        "frozen": {"weights": str(reference), "frozen": True, "recipe": "finetune_odc"},
        "fine": {"fine_share": 0.5, "fine_clusters": 12, "final_pass": True, "instance_weight": 1.0},
    }
    runs = [["train", str(image_folder), str(tmp_path / name), {**TINY, **given}] for name, given in methods.items()]
    succeed(tmp_path, 2, "train", json.dumps(runs))
    for name in methods:
        assert (tmp_path / name / "backbone" / "model.safetensors").is_file(), name


@pytest.mark.faults
def test_refusals_are_told_alike_and_leave_nothing_behind(image_folder, tmp_path):
    said = succeed(tmp_path, 2, "refuse", str(image_folder), str(tmp_path / "run"))
    for rank in (0, 1):
        assert f"{rank}: a batch of 2 cannot be shared by 2 ranks" in said
        assert f"{rank}: 97 images in 90 clusters" in said


def keep(run: Path, last: int) -> None:
    """Forget what came after a step."""
    for path in checkpoint.candidates(run / "checkpoints"):
        if int(path.name[5:]) > last:
            shutil.rmtree(path)


@pytest.mark.faults
def test_verbs_that_are_spread_give_what_one_process_gives(reference, image_folder, tmp_path):
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        given = [str(reference), str(image_folder), "--batch-size", "8", "--out"]
        words = [["embed", *given, str(out / "rows.npy")], ["assign", *given, str(out / "table.csv")]]
        succeed(tmp_path, ranks, "verbs", json.dumps(words))
    for name in ("rows.npy", "rows.images.csv", "table.csv"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


# Machines of their own: network namespaces ------------------------------------------------------------


@pytest.fixture
def two_machines():
    """Two network namespaces with an address each, joined by a cable; nothing else is reachable from them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"odc{os.getpid()}{side}" for side in "ab"]
    cables = [f"v{os.getpid() % 10**6}{side}" for side in "ab"]
    addresses = ["10.231.77.1", "10.231.77.2"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1]], check=True)
        for name, cable, address in zip(names, cables, addresses, strict=True):
            subprocess.run(["ip", "link", "set", cable, "netns", name], check=True)
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"{address}/24", "dev", cable], check=True)
            subprocess.run([*inside, "link", "set", cable, "up"], check=True)
            subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        yield list(zip(names, cables, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.faults
def test_two_machines_train_as_one(two_machines, reference, image_folder, tmp_path):
    run, first = tmp_path / "run", two_machines[0][2]
    children = []
    for name, cable, address in two_machines:
        host = f"--rdzv-conf=is_host={int(address == first)}"  # a namespace has the name of the whole machine
        command = [
            *TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={first}:29400",
            host, "--rdzv-id=test", f"--local-addr={address}", str(JOBS),
            *hurt(image_folder, run, "SIGKILL", 0, 10_000),
        ]  # fmt: skip
        children.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env=environment(GLOO_SOCKET_IFNAME=cable),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for child in children:
        _, said = child.communicate(timeout=300)
        assert child.returncode == 0, said[-4000:]
    assert hashes(run) == hashes(reference)
