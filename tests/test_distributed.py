"""Several processes: helpers alone, and two processes under torchrun on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine import tiny_images
from tests.engine.tiny import tiny_values, write_config, write_split
from vitdet import distributed
from vitdet.engine.checkpoint import load_training_state, read_weights

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 120  # seconds; a process that waits for another one would wait for half an hour


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    distributed.start()
    assert not distributed.is_distributed()
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    value = torch.tensor([1.0, 2.0])
    assert torch.equal(distributed.mean_over_ranks(value), value)
    items = [{"a": 1}]
    assert distributed.gather_lists(items) is items
    distributed.share_from_main([value])
    assert value.tolist() == [1.0, 2.0]
    distributed.stop()


def launch(*words: str | Path, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """``torchrun --standalone --nproc-per-node N``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*run, *(str(word) for word in words)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)


HELPERS = """
import torch
from vitdet import distributed
distributed.start()
rank = distributed.rank()
value = torch.tensor([float(rank), 4.0])
assert torch.equal(distributed.mean_over_ranks(value), torch.tensor([0.5, 4.0]))
assert torch.equal(value, torch.tensor([float(rank), 4.0])), "the argument is left alone"
assert distributed.gather_lists([rank, "x"] if rank else []) == [1, "x"]
assert distributed.gather_lists([rank]) == [0, 1]
mixed = [torch.full((2, 3, 4, 5), rank + 1.0).to(memory_format=torch.channels_last), torch.tensor(rank + 7)]
distributed.share_from_main(iter(mixed))
assert mixed[0].unique().tolist() == [1.0] and mixed[1].item() == 7
assert distributed.world_size() == 2
distributed.stop()
assert not distributed.is_distributed()
print("fine")
"""


@pytest.mark.slow
def test_helpers_on_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HELPERS)
    done = launch(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """An epoch without a hang, though one image has no object and the last validation batch is one process's alone."""
    root = tmp_path / "set"
    write_split(root, "train", [1, 0, 2, 1, 1, 1])
    write_split(root, "val", [1, 1, 2])
    outputs = {}
    for processes in (1, 2):
        values = tiny_values(root, tmp_path / f"out{processes}")
        values["train"].update(epochs=2, batch=3 - processes)  # the same number of steps and images
        values["eval"] = {"batch": 1}
        config = write_config(tmp_path / f"run{processes}.yaml", values)
        done = launch(ROOT / "tools" / "train.py", config, processes=processes)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("IoU=0.50:0.95 | area=   all | maxDets=100 ] =") == 2, "AP and AR, by one process only"
        assert done.stderr.count("epoch 1/2  loss") == 1
        outputs[processes] = tmp_path / f"out{processes}"
    rows = {
        n: [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for n, out in outputs.items()
    }
    assert [row["step"] for row in rows[2]] == [row["step"] for row in rows[1]] == [3, 6]
    for one, two in zip(rows[1], rows[2], strict=True):
        assert one.keys() == two.keys()
        assert one["loss"].keys() == two["loss"].keys()
        assert one["metrics"].keys() == two["metrics"].keys()
        assert two["skipped"] == 0
    assert {path.name for path in outputs[2].iterdir()} == {path.name for path in outputs[1].iterdir()}
    names = {n: read_weights(out / "best.safetensors")[1].keys() for n, out in outputs.items()}
    assert names[1] == names[2], "no prefix of the wrapper in the file"


@pytest.mark.slow
def test_two_processes_resume(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for split in ("train", "val"):
        write_split(root, split, [1, 1, 2, 1])
    values = tiny_values(root, tmp_path / "out")
    values["train"].update(epochs=2, batch=1)
    config = write_config(tmp_path / "run.yaml", values)
    script = tmp_path / "interrupt.py"  # a run that ends after its first epoch
    script.write_text(
        "import sys\nfrom vitdet import build, distributed\nfrom vitdet.config import load_config\n"
        "distributed.start()\ntrainer = build.build_trainer(load_config(sys.argv[1]))\n"
        "trainer.epochs = 1\ntrainer.fit()\ndistributed.stop()\n"
    )
    done = launch(script, config)
    assert done.returncode == 0, done.stderr
    done = launch(ROOT / "tools" / "train.py", "--resume", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    state = load_training_state(tmp_path / "out" / "last.pt")
    assert (state["epoch"], state["step"]) == (2, 4)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_two_processes_classify_like_one(tmp_path: Path) -> None:
    """The same images in the same steps, so the same losses and, up to rounding, the same weights and metrics."""
    root = tiny_images.write_images(tmp_path / "set", per_split={"train": 8, "val": 5})  # 15: not the same for both
    states, shown = {}, {}
    for processes in (1, 2):
        values = tiny_images.tiny_values(root, tmp_path / f"out{processes}")
        values["train"].update(epochs=4, batch=8 // processes, accumulate=2)
        values["eval"] = {"batch": 2, "every": 2}
        config = write_config(tmp_path / f"run{processes}.yaml", values)
        done = launch(ROOT / "tools" / "train.py", config, processes=processes)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("top-1 accuracy") == 1, "by one process only"
        states[processes] = load_training_state(tmp_path / f"out{processes}" / "last.pt")
        lines = (tmp_path / f"out{processes}" / "metrics.jsonl").read_text().splitlines()
        shown[processes] = [json.loads(line) for line in lines]
    for one, two in zip(shown[1], shown[2], strict=True):
        assert one["step"] == two["step"] == 2 * one["epoch"]
        # The main process tells the loss of its own images.
        assert two["loss"]["total"] == pytest.approx(one["loss"]["total"], rel=0.3)
        assert two.get("metrics") == pytest.approx(one.get("metrics"), abs=1e-4)
    assert states[2]["best_metrics"]["confusion"] == states[1]["best_metrics"]["confusion"]
    assert shown[2][-1]["metrics"]["images"] == 15
    assert shown[2][-1]["metrics"]["top1"] > 0.5
    for name, value in states[1]["model"].items():
        torch.testing.assert_close(states[2]["model"][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_a_mistake_ends_all_processes(tmp_path: Path) -> None:
    done = launch(ROOT / "tools" / "train.py", "nowhere.yaml")
    assert done.returncode != 0
    assert "vitdet: there is no configuration nowhere.yaml; give a YAML file" in done.stderr
    assert "KeyError" not in done.stderr
