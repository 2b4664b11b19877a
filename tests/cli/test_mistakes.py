"""What goes wrong: exit code 2, one sentence that names the thing, nothing half-written; ``--debug`` shows more."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Run
from tests.engine.tiny import tiny_values, write_config, write_set
from vitdet.cli import main
from vitdet.engine.checkpoint import read_weights
from vitdet.errors import UserError

Fails = Callable[..., str]
Spoil = Callable[[Path], None]
ROOT = Path(__file__).resolve().parents[2]


def nothing_at(source: object) -> str:
    """What is told where a source of weights is nothing of the kind."""
    formats = ".safetensors, .pth, .pt, .bin, .pkl, .ckpt, .npz"
    return (
        f"there is no {str(source)!r}; pass a file ({formats}), a folder with a config.json, or a Hub id (owner/name)"
    )


def spoil_json(change: Callable[[dict], object]) -> Spoil:
    def spoil(root: Path) -> None:
        path = root / "annotations" / "instances_train.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def truncate_image(root: Path) -> None:
    """A JPEG that ends in its middle, under the name of a listed image."""
    name = sorted((root / "train").iterdir())[2]
    buffer = io.BytesIO()
    with Image.open(name) as image:
        Image.effect_noise(image.size, 90).save(buffer, "JPEG")
    name.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])


def break_json(root: Path) -> None:
    path = root / "annotations" / "instances_train.json"
    path.write_text(path.read_text()[:200])


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (shutil.rmtree, ["the data set folder", "set does not exist", "data.root"]),
        (lambda root: shutil.rmtree(root / "annotations"), ["no data set is recognised in", "set", "COCO JSON"]),
        (spoil_json(lambda c: c.update(images=[])), ["instances_train.json lists 0 images"]),
        (spoil_json(lambda c: c.update(categories=[])), ["instances_train.json lists 0 categories"]),
        (break_json, ["instances_train.json is broken JSON at line 1"]),
        (spoil_json(lambda c: c["annotations"][0].update(category_id=9)), ["category_id 9", "known ids are 3, 7"]),
        (truncate_image, ["train_13.png cannot be decoded (", "replace or remove it"]),
        (lambda root: (root / "train" / "train_12.png").unlink(), ["train_12.png", "1 of the 6 images", "missing"]),
        (lambda root: (root / "train" / "train_12.png").write_text(""), ["train_12.png is empty (0 bytes)"]),
    ],
    ids=["no folder", "nothing", "no images", "no classes", "broken JSON", "category", "truncated", "missing", "empty"],
)
def test_training_on_bad_data(tmp_path: Path, fails: Fails, spoil: Spoil, expected: list[str]) -> None:
    root = write_set(tmp_path / "set")
    spoil(root)
    config = write_config(tmp_path / "run.yaml", tiny_values(root, tmp_path / "out"))
    sentence = fails("train", config)
    for part in expected:
        assert part in sentence
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "set") == ["run.yaml"]


def test_an_error_in_a_worker_is_one_sentence_too(tmp_path: Path, fails: Fails) -> None:
    root = write_set(tmp_path / "set")
    truncate_image(root)
    config = write_config(tmp_path / "run.yaml", tiny_values(root, tmp_path / "out"))
    sentence = fails("train", config, "data.workers=1")
    assert sentence.startswith(f"{root / 'train' / 'train_13.png'} cannot be decoded (")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.epoch=3"], ["run.yaml: unknown key 'train.epoch' (did you mean 'epochs'?)"]),
        (["train.epochs=0"], ["'train.epochs'", "got 0"]),
        (["train.epochs"], ["cannot read the override 'train.epochs'"]),
        (["model.name=rtdetr_nanno"], ["there is no model 'rtdetr_nanno'; did you mean 'rtdetr_nano'?"]),
        (["model.overrides.num_querys=5"], ["has no argument 'num_querys'; did you mean 'num_queries'?"]),
        (["model.overrides.width=30"], ["model 'rtdetr_nano' cannot be built with", "'width': 30"]),
        (["data.size=[64, 100]"], ["data.size [64, 100] must be divisible by 32 for rtdetr_nano; change it"]),
        (["data.sizes=[[64, 64], [64, 70]]"], ["data.sizes [64, 70] must be divisible by 32 for rtdetr_nano"]),
        (["optim.layer_decay=0.5"], ["optim.layer_decay cannot be 0.5 for rtdetr_nano: ", "RTDETR has none"]),
        (["train.freeze=backbon"], ["train.freeze names 'backbon', ", "did you mean 'backbone'?"]),
        (["model.num_classes=5"], ["model.num_classes is 5 but", "has 2 classes"]),
        (["model.weights=nowhere.safetensors"], [nothing_at("nowhere.safetensors")]),
        (["data.train_split=trian"], ["has no split 'trian': its splits are train, val"]),
        (["augment.scale_jitter=[2.0, 0.5]"], ["'augment.scale_jitter'", "[2.0, 0.5]"]),
        (["train.device=gpu"], ["the device 'gpu' cannot be used here; choose 'cpu' or 'auto'"]),
    ],
)
def test_training_with_bad_values(
    run: Run, tmp_path: Path, fails: Fails, overrides: list[str], expected: list[str]
) -> None:
    config = write_config(tmp_path / "run.yaml", tiny_values(run.root, tmp_path / "out"))
    sentence = fails("train", config, *overrides)
    for part in expected:
        assert part in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_training_with_other_mistakes(tmp_path: Path, fails: Fails) -> None:
    assert fails("train", "nowhere.yaml").startswith("there is no configuration nowhere.yaml; give a YAML file or one")
    assert fails("train", tmp_path).startswith(f"there is no configuration {tmp_path}; ")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: [\ntrain: 1")
    assert fails("train", broken) == f"{broken} is not valid YAML at line 2; mend the file"
    assert fails("train") == "vitdet train needs a configuration, or --resume RUN without one"
    nothing = f"there is no checkpoint {tmp_path / 'last.pt'} to resume from; start the run without --resume"
    assert fails("train", "--resume", tmp_path) == nothing
    torch.save([1, 2], tmp_path / "last.pt")
    assert str(tmp_path / "last.pt") in fails("train", "--resume", tmp_path)


@pytest.mark.parametrize(
    "more", [["run.yaml"], ["run.yaml", "train.epochs=9"], ["train.epochs=9"], ["--overwrite"]], ids=" ".join
)
def test_a_resumed_run_cannot_be_changed(run: Run, fails: Fails, more: list[str]) -> None:
    before = {path.name: path.read_bytes() for path in run.output.iterdir()}
    assert fails("train", "--resume", run.output, *more) == (
        "--resume takes no configuration, no overrides and no --overwrite: the run goes on as it was started"
    )
    assert {path.name: path.read_bytes() for path in run.output.iterdir()} == before


def test_an_overwriting_run_that_fails_leaves_the_old_one(run: Run, tmp_path: Path, fails: Fails) -> None:
    """In its first epoch, on an image that cannot be read."""
    root = write_set(tmp_path / "set")
    truncate_image(root)
    shutil.copytree(run.output, tmp_path / "out")
    config = write_config(tmp_path / "run.yaml", tiny_values(root, tmp_path / "out"))
    assert "train_13.png cannot be decoded (" in fails("train", config, "--overwrite")
    for path in run.output.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list((tmp_path / "out").iterdir())) == len(list(run.output.iterdir()))


def test_an_output_that_is_a_file(run: Run, tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "out").write_text("mine")
    config = write_config(tmp_path / "run.yaml", tiny_values(run.root, tmp_path / "out"))
    sentence = fails("train", config, "train.epochs=1")
    assert sentence.startswith(f"the output folder {tmp_path / 'out'} is a file"), "and not after the first epoch"
    assert (tmp_path / "out").read_text() == "mine"


def with_header(run: Run, path: Path, **changes: object) -> Path:
    """The run's weights under an edited header."""
    header = json.dumps(read_weights(run.weights)[0].to_dict() | changes)
    save_file(load_file(run.weights), path, metadata={"vitdet": header, "format": "pt"})
    return path


@pytest.mark.parametrize("command", ["eval", "predict", "info"])
def test_files_that_are_no_model(run: Run, tmp_path: Path, fails: Fails, command: str) -> None:
    out = tmp_path / "out"
    rest = {"eval": ["--data", run.root, "--save", out], "predict": [run.root / "val", "--out", out], "info": []}[
        command
    ]
    missing = tmp_path / "missing.safetensors"
    assert fails(command, missing, *rest) == nothing_at(missing)
    text = tmp_path / "text.safetensors"
    text.write_text("hello")
    assert fails(command, text, *rest).startswith(f"{text} is not a readable weights file (")
    foreign = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(1)}, foreign)
    assert fails(command, foreign, *rest) == (
        f"{foreign} cannot be loaded: its layout is not known (it holds x); "
        "pass model='timm/NAME' where it is another model of timm's"
    )
    assert str(tmp_path) in fails(command, tmp_path, *rest)
    assert not out.exists()


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_models_that_do_not_fit(run: Run, tmp_path: Path, fails: Fails, command: str) -> None:
    out = tmp_path / "out"
    rest = {"eval": ["--data", run.root, "--save", out], "predict": [run.root / "val", "--out", out]}[command]
    other = with_header(run, tmp_path / "other.safetensors", name="rtdetr_r18", arguments={"num_classes": 2})
    assert fails(command, other, *rest).startswith(f"{other} does not hold the weights of 'rtdetr_r18' that it names: ")
    unknown = with_header(run, tmp_path / "unknown.safetensors", name="rtdetr_nanoo")
    assert "there is no model 'rtdetr_nanoo'; did you mean 'rtdetr_nano'?" in fails(command, unknown, *rest)
    named = fails(command, "rtdetr_r18", *rest)
    assert named.startswith("'rtdetr_r18' names a model without weights; pass rtdetr_r18:coco or ")
    assert not out.exists()


def test_evaluation_on_bad_data(run: Run, tmp_path: Path, fails: Fails) -> None:
    def bad(*words: str | Path) -> str:
        return fails("eval", run.weights, "--device", "cpu", "--workers", "0", *words)

    assert bad("--data", tmp_path / "no").startswith(f"the data set folder {tmp_path / 'no'} does not exist")
    assert "has no split 'test': its splits are train, val" in bad("--data", run.root, "--split", "test")
    assert "the evaluation backend 'coco' is unknown" in bad("--data", run.root, "--backend", "coco")
    root = write_set(tmp_path / "set", categories={3: "red"})
    assert f"the model knows the classes red, blue but {root} has red" in bad("--data", root)
    root = write_set(tmp_path / "damaged")
    shutil.copy(root / "val" / "val_11.png", root / "val" / "val_13.png")
    (root / "val" / "val_13.png").write_bytes((root / "val" / "val_11.png").read_bytes()[:60])
    assert "val_13.png" in bad("--data", root, "--save", tmp_path / "results.json", "--json", tmp_path / "metrics.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "set"]


def test_the_folder_of_the_figures_is_made(run: Run, tmp_path: Path) -> None:
    """An evaluation must not be lost for a folder that is not there."""
    path = tmp_path / "new" / "metrics.json"
    words = ["eval", run.weights, "--data", run.root, "--workers", "0", "--device", "cpu", "--json", path]
    assert main([str(word) for word in words]) == 0
    assert "AP50" in json.loads(path.read_text())


def test_prediction_on_bad_images(run: Run, tmp_path: Path, fails: Fails) -> None:
    out = tmp_path / "out"

    def bad(*images: str | Path) -> str:
        sentence = fails("predict", run.weights, *images, "--out", out, "--device", "cpu")
        assert not out.exists(), "no folder is left for nothing"
        return sentence

    assert bad(tmp_path / "no.jpg") == f"image {tmp_path / 'no.jpg'} does not exist: check the path"
    assert bad(f"{tmp_path}/*.jpg").startswith(f"no image matches {tmp_path}/*.jpg; check the pattern")
    (tmp_path / "empty").mkdir()
    assert bad(tmp_path / "empty").startswith(f"the folder {tmp_path / 'empty'} has no images; check it")
    damaged = tmp_path / "damaged"
    shutil.copytree(run.root / "train", damaged / "train")
    truncate_image(damaged)
    assert "train_13.png cannot be decoded (" in bad(damaged / "train")
    sentence = fails("predict", run.weights, run.root / "val", "--out", run.config, "--device", "cpu")
    assert sentence == f"the output folder {run.config} cannot be made, because a file has that name; choose another"
    assert "rtdetr_nano" in run.config.read_text()


def test_an_error_on_the_way_leaves_whole_pictures_only(run: Run, tmp_path: Path, fails: Fails) -> None:
    shutil.copytree(run.root / "train", tmp_path / "images" / "train")
    truncate_image(tmp_path / "images")
    out = tmp_path / "out"
    fails("predict", run.weights, tmp_path / "images" / "train", "--out", out, "--batch", "1", "--device", "cpu")
    left = sorted(path.name for path in out.iterdir()) if out.exists() else []
    assert set(left) <= {"train_11.png", "train_12.png"}
    for name in left:
        Image.open(out / name).load()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "No such command 'trian'."),
        (["eval"], "Missing argument"),
        (["eval", "best.safetensors"], "Missing option '--data'."),
        (["predict", "best.safetensors", "--out", "x"], "Missing argument"),
        (["predict", "best.safetensors", "a.jpg"], "Missing option '--out'."),
        (["predict", "best.safetensors", "a.jpg", "--out", "x", "--threshold", "2"], "'--threshold'"),
        (["eval", "best.safetensors", "--data", "x", "--batch", "0"], "'--batch'"),
        (["eval", "best.safetensors", "--data", "x", "--batch", "many"], "'--batch'"),
        (["models", "--nope"], "No such option: --nope"),
        (["data", "make", "letters", "x"], "there is no offline data set 'letters'; the one there is is called digits"),
    ],
)
def test_wrong_words(words: list[str], expected: str, fails: Fails) -> None:
    assert expected in fails(*words)


def test_debug_shows_the_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no '.*x\.safetensors'"):
        main(["info", str(tmp_path / "x.safetensors"), "--debug"])


def test_no_words_give_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) in (0, 2)
    captured = capsys.readouterr()
    assert "Usage: vitdet" in captured.out + captured.err
    assert "vitdet: \n" not in captured.err


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a checkout that may not be installed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_module_starts() -> None:
    done = start("-m", "vitdet", "--help")
    assert done.returncode == 0
    for name in ("train", "eval", "predict", "models", "info", "data"):
        assert f" {name} " in done.stdout
    assert done.stderr == ""


def test_the_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom vitdet.cli import main\n"
        "for words in ([], ['train'], ['eval'], ['predict'], ['models'], ['info'], ['benchmark', 'timm']):\n"
        "    assert main([*words, '--help']) == 0\n"
        "assert not {'torch', 'timm', 'cv2', 'matplotlib'} & set(sys.modules)"
    )
    done = start("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: vitdet") == 7


@pytest.mark.parametrize("name", ["train", "eval", "predict", "benchmark"])
def test_the_tools_start(name: str) -> None:
    done = start(f"tools/{name}.py", "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: vitdet {name}" in done.stdout


def test_the_exit_code_reaches_the_shell() -> None:
    done = start("tools/eval.py", "nowhere.safetensors", "--data", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"vitdet: {nothing_at('nowhere.safetensors')}\n"
